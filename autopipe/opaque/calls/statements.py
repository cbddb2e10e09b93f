"""Find out which names some statements of a function read and write, to make them a method.

    picked = h[mask]                            given  h, mask, x
    last = picked.view(len(x), 2, -1)[:, 1]
    return self.head(last)                      gives  last, which is read here; picked is not

They can be a method if every name that they read has a value for certain, and they do not jump out
(`break`, or `return` in the middle).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

_LOOPS = (ast.For, ast.While)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_LATE = (*_SCOPES, ast.GeneratorExp)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

_LOOKS_AROUND = {"locals", "vars", "dir", "eval", "exec"}
"""Functions that may read every name of the function that calls them."""


@dataclass(frozen=True)
class Excerpt:
    """Statements in the lines `first` to `last` of a file, as a method.

    Attributes:
        given, gives: the names of its arguments, besides the module, and of its results.
        returns: whether the last statement returns from the function.
    """

    first: int
    last: int
    given: tuple[str, ...]
    gives: tuple[str, ...]
    returns: bool


@dataclass(frozen=True)
class Spot:
    """The statement `block[index]`, in a block of the statement `of`; None: of the function."""

    block: list[ast.stmt]
    index: int
    of: ast.stmt | None


def self_name(tree: ast.FunctionDef) -> str:
    """The name of a method's first argument, usually `self`."""
    return [*tree.args.posonlyargs, *tree.args.args][0].arg


def can_be_taken_from(tree: ast.FunctionDef) -> bool:
    """Whether a function is a method from which statements can be taken."""
    strange = (ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom, ast.Await, ast.Delete)
    names = _Names(tree.body)
    return (
        bool(tree.args.posonlyargs or tree.args.args)
        and self_name(tree) not in names.written
        and names.read.isdisjoint(_LOOKS_AROUND)
        and not any(isinstance(node, strange) for node in ast.walk(tree))
    )


def excerpts_around(tree: ast.FunctionDef, line: int) -> Iterator[Excerpt]:
    """The statements around a line that can be a method, the fewest first."""
    path = _path(tree.body, line)
    own = (_arguments(tree) | _Names(tree.body).written) - {self_name(tree)}
    for depth in range(len(path), 0, -1):
        for begin, end in _growing_ranges(path[depth - 1], own):
            excerpt = _excerpt(tree, path[:depth], begin, end)
            if excerpt is not None:
                yield excerpt


def excerpt_at(tree: ast.FunctionDef, first: int, last: int) -> Excerpt | None:
    """The excerpt of exactly these lines; None if they cannot be a method."""
    found = _at(tree, first, last)
    return found and found[2]


def put_call(tree: ast.FunctionDef, excerpt: Excerpt, call: ast.stmt) -> list[ast.stmt]:
    """Replace the statements of an excerpt by one, and return them."""
    found = _at(tree, excerpt.first, excerpt.last)
    assert found is not None, "an excerpt of another function"
    place, end, _ = found
    taken = place.block[place.index : end]
    place.block[place.index : end] = [ast.copy_location(call, taken[0])]
    return taken


def _at(tree: ast.FunctionDef, first: int, last: int) -> tuple[Spot, int, Excerpt] | None:
    """The first of the statements in exactly these lines, the index behind the last one, and their
    excerpt; None if they cannot be a method.

    They may be within another one in these lines: `if mask is None: return x[0]`.
    """
    path = _path(tree.body, first)
    for depth, place in enumerate(path, 1):
        block, begin = place.block, place.index
        ends = [n for n in range(begin, len(block)) if block[n].end_lineno == last]
        if block[begin].lineno == first and ends:
            excerpt = _excerpt(tree, path[:depth], begin, ends[-1] + 1)
            if excerpt is not None:
                return place, ends[-1] + 1, excerpt
    return None


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    if not isinstance(statement, _SCOPES):
        for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            yield part.body
        for field in ("body", "orelse", "finalbody"):
            yield getattr(statement, field, [])


def _path(block: list[ast.stmt], line: int, of: ast.stmt | None = None) -> list[Spot]:
    """The statements around a line, the outermost first."""
    for number, statement in enumerate(block):
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            deeper = (_path(inner, line, statement) for inner in _blocks(statement))
            return [Spot(block, number, of), *next(filter(None, deeper), [])]
    return []


