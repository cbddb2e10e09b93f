"""Who may import whom: read the table to learn the layout; the tests hold the files to it.

examples             plain PyTorch, which knows nothing of autopipe
autopipe/planners    search: from values to values, without torch and without processes
autopipe/runtime     processes: they execute a plan and never look for one
autopipe             the words both are written in; only its doors put the two to work
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import autopipe

ROOT = Path(__file__).parent.parent

DOORS = {  # Python API, command line
    *("__init__", "__main__", "candidate", "choosing", "cli", "draft", "parallel", "planning"),
    "second_look",
}
# Plain values and arithmetic: a plan is made, read, drawn and proved without torch.
VALUES = {
    f"autopipe.{name}"
    for name in """
        ahead as_json cluster codec colours communication compare errors estimate explain facts
        figures files footprint forecast law machine megatron numbers page paper perfetto phrases
        picture placements plan presets problem programs progress proof rates reruns roofline
        rules schedule schedules schema simulate sketch spec stage_costs svg tables teams tracks
        traffic transfers walk written
    """.split()
}


def forbidden(module: str, name: str) -> str | None:
    """Why `module` may not import `name`, or None: the table, a line a rule."""

    def inside(name: str, packages: set[str]) -> bool:
        return any(f"{name}.".startswith(f"{package}.") for package in packages)

    planner, runtime = {"autopipe.planners"}, {"autopipe.runtime"}
    core = inside(module, {"autopipe"}) and not inside(module, planner | runtime)
    door = core and module.split(".")[1] in DOORS
    value = module in VALUES or inside(module, planner)
    private = any(part.startswith("_") and part[:2] != "__" for part in name.split("."))
    rules = {
        "a second module object: write autopipe.*": inside(name, {"planners", "runtime"}),
        "nobody prepares an example": inside(module, {"examples"}) and inside(name, {"autopipe"}),
        "planners run no processes": inside(module, planner) and inside(name, runtime),
        "the runtime does not search": inside(module, runtime) and inside(name, planner),
        "only doors open": core and not door and inside(name, planner | runtime),
        "values hold no torch": value and inside(name, {"torch"}),
        "values stand on values": value
        and inside(name, {"autopipe"})
        and not inside(name, VALUES | planner),
        "private torch is for autopipe/fake.py": inside(name, {"torch"})
        and private
        and module != "autopipe.fake",
    }
    return next((why for why, broken in rules.items() if broken), None)


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of all that is imported, and of what is reached as `torch._name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch._"):
            yield node.lineno, ast.unparse(node)


FILES = {
    ".".join((package, *path.relative_to(ROOT / folder).with_suffix("").parts)): path
    for package, folder in (
        ("examples", "examples"),
        ("autopipe.planners", "planners"),
        ("autopipe.runtime", "runtime"),
        ("autopipe", "autopipe"),
    )
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.relative_to(ROOT).parts[:2] not in {("autopipe", "planners"), ("autopipe", "runtime")}
}


@pytest.mark.parametrize("module", FILES)
def test_imports_run_downhill(module: str) -> None:
    found = list(imports(ast.parse(FILES[module].read_text())))
    assert [f"line {line}: {name}" for line, name in found if name.startswith(".")] == []
    broken = [(line, name, forbidden(module, name)) for line, name in found]
    assert [f"line {line}: {name}: {why}" for line, name, why in broken if why] == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("autopipe.trace", "planners.dynamic"),
        ("examples.gpt", "autopipe"),
        ("autopipe.planners.dynamic", "autopipe.runtime.executor"),
        ("autopipe.planners.dynamic", "torch.distributed"),
        ("autopipe.planners.dynamic", "autopipe.trace.trace"),
        ("autopipe.stage_costs", "autopipe.planners.orders.orders"),
        ("autopipe.runtime.executor", "autopipe.planners.uniform"),
        ("autopipe.trace", "autopipe.runtime.executor"),
        ("autopipe.schedule", "torch"),
        ("autopipe.forecast", "autopipe.rehearsal.rehearse"),
        ("autopipe.trace", "torch._dynamo"),
        ("autopipe.trace", "torch.utils._pytree.tree_map"),
    ],
)
def test_the_table_refuses(module: str, name: str) -> None:
    assert forbidden(module, name)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("autopipe.parallel", "autopipe.runtime.executor"),
        ("autopipe.planning", "autopipe.planners"),
        ("autopipe.planners.dynamic", "autopipe.problem.Problem"),
        ("autopipe.planners.dynamic", "autopipe.planners.orders.classes"),
        ("autopipe.runtime.executor", "torch.distributed"),
        ("autopipe.fake", "torch._subclasses.FakeTensorMode"),
        ("autopipe.trace", "torch.__version__"),
    ],
)
def test_the_table_allows(module: str, name: str) -> None:
    assert forbidden(module, name) is None


def test_the_public_names() -> None:
    assert autopipe.__all__ == sorted(autopipe.__all__)
    errors = "Autopipe Capture Infeasible Launch Model Plan Schedule".split()
    expected = {"Pipe", "Plan", "parallelize", "plan"} | {f"{name}Error" for name in errors}
    assert expected <= set(autopipe.__all__)
    assert all(getattr(autopipe, name).__doc__ for name in autopipe.__all__)
    # `plan` is the function, not the module autopipe.plan, whichever was imported last.
    assert callable(autopipe.plan)
