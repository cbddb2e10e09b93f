"""`autopipe export`: files and stdout, what is asked of whom, and hostile plans."""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from autopipe.errors import AutopipeError
from autopipe.export.targets import LAUNCHERS, export
from autopipe.export.words import Words
from autopipe.interop.targets import RUNTIMES
from autopipe.planfile.contents import Plan
from autopipe.util import codec
from tests.support.long import LONG
from tests.support.shell import Shell
from tests.support.spread import on_cpus


@pytest.fixture
def autopipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    shell = Shell(tmp_path, monkeypatch, capsys)
    on_cpus(2, 1).save("plan.json")
    return shell


def test_to_stdout_or_a_file_that_runs(autopipe: Shell) -> None:
    shown = autopipe("export", "plan.json", "--to", "torchrun")
    written = autopipe("export", "plan.json", "--to", "torchrun", "-o", "train.sh")
    assert (shown.code, written.code, written.out) == (0, 0, "")
    assert written.err == "train.sh: for torchrun\n"
    assert Path("train.sh").read_text() == shown.out
    assert os.access("train.sh", os.X_OK)


def test_options_of_run_stand_behind_two_dashes(autopipe: Shell) -> None:
    said = autopipe("export", "plan.json", "--to", "slurm", "--", "--steps", "9", "--save", "m.s")
    assert "    exec python -m autopipe run plan.json --steps 9 --save m.s\n" in said.out


def test_checkpoints(autopipe: Shell) -> None:
    words = ("--checkpoints", "kept", "--save-every", "10", "--keep", "2", "--time", "1:00:00")
    said = autopipe("export", "plan.json", "--to", "slurm", *words)
    assert " --checkpoints kept --resume --save-every 10 --keep 2\n" in said.out
    assert "#SBATCH --time=0-01:00:00\n" in said.out


@pytest.mark.parametrize("target", RUNTIMES)
def test_what_a_runtime_cannot_say_is_told(target: str, autopipe: Shell) -> None:
    said = autopipe("export", "plan.json", "--to", target)
    assert said.code == 0 and said.out
    assert f"{target} cannot say: " in said.err


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--to", "mars"], "--to: expected one of torchrun, slurm, kubeflow, "),
        (["--to", "slurm", "--", "--local", "2"], "--local starts processes itself"),
        (["--to", "slurm", "--", "--steps", "0"], "--steps: "),
        (
            ["--to", "slurm", "--", "--frob"],
            "there is no option '--frob'\n\nhint: `autopipe run --help` lists all options",
        ),
        (["--to", "slurm", "--name", "a b"], "--name: expected small letters, digits and -"),
        (["--to", "kubeflow"], "a pod needs an image, and none was named"),
        (["--to", "megatron", "--image", "x"], "--image is of launching, and megatron launches"),
        (["--to", "torchrun", "--array", "1-2"], "--array means nothing to torchrun; it is a "),
        (["--to", "slurm", "-o", "none/x.sh"], "none/x.sh cannot be written: there is no folder"),
    ],
)
def test_what_is_refused(argv: list[str], sentence: str, autopipe: Shell) -> None:
    assert autopipe("export", "plan.json", *argv).error.startswith(sentence)


# --- hostile plans


MUTATIONS = 10_000 if LONG else 300

TEXTS = ("\n", "$(touch never)", "'\"", "../../x", "\0", "a" * 10_000, "-rf", "{{ 7 }}", "%x", "é")
NUMBERS = (-1, 0, 2**63, 1e308, 10**400, 0.5, True)


def mutated(data: Any, draw: random.Random) -> Any:
    """A plan's data with something else in one place."""
    found = json.loads(json.dumps(data))
    at = found
    while True:
        keys = [*at] if isinstance(at, dict) else [*range(len(at))]
        key = draw.choice(keys)
        if not isinstance(at[key], dict | list) or not at[key] or draw.random() < 0.1:
            break
        at = at[key]
    choice = draw.randrange(5)
    if choice == 0:
        del at[key]
    elif choice == 1 and isinstance(at, list):
        at.append(at[key])
    else:
        at[key] = draw.choice([*TEXTS, *NUMBERS, None, [], {}, [at[key]]])
    return found


def test_hostile_plans_are_refused_or_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of ours alone; scripts that bash reads; nothing is written and no command runs."""
    monkeypatch.chdir(tmp_path)
    data = codec.to_json(on_cpus(2, 2))
    draw, targets = random.Random(0), [*LAUNCHERS, *RUNTIMES]
    refused, scripts = 0, []
    for _ in range(MUTATIONS):
        target = draw.choice(targets)
        try:
            Path("plan.json").write_text(json.dumps(mutated(data, draw)))
            plan = Plan.load("plan.json")
            if target in RUNTIMES:
                RUNTIMES[target](plan)
                continue
            words = Words(image="i") if "image" in LAUNCHERS[target].takes else Words()
            text = export(plan, target, "plan.json", words)
            if LAUNCHERS[target].program:
                scripts.append(text)
            else:
                yaml.safe_load(text)
        except AutopipeError:
            refused += 1
    assert 0 < refused < MUTATIONS and scripts
    for text in {*scripts}:
        assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_hostile_words_are_refused_or_quoted(tmp_path: Path) -> None:
    """Every text in the place of every word, and as the plan's path."""
    for target, launcher in LAUNCHERS.items():
        for name in sorted(launcher.takes - {"run", "hosts"}):
            for text in TEXTS:
                value: Any = text if Words.__dataclass_fields__[name].type != "int" else -1
                least: dict[str, Any] = {"image": "i"} if "image" in launcher.takes else {}
                try:
                    made = export(on_cpus(2, 1), target, text, Words(**{**least, name: value}))
                except AutopipeError:
                    continue
                if launcher.program:
                    assert subprocess.run(["bash", "-n"], input=made, text=True).returncode == 0
                else:
                    yaml.safe_load(made)
