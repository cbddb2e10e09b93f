"""The batch script as text: what sbatch and srun are asked for, and what is refused.

`tests/whole/test_slurm.py` runs it on a real cluster.
"""

from dataclasses import replace

import pytest

from autopipe.errors import AutopipeError
from autopipe.export.targets import export
from autopipe.export.words import Words
from autopipe.planfile.contents import Plan
from tests.support.scripts import check_script
from tests.support.spread import on_cpus, spread

GPUS = spread("2x4xA100-80GB", [4, 4])
SAVES = Words(checkpoints="it's $HOME", save_every=10, time_limit=3600)


def asked(plan: Plan, words: Words) -> set[str]:
    """The options of sbatch."""
    lines = export(plan, "slurm", "plan.json", words).splitlines()
    return {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}


@pytest.mark.parametrize("style", ["srun", "torchrun"])
@pytest.mark.parametrize(
    "words",
    [
        Words(),
        SAVES,
        replace(SAVES, array="0-3%2"),
        Words(image="a/b:c", venv="/opt/my env", cpus=4, port=4000, run=("--save", "a b.s")),
    ],
)
@pytest.mark.parametrize("plan", [GPUS, on_cpus(2, 2)], ids=["gpus", "cpus"])
def test_it_is_a_script(plan: Plan, words: Words, style: str) -> None:
    check_script(export(plan, "slurm", "my plan's.json", replace(words, style=style)))


def test_a_task_for_each_rank() -> None:
    assert asked(GPUS, Words()) == {
        "job-name=autopipe", "nodes=2", "ntasks-per-node=4", "gpus-per-node=4",
        "output=%x-%j.out", "open-mode=append", "no-requeue",
    }  # fmt: skip


def test_torchrun_for_each_node() -> None:
    options = asked(GPUS, Words(style="torchrun", cpus=32))
    assert {"ntasks-per-node=1", "gpus-per-node=4", "cpus-per-task=32"} <= options
    text = export(GPUS, "slurm", "plan.json", Words(style="torchrun", cpus=32))
    assert "--cpus-per-task=32" in text[text.index("\nsrun ") :]  # srun takes it from nobody else
    assert '--node-rank "$SLURM_NODEID"' in text and "c10d" not in text


def test_only_torchrun_starts_ranks_again() -> None:
    text = export(GPUS, "slurm", "plan.json", Words(style="torchrun", restarts=7))
    assert "--max-restarts 7" in text
    for count in (7, 3):  # 3 is what torchrun does without a word
        with pytest.raises(AutopipeError, match=f"--restarts {count}: srun starts no task again"):
            export(GPUS, "slurm", "plan.json", Words(restarts=count))


def test_what_it_asks_for_in_time() -> None:
    """Two steps, a minute that Slurm may be late and one to write: 120 s and 2 x 31.5 ms."""
    options = asked(GPUS, SAVES)
    assert {"time=0-01:00:00", "signal=B:USR1@121", "requeue"} <= options
    with pytest.raises(AutopipeError, match="--time is 120 s, and the last checkpoint begins 121"):
        export(GPUS, "slurm", "plan.json", replace(SAVES, time_limit=120))


def test_slurms_own_words() -> None:
    words = Words(partition="gpu", account="ml", qos="high", constraint="a&b", memory="64Gi")
    expected = {"partition=gpu", "account=ml", "qos=high", 'constraint="a&b"', "mem=64G"}
    assert expected <= asked(GPUS, words)


def test_an_array_is_a_run_for_each_number() -> None:
    words = replace(SAVES, array="0-3")
    assert {"array=0-3", "output=%x-%A_%a.out"} <= asked(GPUS, words)
    text = export(GPUS, "slurm", "plan.json", words)
    number = '"$SLURM_ARRAY_TASK_ID"'
    assert f" --seed {number} --checkpoints 'it'\"'\"'s $HOME'/{number}\n" in text
    assert text.count("--checkpoints") == 1
    for run in (("--seed", "3"), ("--seed=3",)):
        with pytest.raises(AutopipeError, match="--array gives each task its number as its seed"):
            export(GPUS, "slurm", "plan.json", replace(words, run=run))


def test_it_never_falls_back_to_this_host() -> None:
    for style in ("srun", "torchrun"):
        text = export(GPUS, "slurm", "plan.json", Words(style=style))
        assert "localhost" not in text and "127.0.0.1" not in text and "|| echo" not in text
