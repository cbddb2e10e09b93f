"""The momentary bytes of a loss, beside those that a backward on this processor allocates."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autopipe
from autopipe.cluster.tp_groups import slowest_kind, tp_groups
from autopipe.ir.dataflow import analyse
from autopipe.ir.graph import Graph, at_batch
from autopipe.planners.costs.loss_bytes import loss_bytes
from autopipe.planners.costs.tp_degrees import as_one_rank
from autopipe.rewriting.loss_in_parts import in_parts
from tests.support.inprocess import machine
from tests.support.staged import trace_model

ROWS, WORDS, WIDTH = 96, 4096, 8


class Alive(TorchDispatchMode):
    """Counts the bytes of the tensors that ops make and that are still there, and their most."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.now = self.most = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        known = {id(s) for s in map(_storage, tree_leaves((args, kwargs))) if s is not None}
        made = func(*args, **(kwargs or {}))
        for storage in map(_storage, tree_leaves(made)):
            if storage is not None and id(storage) not in self.seen | known:
                self.seen.add(id(storage))
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, id(storage), storage.nbytes())
        self.most = max(self.most, self.now)
        return made

    def _gone(self, storage: int, size: int) -> None:
        self.seen.discard(storage)
        self.now -= size


def _storage(leaf: object) -> Any:
    return leaf.untyped_storage() if isinstance(leaf, Tensor) else None


Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, tuple[torch.dtype, Loss]] = {
    "fp32": (torch.float32, F.cross_entropy),
    "bf16": (torch.bfloat16, F.cross_entropy),
    "bf16, wide": (torch.bfloat16, lambda logits, words: F.cross_entropy(logits.float(), words)),
    "in two": (torch.float32, lambda logits, words: F.nll_loss(logits.log_softmax(1), words)),
    "smooth": (torch.float32, nn.CrossEntropyLoss(label_smoothing=0.1)),
}


class Head(nn.Module):
    def __init__(self, loss: str) -> None:
        super().__init__()
        dtype, self.loss = LOSSES[loss]
        self.head = nn.Linear(WIDTH, WORDS, bias=False, dtype=dtype)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        return self.loss(self.head(x), words)


def inputs(dtype: torch.dtype, rows: int = ROWS) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, WIDTH, dtype=dtype), "words": torch.arange(rows)}


def head(loss: str) -> tuple[Graph, dict[str, Tensor]]:
    """A head's graph, and a batch."""
    batch = partial(inputs, LOSSES[loss][0])
    return trace_model(Head(loss), batch).graph, batch(ROWS)


def most(graph: Graph) -> int:
    return max(
        at_batch(size, ROWS) for size in loss_bytes(graph, range(len(graph.nodes)), compiled=False)
    )


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("loss", LOSSES)
def test_what_a_backward_has_beside_what_is_kept(loss: str) -> None:
    """To 2 %: sums of rows, masks and single numbers are not counted."""
    graph, given = head(loss)
    with Alive() as alive:
        made = Head(loss)(**given)
        kept = alive.now
        alive.most = 0
        made.backward()
    assert most(graph) == pytest.approx(alive.most - kept, rel=0.02)


def test_a_loss_in_parts_has_those_of_one_part() -> None:
    """Of 1024 of the 4096 columns, in fp32."""
    graph, _ = head("bf16")
    assert most(in_parts(graph, 4)) == 2 * ROWS * 1024 * 4


def test_of_words_that_ranks_share_out_each_has_its_own() -> None:
    trace = trace_model(Head("bf16, wide"), partial(inputs, torch.bfloat16))
    flow = analyse(trace.graph)
    kind = slowest_kind(tp_groups(machine(2), 2))
    rank = as_one_rank(2, trace, flow, (), machine(2), ROWS, slowest=kind).trace.graph
    assert [node.op for node in rank.nodes].count("autopipe.largest.default") == 1
    assert most(rank) == most(trace.graph) // 2 == 2 * ROWS * WORDS * 4 // 2


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), Head("fp32")

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        made: Tensor = self.last(self.first(x), words)
        return made


def test_a_plan_has_them_with_its_fullest_moment() -> None:
    """The last of two stages, beside its largest gradient; of 24 rows, as a micro-batch has."""
    plan = autopipe.plan(
        Deep,
        partial(inputs, torch.float32),
        cluster=machine(2),
        batch_size=ROWS,
        micro_batches=4,
        pp=2,
        tp=1,
        schedule="1f1b",
    )
    first, last = (stage.predicted.memory.passing for stage in plan.stages)
    assert first == 4 * WIDTH * WIDTH
    assert last == 4 * WIDTH * WORDS + 2 * ROWS // 4 * WORDS * 4
