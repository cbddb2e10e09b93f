"""The plan's cuts and shards in another trace of its model."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import autopipe
from autopipe.runtime.cut_again import split_at_length, traces_at_lengths
from autopipe.sharding.plan_io import read_back
from autopipe.stages.bind import split_as_planned
from autopipe.tracing.source import trace_source
from tests.support.inprocess import close_together
from tests.support.zoo import integers


class Encoder(nn.Module):
    """tokens [b, s] -> [b, s, 32]; of 24 positions the first s are added."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True)
        self.positions = nn.Parameter(torch.randn(24, 16))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(tokens) + self.positions[: tokens.shape[1]]))


def loss(made: Tensor, batch: Any) -> Tensor:
    return made.square().mean()


def tokens(rows: int, length: int = 24) -> dict[str, Tensor]:
    return {"tokens": integers(rows, length, below=32)}


def test_positions_that_are_sharded_are_whole_where_shorter_rows_are_cut_off() -> None:
    """Bug: each rank took the first 6 of its own 12 positions, and the loss was another one."""
    plan = autopipe.plan(
        Encoder, tokens, loss=loss, cluster=close_together(2), tp=2, batch_size=4, micro_batches=1
    )
    sharding = read_back(plan)
    assert sharding.states["positions"].sharded, "or this test is of nothing"
    trace = trace_source(Encoder, tokens(2), plan.inputs, loss)
    split = split_as_planned(trace, plan, 1, sharding)
    part: Any = SimpleNamespace(plan=plan, place=SimpleNamespace(tp=1), split=split)
    traces = traces_at_lengths(Encoder, tokens(2), loss, plan)
    short = split_at_length(traces, part, sharding, tokens(4, 12), 12)
    (read,) = [node for node in short.graph.nodes if node.name == "slice/0"]
    assert read.outputs[0] is not None and read.outputs[0].shape == (12, 16)
