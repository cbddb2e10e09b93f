"""Move some lines of a method into a method of their own, which can then run as it is.

    def forward(self, x, mask):                 def forward(self, x, mask):
        h = self.body(x)                            h = self.body(x)
        picked = h[mask]                            last = self.forward_lines_3_to_4(h, mask)
        last = picked.view(len(x), 2, -1)[:, 1]     return self.head(last)
        return self.head(last)

The function is compiled again with the call in it, and computes the same. Lines are counted from
the function's own first line, so that a plan stays valid when the file changes elsewhere.
"""

from __future__ import annotations
import __future__

import ast
import linecache
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import cache
from types import CodeType, FunctionType

from autopipe.errors import CaptureError
from autopipe.frontend.user_lines import codes_in
from autopipe.opaque.calls.statements import (
    Excerpt,
    can_be_taken_from,
    excerpt_at,
    excerpts_around,
    put_call,
    self_name,
)

_NAME = re.compile(r"(?P<method>\w+)_lines_(?P<first>\d+)_to_(?P<last>\d+)")
_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)

_compiling = threading.Lock()
_trees: dict[FunctionType, ast.FunctionDef] = {}
"""Of functions that have been looked at, their source as it stands in the file."""
_taken: dict[FunctionType, dict[str, Excerpt]] = {}
"""Of functions that were compiled once more, the methods that they call, by their names."""
_before: list[tuple[FunctionType, CodeType, dict[str, Excerpt]]] = []
"""Of each time that a function was compiled once more, its code and its methods before."""


def candidates(kind: type, code: CodeType, line: int) -> list[str]:
    """The names of methods that lines around `line` could be, the fewest lines first.

    Args:
        kind: the class of the module.
        code: the code of one of its methods, which runs `line` of its file.
    """
    function = _function(kind, code.co_name, code)
    tree = _tree(function) if function is not None else None
    if tree is None:
        return []
    offset = tree.lineno - 1
    names = (
        f"{code.co_name}_lines_{excerpt.first - offset}_to_{excerpt.last - offset}"
        for excerpt in excerpts_around(tree, line)
    )
    return list(dict.fromkeys(names))


def is_outlined(method: str) -> bool:
    """Whether a method has a name that `candidates` gives."""
    return _NAME.fullmatch(method) is not None


def outline(kind: type, name: str) -> None:
    """Give a class the method `name`, one that `candidates` names, and have its lines call it.

    Raises:
        CaptureError: its source has no such lines.
    """
    match = _NAME.fullmatch(name)
    assert match is not None, "no name of lines"
    with _compiling:
        function = _function(kind, match["method"])
        tree = _tree(function) if function is not None else None
        if function is None or tree is None or not _outlined(kind, function, tree, name, match):
            place = f"{kind.__module__}.{kind.__qualname__}.{match['method']}()"
            raise CaptureError(
                f"lines {match['first']} to {match['last']} of {place} run as they are in the "
                "plan, and are no statements of the code that is there now",
                hint="the code has changed: plan again",
            )


@contextmanager
def put_back_after_errors() -> Iterator[None]:
    """Within, lines may become methods; after an error functions are as they were before."""
    known = len(_before)
    try:
        yield
    except Exception:
        with _compiling:
            while len(_before) > known:
                function, code, methods = _before.pop()
                function.__code__, _taken[function] = code, methods
        raise


def _outlined(
    kind: type, function: FunctionType, tree: ast.FunctionDef, name: str, match: re.Match[str]
) -> bool:
    """Compile a function with one more such call; calls whose lines overlap with it go."""
    known = _taken.get(function, {})
    if name in known:
        return True
    first, last = (int(match[word]) + tree.lineno - 1 for word in ("first", "last"))
    excerpt = excerpt_at(tree, first, last)
    if excerpt is None:
        return False
    apart = {n: other for n, other in known.items() if other.last < first or last < other.first}
    excerpts = {**apart, name: excerpt}
    owner = next(base for base in kind.__mro__ if match["method"] in vars(base))
    codes = _compiled(owner.__name__, function, tree, excerpts)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for method in excerpts:
        closure = tuple(cells[free] for free in codes[method].co_freevars)
        compiled = FunctionType(codes[method], function.__globals__, method, None, closure)
        setattr(owner, method, compiled)
    _before.append((function, function.__code__, known))
    function.__code__ = codes[tree.name].replace(co_qualname=function.__code__.co_qualname)
    _taken[function] = excerpts
    return True


