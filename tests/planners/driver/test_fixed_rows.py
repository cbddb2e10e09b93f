"""A model whose graph is another one for each number of rows is planned for the one it will get.

    forward loops over rows      one op a row       batch 8, dp 1, 2 micro-batches: 4 rows, 4 ops

The rows of a micro-batch are known where all that they follow from is asked for. A loss may see how
rows are grouped, which such a graph does not show: it has to be asked for by micro-batch.

Where they are not known, the lines that fix them run as they are, if they can.
"""

from __future__ import annotations

import copy
from types import FunctionType

import pytest
import torch
from torch import Tensor, nn

import autopipe
from autopipe import Plan, SumCount
from autopipe.batch.description import count_rows
from autopipe.batch.tree import flatten
from autopipe.errors import CaptureError, ModelError
from autopipe.runtime.start import trace_planned
from tests.support.inprocess import machine
from tests.support.long import chosen
from tests.support.odd_models import ROWS, Net, built, inputs, square
from tests.support.staged import Step, differences, staged_step, trace_model
from tests.support.zoo import ZOO

KNOWN = {"dp": 1, "micro_batches": 2, "batch_size": 8, "loss_over": "micro-batch"}


class RowByRow(Net):
    """Each row is weighed by its place, and the rows become a list, and a tensor again.

    In a method of its own it would run as it is (`opaque`); in forward it is the graph.
    """

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).relu()
        rows = [self.middle(row) / (1 + place) for place, row in enumerate(hidden)]
        return self.down(torch.stack(rows).relu())


class Listed(Net):
    """Bug: LLaVA makes a list of pictures, and joins them again."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.cat(list(self.middle(self.up(x).relu())[:, None])))


class Numbered(Net):
    """Another model for each number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(self.middle(hidden).relu() if len(hidden) == 4 else hidden)


class Pair(Net):
    """No lines of it can run as they are: a micro-batch may have four rows."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.up(x)
        return self.down(torch.stack([self.middle(first), self.middle(second)]).relu())


class Appended(Net):
    """Bug: refused, as a list that is made before the loop cannot be given to a method."""

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        hidden = self.up(x)
        for row in range(x.shape[0]):
            rows.append(self.middle(hidden[row]))
        return self.down(torch.stack(rows).relu())


class Int(Net):
    """int() of a size is a number of one graph."""

    def forward(self, x: Tensor) -> Tensor:
        count = int(x.shape[0])
        hidden = self.up(x).reshape(count, 2, -1).flip(1).reshape(count, -1)
        return self.down(self.middle(hidden).relu())


class Slopes(Net):
    """torch.gradient asks how many there are."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        slopes = torch.gradient(hidden, dim=1)[0] + torch.gradient(hidden, dim=0)[0]
        return self.down(self.middle(hidden + slopes).relu())


def apart(kind: type[Net]) -> type[Net]:
    """A class whose forward may get other code, with nothing changed for the other tests."""
    plain = kind.forward
    forward = FunctionType(plain.__code__, plain.__globals__, "forward")
    return type(kind.__name__, (kind,), {"forward": forward})


KINDS = [RowByRow, Listed, Numbered]


