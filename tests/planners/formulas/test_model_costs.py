"""What a model costs as formulas: worked by hand, and beside models of other lengths."""

from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import sympy
import torch
from torch import Tensor, nn

from autopipe import errors
from autopipe.cluster.spec import parse
from autopipe.cluster.tp_groups import slowest_kind, tp_groups
from autopipe.ir import op_costs
from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import analyse
from autopipe.ir.graph import BATCH, SEQUENCE, Graph
from autopipe.ir.repeats import shorten
from autopipe.planners.costs.tp_degrees import as_first, as_one_rank, exchanges
from autopipe.planners.formulas import model_costs
from autopipe.planners.formulas.model_costs import Amounts, Formulas, cost_formulas
from autopipe.planners.saved.observe import observe_saved
from autopipe.tracing.capture.low_precision import kept
from autopipe.tracing.symbolic_sequence import Lengths, trace_lengths
from tests.support.models import LENGTH, VOCABULARY, WIDTH
from tests.support.staged import traced_at
from tests.support.traces import kept as remembered
from tests.support.zoo import ZOO

CLUSTER = "2xA100-80GB"
b, s, h, v = BATCH, SEQUENCE, WIDTH, VOCABULARY


@cache
def _formulas(name: str, options: tuple[tuple[str, Any], ...]) -> Formulas:
    case = ZOO[name]

    def once(model: Any, example: Any, specs: Any, loss: Any, dtypes: Any) -> Lengths:
        """The model traced once, whatever is asked of its costs."""
        asked = f"{name} at all lengths, {dtypes}"
        return remembered(asked, lambda: trace_lengths(model, example, specs, loss, dtypes))

    with patch.object(model_costs, "trace_lengths", once):
        return cost_formulas(case.model(), case.inputs, loss=case.loss, **dict(options))


def formulas(name: str, **options: Any) -> Formulas:
    return _formulas(name, tuple(({"precision": "fp32"} | options).items()))


def test_a_decoder_block_by_hand() -> None:
    """Korthikanti et al. 2022, section 4.1 and appendix A, with a fused causal attention.

    24 b s h^2 of matrices and half of 4 b s^2 h; besides, one for each element made: two norms, two
    additions, and 4 h of gelu. Bytes kept, of four each: the inputs of two norms and their two
    statistics, what the four matrices read, q, k and v for the attention, its result and
    log-sum-exp of 4 heads, and what gelu reads.
    """
    (blocks,) = [part for part in formulas("gpt").parts if part.count > 1]
    assert (blocks.name, blocks.count) == ("blocks.0 to 3", 4)
    each = blocks.each
    assert each.forward_flops == 24 * b * s * h**2 + 2 * b * s**2 * h + b * s * (2 + 2 + 4) * h + (
        2 * b * s * h  # the residual's dropout, twice
    )
    assert each.parameters == 4 * (12 * h**2 + (3 + 1 + 4 + 1) * h + 4 * h)
    floats = (h + 2) + h + 3 * h + (h + 4) + (h + 2) + h + 4 * h + 4 * h
    assert each.kept == 4 * floats * b * s


@pytest.mark.long
def test_the_whole_is_its_parts_and_its_nodes() -> None:
    found = formulas("t5")
    assert Amounts.sum(found.nodes.values()) == found.total
    head = found.nodes["lm_head/linear/0"]
    assert head.forward_flops == 2 * b * 8 * h * v, (
        "eight labels, which are no part of the sequence"
    )