# The function and its source


def _function(kind: type, name: str, code: CodeType | None = None) -> FunctionType | None:
    """The plain function of a method, without its decorators."""
    owner = next((base for base in kind.__mro__ if name in vars(base)), None)
    if owner is None or owner.__module__.partition(".")[0] == "torch":
        return None
    pending, seen = [vars(owner)[name]], set[int]()
    while pending:
        candidate = pending.pop(0)
        if id(candidate) in seen or not callable(candidate):
            continue
        seen.add(id(candidate))
        if isinstance(candidate, FunctionType):
            found = candidate.__code__
            if found is code or (code is None and found.co_name == name):
                return candidate
            for cell in candidate.__closure__ or ():
                with suppress(ValueError):  # nothing in it yet
                    pending.append(cell.cell_contents)
        pending += [getattr(candidate, "__wrapped__", None), getattr(candidate, "func", None)]
    return None


def _tree(function: FunctionType) -> ast.FunctionDef | None:
    """The source of a function, at its lines of the file; None if no statement can be taken."""
    if function not in _trees:
        code = function.__code__
        for node in ast.walk(_file(code.co_filename)):
            if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
                begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if begin == code.co_firstlineno and can_be_taken_from(node):
                    _trees[function] = node
    return _trees.get(function)


@cache
def _file(filename: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


# The function compiled once more


def _compiled(
    owner: str, function: FunctionType, tree: ast.FunctionDef, excerpts: Mapping[str, Excerpt]
) -> dict[str, CodeType]:
    """The code of a function that calls the excerpts, and of these, by name.

    Args:
        owner: the name of the class, which is part of what `self.__name` means.
    """
    free = function.__code__.co_freevars
    host = deepcopy(tree)
    methods = [_method(host, name, excerpt) for name, excerpt in excerpts.items()]
    for definition in (host, *methods):
        definition.decorator_list, definition.returns = [], None
        # Named in dead code: it must have the same cells as before to take the function's place.
        named = ast.Tuple([ast.Name(name, ast.Load()) for name in free], ast.Load())
        definition.body.insert(0, ast.If(ast.Constant(False), [ast.Expr(named)], []))
    # The class that a method names (`Net.SCALE`) is the module's, unless a function made it.
    mine = "pass" if owner in free else f"global {owner}"
    takes = ", ".join(name for name in free if name != "__class__")
    module = ast.parse(f"def around({takes}):\n {mine}\n class {owner}: ...")
    (kind,) = (node for node in ast.walk(module) if isinstance(node, ast.ClassDef))
    kind.body = [host, *methods]
    ast.fix_missing_locations(module)
    flags = function.__code__.co_flags & _FUTURE
    compiled = compile(module, function.__code__.co_filename, "exec", flags, dont_inherit=True)
    codes = list(codes_in(compiled))
    return {
        name: next(code for code in codes if code.co_name == name)
        for name in (tree.name, *excerpts)
    }


def _method(host: ast.FunctionDef, name: str, excerpt: Excerpt) -> ast.FunctionDef:
    """An excerpt as a method, which `host` calls from now on."""
    bound = ast.Attribute(ast.Name(self_name(host), ast.Load()), name, ast.Load())
    call = ast.Call(bound, [ast.Name(argument, ast.Load()) for argument in excerpt.given], [])
    if excerpt.returns:
        statement: ast.stmt = ast.Return(call)
    elif excerpt.gives:
        statement = ast.Assign([_names(excerpt.gives, ast.Store())], call)
    else:
        statement = ast.Expr(call)
    body = put_call(host, excerpt, statement)
    if excerpt.gives:
        body = [*body, ast.Return(_names(excerpt.gives, ast.Load()))]
    (method,) = ast.parse(f"def {name}({', '.join((self_name(host), *excerpt.given))}): ...").body
    assert isinstance(method, ast.FunctionDef)
    method.body = body
    return ast.copy_location(method, body[0])


def _names(names: tuple[str, ...], context: ast.expr_context) -> ast.expr:
    found = [ast.Name(name, context) for name in names]
    return found[0] if len(found) == 1 else ast.Tuple([*found], context)
