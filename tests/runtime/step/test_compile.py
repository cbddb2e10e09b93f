"""Compiled stages: where the islands are, and that what they compute is what eager computes."""

import copy

import pytest
import torch

from autopipe.ir.blocks import find_blocks
from autopipe.runtime.step.compile import compile_stage
from autopipe.stages.lower import lower
from autopipe.stages.precision import arithmetic, computing
from autopipe.stages.recompute import Recomputed
from autopipe.stages.rng import stream
from tests.support.long import chosen
from tests.support.staged import micro_batches, split, traced
from tests.support.zoo import ZOO

# torch's own compiler warns itself: it asks for the .grad of tensors that have none.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]


def stage_of(name, *, recompute=False, precision="fp32"):
    """A fresh model of the zoo in one stage, and the parameters that want copies."""
    found, model = traced(name), copy.deepcopy(ZOO[name].model())
    (stage,), blocks = split(found, []), find_blocks(found.graph)
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


def step(name, compiler, **options):
    """The loss, gradients and buffers of one micro-batch; `compiler` None: nothing is compiled."""
    made, model, wanted = stage_of(name, **options)
    if compiler is not None:
        compile_stage(made.module, compiler)
    leaves = micro_batches(traced(name), ZOO[name].inputs(2), 1)[0]
    how = arithmetic(options.get("precision", "fp32"), "cpu", wanted)
    with stream(0, 0, 0), computing(how):
        (loss, *_) = made.module(*[leaves[path] for path in made.stage.inputs])
    loss.backward()
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
        ("resnet", {}),
        pytest.param("lstm", {}, marks=pytest.mark.long),
    ],
)
def test_islands_change_nothing(name, options):
    """Cut out, traced forward and backward, but run by eager kernels: masks are the same ones,
    running statistics are written, reads are checked."""
    assert_equal(step(name, "aot_eager", **options), step(name, None, **options), 1e-5)


def islands(module):
    """The islands that a module calls, in order, and what runs as Python in between."""
    names = [n.target.__name__ for n in module.graph.nodes if n.op == "call_function"]
    return [name for name in names if name not in ("take", "low")]


def test_blocks_of_one_structure_are_compiled_once():
    made, _, _ = stage_of("gpt")
    compile_stage(made.module, "aot_eager")
    blocks = [made.module.get_submodule(f"blocks.{n}") for n in range(4)]
    (shared,) = islands(blocks[0])
    assert all(islands(block) == [shared] for block in blocks)
    before, after = islands(made.module)
    assert len({before, after, shared}) == 3
    calls = [n for n in made.module.graph.nodes if n.op == "call_module"]
    assert len(calls) == 4


def test_random_nodes_stand_between_islands():
    """So that they draw what they draw uncompiled. They name their streams, islands do not."""
    made, _, _ = stage_of("dropout")
    compile_stage(made.module, "aot_eager")
    first, second = (islands(made.module.get_submodule(f"blocks.{n}")) for n in (1, 2))
    assert first == second
    assert first[1::2] == ["draw"] * 3, "in attention, after it, and at the block's end"


def test_a_recomputed_block_is_compiled_inside():
    made, _, _ = stage_of("gpt", recompute=True, precision="bf16-autocast")
    compile_stage(made.module, "aot_eager")
    block = made.module.get_submodule("blocks.1")
    assert isinstance(block, Recomputed)
    assert len(islands(block.block)) == 1
    assert "qkv.weight" in dict(block.named_parameters())


def test_one_body_with_states_of_other_shapes_is_another_island():
    """Else the third and fourth would be compiled anew each time their turn comes."""
    made, _, _ = stage_of("unet")
    compile_stage(made.module, "aot_eager")
    graphs = [m for m in made.module.modules() if isinstance(m, torch.fx.GraphModule)]
    called = [name for graph in graphs for name in islands(graph)]
    assert len(called) == len(set(called)), "no two of its parts have the same shapes"
