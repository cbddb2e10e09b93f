"""A schedule in a file that cannot be, and what `autopipe simulate` cannot draw, are refused."""

import pytest

from tests.support.shell import Shell


@pytest.mark.parametrize(
    ("lines", "arguments", "sentence"),
    [
        ("", "", "steps.txt: expected a schedule, found no instruction"),
        ("rank 0: 0F0 0B1", "", "steps.txt: rank 0: 0B1 needs 0F1 before it, which is missing"),
        ("rank 0: 0F0 0WAIT_B0<1", "", "steps.txt: rank 0: expected compute alone, found 0WAIT"),
        ("rank 0: forward", "", "steps.txt: rank 0: expected an instruction, found 'forward'"),
        (
            "rank 0: 0F0 2F0 2B0 0B0\nrank 1: 1F0 1B0",
            "--pp 2",  # Bug: an IndexError
            "steps.txt: a plan has equally many stages on each rank, and its ranks have 2, 1\n\n"
            "hint: `autopipe simulate` draws such a schedule",
        ),
        (
            "rank 0: 0F0 0B0\nrank 1: 1F0 1B0",
            "--pp 4",
            "pp=4 was asked for, and the schedule is written for pp=2\n\nhint: leave pp out, or ",
        ),
        (
            "rank 0: 0F0 0B0\nrank 1: 1F0 1B0",
            "--micro-batches 4",
            "micro_batches=4 was asked for, and the schedule is written for micro_batches=1",
        ),
        (
            "rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1F1 1B0 1B1",
            "",
            "deadlock: rank 0 waits at 0WAIT_B0<1 for 1SEND_B0>0, which comes after ",
        ),
    ],
)
def test_a_written_schedule(
    lines: str, arguments: str, sentence: str, autopipe: Shell, four: str
) -> None:
    autopipe.write("steps.txt", lines)
    command = ("plan", "net.py", "--cluster", four, "--schedule", "steps.txt")
    assert autopipe(*command, *arguments.split()).error.startswith(sentence)
    if not arguments:
        assert autopipe("simulate", "steps.txt").error.startswith(sentence)
    assert autopipe.files() == ["net.py", "steps.txt"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("zb-h3", "there is no schedule 'zb-h3', and no file of that name\n\nhint: one of naive, "),
        (".", "there is no schedule '.', and no file that can be read: "),
        (
            "1f1b --depth 3",
            "--depth 3 makes no difference to 1f1b\n\n"
            "hint: chunks are for interleaved, a depth is for eager-1f1b",
        ),
        ("zb-v --chunks 3", "--chunks 3 makes no difference to zb-v\n\nhint: chunks are for inter"),
        ("gone.json", "gone.json: no such file, asked for the plan"),
        ("zb-h3 --ranks 3", "there is no schedule 'zb-h3', and no file of that name\n\nhint: one "),
        (
            "--svg step.svg",
            "--svg makes one picture, and no schedule was named\n\n"
            "hint: autopipe simulate 1f1b --svg step.svg",
        ),
        ("1f1b --svg gone/step.svg", "gone/step.svg cannot be written: there is no folder "),
    ],
)
def test_what_cannot_be_drawn(arguments: str, sentence: str, autopipe: Shell) -> None:
    assert autopipe("simulate", *arguments.split()).error.startswith(sentence)
    assert autopipe.files() == ["net.py"]


def test_what_a_file_says_itself(autopipe: Shell) -> None:
    autopipe.write("steps.txt", "rank 0: 0F0 0B0")
    autopipe.write("plan.json", "{}")
    assert autopipe("simulate", "steps.txt", "--ranks", "3").error.startswith(
        "--ranks 3 makes no difference to steps.txt\n\nhint: the file says it"
    )
    said = autopipe("simulate", "plan.json", "--latency", "0.5", "--window", "3").error
    assert said.startswith(
        "--latency 0.5 makes no difference to plan.json\n\nhint: a plan is drawn as it is"
    )
