"""Both halves together are the backward that autograd does at once, bit by bit."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import analyse
from autopipe.ir.graph import shape_at
from autopipe.ir.partition import legal_cuts
from autopipe.ir.torch_private import storage_key
from autopipe.joint.joint_graph import CannotSplit, Layout
from autopipe.joint.split_backward import split
from autopipe.joint.wanted import HALVES, Wanted
from autopipe.runtime.step.engine import AutogradEngine, JointEngine
from autopipe.sharding.vocabulary_loss import BACKWARD, vocabulary_loss
from autopipe.stages.lower import Lowered, lower
from autopipe.stages.precision import arithmetic, computing
from autopipe.stages.recompute import within
from autopipe.stages.rng import stream
from tests.support.long import chosen
from tests.support.models import LENGTH, WIDTH
from tests.support.staged import lowered, micro_batches, sum_of, traced
from tests.support.staged import split as stages_between
from tests.support.zoo import ZOO

FLOAT = 4


class Stage(nn.Module):
    """`run(self, x)` is what the stage does."""

    def __init__(self, run):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.convolution = nn.Conv2d(4, 4, 3, padding=1)
        self.run = run

    def forward(self, x):
        return (self.run(self, x),)


def joint_of(run, shape=(3, 4), *, gradient=True):
    """The joint graph of a stage whose result has the shape of its argument."""
    x = torch.ones(shape, requires_grad=gradient)
    return split(Lowered(None, Stage(run), 3), [Layout.of(x)], [Layout.of(torch.ones(shape))])


def lines(module):
    """A graph's code without the letting go."""
    body = module.code.replace("torch.ops.aten.", "").replace(".default", "").split("\n")
    return [line.split(";")[0].strip() for line in body if line.startswith("    ") and line.strip()]


def ops(module):
    """The names of the ops that a graph calls."""
    calls = [node.target for node in module.graph.nodes if node.op == "call_function"]
    return [op.__name__.split(".")[0] for op in calls]


def test_the_three_graphs_of_a_linear_layer():
    joint = joint_of(lambda m, x: m.linear(x))
    assert lines(joint.forward) == [
        "linear_weight = self.linear.weight",
        "t = t(linear_weight)",
        "linear_bias = self.linear.bias",
        "addmm = addmm(linear_bias, x0, t)",
        "return (addmm, x0)",
    ]
    assert lines(joint.backward_input) == [
        "pop = values.pop()",
        "linear_weight = self.linear.weight",
        "t = t(linear_weight)",
        "t_1 = t(t)",
        "mm = mm(pop, t_1)",
        "return (mm, pop)",
    ]
    assert lines(joint.backward_weight) == [
        "pop = values.pop()",
        "pop_1 = values.pop()",
        "t_2 = t(pop)",
        "mm_1 = mm(t_2, pop_1)",
        "t_3 = t(mm_1)",
        "sum_1 = sum.dim_IntList(pop, [0], True)",
        "view = reshape(sum_1, [4])",
        "t_4 = t(t_3)",
        "return (t_4, view)",
    ]
    assert joint.parameters == ("linear.weight", "linear.bias")


def test_the_bytes_of_a_stage_worked_by_hand():
    """y = tanh(linear(tanh(x))) on x [3, 4]: both results of tanh are saved.

    from F:  tanh(x) for dx and dw, y for dx and, through dz, dw            2 x 48
    I to W:  tanh(x), and dz = tanh'(y) dy, which I has made                48 + 48
    """
    joint = joint_of(lambda m, x: torch.tanh(m.linear(torch.tanh(x))))
    tensor = 3 * 4 * FLOAT
    assert (joint.kept, joint.stash, joint.fresh) == (2 * tensor, 2 * tensor, tensor)
    # A linear layer alone keeps its argument and hands on the gradient it is given: both others'.
    joint = joint_of(lambda m, x: m.linear(x))
    assert (joint.kept, joint.stash, joint.fresh) == (0, 0, 0)


def test_views_of_one_storage_are_counted_once():
    joint = joint_of(lambda m, x: m.linear(torch.exp(x).t().contiguous().t()))
    assert joint.kept == 2 * 48  # exp for itself, and its other layout for the weight

    def halves(m, x):
        a, b = torch.exp(x).split(2, 1)
        return torch.cat([a * b, b], 1)

    assert joint_of(halves).kept == 48


