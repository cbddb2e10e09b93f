"""Steps regrouped: the same sums in the order of another split."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from autopipe.ir.graph import Ref, State, Value
from autopipe.ir.partition import owners
from tests.support.inprocess import ROWS, Cut, cut, micro_batch
from tests.support.zoo import ZOO


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
    found = {name for name, own in owners(split.stages, trainable).items() if len(own) > 1}
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
