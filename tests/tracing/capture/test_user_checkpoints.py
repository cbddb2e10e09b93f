"""`torch.utils.checkpoint` in a user's model becomes recomputed blocks of the plan."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopipe
from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import analyse
from autopipe.report import explain
from autopipe.stages.lower import lower
from autopipe.tracing.capture import user_checkpoints
from tests.support import odd_models
from tests.support.inprocess import machine
from tests.support.staged import split, trace_model
from tests.support.zoo import ZOO

WIDTH = 8
again = partial(checkpoint, use_reentrant=False)


def plainly(block, x):
    return block(x)


class Block(nn.Module):
    def __init__(self, run=plainly):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.run = run

    def inner(self, x):
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x):
        return x + self.run(self.inner, x)


class Net(nn.Module):
    """Four blocks; `run(block, x, number)` runs each."""

    def __init__(self, run, block=Block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.run = run

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = self.run(block, x, number)
        return x.square().mean()


def inputs(rows):
    return {"x": torch.randn(rows, WIDTH)}


def found_of(model, inputs=inputs):
    """What a model is found to ask for, and what is said of it."""
    said = []
    found = trace_model(model, inputs)
    return user_checkpoints.checkpointed_blocks(
        analyse(found.graph), find_blocks(found.graph), said.append
    ), said


RUNS = {
    "all": (lambda b, x, n: again(b, x), (0, 1, 2, 3)),
    "every other": (lambda b, x, n: again(b, x) if n % 2 else b(x), (1, 3)),
    "their methods": (lambda b, x, n: again(b.forward, x), (0, 1, 2, 3)),
    "a function around them": (lambda b, x, n: again(lambda y: b(y), x), (0, 1, 2, 3)),
    "nested": (lambda b, x, n: again(lambda y: again(b, y), x), (0, 1, 2, 3)),
}


@pytest.mark.sweep(of=5)
@pytest.mark.parametrize(("run", "numbers"), RUNS.values(), ids=RUNS)
def test_checkpointed_blocks_are_asked_for(run, numbers):
    wanted, said = found_of(Net(run))
    if run is RUNS["their methods"][0]:
        # No call of the module is seen: its nodes are the model's own.
        assert wanted == () and len(said) == 1
        return
    assert wanted == tuple(f"blocks.{number}" for number in numbers)
    assert said == [
        f"recompute: {len(numbers)} blocks, as the model asks by torch.utils.checkpoint"
    ]


@pytest.mark.long
def test_two_blocks_in_one_checkpoint_are_both_recomputed():
    class Pairs(Net):
        def forward(self, x):
            for n in (0, 2):
                x = again(lambda y, n=n: self.blocks[n + 1](self.blocks[n](y)), x)
            return x.square().mean()

    wanted, _ = found_of(Pairs(None))
    assert wanted == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


@pytest.mark.long
def test_who_asks_for_nothing_leaves_it_to_the_planner():
    assert found_of(Net(lambda b, x, n: b(x))) == (None, [])


def test_a_part_of_a_block_is_kept_and_said_with_its_line():
    wanted, said = found_of(Net(lambda b, x, n: b(x), lambda: Block(again)))
    assert wanted == ()
    line = Block.forward.__code__.co_firstlineno + 1
    assert said == [
        f"{__file__}:{line}: torch.utils.checkpoint asks to run a part of block 'blocks.0' again; "
        "its activations are kept"
    ]


def test_what_is_no_block_is_kept_and_said_with_its_line():
    class Once(Net):
        def forward(self, x):
            x = again(torch.tanh, x) + self.blocks[0](x)  # here
            return x.square().mean()

    wanted, said = found_of(Once(None))
    line = Once.forward.__code__.co_firstlineno + 1
    assert wanted == ()
    assert said == [
        f"{__file__}:{line}: torch.utils.checkpoint asks to run what is no block of the model "
        "again; its activations are kept"
    ]


def test_evaluation_asks_for_nothing_more():
    """Autograd's hooks are not entered where nothing is kept for backward."""
    before = torch.autograd.graph.saved_tensors_hooks.__enter__
    trace_model(Net(RUNS["all"][0]), inputs, training=False)
    assert torch.autograd.graph.saved_tensors_hooks.__enter__ is before


def test_gradients_are_those_of_the_checkpointed_model():
    torch.manual_seed(0)
    model = Net(RUNS["every other"][0])
    found, batch = trace_model(model, inputs), inputs(2)
    blocks = find_blocks(found.graph)
    wanted = user_checkpoints.checkpointed_blocks(analyse(found.graph), blocks, lambda line: None)
    (stage,) = split(found, [])
    states = {**dict(model.named_parameters()), **found.graph.constants}
    lowered = lower(found.graph, stage, blocks, states, found.reads, 2, last=True, recompute=wanted)
    expected = model(**batch)
    expected.backward()
    own = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    (loss,) = lowered.module(batch["x"])
    loss.backward()
    assert torch.equal(loss, expected)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, own[name]), name


def planned(model, **options):
    return autopipe.plan(
        model, inputs, cluster=machine(2), batch_size=8, pp=2, tp=1, micro_batches=2,
        schedule="1f1b", zero=0, **options,
    )  # fmt: skip


def test_the_plan_counts_and_shows_them_as_recomputed_blocks():
    said = []
    own = planned(lambda: Net(RUNS["all"][0]), say=said.append)
    asked = planned(lambda: Net(lambda b, x, n: b(x)), recompute="all")
    kept = planned(lambda: Net(RUNS["all"][0]), recompute="none")
    assert [stage.recompute for stage in own.stages] == [stage.recompute for stage in asked.stages]
    assert len({path for stage in own.stages for path in stage.recompute}) == 4
    assert own.stages == asked.stages
    assert "recompute: 4 blocks, as the model asks by torch.utils.checkpoint" in said
    shown = explain.explain(own)
    assert "\nrecompute  4 blocks run a second time in backward" in shown
    activations = [
        [stage.predicted.memory.activations for stage in plan.stages] for plan in (own, kept)
    ]
    assert all(less < more for less, more in zip(*activations, strict=True))


def test_transformers_own_switch_is_one():
    case = ZOO["gpt2"]
    model = case.model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a later version calls it otherwise
        model.gradient_checkpointing_enable({"use_reentrant": False})
    wanted, _ = found_of(model, case.inputs)
    assert wanted == ("transformer.h.0", "transformer.h.1", "transformer.h.2", "transformer.h.3")


class WrittenAfterwards(odd_models.Net):
    """A tanh keeps its result for backward, and a checkpoint keeps nothing.

    Bug: refused, as what the graph kept was written.
    """

    def begin(self):
        self.norm = nn.LayerNorm(8)

    def inside(self, hidden):
        made = again(lambda x: self.middle(x).tanh(), hidden)
        made += hidden
        made = again(lambda x: torch.sigmoid(self.norm(x)), made)
        made.view(-1)[::2] *= 0.5
        return made * hidden


def test_later_code_may_write_in_what_a_checkpoint_gives():
    model = odd_models.built(WrittenAfterwards)
    names = [
        node.name for node in trace_model(model, odd_models.inputs, odd_models.square).graph.nodes
    ]
    assert [name for name in names if "clone" in name] == ["clone/0", "clone/1"]
    assert odd_models.unlike_whole_or_cut(model, cuts=("clone/1",)) == []
