"""The joint graph says op by op what a stage does, forward and backward."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe.ir.torch_private import fake_mode
from autopipe.joint.joint_graph import CannotSplit, Layout, differentiate
from autopipe.rewriting.gpu_autocast import of_absent_gpus
from autopipe.stages.lower import Lowered
from autopipe.stages.op_tape import MADE
from autopipe.stages.precision import low
from autopipe.stages.rng import draw
from tests.support.staged import lowered, traced
from tests.support.zoo import ZOO

ROWS = 3
X = Layout((ROWS, 4), (4, 1), torch.float32, gradient=True)
DY = Layout((ROWS, 4), (4, 1), torch.float32)
HALF = Layout((ROWS, 4), (4, 1), torch.bfloat16)


class Stage(nn.Module):
    """`run(self, x)` is what the stage does; it has two linear layers of 4 features."""

    def __init__(self, run):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.run = run

    def forward(self, x):
        result = self.run(self, x)
        return result if isinstance(result, tuple) else (result,)


def stage(run, low=()):
    return Lowered(None, Stage(run), ROWS, low)


def joint_graph(run, *, x=X, seeds=(DY,), low=(), precision="fp32"):
    return differentiate(stage(run, low), [x], seeds, precision)


def ops(nodes):
    return [getattr(node.target, "__name__", "").split(".")[0] for node in nodes]


def test_forward_and_backward_are_the_ops_that_autograd_runs():
    found = joint_graph(lambda m, x: torch.tanh(m.first(x)))
    assert ops(found.forward) == ["t", "addmm", "tanh", "detach"]
    assert ops(found.backward) == "detach tanh_backward t mm t mm t sum view t".split()
    names = ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert list(found.states.values()) == names
    assert list(found.of_parameters) == ["first.weight", "first.bias"]
    assert ops(found.of_arguments) == ["mm"]


def test_it_is_the_same_where_a_script_looks_for_anomalies():
    with torch.autograd.set_detect_anomaly(True):
        found = joint_graph(lambda m, x: torch.tanh(m.first(x)))
    assert ops(found.backward) == "detach tanh_backward t mm t mm t sum view t".split()


def test_what_needs_no_gradient_has_none():
    found = joint_graph(lambda m, x: m.first(x), x=DY)
    assert found.of_arguments == (None,)
    assert ops(found.backward) == "t mm t sum view t".split()
    found = joint_graph(lambda m, x: (x.detach() * 2, m.first(x)), seeds=(DY, None))
    assert (list(found.seeds), found.unseeded, found.backward) == ([], [1], [])


def test_a_result_may_be_a_number():
    found = joint_graph(lambda m, x: (0.5, m.first(x), None), seeds=(None, DY, None))
    assert (found.results[0], found.results[2]) == (0.5, None)
    assert list(found.seeds) == [1]


def test_ops_in_place_stay_in_place():
    found = joint_graph(lambda m, x: F.relu(m.first(x), inplace=True))
    assert ops(found.forward) == ["t", "addmm", "relu_", "detach"]


def test_a_random_op_draws_for_the_node_of_the_stage_it_came_from():
    def run(m, x):
        return draw(F.dropout, "drop/0", m.first(x), 0.5)

    found = joint_graph(run)
    drawing = [node for node in found.forward if node.target is draw]
    assert [node.args[:2] for node in drawing] == [(torch.ops.aten.bernoulli_.float, "drop/0")]


def test_two_random_ops_from_one_stream_are_not_taken_apart():
    """The second goes on where the first has stopped."""

    def twice(x):
        return F.dropout(F.dropout(x))

    with pytest.raises(CannotSplit, match="drop/0 draws twice"):
        joint_graph(lambda m, x: draw(twice, "drop/0", x))


def test_autocast_becomes_the_casts_it_makes():
    with torch.autocast("cpu", torch.bfloat16):
        found = joint_graph(lambda m, x: m.first(x), seeds=(HALF,))
    assert ops(found.forward) == ["_to_copy", "_to_copy", "_to_copy", "t", "addmm"]
    dtypes = {node.meta[MADE].dtype for node in found.of_parameters.values()}
    assert dtypes == {torch.bfloat16}, "whoever adds them to fp32 sums casts them"


def test_autocast_is_of_the_device_of_the_arguments_where_a_stage_has_no_states():
    class Squared(nn.Module):
        def forward(self, x):
            return (x @ x.T,)

    x = Layout.dense((ROWS, 4), torch.float32, "cuda")  # no backward: that wants a real GPU
    with of_absent_gpus():
        found = differentiate(Lowered(None, Squared(), ROWS, ()), [x], [None], "bf16-autocast")
    (result,) = found.results
    assert result.meta[MADE].dtype == torch.bfloat16


def test_a_steps_copy_of_a_parameter_is_made_for_the_step_and_not_by_the_stage():
    """One copy however often it is used, whose gradients are summed before they become fp32."""

    def run(m, x):
        weight = low(m.first.weight)
        return F.linear(F.linear(x, weight), weight)

    found = joint_graph(run, seeds=(HALF,), low=("first.weight",), precision="bf16-autocast")
    assert list(found.copies.values()) == [("first.weight", torch.bfloat16)]
    assert ops(found.forward) == ["_to_copy", "t", "mm", "t", "mm"]  # the cast of x
    assert ops(found.backward).count("_to_copy") == 2


def test_opaque_ops_are_refused():
    (whole,) = lowered(traced("lstm"), ZOO["lstm"].model(), [], ROWS)
    with pytest.raises(CannotSplit, match="aten.lstm.input reads or keeps what only its real"):
        differentiate(whole, [], [])


def test_an_op_that_cannot_be_traced_is_refused_with_its_own_words():
    with pytest.raises(CannotSplit, match="DataDependentOutputException: aten._local_scalar"):
        joint_graph(lambda m, x: torch.full((2,), x.sum().item()))


def test_a_bug_in_a_rule_is_not_taken_for_an_op_that_cannot_be_traced():
    def broken(m, x):
        return {}["no such rule"]

    with pytest.raises(KeyError, match="no such rule"):
        joint_graph(broken)


def test_the_stage_is_left_as_it_was():
    whole = stage(lambda m, x: m.first(x))
    weight = whole.module.first.weight
    before = weight.detach().clone()
    differentiate(whole, [X], [DY])
    assert whole.module.first.weight is weight
    assert torch.equal(weight, before) and weight.grad is None
    assert weight.requires_grad


def test_stages_of_fake_tensors_have_the_same_graph():
    """A planner has no others."""
    real = stage(lambda m, x: torch.tanh(m.first(x)))
    with fake_mode():
        fake = stage(lambda m, x: torch.tanh(m.first(x)))
        planned = differentiate(fake, [X], [DY])
    run = differentiate(real, [X], [DY])
    assert ops(planned.backward) == ops(run.backward)


# Layouts


def test_a_layout_fits_a_tensor_by_copying_it_if_it_must():
    layout = Layout((2, 3), (3, 1), torch.float32)
    lies_so, otherwise = torch.ones(2, 3), torch.arange(6.0).view(3, 2).t()
    assert layout.fit(lies_so) is lies_so
    assert layout.fit(otherwise).stride() == (3, 1)
    assert torch.equal(layout.fit(otherwise), otherwise)
    assert Layout.of(layout.fit(otherwise)) == layout


def test_the_stride_of_a_single_row_is_anybodys_choice():
    layout = Layout((1, 3), (3, 1), torch.float32)
    row = torch.ones(4, 3)[::4]
    assert row.stride() == (12, 1)
    assert layout.fit(row) is row


def test_a_dense_layout_is_that_of_a_new_tensor():
    assert Layout.dense((2, 3, 1), torch.bfloat16) == Layout.of(torch.ones(2, 3, 1).bfloat16())
    assert Layout.dense((), torch.float32) == Layout.of(torch.ones(()))
