"""Names and paths with letters that shells, templates and YAML read: each stays one word.

Scripts are run, with programs in the place of launchers that write down what they are started with.
"""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import yaml

from autopipe.errors import AutopipeError
from autopipe.export.targets import LAUNCHERS, export
from autopipe.export.words import Words
from tests.support.hostile import NEVER, TEXTS
from tests.support.scripts import commands, launchers, started
from tests.support.spread import on_cpus

PRINTED = [text for text in TEXTS if text and text.isprintable() and len(text) < 200]
"""What may be a path; the others are refused."""


def exported(target: str, path: str, words: Words) -> str:
    takes = LAUNCHERS[target].takes
    if "image" in takes and not LAUNCHERS[target].program:
        words = replace(words, image="i", claim="c")
    if "time_limit" in takes:
        words = replace(words, time_limit=600)
    return export(on_cpus(1, 2), target, path, words)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launchers(tmp_path_factory.mktemp("launchers"))


def put(path: Path) -> bool:
    """An empty file; whether the path can have one within this folder."""
    if path.is_absolute() or ".." in path.parts:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return True


@pytest.mark.parametrize("style", ["torchrun", "srun", "slurm's torchrun"])
def test_a_script_passes_it_on_as_it_is(
    style: str, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the plan's path, a folder of checkpoints, an environment, and an option of `run`."""
    monkeypatch.chdir(tmp_path)
    target = "torchrun" if style == "torchrun" else "slurm"
    tried = 0
    for text in PRINTED:
        if not put(Path(f"{text}.json")) or not put(Path(text, "bin/activate")):
            continue
        words = Words(checkpoints=text, venv=text, run=("--save", f"{text}.safetensors"))
        if target == "slurm":
            words = replace(words, style=style.rpartition(" ")[2])
        path = f"./{text}.json" if text.startswith("-") else f"{text}.json"
        found = started(exported(target, f"{text}.json", words), tmp_path, programs)
        assert found[found.index("-m") :] == [
            *("-m", "autopipe", "run", path, "--checkpoints", text, "--resume"),
            *("--save", f"{text}.safetensors"),
        ]
        tried += 1
    assert tried > 20 and not Path(NEVER).exists()


@pytest.mark.parametrize("target", ["kubeflow", "pytorchjob", "jobset"])
def test_a_manifest_has_it_as_it_is(target: str) -> None:
    """Kubernetes puts variables in the place of $(NAME), and a $ in that of $$."""
    for text in PRINTED:
        made = exported(target, f"x{text}", Words(run=("--save", text), folder="/w"))
        (command,) = commands(yaml.safe_load(made))
        assert [word.replace("$$", "$") for word in command] == [
            *("python", "-m", "autopipe", "run", str(Path("/w") / f"x{text}"), "--save", text)
        ]
        assert all("$" not in word.replace("$$", "") for word in command)


@pytest.mark.parametrize("target", LAUNCHERS)
def test_each_text_as_each_word(target: str) -> None:
    """Refused by a sentence; what is of letters, digits, dots and slashes harms nobody."""
    own = LAUNCHERS[target].takes - {"run", "hosts", "checkpoints", "venv", "folder"}
    names = [name for name in own if "int" not in Words.__dataclass_fields__[name].type]
    assert "name" in names
    for name, text in product(names, TEXTS):
        if re.search(r"[^\w./]", text):
            with pytest.raises(AutopipeError, match=f"--{name}: expected"):
                export(on_cpus(2, 1), target, "plan.json", Words(**{name: text}))


@pytest.mark.parametrize("target", LAUNCHERS)
def test_a_path_of_several_lines(target: str) -> None:
    for text in (text for text in TEXTS if not text or not text.isprintable()):
        with pytest.raises(AutopipeError, match="expected text of one line"):
            exported(target, text, Words())
