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
from functools import cache

import pytest
import torch
from torch import Tensor

from autopipe.graph import Ref, State, Value
from autopipe.partition import legal_cuts, tied_states
from tests.inprocess import ROWS, Cut, cut, micro_batch, run, traced
from tests.zoo import ZOO

MICRO_BATCHES = (1, 2, 3, 8)
SCHEDULES = ("1f1b", "gpipe")
RANDOM = ("dropout",)  # draws other numbers than plain PyTorch; see the last tests

DETERMINISTIC = [name for name in ZOO if name not in RANDOM]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The sum of a matmul's parts must not depend on how many threads happened to be free."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def whole(
    name: str, micro_batches: int
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, gradients and buffers of the model that nobody has split."""
    case = ZOO[name]
    model, losses = case.model(), []
    batch = case.inputs(ROWS * micro_batches)
    for k in range(micro_batches):
        found = case.eager(model, micro_batch(cut(name, 1), batch, k))
        loss = found if isinstance(found, Tensor) else found[0]  # (sum, count)
        loss.backward(torch.full_like(loss, 1 / micro_batches))
        losses.append(loss.detach())
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return losses, gradients, dict(model.named_buffers())


def regrouped(split: Cut) -> set[str]:
    """Parameters whose gradient adds up in another order in this split.

    Tied ones that stand in several stages, and all that lies upstream of a value with this fate:

        stage    makes v    reads v twice or more    reads v        an encoder's output, say
                                 (b + a)          +    c
    """
    graph, flow = split.graph, split.flow
    trainable = [name for name, state in graph.states.items() if state.trainable]
    found = set(tied_states(split.stages, trainable))
    holders = {p: stage.index for stage in split.stages for p in range(stage.first, stage.stop)}
    for stage in split.stages:
        for value in stage.outgoing:
            last = max(taker for sent, taker in stage.sends if sent == value)
            users = [holders.get(user, last) for user in flow.users[value]]
            if any(users.count(between) > 1 for between in range(stage.index + 1, last)):
                found |= upstream(split, value)
    return found


def upstream(split: Cut, value: Value) -> set[str]:
    """The states that a value depends on."""
    graph, pending, seen = split.graph, [value], set[Value]()
    while pending:
        value = pending.pop()
        if value not in seen:
            seen.add(value)
            if isinstance(value, Ref):
                pending += graph.nodes[graph.index[value.node]].values()
    return {value.name for value in seen if isinstance(value, State)}


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


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_cut_evenly(name: str, pp: int, schedule: str) -> None:
    for micro_batches in MICRO_BATCHES:
        check(cut(name, pp), micro_batches, schedule)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_cut_anywhere(name: str, pp: int, seed: int) -> None:
    """Inside attention, between a norm and its residual, wherever it is legal."""
    for micro_batches, schedule in zip((1, 3), SCHEDULES, strict=True):
        check(cut(name, pp, seed), micro_batches, schedule)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_one_stage_is_the_whole_model(name: str) -> None:
    split = cut(name, 1)
    assert regrouped(split) == set()
    check(split, 2, "1f1b")


def test_little_is_exempt() -> None:
    """Only tied weights and encoders; a skip connection has two summands, and a + b = b + a."""
    exempt = {name for name in DETERMINISTIC for pp in (2, 3, 4) if regrouped(cut(name, pp))}
    assert exempt == {"gpt2", "t5", "whisper"}
    assert regrouped(cut("gpt2", 3)) == {"transformer.wte.weight"}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4])
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
        assert len(legal_cuts(flow)) >= max(3, len(places) // 2), name
