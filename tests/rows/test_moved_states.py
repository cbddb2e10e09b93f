"""Planning names a buffer that each micro-batch moves and the next one computes with, and refuses
one that a batch norm writes over what backward is to read."""

import pytest
import torch
from torch import nn

from autopipe.errors import CaptureError
from autopipe.rows import moved_states
from tests.support.odd_models import Net, built, inputs, planned, refusal, square
from tests.support.staged import Step, differences, staged_step, trace_model


class Centre(Net):
    """As DINO's: outputs are taken from a mean that moves."""

    def begin(self):
        self.register_buffer("centre", torch.zeros(8))

    def inside(self, hidden):
        made = self.middle(hidden) - self.centre
        self.centre = 0.9 * self.centre + 0.1 * hidden.detach().mean(0)
        return made


class InPlace(Centre):
    def inside(self, hidden):
        self.centre.lerp_(hidden.detach().mean(0), 0.1)
        return self.middle(hidden) - self.centre


class Calls(Net):
    def begin(self):
        self.register_buffer("calls", torch.zeros(()))

    def inside(self, hidden):
        self.calls += 1
        return self.middle(hidden) / self.calls


class SpectralNorm(Net):
    """Its power iteration goes on from call to call."""

    def begin(self):
        self.middle = nn.utils.parametrizations.spectral_norm(self.middle)


class Teacher(Net):
    """Frozen, and follows the student."""

    def begin(self):
        self.teacher = nn.Linear(8, 8).requires_grad_(False)

    def inside(self, hidden):
        target = self.teacher(hidden)
        for own, follows in zip(self.middle.parameters(), self.teacher.parameters(), strict=True):
            follows.data.lerp_(own.data, 0.1)
        return self.middle(hidden) - target


class Statistics(Net):
    def begin(self):
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))


class StatisticsOfAllCalls(Net):
    def begin(self):
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None))


class ForALog(Centre):
    """Moved, and read by nothing."""

    def inside(self, hidden):
        self.centre = 0.9 * self.centre + 0.1 * hidden.detach().mean(0)
        return self.middle(hidden)


class Cache(Net):
    """Written as a whole before it is read."""

    def begin(self):
        self.register_buffer("scale", torch.zeros(8))

    def inside(self, hidden):
        self.scale.copy_(torch.arange(8.0))
        return self.middle(hidden) * self.scale


class Clamped(Net):
    """A trained parameter within bounds: a second clamp changes nothing."""

    def inside(self, hidden):
        self.middle.weight.data.clamp_(-0.1, 0.1)
        return self.middle(hidden)


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Centre, "centre"),
        (InPlace, "centre"),
        (Calls, "calls"),
        (SpectralNorm, "middle.parametrizations.weight.0._v"),
        (Teacher, "teacher.weight"),
    ],
)
def test_what_the_next_call_reads_is_named(kind, name):
    line = moved_states.remark(trace_model(built(kind), inputs, square).graph)
    assert f"forward moves {name!r}, and the loss is computed with it" in line
    assert line.startswith("/"), "no line of the user's is named"


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize("kind", [Statistics, StatisticsOfAllCalls, ForALog, Cache, Clamped])
def test_what_it_does_not_read_is_not(kind):
    assert moved_states.remark(trace_model(built(kind), inputs, square).graph) is None


class WrittenAfterwards(Net):
    """Backward of `*` reads what the norm has made of its statistics by then: in one process that
    of its own micro-batch, in a pipeline that of the last one whose forward has run."""

    def begin(self):
        self.norm = nn.BatchNorm1d(8)

    def inside(self, hidden):
        return self.norm(self.middle(hidden) * self.norm.running_var)


class CopyOfIt(WrittenAfterwards):
    def inside(self, hidden):
        return self.norm(self.middle(hidden) * self.norm.running_var.clone())


class Added(WrittenAfterwards):
    """Backward of `-` reads nothing."""

    def inside(self, hidden):
        return self.norm(self.middle(hidden) - self.norm.running_mean)


class WrittenBefore(WrittenAfterwards):
    def inside(self, hidden):
        return self.norm(self.middle(hidden)) * self.norm.running_var


class CalledTwice(WrittenAfterwards):
    def inside(self, hidden):
        return self.norm(self.norm(self.middle(hidden)))


def test_statistics_that_backward_reads_are_not_written_afterwards():
    graph = trace_model(built(WrittenAfterwards), inputs, square).graph
    with pytest.raises(CaptureError) as error:
        moved_states.check(graph)
    assert "mul() computes with [norm.running_var], which the batch norm at " in str(error.value)
    copy = "compute with a copy: self.norm.running_var.clone()"
    assert error.value.hint == f"{copy}; or --micro-batches 1"


def test_where_no_other_forward_runs_before_a_backward_they_may_be():
    """Bug: it was refused for two replicas with a micro-batch each, too."""
    plan = planned(built(WrittenAfterwards), dp=2, micro_batches=1)
    assert (plan.mesh.dp, plan.batch.micro_batches) == (2, 1)
    model, batch = built(WrittenAfterwards), inputs(4)
    step = staged_step(model, trace_model(model, inputs, square), batch, [], 1)
    loss = square(model(batch["x"]), batch)
    loss.backward()
    assert differences(step, Step.of([loss], model)) == []
    assert "which the batch norm at" in refusal(built(WrittenAfterwards), dp=2, micro_batches=2)


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("kind", [CopyOfIt, Added, WrittenBefore, CalledTwice, Statistics])
def test_other_statistics_are_taken(kind):
    moved_states.check(trace_model(built(kind), inputs, square).graph)
