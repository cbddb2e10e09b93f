"""Imports run downhill between rooms: `tests/support/house.py` has the table; read it first."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import autopipe
from tests.support.house import (
    DOORS,
    FILES,
    MAY_IMPORT,
    ROOT,
    forbidden,
    imports,
    module_of,
    room,
    tree,
)  # fmt: skip

TORCH_ATTRIBUTES = {
    name
    for owner in (
        torch.nn.Module(),
        torch.empty(0),
        torch.empty(0).untyped_storage(),
        torch.ops.aten.add.Tensor,
        torch.autograd.Function,
        torch.nn.init,
    )
    for name in dir(owner)
    if name.startswith("_") and not name.endswith("__")
}
"""Private attributes of what torch makes, as `_schema` of an op or `_version` of a tensor."""


def private_attributes(parsed: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of torch's private attributes that are read of anything but `self`."""
    for node in ast.walk(parsed):
        if isinstance(node, ast.Attribute) and node.attr in TORCH_ATTRIBUTES:
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.lineno, ast.unparse(node)


def test_the_table_runs_downhill() -> None:
    order = list(MAY_IMPORT)
    uphill = {
        (here, there)
        for here, row in MAY_IMPORT.items()
        for there in row.split()
        if order.index(there) >= order.index(here)
    }
    assert uphill == set()


def test_imports_run_downhill() -> None:
    assert [
        f"{module}, line {line}: {name}: {why}"
        for module in FILES
        if module not in DOORS
        for line, name in imports(tree(module))
        if (why := forbidden(module, name))
    ] == []


def test_no_room_may_import_what_it_does_not() -> None:
    """The table is a map: each word of it is an import that somebody makes."""
    made = {
        (room(module), room(target))
        for module in FILES
        for _, name in imports(tree(module))
        if (target := module_of(name))
    }
    assert {(here, t) for here, row in MAY_IMPORT.items() for t in row.split()} - made == set()


def test_torchs_private_attributes_stand_in_one_file() -> None:
    found = {module for module in FILES if list(private_attributes(tree(module)))}
    assert found == {"ir.torch_private"}


@pytest.mark.parametrize(
    "line",
    [
        "op._schema",
        "tensor._version",
        "module._parameters['weight']",
        "block.inner._modules",
        "nn.Module._apply",
    ],
)
def test_a_private_attribute_is_seen(line: str) -> None:
    assert list(private_attributes(ast.parse(line)))


def test_ones_own_attribute_is_no_private_one_of_torch() -> None:
    assert list(private_attributes(ast.parse("self._parameters"))) == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.py")), ids=lambda p: p.name)
def test_nobody_prepares_an_example(path: Path) -> None:
    found = imports(ast.parse(path.read_text()))
    assert [name for _, name in found if name.split(".")[0] == "autopipe"] == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("tracing.trace", "planners.search.dynamic"),
        ("planners.search.dynamic", "autopipe.runtime.step.executor"),
        ("planners.search.dynamic", "torch.distributed"),
        ("planners.search.dynamic", "autopipe.tracing.trace.trace"),
        ("planners.model.stage_costs", "autopipe.planners.search.uniform"),
        ("runtime.step.executor", "autopipe.planners.search.uniform"),
        ("tracing.trace", "autopipe.runtime.step.executor"),
        ("schedules.instructions", "torch"),
        ("planfile.predict", "autopipe.stages.dry_run.rehearse"),
        ("tracing.trace", "torch._dynamo"),
        ("tracing.trace", "torch.utils._pytree.tree_map"),
        ("runtime.train", "torch.cuda.memory._snapshot"),
    ],
)
def test_the_table_refuses(module: str, name: str) -> None:
    assert forbidden(module, name)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("runtime.parallelize", "autopipe.runtime.step.executor"),
        ("planners.driver.make_plan", "autopipe.planners.search.best"),
        ("planners.search.dynamic", "autopipe.planners.model.problem.Problem"),
        ("planners.search.dynamic", "autopipe.planners.search.device_orders.classes"),
        ("runtime.step.executor", "torch.distributed"),
        ("ir.torch_private", "torch._subclasses.FakeTensorMode"),
        ("tracing.trace", "torch.__version__"),
        ("runtime.telemetry.memory_snapshot", "torch.cuda.memory._dump_snapshot"),
    ],
)
def test_the_table_allows(module: str, name: str) -> None:
    assert forbidden(module, name) is None


def test_a_private_name_is_seen_that_is_reached_through_torch() -> None:
    """Of ops the names are torch's own business."""
    code = "torch.cuda.memory._snapshot(); torch.ops.aten._ctc_loss; torch.cuda.synchronize()"
    assert [name for _, name in imports(ast.parse(code))] == ["torch.cuda.memory._snapshot"]


def test_the_public_names() -> None:
    assert autopipe.__all__ == sorted(autopipe.__all__)
    errors = "Autopipe Capture Infeasible Launch Model Plan Schedule".split()
    expected = {"Pipe", "Plan", "parallelize", "plan"} | {f"{name}Error" for name in errors}
    assert expected <= set(autopipe.__all__)
    assert all(getattr(autopipe, name).__doc__ for name in autopipe.__all__)
    assert callable(autopipe.plan), "no module of the package is called `plan`"


def listed(room: str) -> Iterator[tuple[str, str | None]]:
    """Module and name of all that a room's `__init__` lists as what other rooms use.

    `.name` is of the module before it; what has no dot is a module.
    """
    said = ast.get_docstring(tree(f"{room}.__init__")) or ""
    module = ""
    for text in re.findall(r"Other rooms use: (.*?)\.(?:\s|$)", said, flags=re.S):
        for word in re.findall(r"`([^`]+)`", text):
            before, dot, name = word.rpartition(".")
            module = (before or module) if dot else word
            yield f"{room}.{module}", name if dot else None


def mapped(docstring: str, modules: set[str]) -> set[str]:
    """The modules at the begin of a line of a room's map: `    problem, devices   ...`."""
    lines = re.findall(r"^ {4}([a-z_0-9]+(?:, [a-z_0-9]+)*) {2,}\S", docstring, flags=re.M)
    return {word for line in lines for word in line.split(", ")} & modules


@pytest.mark.parametrize("of", MAY_IMPORT)
def test_a_map_of_a_room_names_all_its_modules(of: str) -> None:
    """Where a room's `__init__` goes through its modules, none is missing."""
    modules = {module.rpartition(".")[2] for module in FILES if room(module) == of} - {"__init__"}
    said = ast.get_docstring(tree(f"{of}.__init__")) or ""
    if len(mapped(said, modules)) > len(modules) / 2:
        assert modules - set(re.findall(r"\w+", said)) == set()


def defined(module: str) -> set[str]:
    """The names that a module itself defines, not those that it imports."""
    names = set()
    for node in tree(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_what_other_rooms_use_is_there(room: str) -> None:
    found = list(listed(room))
    assert [module for module, _ in found if module not in FILES] == []
    assert [
        f"{module} has no {name}"
        for module, name in found
        if name is not None and name not in defined(module)
    ] == []


def test_the_lists_of_what_other_rooms_use_are_read() -> None:
    words = set(listed("stages"))
    assert {("stages.lower", "lower"), ("stages.lower", "Lowered")} <= words
    assert ("checking.comparison", None) in listed("checking")
