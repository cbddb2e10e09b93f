"""The rooms of the package as data: which there are, their files, and who may import whom."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

MAY_IMPORT = {
    "util": "",
    "cluster": "util",
    "schedules": "",
    "planfile": "util cluster schedules",
    "report": "util cluster schedules planfile",
    "scaling": "util cluster schedules planfile",
    "page": "util schedules planfile report scaling",
    "export": "util cluster planfile",
    "interop": "util planfile report",
    "ir": "util cluster planfile",
    "onnx_files": "",
    "batch": "util planfile ir",
    "frontend": "util planfile ir batch onnx_files",
    "eager": "planfile ir frontend",
    "sharding": "util cluster planfile ir",
    "rewriting": "util planfile ir frontend sharding",
    "opaque.calls": "util planfile ir frontend eager",
    "opaque": "opaque.calls util planfile ir frontend eager rewriting",
    "tracing.capture": "util planfile ir batch frontend eager opaque.calls opaque rewriting",
    "tracing": "tracing.capture util planfile ir batch frontend eager opaque.calls opaque "
    "rewriting",
    "rows": "util planfile ir batch frontend rewriting tracing",
    "stages": "util schedules planfile ir frontend tracing.capture tracing sharding rewriting rows",
    "joint": "util ir sharding stages",
    "emit": "util schedules planfile ir batch frontend tracing sharding rewriting stages",
    "planners.model": "cluster schedules planfile",
    "planners.search": "util schedules planfile planners.model",
    "runtime.launch": "util schedules",
    "runtime.comm": "schedules planfile sharding runtime.launch",
    "runtime.parameters": "util planfile ir frontend tracing sharding stages",
    "runtime.checkpoint": "util planfile ir runtime.parameters",
    "runtime.script": "util planfile ir batch frontend eager tracing runtime.parameters "
    "runtime.checkpoint",
    "runtime.step": "util schedules planfile ir batch frontend sharding rewriting rows stages "
    "joint emit runtime.launch runtime.comm runtime.parameters runtime.checkpoint runtime.script",
    "runtime.probe": "util cluster sharding",
    "runtime.telemetry": "util schedules planfile report batch",
    "runtime": "util schedules planfile ir batch frontend tracing.capture tracing sharding stages "
    "runtime.launch runtime.comm runtime.parameters runtime.checkpoint runtime.script runtime.step "
    "runtime.telemetry",
    "planners.saved": "util ir stages joint planners.model",
    "planners.costs": "util cluster schedules planfile ir tracing sharding stages joint "
    "planners.model planners.saved",
    "planners.driver": "util cluster schedules planfile report ir batch frontend eager "
    "tracing.capture tracing sharding rewriting rows stages joint planners.model planners.search "
    "planners.costs runtime.probe",
    "planners.formulas": "util cluster schedules planfile scaling ir batch frontend "
    "tracing.capture tracing sharding rewriting rows stages joint planners.model planners.search "
    "planners.saved planners.costs planners.driver",
    "checking": "util cluster schedules planfile ir batch frontend eager opaque.calls opaque "
    "tracing.capture tracing sharding rewriting stages planners.driver runtime.launch runtime.step "
    "runtime",
    "terminal": "util planfile frontend runtime.launch",
    "cli.running": "terminal util planfile report frontend runtime.launch runtime.checkpoint "
    "runtime.telemetry runtime.step runtime planners.driver",
    "cli": "cli.running terminal util schedules planfile report export interop batch frontend "
    "tracing emit checking runtime.launch runtime.probe runtime.checkpoint runtime planners.driver "
    "planners.formulas page",
}
"""For each room the rooms that its files may import; all of them may import autopipe.errors."""

NO_TORCH = {
    *("util", "cluster", "schedules", "planfile", "report"),
    *("scaling", "page", "export", "interop"),
    *("planners.model", "planners.search"),
}
"""A plan is searched for, read, drawn and proved without torch."""

PRIVATE_TORCH = {"ir.torch_private", "joint.compiled_graph", "runtime.telemetry.memory_snapshot"}
"""Files that use private names of torch, each with the reason in its first lines."""

DOORS = {"__init__", "__main__"}
"""Beside the rooms: what `import autopipe` and `python -m autopipe` load."""

HOUSES = {"autopipe": "", "planners": "planners.", "runtime": "runtime."}
"""The top-level folders of the package and what their modules' names begin with."""

FILES = {
    prefix + ".".join(path.relative_to(ROOT / house).with_suffix("").parts): path
    for house, prefix in HOUSES.items()
    for path in sorted((ROOT / house).rglob("*.py"))
    # The links autopipe/planners and autopipe/runtime show the same files twice.
    if path.relative_to(ROOT).parts[:2] not in {("autopipe", "planners"), ("autopipe", "runtime")}
}
"""Every module by its name without `autopipe.` before it."""


_PRIVATE = re.compile(r"torch\.(?!ops\.)(\w+\.)*_")


def room(module: str) -> str:
    """The room that a module stands in; "" beside all of them."""
    return module.rpartition(".")[0]


@cache
def tree(module: str) -> ast.Module:
    """A module of the house, parsed once a process."""
    return ast.parse(FILES[module].read_text())


def imports(parsed: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of all that is imported, and of private names reached through `torch`.

    Ops are public, whatever they are called: `torch.ops.aten._ctc_loss`.
    """
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            if _PRIVATE.match(name := ast.unparse(node)):
                yield node.lineno, name


def module_of(name: str) -> str | None:
    """The module of autopipe that an imported name is of, without `autopipe.`; None: of no one."""
    parts = name.removeprefix("autopipe.").split(".")
    found = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    inits = [f"{each}.__init__" for each in found]
    return next(
        (each for pair in zip(found, inits, strict=True) for each in pair if each in FILES), None
    )


def forbidden(module: str, name: str) -> str | None:
    """Why `module` may not import `name`, or None: the table, a line a rule."""
    here = room(module)
    package = name.split(".")[0]
    target = module_of(name) if package == "autopipe" else None
    there = room(target) if target else ""
    private = any(part.startswith("_") and part[:2] != "__" for part in name.split("."))
    rules = {
        "relative imports hide the room": name.startswith("."),
        "a second module object: write autopipe.*": package in {"planners", "runtime"},
        "rooms see what is below them": target not in (None, "errors")
        and there != here
        and there not in MAY_IMPORT.get(here, "").split(),
        "this room holds no torch": here in NO_TORCH and package == "torch",
        "private torch is for the files that say why": package == "torch"
        and private
        and module not in PRIVATE_TORCH,
    }
    return next((why for why, broken in rules.items() if broken), None)