def test_a_part_of_a_parameter_is_no_value_that_forward_keeps():
    """Backward takes it from the parameter again, as nn.MultiheadAttention's three weights in one:
    under ZeRO-3 nothing that lies in a gathered parameter may be kept."""

    def halves(m, x):
        first, second = m.linear.weight.split([2, 2])
        return torch.cat([x @ first.t(), x @ second.t()], 1)

    joint = joint_of(halves)
    assert lines(joint.forward)[-1] == "return (cat, x0)"
    assert ops(joint.backward_input).count("split_with_sizes") == 1


def test_a_first_stage_does_all_of_its_backward_for_the_weights():
    """Nobody waits for its arguments' gradients: the first half only hands over."""
    joint = joint_of(lambda m, x: torch.tanh(m.linear(x)), gradient=False)
    assert ops(joint.backward_input) == []
    assert ops(joint.backward_weight) == "detach tanh_backward t mm t sum reshape t".split()
    assert joint.to_input == ()
    assert (joint.kept, joint.stash, joint.fresh) == (48, 48, 0)


def test_a_stage_without_parameters_has_nothing_left_for_the_second_half():
    joint = joint_of(lambda m, x: torch.tanh(x))
    assert ops(joint.backward_input) == ["detach", "tanh_backward"]
    assert (ops(joint.backward_weight), joint.parameters) == ([], ())
    assert (joint.kept, joint.stash) == (48, 0)


def test_a_convolution_has_its_weights_gradient_in_the_second_half():
    joint = joint_of(lambda m, x: m.convolution(x), (2, 4, 8, 8))
    backward = torch.ops.aten.convolution_backward.default
    masks = [
        [node.args[-1] for node in half.graph.find_nodes(op="call_function", target=backward)]
        for half in (joint.backward_input, joint.backward_weight)
    ]
    assert masks == [[[True, False, False]], [[False, True, True]]]


def test_a_loss_in_parts_has_its_weights_gradient_in_the_second_half():
    """Each half makes the logits again: neither keeps them for the other."""

    def run(m, x):
        target = torch.zeros(3, dtype=torch.int64)
        how = -100, 1, torch.float32, 2, 0, ""
        return vocabulary_loss(x, m.linear.weight, m.linear.bias, target, *how)[0]

    x = torch.ones(3, 4, requires_grad=True)
    joint = split(Lowered(None, Stage(run), 3), [Layout.of(x)], [Layout.of(torch.ones(()))])
    wanted = [
        [node.args[-1] for node in half.graph.find_nodes(op="call_function", target=BACKWARD)]
        for half in (joint.backward_input, joint.backward_weight)
    ]
    assert wanted == [[[True, False, False]], [[False, True, True]]]
    assert joint.parameters == ("linear.weight", "linear.bias")
    assert joint.kept == 3 * 8 + 3 * FLOAT, "targets and log-sum-exps"
    assert joint.fresh == 0


def test_a_first_stages_convolution_stays_in_one_piece():
    def run(m, x):
        return m.convolution(torch.relu(m.convolution(x)))

    joint = joint_of(run, (2, 4, 8, 8), gradient=False)
    backward = torch.ops.aten.convolution_backward.default
    found = joint.backward_weight.graph.find_nodes(op="call_function", target=backward)
    assert [node.args[-1] for node in found] == [[True, True, True], [False, True, True]]


def test_a_norm_stays_in_one_piece_and_hands_on_two_vectors():
    """Not what it has made in one call with them: the gradient of its argument."""
    joint = joint_of(lambda m, x: m.norm(torch.exp(x)))
    assert "native_layer_norm_backward" in ops(joint.backward_input)
    assert ops(joint.backward_weight) == []
    assert (joint.stash, joint.fresh) == (2 * 4 * FLOAT, 2 * 4 * FLOAT)


class Frugal(torch.autograd.Function):
    """exp, whose backward writes its gradient into new memory, or over what it has saved."""

    @staticmethod
    def forward(ctx, x, over_saved):
        y = x.exp()
        ctx.save_for_backward(y)
        ctx.over_saved = over_saved
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return (y if ctx.over_saved else torch.ones_like(y).mul_(y)).mul_(gradient), None


def test_what_is_written_in_place_is_made_by_the_half_that_reads_it():
    joint = joint_of(lambda m, x: Frugal.apply(m.linear(x), False))
    assert ops(joint.backward_input) == ["detach", "ones_like", "mul_", "mul_", "t", "t", "mm"]
    assert ops(joint.backward_weight) == ["t", "mm", "t", "sum", "reshape", "t"]