def _growing_ranges(place: Spot, own: Set[str]) -> Iterator[tuple[int, int]]:
    """Growing ranges of statements around one: itself, then on to the last statement that reads
    its names, and so on.

    Each range is tried again from the statement that writes its inputs, which may be no tensors,
    and from those that made what it changes: `rows = []` before `rows.append(row)`. The last range
    goes to the end of the block, since reads of attributes cannot be seen by name.

    Args:
        own: the names of the function, besides `self`.
    """
    block, index = place.block, place.index
    end, follows = index + 1, _Names([block[index]]).followed(own)
    while True:
        yield from _with_begins(block, index, end, own)
        readers = [n for n in range(index, len(block)) if _Names([block[n]]).read & follows]
        known = end, follows
        end = max([index, *readers]) + 1
        follows = follows.union(*(_Names([block[n]]).followed(own) for n in readers))
        if (end, follows) == known:
            yield from _with_begins(block, index, len(block), own)
            return


def _with_begins(
    block: Sequence[ast.stmt], index: int, end: int, own: Set[str]
) -> Iterator[tuple[int, int]]:
    """The range from `index` to `end`, and from where what it reads or changes is written."""
    names = _Names(block[index:end])
    last = {name: n for n in range(index) for name in _Names([block[n]]).written & names.read}
    made = [last[name] for name in names.changed & own if name in last]
    begins = (index, *([max(last.values())] if last else ()), *([min(made)] if made else ()))
    yield from ((begin, end) for begin in dict.fromkeys(begins))


def _excerpt(tree: ast.FunctionDef, path: Sequence[Spot], begin: int, end: int) -> Excerpt | None:
    """The excerpt from `begin` to `end` in the block at a path; None: it cannot be a method."""
    taken = path[-1].block[begin:end]
    returns = isinstance(taken[-1], ast.Return)
    names, bound = _Names(taken), _bound_before(tree, path, begin)
    if _jumps_out(taken[:-1] if returns else taken) or _share_cells(tree, taken, names):
        return None
    gives = set() if returns else names.written & _read_after(path, end)
    given = _read_first(taken) & (_arguments(tree) | _Names(tree.body).written)
    given |= gives - (_bound_after(taken) or set())
    if not given <= bound:
        return None
    last = taken[-1].end_lineno or taken[-1].lineno
    given.discard(self_name(tree))
    return Excerpt(taken[0].lineno, last, tuple(sorted(given)), tuple(sorted(gives)), returns)


def _jumps_out(statements: Sequence[ast.stmt], *, in_loop: bool = False) -> bool:
    """Whether statements may return, or go on elsewhere in a loop around them."""
    for statement in statements:
        jumps = isinstance(statement, ast.Break | ast.Continue) and not in_loop
        if isinstance(statement, ast.Return) or jumps:
            return True
        inside = in_loop or isinstance(statement, _LOOPS)
        if any(_jumps_out(block, in_loop=inside) for block in _blocks(statement)):
            return True
    return False


def _arguments(tree: ast.FunctionDef) -> set[str]:
    return {argument.arg for argument in ast.walk(tree.args) if isinstance(argument, ast.arg)}


def _bound_before(tree: ast.FunctionDef, path: Sequence[Spot], begin: int) -> set[str]:
    """Names that have values for certain when the statements from `begin` on run."""
    found = _arguments(tree)
    for place in path:
        found |= _bound_by_head(place.of)
        upto = begin if place is path[-1] else place.index
        found |= _bound_after(place.block[:upto]) or set()
    return found


def _read_after(path: Sequence[Spot], end: int) -> set[str]:
    """Names that may be read once the statements before `end` have run."""
    found = set[str]()
    for place in path:
        rest = place.block[end if place is path[-1] else place.index + 1 :]
        found |= _read_first(rest)
        if isinstance(place.of, _LOOPS):  # its next round, which may begin before all of the rest
            found |= _read_first([place.of])
        elif isinstance(place.of, ast.Try | ast.TryStar):
            found |= _Names([place.of]).read
    return found


def _share_cells(tree: ast.FunctionDef, taken: Sequence[ast.stmt], names: _Names) -> bool:
    """Whether an inner function reads a name that is written on the other side of an excerpt.

    `late = lambda: h + 1` has the h that is there when `late` is called.
    """
    rest = _Names(tree.body, but=taken)
    inside = {id(node) for statement in taken for node in ast.walk(statement)}
    late = (node for part in tree.body for node in ast.walk(part) if isinstance(node, _LATE))
    return any(
        _Names([node]).read & (rest if id(node) in inside else names).written for node in late
    )


