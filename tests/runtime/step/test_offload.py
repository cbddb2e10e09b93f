"""Blocks whose kept tensors wait in the host's memory: the same gradients, and bytes as counted.

The oracle is the engine that keeps them on the device. What has left is overwritten, so that who
reads it still is found out.
"""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from autopipe.errors import PlanError
from autopipe.ir.blocks import find_blocks
from autopipe.joint.joint_graph import Layout
from autopipe.joint.split_backward import split
from autopipe.joint.wanted import Wanted
from autopipe.runtime.comm.host_copies import HostCopies
from autopipe.runtime.step.compile import Compiler
from autopipe.runtime.step.engine import JointEngine
from autopipe.stages.lower import lower
from autopipe.stages.precision import arithmetic, computing
from autopipe.stages.rng import stream
from tests.support.pipes import piped, planned
from tests.support.staged import micro_batches, traced
from tests.support.staged import split as stages_between
from tests.support.zoo import ZOO


class Wiping(HostCopies):
    """Overwrites what has left."""

    def settle(self) -> None:
        for bytes in () if self._leaving is None else self._leaving.away:
            bytes.fill_(255)  # NaN, as a float
        super().settle()


@dataclass(frozen=True)
class Run:
    """The loss and gradients of a micro-batch, and bytes: kept, moving, and the most that were."""

    tensors: dict[str, Tensor]
    kept: int
    moving: int
    most_forward: int
    most_backward: int
    made: int


def run(name: str, offload: bool, *, least: bool = False, compiled: bool = False) -> Run:
    """A micro-batch of a model in one stage, all of whose blocks offload, or none."""
    found, model = traced(name), copy.deepcopy(ZOO[name].model())
    (stage,), blocks = stages_between(found, []), find_blocks(found.graph)
    named = dict(model.named_parameters()) | dict(model.named_buffers()) | found.graph.constants
    states = {state: named[state] for state in stage.states}
    made = lower(found.graph, stage, blocks, states, found.reads, 2, last=True)
    leaves = micro_batches(found, ZOO[name].inputs(2), 1)[0]
    arguments = [leaves[path] for path in stage.inputs]
    others = [None] * (len(found.graph.outputs) - 1)
    paths = frozenset(block.path for block in blocks) if offload else frozenset[str]()
    joint = split(
        made,
        [Layout.of(x) for x in arguments],
        [Layout.dense((), torch.float32), *others],
        wanted=Wanted(halves=False, least=least, offload=paths),
    )
    finish = {"finish": Compiler("eager")} if compiled else {}
    engine = JointEngine(made.module, joint, offloader=Wiping(torch.device("cpu")), **finish)
    held = [0]
    engine.hold = lambda bytes: held.append(held[-1] + bytes)
    with stream(0, 0, 0), computing(arithmetic("fp32", "cpu")):
        loss = engine.forward(0, arguments)[0]
    forward, after = max(held), held[-1]
    del held[:-1]
    with stream(0, 0, 0):
        engine.backward_input(0, [torch.ones(()), *others])
        engine.backward_weight(0)
    assert held[-1] == 0 and after == joint.kept
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    tensors = {"loss": loss.detach(), **gradients}
    return Run(tensors, joint.kept, joint.moving, forward, max(held), joint.made)


MODELS = "dropout", "llama", "t5", "mask", "keywords"
LATER = pytest.mark.long


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize(
    ("how", "name"),
    [
        pytest.param(how, name, marks=() if how != "compiled" or name == "dropout" else LATER)
        for how in ("as it is", "least", "compiled")
        for name in MODELS
    ],
)
def test_offloading_changes_no_bit_and_the_bytes_are_those_counted(name: str, how: str) -> None:
    words = {"least": how != "as it is", "compiled": how == "compiled"}
    kept, moved = (run(name, offload, **words) for offload in (False, True))
    assert moved.tensors.keys() == kept.tensors.keys()
    for tensor, expected in kept.tensors.items():
        assert torch.equal(moved.tensors[tensor], expected), tensor
    assert moved.kept < kept.kept
    most = moved.most_forward - moved.kept, moved.most_backward - moved.kept - moved.made
    assert moved.moving == max(most)


def test_a_block_that_a_plan_offloads_has_to_be_there() -> None:
    plan = planned("gpt", 1, 1, 2)
    edited = replace(plan, stages=(replace(plan.stages[0], offload=("blocks.9",)),))
    with pytest.raises(PlanError, match=r"stages\[0\].offload: 'blocks.9' is no block") as refusal:
        piped("gpt", edited).step(ZOO["gpt"].inputs(plan.batch.rows))
    assert refusal.value.hint == "its blocks are blocks.0, blocks.1, blocks.2, blocks.3"


def test_what_is_on_the_host_already_is_not_copied() -> None:
    """The seed of a GPU's attention is; the device is taken for it here."""
    device, there = torch.arange(6.0).reshape(2, 3).t(), torch.empty(4, device="meta")
    copies = HostCopies(torch.device("cpu"))
    held = [0]
    copies.hold = lambda bytes: held.append(held[-1] + bytes)
    sent = copies.send([device, there])
    copies.settle()
    assert sent.bytes == 24 and held[-1] == 0
    copies.begin(sent)
    back, same = copies.fetched(sent)
    assert same is there and back.equal(device) and back.stride() == device.stride()
    copies.let_go(sent)
    assert held[-1] == 0
