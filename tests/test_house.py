"""What a reader may count on: rooms of a size to know, files and functions that fit on few screens.

room       5 to 15 files, and an `__init__` that says what comes in, goes out, is never there
file       350 lines at most; long tables of data excepted by name
function   60 lines at most, its signature and docstring aside
class      one name, one meaning: no name is defined in two rooms
"""

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.house import FILES, MAY_IMPORT, ROOT, imports, module_of, room, tree

TABLES = {"cluster.datasheets"}
"""Data of a page per device, which a split would only hide."""

TESTS = sorted((ROOT / "tests").rglob("*.py"))


def modules_of(name: str) -> list[str]:
    """The modules of a room, its `__init__` aside."""
    return [m for m in FILES if room(m) == name and not m.endswith("__init__")]


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_a_room_has_a_size_to_know(name: str) -> None:
    assert 5 <= len(modules_of(name)) <= 15


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_a_room_says_what_it_is_for(name: str) -> None:
    said = import_module(f"autopipe.{name}").__doc__ or ""
    assert "Never found here:" in said


def test_no_room_stands_outside_of_the_table() -> None:
    rooms = {room(name) for name in FILES if not name.endswith("__init__")}
    assert rooms - {""} == set(MAY_IMPORT)


def test_a_file_fits_on_few_screens() -> None:
    lines = {name: len(FILES[name].read_text().splitlines()) for name in set(FILES) - TABLES}
    assert {name: count for name, count in lines.items() if count > 350} == {}


def functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Name and lines of the body of each function, its docstring aside."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node, clean=False) else node.body
            if body:
                yield node.name, (body[-1].end_lineno or 0) - body[0].lineno + 1


def test_a_function_fits_on_a_screen() -> None:
    long = [(name, f, lines) for name in FILES for f, lines in functions(tree(name)) if lines > 60]
    assert long == []


def test_a_class_name_means_one_thing() -> None:
    rooms: dict[str, set[str]] = defaultdict(set)
    for name in FILES:
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.ClassDef):
                rooms[node.name].add(room(name))
    assert {c: sorted(found) for c, found in rooms.items() if len(found) > 1} == {}


def test_imports_have_no_cycle() -> None:
    """Imports for types count: a reader follows them too."""
    uses = {
        name: {module_of(what) for _, what in imports(tree(name)) if what.startswith("autopipe")}
        - {None, name, "__init__"}
        for name in FILES
    }
    try:
        TopologicalSorter(uses).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(map(str, error.args[1])))


def test_nothing_of_the_package_is_called_plan() -> None:
    """`autopipe.plan` is the public function, whichever module was imported last."""
    words = {part for name in FILES for part in name.split(".")}
    assert "plan" not in words


def wrongly_imported(path: Path) -> Iterator[str]:
    """What a test imports and may not, by its line."""
    for line, name in imports(ast.parse(path.read_text())):
        parts, here = name.split("."), f"{path.relative_to(ROOT)}:{line}"
        if (
            parts[0] == "tests"
            and path.name != "test_house.py"
            and any(part.startswith("test_") for part in parts[:-1])
        ):
            yield f"{here}: {name}: a test imports a test"
        private = [p for p in parts if p.startswith("_") and not p.startswith("__")]
        if parts[0] == "autopipe" and private:
            yield f"{here}: {name} is private"


def test_a_test_stands_on_helpers_and_public_names() -> None:
    assert len(TESTS) > 400
    assert [said for path in TESTS for said in wrongly_imported(path)] == []


def test_the_lowest_versions_are_those_that_pyproject_allows() -> None:
    """`.ci/lowest.txt` tries what `pyproject.toml` promises; make names torch."""
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    promised = dict(one.split(">=") for one in asked if not one.startswith("torch>="))
    lines = (ROOT / ".ci" / "lowest.txt").read_text().splitlines()
    tried = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert promised.keys() == tried.keys()
    for name, version in tried.items():
        assert f"{version}.".startswith(f"{promised[name]}."), name
