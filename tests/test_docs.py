"""The documents say what is there: modules that they name, links, the README's picture and code."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.house import FILES, ROOT
from tests.support.shell import Said, end, ranks, start

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


def started(*words: str) -> Callable[[Path], Said]:
    """By a command, as a newcomer types it."""
    return lambda folder: end(start(sys.executable, *words, "train.py", folder=folder))


@pytest.mark.parametrize(
    ("launch", "processes"),
    [
        pytest.param(started(), 1, marks=pytest.mark.long),
        pytest.param(
            started("-m", "torch.distributed.run", "--nproc-per-node", "2"),
            2,
            marks=pytest.mark.long,
        ),
        (lambda folder: ranks(2, "train.py", folder=folder), 2),
    ],
    ids=["python", "torchrun", "as torchrun does"],
)
def test_the_readme_trains(launch: Callable[[Path], Said], processes: int, tmp_path: Path) -> None:
    """Its lines of Python."""
    (code,) = fenced((ROOT / "README.md").read_text(), "python")
    written = "    open(f'loss{distributed.get_rank()}', 'w').write(str(float(mean)))\n"
    (tmp_path / "train.py").write_text(code + written)
    said = launch(tmp_path)
    assert said.code == 0, said.err
    found = [float((tmp_path / f"loss{rank}").read_text()) for rank in range(processes)]
    assert len({*found}) == 1 and found[0] < 1.1
