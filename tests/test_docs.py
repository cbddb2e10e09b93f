"""The documents say what is there: modules that they name, links, the README's picture and code."""

import doctest
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.house import FILES, ROOT
from tests.support.shell import Said, end, free_port, rank, start, torchrun_environment

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PLAN = "examples/gpt.plan.json"
ROOMS = {name.rpartition(".")[0] for name in FILES}
HOUSES = ("autopipe", "planners", "runtime")


def fenced(text: str, language: str = "") -> list[str]:
    """The blocks of code of a language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S)
    return [block for of, block in blocks if of == language]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())
    inside = [link for link in links if "://" not in link]
    assert [link for link in inside if not (path.parent / link).exists()] == []


def named(text: str) -> list[str]:
    """What stands in backticks and begins with a room: `tracing.trace`, `planners.driver`."""
    words = re.findall(r"`([a-z_]+(?:\.[A-Za-z_0-9]+)+)`", text)
    firsts = {room.split(".")[0] for room in ROOMS if room} | {"autopipe"}
    return [w for w in words if w.split(".")[0] in firsts and not w.endswith((".py", ".json"))]


def there(name: str) -> bool:
    """Whether a room, a module or something that a module defines has this name."""
    name = name.removeprefix("autopipe.")
    if name in FILES or name in ROOMS:
        return True
    module, _, what = name.rpartition(".")
    return module in FILES and bool(
        re.search(rf"^(def|class) {what}\b|^{what}\b", FILES[module].read_text(), flags=re.M)
    )


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_is_there(path: Path) -> None:
    assert [name for name in named(path.read_text()) if not there(name)] == []


def test_examples_in_docstrings_show_what_they_return() -> None:
    with_examples = [name for name, path in FILES.items() if "\n    >>> " in path.read_text()]
    assert with_examples
    for name in with_examples:
        assert doctest.testmod(importlib.import_module(f"autopipe.{name}")).failed == 0, name


def test_the_readme_shows_the_plan_that_is_kept() -> None:
    """Its picture and its table are lines of `autopipe explain`."""
    run = [sys.executable, "-m", "autopipe", "explain", str(ROOT / PLAN)]
    wide = {**os.environ, "COLUMNS": "100"}
    printed = subprocess.run(run, capture_output=True, text=True, check=True, env=wide).stdout
    said = {" ".join(line.split()) for line in printed.splitlines()}
    (block,) = [text for text in fenced((ROOT / "README.md").read_text()) if "rank 0" in text]
    lines = [" ".join(line.split()) for line in block.splitlines() if line.strip()]
    assert len(lines) > 5
    assert [line for line in lines if line not in said] == []


def typed(folder: Path) -> list[Said]:
    """The two commands of a newcomer."""
    commands = ((), ("-m", "torch.distributed.run", "--nproc-per-node", "2"))
    return [
        end(start(sys.executable, *words, "train.py", folder=folder), timeout=300)
        for words in commands
    ]


def forked(folder: Path) -> list[Said]:
    """What they start, with the same environment."""
    alone = rank("train.py", folder=folder, environ={})()
    port = free_port()
    two = [torchrun_environment(number, 2, port) for number in (0, 1)]
    given = {"TORCHELASTIC_RUN_ID": "none"}
    begun = [rank("train.py", folder=folder, environ=own | given) for own in two]
    return [alone, *(ended() for ended in begun)]


@pytest.mark.parametrize("started", [forked, pytest.param(typed, marks=pytest.mark.long)])
def test_the_readme_trains(started: Callable[[Path], list[Said]], tmp_path: Path) -> None:
    """Its lines of Python."""
    (code,) = fenced((ROOT / "README.md").read_text(), "python")
    written = "    open(f'loss{distributed.get_rank()}', 'w').write(str(float(mean)))\n"
    (tmp_path / "train.py").write_text(code + written)
    planned, *ranks = started(tmp_path)
    for said in (planned, *ranks):
        assert said.code == 0, said.err
    assert "".join(said.out for said in ranks).count("step 9: loss ") == 1
    first, second = (float((tmp_path / f"loss{rank}").read_text()) for rank in (0, 1))
    assert first == second < 1.1
