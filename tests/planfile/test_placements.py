"""States are written and read back, conversions send what the table says, shards follow views."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from autopipe.ir.graph import BATCH
from autopipe.planfile.placements import (
    BIG,
    I,
    P,
    Placement,
    R,
    S,
    divides,
    lengths,
    local_size,
    moves,
    parse,
    part,
    through_view,
)
from autopipe.sharding.collectives import own_part, together

WRITTEN = {
    "I": I,
    "R": R,
    "P": P,
    "S(0)": S(0),
    "S(12)": S(12),
    "S(1, 3)": S(1, 3),
    "S(0, 8+2+2)": S(0, (8, 2, 2)),
    "S(0, b)": S(0, BIG),
    "S(2, 12*b)": S(2, 12 * BIG),
}


@pytest.mark.parametrize("text", WRITTEN)
def test_they_are_written_and_read_back(text: str) -> None:
    assert str(WRITTEN[text]) == text
    assert parse(text) == WRITTEN[text]


@pytest.mark.parametrize(
    "text", ["", "Q", "S", "S()", "S(-1)", "S(0,3)", "S(0, 8+)", "S(0) ", "S(0, 0)", "S(0, 0*b)"]
)
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no placement; I, R, P, S"):
        parse(text)


def test_equal_lengths_are_a_number() -> None:
    assert S(1, (4, 4, 4)) == S(1, 3)
    assert S(1, (5,)) == S(1)


def test_segments_as_many_as_the_rows() -> None:
    assert S(0, 4 * BIG).at(3) == S(0, 12)
    assert S(0, 4).at(3) == S(0, 4)
    assert S(0, (8, 2)).at(3) == S(0, (8, 2))


# Conversions


@pytest.mark.parametrize(
    ("source", "target", "sent"),
    [
        (I, R, "nothing, all-reduce"),  # f of Megatron-LM
        (P, I, "all-reduce, nothing"),  # g
        (S(1), R, "all-gather, reduce-scatter"),  # and those of sequence parallelism
        (P, S(1), "reduce-scatter, all-gather"),
        (S(1), I, "all-gather, nothing"),
        (I, S(1), "nothing, all-gather"),
        (R, S(1), "nothing, nothing"),
        (R, I, "nothing, nothing"),
        (I, P, "nothing, nothing"),
        (P, R, "all-reduce, all-reduce"),
        (S(1), S(0), "all-to-all, all-to-all"),
        (S(1), S(1, 3), "all-to-all, all-to-all"),
        (S(1), S(1), "nothing, nothing"),
        (P, P, "nothing, nothing"),
        (R, P, None),
        (S(1), P, None),
    ],
)
def test_what_conversions_send(source: Placement, target: Placement, sent: str | None) -> None:
    def shown(differentiable: bool) -> list[str] | None:
        found = moves(source, target, differentiable)
        return found and [move.name if move else "nothing" for move in found]

    assert shown(True) == (sent and sent.split(", "))
    assert shown(False) == (sent and [sent.split(", ")[0], "nothing"])


def test_a_gradient_is_converted_as_its_duals_are() -> None:
    """a to b sends of the gradient what b's dual to a's dual sends of a value."""
    duals = {I: I, R: P, P: R, S(0): S(0), S(1): S(1)}
    for a, b in itertools.product(duals, duals):
        found, back = moves(a, b, True), moves(duals[b], duals[a], True)
        if found is not None and back is not None:
            assert found[1] == back[0], (a, b)


# Parts


def test_a_vocabulary_that_does_not_divide() -> None:
    assert [part(127, 4, rank) for rank in range(4)] == [(0, 32), (32, 32), (64, 32), (96, 31)]
    assert [part(5, 4, rank) for rank in range(4)] == [(0, 2), (2, 2), (4, 1), (5, 0)]
    assert [local_size(127, 1, 4, rank) for rank in range(4)] == [32, 32, 32, 31]


def test_sizes_are_formulas_in_the_rows() -> None:
    assert local_size(12 * BATCH, 1, 4, 3) == 3 * BATCH
    assert local_size(12 * BATCH, BIG, 4, 3) == 3 * BATCH


def test_segments_of_a_fused_weight() -> None:
    rows = torch.arange(12)
    assert own_part(rows, S(0), 2, 0).tolist() == [0, 1, 2, 3, 4, 5]
    assert own_part(rows, S(0, 3), 2, 0).tolist() == [0, 1, 4, 5, 8, 9]
    assert own_part(rows, S(0, (8, 2, 2)), 2, 1).tolist() == [4, 5, 6, 7, 9, 11]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("size", [1, 5, 12, 24, 127])
@pytest.mark.parametrize("segments", [1, 2, 3, (8, 2, 2), (12, 12), (16, 4, 4)])
def test_parts_make_the_whole_again(ranks: int, size: int, segments: int) -> None:
    lies = S(1, segments)
    if lies.segments != 1 and not divides(size, lies.segments, ranks):
        return
    whole = torch.arange(3 * size * 2).view(3, size, 2)
    parts = [own_part(whole, lies, ranks, rank) for rank in range(ranks)]
    assert torch.equal(together(parts, lies, size), whole)
    expected = [local_size(size, lies.segments, ranks, rank) for rank in range(ranks)]
    assert [x.shape[1] for x in parts] == expected
    assert sum(lengths(size, lies.segments)) == size


# Views, against all of them


def factors(size: int, dims: int) -> Iterator[tuple[int, ...]]:
    """The shapes of so many dims with `size` elements."""
    if dims == 1:
        yield (size,)
        return
    for first in range(1, size + 1):
        if size % first == 0:
            for rest in factors(size // first, dims - 1):
                yield (first, *rest)


def shapes(size: int) -> list[tuple[int, ...]]:
    return [shape for dims in (1, 2, 3) for shape in factors(size, dims)]


def fits(x: Tensor, after: tuple[int, ...], lies: Placement, made: Placement, ranks: int) -> bool:
    """Whether the view of each rank's shard is that rank's shard of the view."""
    shape = list(after)
    shape[made.dim] //= ranks
    return all(
        torch.equal(
            own_part(x, lies, ranks, rank).reshape(shape),
            own_part(x.view(after), made, ranks, rank),
        )
        for rank in range(ranks)
    )


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("size", [12, 24, 36])
def test_views_against_brute_force(size: int, ranks: int) -> None:
    """It is right wherever it says something, and says nothing only where no dim would do."""
    looked_at = 0
    for before, after in itertools.product(shapes(size), shapes(size)):
        x = torch.arange(size).view(before)
        for dim, length in enumerate(before):
            for segments in range(1, length // ranks + 1):
                if not divides(length, segments, ranks):
                    continue
                lies = S(dim, segments)
                made = through_view(before, after, dim, segments, ranks)
                if made is not None:
                    looked_at += 1
                    assert divides(after[made.dim], made.segments, ranks)
                    assert fits(x, after, lies, made, ranks), (before, after, lies, made)
                    continue
                for axis, other in enumerate(after):
                    possible = [k for k in range(1, other + 1) if divides(other, k, ranks)]
                    for k in possible:
                        assert not fits(x, after, lies, S(axis, k), ranks), (before, after, lies)
    assert looked_at > 100


@pytest.mark.parametrize(
    ("before", "lies", "after", "made"),
    [
        ((2, 6, 4), S(1), (2, 24), S(1)),
        ((2, 24), S(1), (12, 4), S(0, 2)),
        ((5, 24), S(1, 3), (5, 3, 8), S(2)),  # q, k and v told apart
        ((5, 3, 8), S(2), (5, 24), S(1, 3)),
        ((2, 24), S(1), (2, 3, 8), None),  # 12 are one and a half of them
        ((BIG, 12, 32), S(1), (BIG * 12, 32), S(0, BIG)),
        ((BIG, 4, 12, 8), S(1), (4 * BIG, 12, 8), S(0, BIG)),  # heads of a batch
        ((5, 12, 7), S(1, (8, 2, 2)), (5, 1, 12, 7), S(2, (8, 2, 2))),
        ((5, 12, 7), S(1, (8, 2, 2)), (5, 84), None),
        ((127, 4), S(0), (1, 127, 4), S(1)),
        ((4, 6, 0), S(0), (24, 0), None),  # no elements
        ((127, 4), S(0), (508,), None),  # unequal parts stay whole rows
    ],
)
def test_views_worth_knowing(before, lies, after, made) -> None:
    assert through_view(before, after, lies.dim, lies.segments, 2) == made