def planned(model: nn.Module, pp: int = 1, **how: object) -> Plan:
    return autopipe.plan(model, inputs, loss=square, cluster=machine(pp), pp=pp, **{**KNOWN, **how})


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_split_it_computes_what_the_model_does(kind: type[Net], tmp_path) -> None:
    model = built(kind)
    plan = planned(model, pp=2)
    assert plan.rows_fixed and plan.traced_rows == 4
    plan.save(tmp_path / "plan.json")
    trace = trace_planned(model, inputs, square, Plan.load(tmp_path / "plan.json")).trace
    assert trace.rows == 4
    batch, losses = inputs(8), []
    cuts = [len(trace.graph.nodes) // 2]
    found = staged_step(copy.deepcopy(model), trace, batch, cuts, 2)
    for k in range(2):
        rows = {name: tensor[4 * k : 4 * k + 4] for name, tensor in batch.items()}
        losses.append(square(model(rows["x"]), rows))
        (losses[-1] / 2).backward()
    assert not differences(found, Step.of(losses, model), tolerance=1e-6)


@pytest.mark.parametrize(
    "left_out", chosen(["dp", "micro_batches", "loss_over"], now=("loss_over",))
)
def test_where_the_rows_are_not_known_it_is_refused(left_out: str) -> None:
    words = {name: value for name, value in KNOWN.items() if name != left_out}
    with pytest.raises(CaptureError, match="the number of rows is fixed here") as error:
        autopipe.plan(built(Pair), inputs, loss=square, cluster=machine(2), **words)
    assert "say how many rows a micro-batch has (--micro-batch-size)" in str(error.value)


LINES = {
    RowByRow: "3_to_4",
    Listed: "2_to_2",
    Numbered: "3_to_3",
    Appended: "2_to_6",
    Int: "2_to_3",
    Slopes: "3_to_3",
}


@pytest.mark.parametrize("kind", chosen(LINES, now=(Slopes,)), ids=lambda kind: kind.__name__)
def test_where_the_rows_are_not_known_the_lines_run_as_they_are(kind: type[Net]) -> None:
    """Bug: refused, where the same lines in a method of their own ran."""
    model, said = built(apart(kind)), []
    words = {"dp": 1, "micro_batches": 2, "batch_size": 8, "say": said.append}
    plan = autopipe.plan(model, inputs, loss=square, cluster=machine(2), pp=2, **words)
    assert not plan.rows_fixed
    assert [region.name for region in plan.regions] == [f"forward_lines_{LINES[kind]}()"]
    mixing = kind in (RowByRow, Numbered, Slopes)
    assert any("depend on the other rows" in line for line in said) == mixing
    assert not any("torch.distributed" in line for line in said), "autopipe itself asked"
    trace = trace_planned(model, inputs, square, plan).trace
    batch, losses = inputs(6), []
    found = staged_step(copy.deepcopy(model), trace, batch, [len(trace.graph.nodes) // 2], 2)
    for k in range(2):
        rows = {name: tensor[3 * k : 3 * k + 3] for name, tensor in batch.items()}
        losses.append(square(model(rows["x"]), rows))
        (losses[-1] / 2).backward()
    assert not differences(found, Step.of(losses, model), tolerance=1e-6)


def test_the_size_of_a_micro_batch_is_enough() -> None:
    size = {"micro_batch_size": 4, "loss_over": "micro-batch", "batch_size": 8}
    plan = autopipe.plan(built(RowByRow), inputs, loss=square, cluster=machine(2), **size)
    assert plan.rows_fixed and plan.traced_rows == 4


def test_a_sum_and_a_count_are_no_loss_of_a_micro_batch() -> None:
    """Bug: the loss of such a graph was not looked at, and this one adds over the whole batch."""

    def counted(outputs: Tensor, batch: dict[str, Tensor]) -> SumCount:
        return SumCount(((outputs - batch["y"]) ** 2).sum(), torch.tensor(float(len(outputs))))

    with pytest.raises(ModelError, match="the loss is a sum and a count"):
        autopipe.plan(built(RowByRow), inputs, loss=counted, cluster=machine(1), **KNOWN)


def test_a_step_and_an_evaluation_are_of_as_many_rows() -> None:
    model = built(RowByRow)
    pipe = autopipe.parallelize(copy.deepcopy(model), planned(model), loss=square)
    batch = inputs(8)
    loss = pipe.step(batch)
    rows = [{name: tensor[n : n + 4] for name, tensor in batch.items()} for n in (0, 4)]
    assert loss.item() == pytest.approx(sum(square(model(r["x"]), r).item() for r in rows) / 2)
    assert pipe.evaluate(batch).item() == pytest.approx(loss.item())
    assert pipe.evaluate(inputs(4)).item() == pytest.approx(
        square(model(inputs(4)["x"]), inputs(4)).item()
    )
    words = "the graph of this model is one of micro-batches of 4 rows alone"
    with pytest.raises(ModelError, match=words) as error:
        pipe.step(inputs(4))
    assert "give 8 rows" in str(error.value)
    with pytest.raises(ModelError, match=words):
        pipe.evaluate(inputs(6))


def test_a_graph_of_any_rows_stays_one() -> None:
    """What is asked for makes no difference where the model fixes nothing."""
    plan = planned(built(Net))
    assert not plan.rows_fixed and plan.traced_rows == ROWS
    assert count_rows(plan.inputs, flatten(inputs(6))) == 6


class Alone(Net):
    """torch.export takes all dims for two and more, and asks nobody whether there is one row."""

    def inside(self, hidden: Tensor) -> Tensor:
        return self.middle(hidden) * (2 if hidden.shape[0] > 1 else 3)


class Centred(Net):
    def inside(self, hidden: Tensor) -> Tensor:
        return self.middle(hidden - hidden.mean(0) if len(hidden) != 1 else hidden)


class Bessel(Net):
    """Bug: planning itself divided by zero, in looking at one row."""

    def inside(self, hidden: Tensor) -> Tensor:
        return hidden * (len(hidden) / (len(hidden) - 1)) if len(hidden) > 1 else hidden


class Limited(Net):
    def inside(self, hidden: Tensor) -> Tensor:
        return self.middle(hidden) * max(0.5, 1 / hidden.shape[0])


class Divided(Net):
    def inside(self, hidden: Tensor) -> Tensor:
        return self.middle(hidden) * (2 if 1 / (len(hidden) - 1) < 5 else 3)


class InTensors(Net):
    """Bug: the two graphs were compared without the values of what forward makes from numbers."""

    def inside(self, hidden: Tensor) -> Tensor:
        return self.middle(hidden) * torch.tensor([2.0] if hidden.shape[0] > 1 else [3.0])


ASKING = [Alone, Centred, Limited, Bessel, Divided, InTensors]


@pytest.mark.parametrize("kind", chosen(ASKING, now=(Bessel, InTensors)))
def test_a_question_whether_there_is_one_row_is_heard(kind: type[Net]) -> None:
    """Bug: micro-batches of one row were computed as those of more, without a word."""
    line = f"test_fixed_rows.py:{kind.inside.__code__.co_firstlineno + 1}: "
    with pytest.raises(ModelError, match=rf"{line}the model asks whether there is one row"):
        autopipe.plan(
            built(kind), inputs, loss=square, cluster=machine(2), batch_size=8, micro_batches=8
        )
    several = autopipe.plan(built(kind), inputs, loss=square, cluster=machine(2), **KNOWN)
    assert several.batch.microbatch_rows(1) == 4 and not several.rows_fixed
    assert [place.endswith(line[:-2]) for place in several.asks_for_one_row] == [True]
    pipe = autopipe.parallelize(built(kind), several, loss=square)
    assert pipe.evaluate(inputs(8)).isfinite()
    with pytest.raises(ModelError, match="these micro-batches have 1"):
        pipe.evaluate(inputs(1))


class Positions(Net):
    """As transformers has it: of one row nothing is expanded."""

    def inside(self, hidden: Tensor) -> Tensor:
        places = torch.arange(8.0)[None]
        if hidden.shape[0] != places.shape[0]:
            places = places.expand(hidden.shape[0], -1)
        return self.middle(hidden + places)


def test_a_question_that_makes_no_difference_is_none() -> None:
    options = {"batch_size": 8, "micro_batches": 8}
    plan = autopipe.plan(built(Positions), inputs, loss=square, cluster=machine(2), **options)
    assert plan.batch.microbatch_rows(plan.mesh.dp) == 1 and plan.asks_for_one_row == ()


def test_the_question_that_most_language_models_ask_costs_no_second_trace(monkeypatch) -> None:
    case = ZOO["llama"]
    assert trace_model(case.model(), case.inputs, case.loss).asks_for_one_row == ()
    monkeypatch.setattr("autopipe.tracing.capture.program.EXPANDS", ())
    (place,) = trace_model(case.model(), case.inputs, case.loss).asks_for_one_row
    assert "masking_utils.py" in place


@pytest.mark.parametrize("kind", chosen([Alone, Centred, Limited], now=(Alone,)))
def test_micro_batches_of_one_row_have_a_graph_of_their_own(kind: type[Net]) -> None:
    plan = autopipe.plan(
        *(built(kind), inputs),
        **{"loss": square, "cluster": machine(1), "dp": 1, "batch_size": 8},
        micro_batch_size=1,
        loss_over="micro-batch",
    )
    assert plan.rows_fixed and plan.batch.micro_batches == 8
    model = built(kind)
    pipe = autopipe.parallelize(copy.deepcopy(model), plan, loss=square)
    batch = inputs(8)
    each = [{name: tensor[n : n + 1] for name, tensor in batch.items()} for n in range(8)]
    losses = [square(model(one["x"]), one).item() for one in each]
    assert pipe.step(batch).item() == pytest.approx(sum(losses) / 8)