def test_what_kernels_lay_out_otherwise_than_fake_tensors_is_copied():
    """Bug: a batch norm on a CPU gives dense channels, of an input whose channels are last too; the
    linear layer, traced with a view of its transpose, ended the run."""

    def run(m, x):
        normed = F.batch_norm(x.transpose(1, 2), None, None, training=True)
        return m.linear(normed.transpose(1, 2))

    stage, x = Stage(run), torch.randn(3, 3, 4)
    layout = Layout.of(x.clone().requires_grad_())
    joint = split(Lowered(None, stage, 3), [layout], [Layout.of(x)])
    assert torch.equal(joint.forward(x)[0], stage(x)[0])


def test_a_first_half_that_writes_over_what_the_second_reads_is_refused():
    """dw = dy' exp(x): in one backward it is had before exp(x) is overwritten."""
    with pytest.raises(CannotSplit, match=r"aten.mul_.Tensor writes over what aten.mm"):
        joint_of(lambda m, x: m.linear(Frugal.apply(x, True)))


# Whole models


NAMES = "gpt dropout unet resnet gpt2 llama t5 whisper frozen dataclass mask counted".split()


class Chain:
    """A zoo's model in three stages, run by autograd: what goes into each stage and comes out."""

    def __init__(self, name, count=3):
        trace, case = traced(name), ZOO[name]
        legal = legal_cuts(analyse(trace.graph))
        cuts = [legal[len(legal) * number // 3] for number in (1, 2)]
        stages = lowered(trace, case.model(), cuts, 2)
        # Each with its own parameters, tied ones too, and all once more for another engine.
        self.modules, self.others = [
            [replace(low, module=copy.deepcopy(low.module)) for low in stages] for _ in range(2)
        ]
        engines = [AutogradEngine(stage.module) for stage in self.modules]
        self.arguments = [{} for _ in engines]
        self.results = [{} for _ in engines]
        self.seeds = [{} for _ in engines]
        self.returned = [{} for _ in engines]
        leaves = micro_batches(trace, case.inputs(2 * count), count)
        for k in range(count):
            self.forward(k, engines, leaves[k])
        for k in ORDER:
            self.backward(k, engines)

    def forward(self, k, engines, leaves):
        made = {}
        for s, (low, engine) in enumerate(zip(self.modules, engines, strict=True)):
            arrived = [
                made[ref].detach().clone().requires_grad_(made[ref].requires_grad)
                for ref, _ in low.stage.receives
            ]
            self.arguments[s][k] = [*arrived, *(leaves[path] for path in low.stage.inputs)]
            with stream(0, 0, k):
                self.results[s][k] = engine.forward(k, self.arguments[s][k])
            made.update(zip(low.stage.outgoing, self.results[s][k], strict=False))

    def backward(self, k, engines):
        back = {}
        for s, (low, engine) in reversed([*enumerate(zip(self.modules, engines, strict=True))]):
            if s == len(engines) - 1:
                results = self.results[s][k]
                seeds = [torch.full_like(results[0], 0.5)] + [None] * (len(results) - 1)
            else:
                seeds = [sum_of(back[r]) if r in back else None for r in low.stage.outgoing]
            self.seeds[s][k] = seeds
            self.returned[s][k] = engine.backward_input(k, seeds)
            for (ref, _), gradient in zip(low.stage.receives, self.returned[s][k], strict=False):
                if gradient is not None:
                    back.setdefault(ref, []).append(gradient)

    def joint(self, s, wanted=HALVES):
        """The joint graph of stage `s`."""
        seeds = [None if seed is None else Layout.of(seed) for seed in self.seeds[s][0]]
        return split(
            self.others[s], [Layout.of(x) for x in self.arguments[s][0]], seeds, wanted=wanted
        )


ORDER = (1, 0, 2)
"""Of the micro-batches' backwards."""

TIMETABLE = "F0 F1 F2 I1 I0 W1 I2 W0 W2".split()


def same(made, expected):
    assert len(made) == len(expected)
    for mine, its in zip(made, expected, strict=True):
        if isinstance(its, torch.Tensor):
            assert torch.equal(mine, its)
        else:
            assert mine == its


WAYS = [Wanted(halves, least) for halves in (True, False) for least in (False, True)]


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("wanted", WAYS, ids=str)
@pytest.mark.parametrize("name", chosen(NAMES, now=("dropout", "unet", "frozen", "counted")))
def test_results_gradients_and_buffers_are_those_of_autograd(name, wanted):
    """Bit by bit, in any order of halves: second halves follow other micro-batches' first ones."""
    chain = Chain(name)
    for s, low in enumerate(chain.others):
        engine = JointEngine(low.module, chain.joint(s, wanted))
        for kind, k in ((word[0], int(word[1])) for word in TIMETABLE):
            with stream(0, 0, k):
                if kind == "F":
                    arguments = [x.detach().clone() for x in chain.arguments[s][k]]
                    same(engine.forward(k, arguments), chain.results[s][k])
                elif kind == "I":
                    same(engine.backward_input(k, chain.seeds[s][k]), chain.returned[s][k])
                else:
                    engine.backward_weight(k)
        expected = chain.modules[s].module
        same(*([p.grad for p in module.parameters()] for module in (low.module, expected)))
        same([*low.module.buffers()], [*expected.buffers()])


@pytest.mark.parametrize(
    "name", chosen(("gpt", "dropout", "unet", "llama", "t5"), now=("dropout", "unet"))
)
def test_bytes_counted_are_bytes_held(name):
    """Of real tensors, and no more than autograd keeps."""
    chain = Chain(name, 3)
    for s, low in enumerate(chain.others):
        joint = chain.joint(s)
        arguments, seeds = chain.arguments[s][0], chain.seeds[s][0]
        states = [*low.module.parameters(), *low.module.buffers()]
        owned = {storage_key(x) for x in (*states, *arguments)}
        with torch.no_grad():
            made = joint.forward(*arguments)
            saved = made[joint.results :]
            assert size(saved, owned) == joint.kept
            start = [seed for n, seed in enumerate(seeds) if n in joint.seeds]
            given = [*(saved[n] for n in joint.to_input), *start]
            stash = joint.backward_input(given)[len(arguments) :]
        assert given == []
        owned |= {storage_key(seed) for seed in start}
        for_weight = [saved[n] for n in joint.to_weight]
        assert size([*for_weight, *stash], owned) == joint.stash
        assert joint.stash - joint.fresh == size(for_weight, owned)
        assert joint.kept <= kept_by_autograd(chain.modules[s].module, arguments)


def size(tensors, owned):
    """Bytes of distinct storages, those owned elsewhere left out."""
    found = {storage_key(t): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for key, size in found.items() if key not in owned)


def kept_by_autograd(module, arguments):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module(*arguments)
    owned = [*module.parameters(), *module.buffers(), *arguments]
    return size(kept, {storage_key(x) for x in owned})


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast"])
def test_mixed_precision_and_recomputation_give_what_autograd_gives(precision, recomputed):
    """What a block makes again is made by the first half, and handed on."""
    trace = traced("dropout")
    blocks = find_blocks(trace.graph)
    cuts = [f"blocks.{number}.norm1/layer_norm/0" for number in (1, 3)]
    _, middle, _ = stages_between(trace, cuts)
    again = (
        within(trace.graph, middle, blocks, [block.path for block in blocks]) if recomputed else ()
    )

    def stage():
        model = ZOO["dropout"].model()
        states = {name: model.get_parameter(name) for name in middle.states}
        return lower(
            trace.graph,
            middle,
            blocks,
            states,
            trace.reads,
            2,
            last=False,
            recompute=again,
            precision=precision,
        )

    (ref,) = middle.outgoing
    x = torch.randn(shape_at(trace.graph.spec(ref), 2), generator=torch.Generator().manual_seed(0))
    arguments, seed = [x.requires_grad_()], [x.detach() * 0.5]
    first = stage()
    joint = split(first, [Layout.of(x)], [Layout.of(seed[0])], precision)
    outcomes = []
    for low, engine_of in ((first, lambda m: JointEngine(m, joint)), (stage(), AutogradEngine)):
        engine, copied = engine_of(low.module), map(low.module.get_parameter, low.low)
        with stream(0, 0, 0), computing(arithmetic(precision, "cpu", copied)):
            made = engine.forward(0, arguments)
        with stream(0, 0, 0):
            back = engine.backward_input(0, seed)
            engine.backward_weight(0)
        outcomes.append([*made, *back, *(p.grad for p in low.module.parameters())])
    same(*outcomes)
    between = 2 * LENGTH * WIDTH * FLOAT  # the argument of the second block; that of the first came
    assert (joint.kept == between) == recomputed


def test_no_product_with_a_weights_gradient_is_in_the_first_half():
    """gpt's middle stage: an `mm` of the first half has a weight in it, none of the second has."""
    chain = Chain("gpt", 3)
    joint = chain.joint(1)
    linears = ops(joint.forward).count("addmm")
    assert ops(joint.backward_input).count("mm") == linears > 0
    assert ops(joint.backward_weight).count("mm") == linears


def test_a_stage_with_an_lstm_cannot_be_split():
    chain_of = lowered(traced("lstm"), ZOO["lstm"].model(), [], 2)
    with pytest.raises(CannotSplit):
        split(chain_of[0], [], [])
