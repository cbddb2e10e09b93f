"""Compiled stages: where the islands are, and that what they compute is what eager computes."""

import copy
import itertools

import pytest
import torch

from autopipe.ir.blocks import find_blocks
from autopipe.joint.joint_graph import Layout
from autopipe.joint.split_backward import split
from autopipe.joint.wanted import Wanted
from autopipe.runtime.step.compile import Compiler, compile_stage, compiled_by
from autopipe.runtime.step.engine import AutogradEngine, JointEngine
from autopipe.stages.lower import lower
from autopipe.stages.precision import arithmetic, computing
from autopipe.stages.rng import stream
from tests.support.long import chosen
from tests.support.staged import micro_batches, traced
from tests.support.staged import split as stages_between
from tests.support.zoo import ZOO

# torch's own compiler warns itself: it asks for the .grad of tensors that have none.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]


def stage_of(name, *, recompute=False, precision="fp32"):
    """A fresh model of the zoo in one stage, and the parameters that want copies."""
    found, model = traced(name), copy.deepcopy(ZOO[name].model())
    (stage,), blocks = stages_between(found, []), find_blocks(found.graph)
    named = dict(model.named_parameters()) | dict(model.named_buffers()) | found.graph.constants
    states = {name: named[name] for name in stage.states}
    paths = [block.path for block in blocks] if recompute else []
    made = lower(
        found.graph,
        stage,
        blocks,
        states,
        found.reads,
        2,
        last=True,
        recompute=paths,
        precision=precision,
    )
    return made, model, [named[name] for name in made.low]


def step(name, compiler, *, halves=False, **options):
    """The loss, gradients and buffers of one micro-batch.

    Args:
        compiler: a `Compiler`, or the name of its backend; None: autograd, as it is.
    """
    made, model, wanted = stage_of(name, **options)
    precision = options.get("precision", "fp32")
    leaves = micro_batches(traced(name), ZOO[name].inputs(2), 1)[0]
    arguments = [leaves[path] for path in made.stage.inputs]
    engine = AutogradEngine(made.module)
    if compiler is not None:
        results = len(traced(name).graph.outputs)
        loss = Layout.dense((), torch.float32)
        joint = split(
            made,
            [Layout.of(x) for x in arguments],
            [loss, *[None] * (results - 1)],
            precision,
            Wanted(halves, least=True),
        )
        engine = JointEngine(
            made.module, joint, compiler if isinstance(compiler, Compiler) else Compiler(compiler)
        )
    with stream(0, 0, 0), computing(arithmetic(precision, "cpu", wanted)):
        (loss, *others) = engine.forward(0, arguments)
    with stream(0, 0, 0):
        engine.backward_input(0, [torch.ones(()), *[None] * len(others)])
        engine.backward_weight(0)
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found, **dict(model.named_buffers())}


def assert_equal(made, expected, tolerance):
    """To `tolerance` of each tensor's largest entry."""
    assert made.keys() == expected.keys()
    for name, tensor in expected.items():
        if not tensor.is_floating_point():
            assert torch.equal(made[name], tensor), name
            continue
        difference = (made[name] - tensor).abs().max()
        assert difference <= tolerance * tensor.abs().max(), f"{name}: {difference}"


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch.compiler.reset()


@pytest.mark.parametrize("name", chosen(("gpt", "dict"), now=("dict",)))
def test_inductor_computes_what_eager_does(name):
    assert_equal(step(name, "inductor"), step(name, None), 1e-5)


def test_another_compiler_may_be_put_in_inductors_place():
    """As `check` does it for a plan for GPUs, on a machine that has no compiler of C++."""
    asked = []

    def backend(body, arguments):
        asked.append(body)
        return body

    with compiled_by(backend):
        found = step("dict", Compiler())
    assert asked
    assert_equal(found, step("dict", None), 1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("dropout", {}, marks=pytest.mark.long),
        pytest.param("dropout", {"recompute": True}, marks=pytest.mark.long),
        pytest.param(
            "gpt", {"recompute": True, "precision": "bf16-autocast"}, marks=pytest.mark.long
        ),
        ("dropout", {"recompute": True, "precision": "bf16-autocast"}),
        pytest.param("llama", {}, marks=pytest.mark.long),
        ("resnet", {"halves": True}),
    ],
)
def test_islands_change_nothing(name, options):
    """Cut out, traced forward and backward, but run by eager kernels: masks are the same ones,
    running statistics are written, reads are checked."""
    assert_equal(step(name, "aot_eager", **options), step(name, None, **options), 1e-5)


def graphs_of(name, **options):
    """The compiled forward and backward of a model in one stage."""
    made, _, _ = stage_of(name, **options)
    leaves = micro_batches(traced(name), ZOO[name].inputs(2), 1)[0]
    arguments = [Layout.of(leaves[path]) for path in made.stage.inputs]
    seeds = [Layout.dense((), torch.float32), *[None] * (len(traced(name).graph.outputs) - 1)]
    joint = split(made, arguments, seeds, wanted=Wanted(halves=False, least=True))
    engine = JointEngine(made.module, joint, Compiler("aot_eager"))
    return engine._forward, engine._input


def calls(module):
    """What a graph calls, in order: islands, and what runs as Python in between."""
    names = [n.target.__name__ for n in module.graph.nodes if n.op == "call_function"]
    return [name for name in names if name not in ("take", "getitem", "step_copy")]


def test_blocks_of_one_structure_are_compiled_once():
    """Forward: the embedding, four blocks alike, the head. Backward: the other way round; the first
    block hands no gradient on to another one."""
    forward, backward = graphs_of("gpt")
    before, *blocks, after = calls(forward)
    assert len(blocks) == 4 and len({*blocks}) == 1 and len({before, after, *blocks}) == 3
    islands = [name for name in calls(backward) if name != "accumulate"]
    _, first, second, *_ = islands
    assert first == second and islands.count(first) >= 3


def test_gradients_are_given_away_when_a_block_is_done():
    """Not all at the end, and without cutting the block's island."""
    _, backward = graphs_of("gpt")
    names = calls(backward)
    assert names[0] != "accumulate" and names[-1] == "accumulate"
    changes = sum(a != b for a, b in itertools.pairwise(n == "accumulate" for n in names))
    assert changes == 2 * 6 - 1, "head, four blocks and embedding, each with its gradients behind"


def test_random_nodes_stand_between_islands():
    """So that they draw what they draw uncompiled. They name their streams, islands do not."""
    forward, _ = graphs_of("dropout")
    assert calls(forward).count("draw") == 3 * 4 + ("draw" in calls(forward)[:3])


def test_in_an_evaluation_blocks_keep_their_place():
    made, _, _ = stage_of("gpt")
    compile_stage(made.module, "aot_eager")
    blocks = [made.module.get_submodule(f"blocks.{n}") for n in range(4)]
    (shared,) = calls(blocks[0])
    assert all(calls(block) == [shared] for block in blocks)
