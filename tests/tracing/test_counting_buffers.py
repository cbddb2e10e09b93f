"""A branch by a buffer that counts calls, or a number of trained weights: the call or the lines
around it run as they are. Where nothing can, planning says after how many calls, or that after an
update, a run would read another value."""

import pytest
import torch

from autopipe.tracing import numbers_of_weights
from tests.support.odd_models import Net, built, inputs, planned, square, unlike_whole_or_cut
from tests.support.staged import trace_model


def others():
    return {name: rows[2:] for name, rows in inputs(4).items()}


class Counts(Net):
    """Draws its projection again in every so manieth call, as Performer does."""

    every = 0

    def begin(self):
        self.register_buffer("calls", torch.tensor(0))

    def inside(self, hidden):
        self.calls += 1
        if self.takes_the_other_side():
            hidden = hidden * 0.5
        return self.middle(hidden)

    def takes_the_other_side(self):
        return self.calls % self.every == 0


class InThe300th(Counts):
    every = 300


class InTheFourth(Counts):
    every = 4


class InTheThird(Counts):
    every = 3


class InThe1000th(Counts):
    def takes_the_other_side(self):
        return self.calls >= 1000


class Assigned(InThe300th):
    def inside(self, hidden):
        self.calls = self.calls + 1
        return self.middle(hidden * 0.5 if self.takes_the_other_side() else hidden)


class InAFloat(InThe1000th):
    def begin(self):
        self.register_buffer("calls", torch.zeros(1))


@pytest.mark.parametrize(
    ("kind", "calls"),
    [(InThe300th, 299), (InTheFourth, 3), (InThe1000th, 999), (Assigned, 299), (InAFloat, 999)],
)
def test_a_later_call_that_takes_the_other_side_is_said(kind, calls):
    """Bug: a run ended in its 300th micro-batch, and nobody had been told. (Of these traces, which
    get no other rows, no call is tried as it is.)"""
    said = []
    trace = trace_model(built(kind), inputs, square, say=said.append)
    (line,) = (line for line in said if "Python reads" in line)
    assert line.partition(": ")[0].rpartition(":")[0] == __file__
    assert line.partition(": ")[2] == (
        f"Python reads False from a tensor here, and True after some {calls} calls of the model, "
        "which a buffer counts: that micro-batch is refused in the run"
    )
    assert len(trace.reads) == 1


@pytest.mark.parametrize("kind", [InThe300th, InTheThird])
def test_what_reads_the_count_runs_as_it_is(kind):
    said = []
    (region,) = planned(built(kind), said=said).regions
    assert "inside" in str(region)
    (line,) = (line for line in said if "runs as it is" in line)
    assert "which a buffer counts" in line


def test_each_micro_batch_takes_the_side_that_its_count_says():
    """Of three micro-batches the third."""
    assert unlike_whole_or_cut(built(InTheThird), cuts=["relu/1"], others=others) == []


class Deletes(InThe300th):
    """No lines are taken out of a function that forgets a name."""

    def forward(self, x):
        hidden = self.up(x).relu()
        self.calls += 1
        del x
        return self.down(hidden * 0.5 if self.takes_the_other_side() else hidden)


def test_where_nothing_runs_as_it_is_the_end_of_a_run_is_said():
    said = []
    trace = trace_model(built(Deletes), inputs, square, others=others, say=said.append)
    assert trace.regions == ()
    (line,) = (line for line in said if "Python reads" in line)
    assert line.endswith("which a buffer counts: that micro-batch is refused in the run")


class IsCounted(Counts):
    """As the batches of a batch norm: nobody reads the count."""

    def takes_the_other_side(self):
        return bool(torch.ones(()) < 0)


class IsSoonOver(Counts):
    """The branch is decided in the first call, and the count goes on."""

    def takes_the_other_side(self):
        return self.calls < 0


@pytest.mark.parametrize("kind", [IsCounted, IsSoonOver])
def test_a_count_that_changes_no_branch_is_not(kind):
    said = []
    model = built(kind)
    trace_model(model, inputs, square, say=said.append)
    assert not [line for line in said if "Python reads" in line]
    assert model.calls == 0


class ReadsAWeight(Net):
    """Scales by a number of a trained weight, through which no gradient goes."""

    def begin(self):
        self.alpha = torch.nn.Parameter(torch.tensor(0.5))

    def inside(self, hidden):
        return self.middle(hidden) * self.alpha.item() + self.alpha * hidden


class ReadsRowsToo(ReadsAWeight):
    def forward(self, x):
        assert torch.isfinite(x).all()
        return super().forward(x)


class ReadsAnotherNumber(ReadsAWeight):
    """Of rows and weights, and the same of all."""

    def forward(self, x):
        return super().forward(x) / self.up(x).abs().min().clamp(0.0, 0.0).add(1.0).item()


@pytest.mark.parametrize("kind", [ReadsAWeight, ReadsRowsToo, ReadsAnotherNumber])
def test_a_number_of_a_trained_weight_is_read_anew(kind):
    """Bugs: it was planned with the number of the first step, and refused in the second one; then
    so where anything read rows, too."""
    said = []
    (region,) = planned(built(kind), said=said).regions
    assert "inside" in str(region)
    (line,) = (line for line in said if "runs as it is" in line)
    assert "Python reads the number 0.5 from a tensor here, which is computed of trained" in line


@pytest.mark.parametrize(("most", "lines"), [(1, 1), (0, 0)])
def test_of_many_weights_the_smallest_tensors_are_looked_at(monkeypatch, most, lines):
    """Bug: of a large model no number was."""
    monkeypatch.setattr(numbers_of_weights, "MOST_WEIGHTS", most)
    said = []
    trace_model(built(ReadsAWeight), inputs, square, say=said.append)
    assert len([line for line in said if "Python reads the number 0.5" in line]) == lines


def test_where_a_weight_s_number_cannot_be_read_anew_it_is_said():
    """Of these traces no call is tried as it is. The weights are as before."""
    said, model = [], built(ReadsAWeight)
    trace_model(model, inputs, square, say=said.append)
    (line,) = (line for line in said if "Python reads" in line)
    assert line.endswith("after an update: the micro-batches after it are refused in the run")
    assert model.alpha.item() == 0.5
