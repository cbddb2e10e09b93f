"""Where the sequence is found in a batch, and that a trace for all lengths is the trace of each."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.batch.description import describe
from autopipe.batch.row_length import length_of, lengthened
from autopipe.ir.graph import SEQUENCE
from autopipe.tracing.source import trace_source
from autopipe.tracing.symbolic_sequence import Lengths, trace_lengths, with_tokens
from tests.support.models import LENGTH
from tests.support.staged import traced_at
from tests.support.zoo import ZOO


def described(inputs):
    return describe(inputs(2), inputs(3), 2, 3)


def whole(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def test_whole_numbers_with_one_dim_besides_the_rows_have_it() -> None:
    specs = described(
        lambda b: {
            "pixels": torch.zeros(b, 3, 16),
            "label": whole(b),
            "tokens": whole(b, 24),
            "kind": whole(b, 24),
            "mask": torch.ones(b, 1, 24, 24, dtype=torch.bool),
            "memory": torch.zeros(b, 24, 24),
            "rows last": whole(24, b),
            "scale": 0.5,
        }
    )
    assert length_of(specs) == 24
    assert {spec.path: spec.shape for spec in lengthened(specs, 24)} == {
        "pixels": ("b", 3, 16),
        "label": ("b",),
        "tokens": ("b", "s"),
        "kind": ("b", "s"),
        "mask": ("b", 1, "s", "s"),
        "memory": ("b", "s", 24),  # the last one is its width, which happens to be as large
        "rows last": ("s", "b"),
        "scale": (),
    }


@pytest.mark.parametrize(
    "inputs",
    [
        lambda b: {"pixels": torch.zeros(b, 3, 16, 16), "labels": whole(b, 16, 16)},
        lambda b: {"features": torch.zeros(b, 32), "label": whole(b)},
        lambda b: {"table": whole(32, 32), "features": torch.zeros(b, 32)},
        lambda b: {"few": whole(b, 4)},
    ],
)
def test_what_has_none(inputs: Any) -> None:
    assert length_of(described(inputs)) is None


@cache
def traced(name: str) -> Lengths:
    case = ZOO[name]
    example, specs = case.inputs(2), described(case.inputs)
    return trace_lengths(case.model(), example, specs, case.loss)


@pytest.mark.long
@pytest.mark.parametrize("name", ("dropout", "gpt2", "llama", "t5", "mask"))
@pytest.mark.parametrize("length", [LENGTH, 7])
def test_at_every_length_it_is_the_trace_of_that_length(name: str, length: int) -> None:
    """Node by node, arguments included; a whole slice of a table is no node at full length."""
    found = traced(name)
    assert found.longest == LENGTH and not found.why
    assert SEQUENCE in found.trace.graph.inputs[next(iter(found.trace.graph.inputs))].shape
    assert with_tokens(found.trace.graph, length) == traced_at(name, length).graph


class Table(nn.Module):
    """As nanoGPT has it: so many places, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.register_buffer("mask", torch.ones(16, 16).tril())

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        assert length <= 16, "too long"
        x = self.embedding(tokens)
        scores = (x @ x.transpose(1, 2)).masked_fill(self.mask[:length, :length] == 0, -1e9)
        return (scores.softmax(-1) @ x).square().mean()


def test_a_model_with_a_table_as_long_as_its_example() -> None:
    def inputs(rows: int, length: int = 16) -> dict[str, Tensor]:
        return {"tokens": whole(rows, length)}

    found = trace_lengths(Table, inputs(2), described(inputs), None)
    assert found.longest == 15  # at 16 the slice is the whole table, and no node
    shorter = partial(inputs, length=9)
    alone = trace_source(Table, shorter(2), described(shorter), None).graph
    made = [(node.name, node.outputs) for node in with_tokens(found.trace.graph, 9).nodes]
    assert made == [(node.name, node.outputs) for node in alone.nodes]


class OneByOne(nn.Module):
    """A loop over the tokens of a row has as many nodes as there are tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for n in range(1, tokens.shape[1]):
            x = torch.tanh(x + x[:, n : n + 1])
        return x.square().mean()


def test_a_model_that_asks_how_many_tokens_there_are() -> None:
    """Then its trace is of that number, and it says so."""

    def inputs(rows: int) -> dict[str, Tensor]:
        return {"tokens": whole(rows, 12)}

    found = trace_lengths(OneByOne, inputs(2), described(inputs), None)
    assert found.longest is None
    assert found.why == "what the model does at 12 tokens depends on their number"
    assert found.trace.graph == trace_source(OneByOne, inputs(2), described(inputs), None).graph


@pytest.mark.long
def test_a_recurrent_layer_asks_how_many_tokens_there_are() -> None:
    found = traced("lstm")
    assert found.longest is None
    assert found.why == "what the model does at 12 tokens depends on their number"
    assert found.trace.graph == traced_at("lstm", LENGTH).graph


def test_a_model_without_one() -> None:
    inputs = {"input": torch.ones(2, 8)}
    found = trace_lengths(
        partial(nn.Linear, 8, 8),
        inputs,
        described(lambda b: {"input": torch.ones(b, 8)}),
        lambda outputs, _: outputs.mean(),
    )
    assert found.longest is None and "whole numbers" in found.why