def seen(graph: Graph, rows: int, precision: str, tp: int) -> dict[str, float]:
    """The amounts of a graph of one length, at one number of rows, without any formula in s."""
    every = op_costs.costs(graph)
    with as_first(tp):
        kept = observe_saved(shorten(analyse(graph), ()), precision, rows)
    sent = [
        [move.sent(size, tp) if move else 0 for move in moves]
        for moves, size in exchanges(graph, tp, precision)
    ]
    sums = {
        "parameters": sum(state.held.bytes for state in graph.states.values()),
        **{
            name: sum(getattr(each, name) for each in every)
            for name in ("forward_flops", "backward_flops", "forward_bytes", "backward_bytes")
        },
        "kept": sum(kept.bytes),
        "sent": sum(there for there, _ in sent),
        "sent_back": sum(back for _, back in sent),
    }
    return {name: float(sympy.sympify(size).subs(BATCH, rows)) for name, size in sums.items()}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("gpt", "fp32"),
        pytest.param("mask", "bf16", marks=pytest.mark.long),
        pytest.param("llama", "fp32", marks=pytest.mark.long),
        pytest.param("llama", "bf16", marks=pytest.mark.long),
        pytest.param("t5", "fp32", marks=pytest.mark.long),
    ],
)
def test_at_every_size_they_are_what_a_model_of_that_size_costs(name: str, precision: str) -> None:
    """Of a length and rows that no formula was made from, seen on the whole graph."""
    graph = traced_at(name, 7, kept=kept(precision)).graph
    expected = seen(graph, 5, precision, tp=1)
    found = formulas(name, precision=precision).at(5, 7)
    assert {n: float(size) for n, size in found.items()} == expected


@pytest.mark.parametrize(
    ("name", "precision"),
    [("gpt", "fp32"), pytest.param("llama", "bf16", marks=pytest.mark.long)],
)
def test_of_one_rank_of_two(name: str, precision: str) -> None:
    found = formulas(name, tp=2, cluster=CLUSTER, precision=precision)
    traced = traced_at(name, LENGTH, kept=kept(precision))
    flow, blocks = analyse(traced.graph), find_blocks(traced.graph)
    cluster = parse(CLUSTER)
    kind = slowest_kind(tp_groups(cluster, 2))
    degree = as_one_rank(2, traced, flow, blocks, cluster, 2, slowest=kind)
    expected = seen(degree.trace.graph, 6, precision, tp=2)
    assert {n: float(size) for n, size in found.at(6, LENGTH).items()} == expected
    assert expected["sent"] > 0


def test_a_thousand_candidates_at_once() -> None:
    found = formulas("gpt")
    rows, lengths = np.arange(1, 101)[:, None], np.arange(2, LENGTH + 1)
    kept = found.at(rows, lengths)["kept"]
    assert kept.shape == (100, LENGTH - 1)
    (block,) = [part for part in found.parts if part.count > 1]
    assert found.at(7, 5)["kept"] == kept[6, 3] > 4 * 7 * 5 * block.each.kept / (b * s)
    assert found.at(rows, lengths)["parameters"].shape == kept.shape


def test_a_model_without_a_sequence_has_formulas_in_its_rows() -> None:
    found = formulas("unet")
    assert found.longest is None and found.why
    assert found.total.forward_flops.free_symbols == {b}
    assert found.at([1, 2])["kept"].tolist() == [108544 + 900, 2 * 108544 + 900]


@pytest.mark.long
def test_what_is_no_polynomial_has_no_formula() -> None:
    """An LSTM's workspace grows by whole tiles of a kernel; its operations have one."""
    found = formulas("lstm")
    assert found.total.kept is sympy.nan
    assert found.nodes["lstm/lstm/0"].kept is sympy.nan
    assert found.total.forward_flops.is_polynomial(b)


class Square(nn.Module):
    """Keeps a row of s^3: more than the formulas know."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens.float() * self.scale
        return torch.einsum("bi,bj,bk->bijk", x, x, x).exp().mean()


def test_a_run_of_another_size_must_be_as_predicted() -> None:
    def inputs(rows: int) -> dict[str, Tensor]:
        return {"tokens": torch.zeros(rows, 16, dtype=torch.int64)}

    found = cost_formulas(Square, inputs)
    assert found.longest == 16 and found.total.kept is sympy.nan
    assert found.nodes["exp/0"].forward_flops == b * s**3


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precision": "fp8"}, "there is no precision 'fp8'"),
        ({"tp": 3, "cluster": "3xA100-80GB"}, "the 4 heads of"),
        ({"tp": 4, "cluster": "2xA100-80GB"}, "tp=4 was asked for, and 2xA100-80GB has 2 devices"),
    ],
)
def test_what_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.AutopipeError, match=said):
        formulas("gpt", **options)
