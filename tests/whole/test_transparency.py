"""Splitting changes nothing: losses, gradients and running statistics are those of the whole model.

    whole     loss(model(batch k)).backward(1/m)        for each micro-batch k in turn
    split     the same micro-batches through 2, 3 or 4 stages, any schedule

All of it bitwise in fp32, but for gradients that sum contributions of more than one stage. Floats
do not associate, and a stage can only add up what it has itself:

    whole     ((d + c) + b) + a           split      (d + c) + (b + a)

`regrouped` says by a rule which these are; they are equal to 1e-5 of their largest entry.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autopipe.ir.partition import legal_cuts
from tests.support.inprocess import ROWS, Cut, cut, run, traced
from tests.support.long import chosen, sampled
from tests.support.regroup import regrouped, whole
from tests.support.zoo import ZOO

MICRO_BATCHES = (1, 2, 3, 8)
SCHEDULES = ("1f1b", "gpipe")
MOST_UNLIKE = ((2, "gpipe"), (4, "1f1b"))
"""Stages and schedules that always run; the others in the long run."""

EVENLY = ("gpt", "gpt2", "lstm", "odd", "resnet", "unet")
"""Models that are always cut evenly too; the others only anywhere, but in the long run."""

RANDOM = ("dropout",)  # draws other numbers than plain PyTorch; see the last tests

DETERMINISTIC = [name for name in ZOO if name not in RANDOM]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The sum of a matmul's parts must not depend on how many threads happened to be free."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(split: Cut, micro_batches: int, schedule: str) -> None:
    """Hold one step of a split model to the whole one."""
    batch = ZOO[split.name].inputs(ROWS * micro_batches)
    found = run(split, batch, micro_batches=micro_batches, schedule=schedule)
    losses, gradients, buffers = whole(split.name, micro_batches)
    said = f"{split}, m={micro_batches}, {schedule}: "
    assert len(found.losses) == micro_batches
    for loss, expected in zip(found.losses, losses, strict=True):
        assert torch.equal(loss[0], expected), said + "loss"
    assert found.gradients.keys() == gradients.keys(), said
    exempt = regrouped(split)
    for name, expected in gradients.items():
        gradient = found.gradients[name]
        if name in exempt:
            most = 1e-5 * expected.abs().max()
            assert (gradient - expected).abs().max() <= most, said + name
        else:
            assert torch.equal(gradient, expected), said + name
    for name, buffer in found.buffers.items():
        assert torch.equal(buffer, buffers[name]), said + name


PIPELINES = pytest.mark.parametrize(
    ("pp", "schedule"),
    [
        pytest.param(pp, schedule, marks=() if (pp, schedule) in MOST_UNLIKE else pytest.mark.long)
        for pp in (2, 3, 4)
        for schedule in SCHEDULES
    ],
)


@PIPELINES
@pytest.mark.parametrize("name", chosen(DETERMINISTIC, now=EVENLY))
def test_cut_evenly(name: str, pp: int, schedule: str) -> None:
    """24 steps of each model; 4 of them by default."""
    for micro_batches in sampled(MICRO_BATCHES, of=2):
        check(cut(name, pp), micro_batches, schedule)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "pp", [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    "name", chosen(DETERMINISTIC, now=[n for n in DETERMINISTIC if n not in ("t5", "whisper")])
)
def test_cut_anywhere(name: str, pp: int, seed: int) -> None:
    """Inside attention, between a norm and its residual, wherever it is legal."""
    for micro_batches, schedule in zip((1, 3), SCHEDULES, strict=True):
        check(cut(name, pp, seed), micro_batches, schedule)


@pytest.mark.parametrize(
    "name", chosen(DETERMINISTIC, now=[n for n in DETERMINISTIC if n != "whisper"])
)
def test_one_stage_is_the_whole_model(name: str) -> None:
    split = cut(name, 1)
    assert regrouped(split) == set()
    check(split, 2, "1f1b")


def test_little_is_exempt() -> None:
    """Only tied weights and encoders; a skip connection has two summands, and a + b = b + a."""
    exempt = {
        name
        for name in DETERMINISTIC
        for pp in sampled((4, 3, 2), of=3)
        if regrouped(cut(name, pp))
    }
    assert exempt == {"gpt2", "t5", "whisper"}
    assert regrouped(cut("gpt2", 3)) == {"transformer.wte.weight"}


@PIPELINES
def test_dropout_is_the_same_however_it_is_split(pp: int, schedule: str) -> None:
    batch = ZOO["dropout"].inputs(ROWS * 4)
    one = run(cut("dropout", 1), batch, micro_batches=4)
    for seed in (None, 1):
        split = run(cut("dropout", pp, seed), batch, micro_batches=4, schedule=schedule)
        assert [loss[0].item() for loss in split.losses] == [loss[0].item() for loss in one.losses]
        for name, gradient in one.gradients.items():
            assert torch.equal(split.gradients[name], gradient), name


def test_dropout_drops() -> None:
    """Otherwise the test above says nothing: other micro-batches and no dropout, other losses."""
    rows = ZOO["dropout"].inputs(ROWS)
    twice = {key: torch.cat([value, value]) for key, value in rows.items()}  # type: ignore[union-attr]
    (first,), (second,) = run(cut("dropout", 2), twice, micro_batches=2).losses
    (without,) = run(cut("gpt", 2), rows, micro_batches=1).losses[0]
    assert len({first.item(), second.item(), without.item()}) == 3


def test_where_the_zoo_can_be_cut() -> None:
    """Nearly everywhere, and each model at least into four stages."""
    for name in ZOO:
        found, flow, _ = traced(name)
        places = [
            node for node, local in zip(found.graph.nodes, flow.local, strict=True) if not local
        ]
        # odd assigns a buffer: what reads it stays in one stage with what writes it.
        least = 3 if name == "odd" else len(places) // 2
        assert len(legal_cuts(flow)) >= max(3, least), name