def _read_first(statements: Sequence[ast.stmt], known: Set[str] = frozenset()) -> set[str]:
    """Names that statements may read before they have written them."""
    found = set[str]()
    for statement in statements:
        blocks = [*_blocks(statement)]
        inner = known | _bound_by_head(statement)
        heads = _Names([statement], but=[each for block in blocks for each in block])
        found |= (heads.read - known).union(*(_read_first(block, inner) for block in blocks))
        known |= _bound_after([statement]) or set()
    return found


def _bound_by_head(statement: ast.stmt | None) -> set[str]:
    """Names that have values for certain in the blocks of a statement, by what is before these."""
    match statement:
        case ast.For():
            return _Names([statement.target]).written
        case ast.With():
            return _Names(statement.items).written
        case ast.Match():
            return _Names([part.pattern for part in statement.cases]).written
        case ast.If() | ast.While():
            first = statement.test  # `(k := f(x)) > 2 and g(k)`: the rest may not run
            while isinstance(first, ast.BoolOp | ast.Compare):
                first = first.values[0] if isinstance(first, ast.BoolOp) else first.left
            return {first.target.id} if isinstance(first, ast.NamedExpr) else set()
    return set()


def _bound_after(statements: Sequence[ast.stmt]) -> set[str] | None:
    """Names that have values after statements for certain; None: nothing runs after them."""
    found = set[str]()
    for statement in statements:
        match statement:
            case ast.Return() | ast.Raise() | ast.Break() | ast.Continue():
                return None
            case ast.If():
                branches = map(_bound_after, (statement.body, statement.orelse))
                going_on = [bound for bound in branches if bound is not None]
                if not going_on:
                    return None
                found |= _bound_by_head(statement).union(set.intersection(*going_on))
            case ast.With():
                found |= _bound_by_head(statement) | (_bound_after(statement.body) or set())
            case ast.For() | ast.While() | ast.Try() | ast.TryStar() | ast.Match():
                pass
            case _:
                found |= _Names([statement]).written
    return found


class _Names(ast.NodeVisitor):
    """The names that nodes, `but` some statements, read and write in the function around them, and
    those of what they may change: `x[0] = y`, `x.append(y)`."""

    def __init__(self, nodes: Sequence[ast.AST], but: Sequence[ast.stmt] = ()) -> None:
        self._but = but
        self.read: set[str] = set()
        self.written: set[str] = set()
        self.changed: set[str] = set()
        for node in nodes:
            self.visit(node)

    def followed(self, own: Set[str]) -> set[str]:
        """The names that are written, and those of `own` that are changed."""
        return self.written | (self.changed & own)

    def visit_Name(self, node: ast.Name) -> None:
        """`x`, read or written."""
        (self.read if isinstance(node.ctx, ast.Load) else self.written).add(node.id)

    def visit_Expr(self, node: ast.Expr) -> None:
        """`x.append(y)`, whose result nobody takes."""
        self.generic_visit(node)
        match node.value:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name))) if node not in self._but:
                self.changed.add(name)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """`x[0]`, read or written."""
        self.generic_visit(node)
        match node:
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()):
                self.changed.add(name)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """`x += 1` reads x too, and changes it if it is a list."""
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            self.read.add(node.target.id)
            self.changed.add(node.target.id)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """`x: int` gives x no value."""
        if node.value is not None:
            self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        """Visit the parts of a node; a function or a comprehension has names of its own."""
        if node in self._but:
            return
        if isinstance(node, ast.alias):
            self.written.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            self.written.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            self.written.add(node.rest)
        if not isinstance(node, (*_SCOPES, *_COMPREHENSIONS)):
            super().generic_visit(node)
            return
        inner = _Names([*ast.iter_child_nodes(node)])
        arguments = {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
        assigned = {part.target.id for part in ast.walk(node) if isinstance(part, ast.NamedExpr)}
        if isinstance(node, _COMPREHENSIONS):
            self.written |= assigned
        elif not isinstance(node, ast.Lambda):
            self.written.add(node.name)
        self.read |= inner.read - arguments - (inner.written - assigned)
