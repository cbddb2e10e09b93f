"""Every schedule computes what one process does: the same losses, gradients and running statistics.

    model           a decoder with dropout, a U-net with skips over every cut, a decoder whose
                    embedding is its head (tied)
    schedule        all, with depths 0, 1 and 3 and with 2 and 3 chunks where they take such
    ranks           2, 3, 4
    window          1, 2, 4
    micro-batches   1 to 16

Of the 4,320 combinations 160 are run: each schedule with each number of micro-batches. The other
three values are taken in turn along that table, so that every pair of any two values occurs. All of
these are for the long run; by default 10 of them run, one of each shape of a schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from autopipe.schedules.registry import SCHEDULES
from tests.support.inprocess import ROWS, cut, run
from tests.support.regroup import regrouped, whole
from tests.support.zoo import ZOO

MODELS = ("dropout", "unet", "gpt2")
RANKS = (2, 3, 4)
WINDOWS = (1, 2, 4)
MICRO_BATCHES = range(1, 17)


class Shape(NamedTuple):
    """A schedule with what it takes besides."""

    schedule: str
    chunks: int = 1
    depth: int = 0


SHAPES = (
    Shape("naive"),
    Shape("gpipe"),
    Shape("1f1b"),
    Shape("eager-1f1b", depth=0),
    Shape("eager-1f1b", depth=1),
    Shape("eager-1f1b", depth=3),
    Shape("interleaved", chunks=2),
    Shape("interleaved", chunks=3),
    Shape("zb-h1"),
    Shape("zb-v", chunks=2),
)


class Case(NamedTuple):
    """One step of one model."""

    model: str
    shape: Shape
    ranks: int
    window: int
    micro_batches: int

    def __str__(self) -> str:
        schedule, chunks, depth = self.shape
        return (
            f"{self.model}-{schedule}-c{chunks}-d{depth}-p{self.ranks}-w{self.window}"
            f"-m{self.micro_batches}"
        )


def grid() -> Iterator[Case]:
    """Row m and column s of the table: its three values are of row and column together.

    Ranks and windows go with m + s and m + 2 s (modulo 3, any two remainders of these meet), models
    change every third row and column.
    """
    for (s, shape), m in product(enumerate(SHAPES), MICRO_BATCHES):
        yield Case(
            MODELS[(m // 3 + s // 3) % 3], shape, RANKS[(m + s) % 3], WINDOWS[(m + 2 * s) % 3], m
        )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The sum of a matmul's parts must not depend on how many threads happened to be free."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def one_process(
    model: str, micro_batches: int
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, gradients and buffers of plain PyTorch; with dropout, whose numbers are the runtime's
    own, of a pipeline of one stage."""
    if model != "dropout":
        return whole(model, micro_batches)
    batch = ZOO[model].inputs(ROWS * micro_batches)
    found = run(cut(model, 1), batch, micro_batches=micro_batches)
    return [loss for (loss,) in found.losses], found.gradients, found.buffers


def test_every_pair_of_values_occurs() -> None:
    cases = list(grid())
    axes = (MODELS, SHAPES, RANKS, WINDOWS, MICRO_BATCHES)
    assert len(cases) == 160
    for (i, first), (j, second) in combinations(enumerate(axes), 2):
        assert {(case[i], case[j]) for case in cases} == set(product(first, second))
    assert {shape.schedule for shape in SHAPES} == set(SCHEDULES)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=() if number % 17 == 0 else pytest.mark.long)
        for number, case in enumerate(grid())
    ],
)
def test_it_is_what_one_process_computes(case: Case) -> None:
    """Bit by bit, but for what `regrouped` says: tied weights add up once in each stage first."""
    schedule, chunks, depth = case.shape
    split = cut(case.model, case.ranks * chunks, split=SCHEDULES[schedule].splits)
    found = run(
        split,
        ZOO[case.model].inputs(ROWS * case.micro_batches),
        micro_batches=case.micro_batches,
        schedule=schedule,
        chunks=chunks,
        window=case.window,
        depth=depth,
    )
    losses, gradients, buffers = one_process(case.model, case.micro_batches)
    assert [loss for (loss, *_) in found.losses] == losses
    assert found.gradients.keys() == gradients.keys()
    exempt = regrouped(split)
    assert exempt == ({"transformer.wte.weight"} if case.model == "gpt2" else set())
    for name, expected in gradients.items():
        difference = (found.gradients[name] - expected).abs().max()
        assert difference <= (1e-5 * expected.abs().max() if name in exempt else 0), name
    for name, buffer in found.buffers.items():
        assert torch.equal(buffer, buffers[name]), name
