"""Each conversion, of a value and of its gradient, is what the table of placements says."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autopipe.planfile.placements import I, P, Placement, R, S, moves
from autopipe.sharding.collectives import Planned, axis_of, bind, convert, largest, own_part, whole
from tests.support.dealing import compare, deal, dual
from tests.support.simulated import Meeting, everywhere

SHARDS = [S(0), S(1), S(1, 3), S(0, (16, 8)), S(2)]
PAIRS = [
    (a, b)
    for a, b in itertools.product([I, R, P, *SHARDS], repeat=2)
    if a != b and moves(a, b, True) is not None
]
EACH = pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda p: str(p))


def size_of(shape: Sequence[int], source: Placement) -> int:
    return shape[source.dim] if source.sharded else 0


def local(source: Placement) -> tuple[Tensor, int]:
    """What rank 0 of 2 has of [24, 24, 8], and the size of the dim that is sharded."""
    x = torch.randn(24, 24, 8)
    own = own_part(x, source, 2, 0).contiguous() if source.sharded else x
    return own, size_of(x.shape, source)


def is_true(shape: tuple[int, ...], source: Placement, target: Placement, ranks: int) -> None:
    """The value lies as the target says and is the same; so is the gradient, as the source says."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    values = deal(generator, x, source, ranks)
    above = deal(generator, dy, dual(target), ranks)

    def run(rank: int) -> tuple[Tensor, Tensor]:
        leaf = values[rank].clone().requires_grad_()
        y = convert(leaf, "tp", str(source), str(target), size_of(shape, source))
        (dx,) = torch.autograd.grad(y, leaf, above[rank])
        return y.detach(), dx

    made, gradients = zip(*everywhere(Meeting(ranks), run), strict=True)
    assert compare(made, target, x) == ""
    assert compare(gradients, dual(source), dy) == ""


@EACH
@pytest.mark.parametrize("ranks", [2, 4])
def test_values_and_gradients(source: Placement, target: Placement, ranks: int) -> None:
    is_true((24, 24, 8), source, target, ranks)


@pytest.mark.parametrize(
    ("source", "target"),
    [(a, b) for a, b in PAIRS if {a, b} <= {I, R, P, S(0), S(1), S(2)}],
    ids=lambda p: str(p),
)
@pytest.mark.parametrize("shape", [(7, 9, 11), (5, 4, 2)])
def test_parts_that_are_unequal_or_empty(
    source: Placement, target: Placement, shape: tuple[int, ...]
) -> None:
    is_true(shape, source, target, 4)


def test_an_input_is_never_written() -> None:
    """Nor is it what comes out: torch forbids both of an op."""

    def run(rank: int) -> bool:
        for source, target in PAIRS:
            x, size = local(source)
            x.fill_(1.0)
            y = convert(x, "tp", str(source), str(target), size)
            y.zero_()
            assert bool(x.all()), (source, target)
        return True

    assert all(everywhere(Meeting(2), run))


def test_the_largest_has_no_gradient() -> None:
    def run(rank: int) -> list[float]:
        x = torch.tensor([float(rank), -float(rank)], requires_grad=True)
        return largest(x.detach(), "tp").tolist()

    assert everywhere(Meeting(3), run) == [[2.0, 0.0]] * 3


@pytest.mark.parametrize("lies", [S(0), S(1), S(1, 3), S(0, (16, 8))], ids=str)
def test_the_whole_of_parts(lies: Placement) -> None:
    x = torch.arange(24 * 12 * 2.0).view(24, 12, 2)
    x = x if lies.segments != 1 else x[:23, :11]

    def run(rank: int) -> Tensor:
        return whole(own_part(x, lies, 2, rank).contiguous(), "tp", lies)

    assert all(torch.equal(found, x) for found in everywhere(Meeting(2), run))


# Seen by fake tensors and tracers. There is one rank here; the others are as it is.


class Alike:
    """An axis whose other ranks have the same tensors as this one."""

    size, rank = 2, 0

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        return x * self.size if op == "sum" else x

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        return [x.clone() for _ in sizes]

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[self.rank] * self.size

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        return [parts[self.rank].clone() for _ in sizes]


@EACH
def test_shapes_on_fake_tensors(source: Placement, target: Placement) -> None:
    """They are those of real ones, though no rank is there but by number."""
    whole = torch.randn(24, 24, 8)
    own = own_part(whole, source, 2, 1).contiguous() if source.sharded else whole
    size = size_of(whole.shape, source)
    expected = own_part(whole, target, 2, 1).contiguous() if target.sharded else whole
    with bind("tp", Planned(2, 1)), FakeTensorMode() as mode:
        fake = mode.from_tensor(own).requires_grad_()
        made = convert(fake, "tp", str(source), str(target), size)
        made.sum().backward()
    assert (made.shape, made.stride(), made.dtype) == (
        expected.shape,
        expected.stride(),
        expected.dtype,
    )
    assert fake.grad is not None and fake.grad.shape == own.shape


@EACH
def test_results_are_dense_as_fake_ones_are(source: Placement, target: Placement) -> None:
    """torch's own attention turns rows and tokens around: its parts are no dense rows."""
    whole = torch.randn(24, 24, 8)
    own = own_part(whole, source, 2, 0) if source.sharded else whole
    turned = own.transpose(0, 1).contiguous().transpose(0, 1)
    with bind("tp", Alike()):
        made = convert(turned, "tp", str(source), str(target), size_of(whole.shape, source))
    assert not turned.is_contiguous() and made.is_contiguous()


def both(x: Tensor, source: str, target: str, size: int) -> tuple[Tensor, Tensor]:
    """A conversion of x squared, and x's gradient of the sum of cubes."""
    x = x.detach().requires_grad_()
    y = convert(x * x, "tp", source, target, size)
    (dx,) = torch.autograd.grad((y**3).sum(), x)
    return y.detach(), dx


@pytest.mark.sweep(of=5)
@EACH
def test_make_fx_writes_them_down(source: Placement, target: Placement) -> None:
    """Both directions are one node each; what it wrote runs with other numbers."""
    x, size = local(source)
    with bind("tp", Alike()):
        traced = make_fx(lambda x: both(x, str(source), str(target), size))(x)
        x, _ = local(source)
        for found, expected in zip(traced(x), both(x, str(source), str(target), size), strict=True):
            torch.testing.assert_close(found, expected)
    ops = [node.target for node in traced.graph.nodes]
    assert ops.count(torch.ops.autopipe.convert.default) == 2


@pytest.mark.sweep(of=5)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("source", "target"), [(I, R), (P, I), (S(1), R), (P, S(1)), (S(1), S(0))], ids=str
)
def test_torch_compile_keeps_them_whole(source: Placement, target: Placement, backend: str) -> None:
    def model(x: Tensor) -> Tensor:
        y = convert(x * x, "tp", str(source), str(target), size)
        return (y**3).sum()

    x, size = local(source)
    torch._dynamo.reset()
    with bind("tp", Alike()):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        found, expected = (x.clone().requires_grad_() for _ in range(2))
        for f, leaf in ((compiled, found), (model, expected)):
            f(leaf).backward()
    torch.testing.assert_close(found.grad, expected.grad)


def test_names_are_bound_inside_only() -> None:
    outer, inner = Planned(2, 0), Planned(4, 3)
    with bind("made up", outer):
        with bind("made up", inner):
            assert axis_of("made up") is inner
        assert axis_of("made up") is outer
    with pytest.raises(KeyError):
        axis_of("made up")
