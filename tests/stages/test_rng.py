"""Random nodes draw from seeds of their own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe.ir.torch_private import fake_mode
from autopipe.stages.lower import lower
from autopipe.stages.op_tape import Tape
from autopipe.stages.rng import DRAWN, device_drawn_on, draw, stream
from autopipe.util.seeding import seed
from tests.support.inprocess import traced
from tests.support.long import chosen
from tests.support.staged import differences, split, staged_step, trace_model
from tests.support.zoo import ZOO

aten = torch.ops.aten


def drawn(node="a", key=(0, 0, 0)):
    with stream(*key):
        return draw(torch.rand, node, 3).tolist()


def test_the_same_key_and_node_draw_the_same_and_any_other_does_not():
    others = [drawn(key=key) for key in ((1, 0, 0), (0, 1, 0), (0, 0, 1))] + [drawn("b")]
    assert drawn() == drawn()
    assert all(other != drawn() for other in others)


def test_parts_of_a_seed_do_not_run_together():
    assert seed(1, 23) != seed(12, 3) != seed(1, 2, 3)
    assert all(0 <= seed(n) < 2**63 for n in range(100))


def test_the_seed_is_the_same_in_every_process_and_version():
    assert seed(0, 1, 2, "dropout/0") == 936182270680380288


def test_the_processes_own_generator_is_left_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    drawn()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("op", "device", "options", "expected"),
    [
        (aten.native_dropout.default, "cuda:0", {}, "cuda:0"),
        (aten.native_dropout.default, "cpu", {}, "cpu"),
        (aten.rand_like.default, "cuda:0", {}, "cuda:0"),
        (aten.rand_like.default, "cuda:0", {"device": torch.device("cpu")}, None),
        (aten.lstm.input, "cuda:0", {}, None),  # its seed comes from the CPU's generator
        (torch.rand, "cuda:0", {}, None),  # what a function of Python's does, nobody knows
    ],
)
def test_only_the_generator_that_an_op_draws_from_is_seeded(op, device, options, expected):
    """None: it is not clear, and the CPU's and the GPU's are."""
    with fake_mode():
        x = torch.empty(2, device=device)
    found = device_drawn_on(op, (x, 0.5, True), options)
    assert found == (None if expected is None else torch.device(expected))


def test_of_tensors_on_several_devices_or_of_none_it_is_not_clear():
    with fake_mode():
        here, there = torch.empty(2), torch.empty(2, device="cuda:0")
    assert device_drawn_on(aten.bernoulli.p, (here, there), {}) is None
    assert device_drawn_on(aten.bernoulli.p, (2, 3), {}) is None


def test_an_error_inside_leaves_generator_and_stream_alone():
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), stream(0, 0, 0):
        draw(lambda: 1 / 0, "a")
    assert torch.equal(before, torch.get_rng_state())
    # Outside the stream again: the global generator is drawn from.
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    assert torch.equal(draw(torch.rand, "a", 2), expected)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(4, 4, 2, batch_first=True, dropout=0.5)

    def forward(self, x):
        return self.layer(x[:, None])[0][:, 0]


class UnderAutocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return F.dropout(self.layer(x), 0.5).float()


@pytest.mark.parametrize("kind", chosen([Recurrent, UnderAutocast], now=(UnderAutocast,)))
def test_random_ops_in_unusual_places(kind):
    """Inside the model's own autocast, and inside an op that only its kernel knows."""
    model = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 4))
    batch = {"input": torch.randn(4, 4)}
    trace = trace_model(
        model, lambda rows: {"input": torch.randn(rows, 4)}, lambda out, batch: out.square().mean()
    )
    (stage,) = split(trace, [])
    states = {name: dict(model.named_parameters())[name] for name in stage.states}
    lower(trace.graph, stage, (), states, None, 2, last=True)  # as it is planned
    steps = [
        staged_step(model, trace, batch, cuts, 2, seeded=True, step=step)
        for cuts, step in (([], 0), (["2/linear/0"], 0), ([], 1))
    ]
    assert steps[0].losses == steps[1].losses != steps[2].losses
    assert not differences(steps[0], steps[1])


def test_a_trace_marks_the_calls_that_a_random_op_becomes():
    """Those of the op and no other; also where the op is left in the middle."""

    def broken(x):
        torch.rand_like(x)
        raise ZeroDivisionError

    x, tape = torch.ones(3), Tape()
    with tape:
        draw(torch.rand_like, "a", x + 1)
        with pytest.raises(ZeroDivisionError):
            draw(broken, "b", x)
    marks = [node.meta.get(DRAWN) for node in tape.graph.nodes if node.op == "call_function"]
    assert marks == [None, "a", "b"]


# A whole model with dropout in all the usual places.

BATCH = ZOO["dropout"].inputs(4)


def step(cuts=(), number=0, batch=BATCH):
    return staged_step(
        ZOO["dropout"].model(), traced("dropout")[0], batch, cuts, 2, seeded=True, step=number
    )


def test_dropout_is_bitwise_the_same_for_one_two_and_four_stages():
    whole = step()
    before = torch.get_rng_state()
    assert differences(step(["blocks.2.norm1/layer_norm/0"]), whole) == []
    cuts = ["dropout/dropout/0", "blocks.1.dropout/dropout/0", "blocks.3/add/0"]
    assert differences(step(cuts), whole) == []
    assert torch.equal(before, torch.get_rng_state())


def test_dropout_differs_by_step_and_by_micro_batch():
    first, again, second = step(), step(), step(number=1)
    assert differences(again, first) == []
    assert not torch.equal(first.losses[0], second.losses[0])
    same_rows = {key: tensor[:2].repeat(2, 1) for key, tensor in BATCH.items()}
    one, two = step(batch=same_rows).losses
    assert not torch.equal(one, two)
