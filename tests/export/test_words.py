"""Words that scripts and manifests hold: which letters they may have, and times."""

import pytest

from autopipe.errors import AutopipeError
from autopipe.export.words import Words, check, seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90 * 60),
        ("10:30", 10 * 60 + 30),
        ("12:00:00", 12 * 3600),
        ("1-00", 86400),
        ("2-06:30", 2 * 86400 + 6 * 3600 + 30 * 60),
        ("0-00:00:01", 1),
    ],
)
def test_times_are_slurms(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "1h", "-5", "1:2:3:4", "9" * 40, "1\n#SBATCH --uid=0"])
def test_no_time(text: str) -> None:
    with pytest.raises(AutopipeError, match="--time: expected"):
        seconds_of(text)


def test_words_of_every_kind() -> None:
    check(
        Words(
            name="gpt-7b",
            image="nvcr.io#nvidia/pytorch:25.01-py3@sha256:0f",
            partition="gpu,long",
            constraint="a100&nvlink",
            array="0-9,12%2",
            memory="64Gi",
            hosts=("node0", "10.0.0.1", "fe80::1"),
            checkpoints="/scratch/it's mine/$HOME",
            interface="enp1s0f0.100",
        )
    )


HOSTILE = (
    "a\nb",
    "a b",
    "a;b",
    "$(id)",
    "`id`",
    "'",
    '"',
    "-x",
    "",
    "a" * 300,
    "ä",
    "a\0b",
    "{{x}}",
)


@pytest.mark.parametrize(
    "name",
    [
        *("name", "namespace", "claim", "image", "interface", "partition", "account", "qos"),
        *("constraint", "array", "memory", "style"),
    ],
)
@pytest.mark.parametrize("text", HOSTILE)
def test_a_word_with_other_letters(name: str, text: str) -> None:
    option = f"--{name}"
    with pytest.raises(AutopipeError) as error:
        check(Words(**{name: text}))
    assert error.value.message.startswith(f"{option}: expected ")


@pytest.mark.parametrize(
    ("array", "sentence", "hint"),
    [  # Bug: written into scripts, which sbatch refuses.
        ("9-0", "a range from its lower to its upper number, found '9-0'", "--array 0-9"),
        ("0-3,7-5%2", "a range from its lower to its upper number, found '7-5'", "--array 5-7"),
        ("0-9%0", "at least 1 run at a time after %, found 0 in '0-9%0'", "--array 0-9%1"),
    ],
)
def test_an_array_that_sbatch_refuses(array: str, sentence: str, hint: str) -> None:
    with pytest.raises(AutopipeError, match=f"^--array: expected {sentence}") as error:
        check(Words(array=array))
    assert error.value.hint is not None and error.value.hint.startswith(hint)


@pytest.mark.parametrize("text", ["a\nb", "", "a\x1b[2J", "a\0", "x" * 5000])
@pytest.mark.parametrize("name", ["checkpoints", "venv", "folder"])
def test_a_path_of_several_lines(name: str, text: str) -> None:
    with pytest.raises(AutopipeError, match=f"--{name}: expected text of one line"):
        check(Words(**{name: text}))


@pytest.mark.parametrize("host", [*HOSTILE, "a,b", "node 0"])
def test_a_host_with_other_letters(host: str) -> None:
    with pytest.raises(AutopipeError, match="--hosts: expected a host name"):
        check(Words(hosts=("node0", host)))


def test_how_often_without_where() -> None:
    with pytest.raises(AutopipeError, match="no folder was named") as error:
        check(Words(save_every=10))
    assert error.value.hint == "--checkpoints FOLDER"
