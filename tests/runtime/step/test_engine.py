"""Two engines and one protocol: forward keeps what backward gives the gradients of.

The autograd engine keeps the edges of its results, the joint engine the values its graphs name.
"""

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from autopipe.joint.joint_graph import Layout
from autopipe.joint.split_backward import split
from autopipe.joint.wanted import Wanted
from autopipe.runtime.parameters.accumulate import accumulate
from autopipe.runtime.step.compile import Compiler
from autopipe.runtime.step.engine import AutogradEngine, Engine, JointEngine
from autopipe.stages.lower import Lowered


class Stage(nn.Module):
    """(x, position) -> (x * weight, position + 1, 0.5): a tensor, an integer tensor, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, float]:
        return x * self.weight, position + 1, 0.5


def arguments(value: float = 2.0) -> tuple[Tensor, Tensor]:
    return torch.tensor(value, requires_grad=True), torch.tensor(7)


def lowered_of(stage: nn.Module) -> Lowered:
    """A module in the place of a lowered stage: a joint graph is traced by calls of it alone."""
    return Lowered(None, stage, 1)  # type: ignore[arg-type]  # no node of a graph stands behind it


def joint_engine(stage: nn.Module) -> JointEngine:
    scalar = Layout((), (), torch.float32)
    lowered = lowered_of(stage)
    layouts = [Layout.of(tensor) for tensor in arguments()]
    return JointEngine(stage, split(lowered, layouts, [scalar, None, None]))


both = pytest.mark.parametrize("engine_of", [AutogradEngine, joint_engine])
EngineOf = Callable[[nn.Module], Engine]


@both
def test_forward_and_backward(engine_of: EngineOf) -> None:
    """y = x w at x = 2, w = 3: dx = 3 dy, dw = 2 dy."""
    stage = Stage()
    engine = engine_of(stage)
    y, position, number = engine.forward(0, arguments())
    assert (y.item(), position.item(), number) == (6.0, 8, 0.5)
    dx, dposition = engine.backward_input(0, [torch.tensor(10.0), None, None])
    engine.backward_weight(0)
    assert dx is not None and stage.weight.grad is not None
    assert (dx.item(), dposition, stage.weight.grad.item()) == (30.0, None, 20.0)


@both
def test_micro_batches_in_any_order(engine_of: EngineOf) -> None:
    """Each has its own edges and leaves; the parameters' gradients add up."""
    stage = Stage()
    engine = engine_of(stage)
    for k in range(3):
        engine.forward(k, arguments(float(k)))
    for k in (1, 0, 2):
        dx, _ = engine.backward_input(k, [torch.tensor(1.0 + k), None, None])
        assert dx is not None and dx.item() == 3 * (1 + k)
    for k in (2, 1, 0):
        engine.backward_weight(k)
    assert stage.weight.grad is not None
    assert stage.weight.grad.item() == sum(k * (1 + k) for k in range(3))


@both
def test_results_are_not_kept(engine_of: EngineOf) -> None:
    """Their memory goes as soon as they are sent, if no backward needs them."""
    engine = engine_of(Stage())
    results = engine.forward(0, arguments())
    gone = weakref.ref(results[0])
    del results
    assert gone() is None
    assert engine.backward_input(0, [torch.tensor(1.0), None, None])[0] is not None


@both
def test_nothing_is_kept_without_gradients(engine_of: EngineOf) -> None:
    engine = engine_of(Stage())
    with torch.no_grad():
        engine.forward(0, arguments())
    with pytest.raises(KeyError):
        engine.backward_input(0, [None, None, None])


def test_backward_lets_go() -> None:
    """A second backward of one micro-batch finds nothing."""
    engine = AutogradEngine(Stage())
    x, position = arguments()
    gone = weakref.ref(x)
    engine.forward(0, (x, position))
    del x
    engine.backward_input(0, [torch.tensor(1.0), None, None])
    assert gone() is None
    with pytest.raises(KeyError):
        engine.backward_input(0, [torch.tensor(1.0), None, None])


@both
def test_no_gradient_comes_back(engine_of: EngineOf) -> None:
    """The later stages have not used the result: nothing to do, and no gradient to give."""
    stage = Stage()
    engine = engine_of(stage)
    engine.forward(0, arguments())
    assert engine.backward_input(0, [None, None, None]) == (None, None)
    engine.backward_weight(0)
    assert stage.weight.grad is None


@both
def test_hooks_fire_once_per_micro_batch(engine_of: EngineOf) -> None:
    """On the tensor, and after accumulation."""
    stage = Stage()
    engine = engine_of(stage)
    seen: list[tuple[str, float]] = []

    def after(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.append(("after", parameter.grad.item()))

    stage.weight.register_hook(lambda gradient: seen.append(("tensor", gradient.item())))
    stage.weight.register_post_accumulate_grad_hook(after)
    for k in range(2):
        engine.forward(k, arguments())
        engine.backward_input(k, [torch.tensor(10.0), None, None])
        engine.backward_weight(k)
    once = ("tensor", 20.0)
    assert seen == [once, ("after", 20.0), once, ("after", 40.0)]


def test_hooks_on_autograds_node_fire_under_autograd() -> None:
    """As DDP's do; a joint graph has no such node."""
    stage = Stage()
    engine, seen = AutogradEngine(stage), list[str]()
    node = stage.weight.view_as(stage.weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]  # a view has one
    assert node is not None
    node.register_hook(lambda *_: seen.append("node"))
    engine.forward(0, arguments())
    engine.backward_input(0, [torch.tensor(10.0), None, None])
    assert seen == ["node"]


class Biased(nn.Module):
    """x -> x w + b + c + d; b and c are of the result's shape, and have one gradient: its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3))
        self.b, self.c = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(2, 3))
        self.d = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x @ self.w + self.b + self.c + self.d,)


Finish = Callable[[fx.GraphModule], fx.GraphModule] | None


def biased(finish: Finish) -> tuple[Biased, JointEngine]:
    stage = Biased()
    layout = Layout.of(torch.empty(2, 3, requires_grad=True))
    lowered = lowered_of(stage)
    joint = split(lowered, [layout], [layout], wanted=Wanted(halves=False))
    return stage, JointEngine(stage, joint, finish)


def given_to(engine: JointEngine) -> dict[str, bool]:
    """Whether each parameter is given the memory of its gradient."""
    calls = engine._input.graph.find_nodes(op="call_function", target=accumulate)
    return {str(call.args[0].target): call.kwargs.get("own", False) for call in calls}


def test_a_parameter_gets_memory_that_nobody_else_reads() -> None:
    """db = dc = dy, which the stage after may still send; dw and dd are new tensors."""
    _, engine = biased(None)
    assert given_to(engine) == {"w": True, "b": False, "c": False, "d": True}


def test_a_compiler_may_return_one_tensor_for_two() -> None:
    _, engine = biased(Compiler("aot_eager"))
    assert not any(given_to(engine).values())


@pytest.mark.parametrize("finish", [None, Compiler("aot_eager")])
def test_gradients_of_micro_batches_do_not_run_into_each_other(
    finish: Finish,
) -> None:
    """Three micro-batches: to the bit autograd's, and what was given back stays as it was."""
    stage, engine = biased(finish)
    alone = copy.deepcopy(stage)
    seeds, back = torch.randn(3, 2, 3), []
    for k, seed in enumerate(seeds):
        x = torch.randn(2, 3, requires_grad=True)
        engine.forward(k, (x,))
        (dx,) = engine.backward_input(k, [seed.clone()])
        alone(x)[0].backward(seed)
        back.append((dx, x.grad))
    for mine, other in zip(stage.parameters(), alone.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        assert torch.equal(mine.grad, other.grad)
    assert all(torch.equal(dx, expected) for dx, expected in back)


class Lowered16(nn.Module):
    """x -> bf16(x) bf16(w), as under autocast: dw is made in bf16, and cast."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x.bfloat16() @ self.w.bfloat16(),)


def lowered16(finish: Finish) -> tuple[Lowered16, JointEngine]:
    stage, x = Lowered16(), torch.empty(2, 3)
    lowered = lowered_of(stage)
    seed = Layout.dense((2, 3), torch.bfloat16)
    joint = split(lowered, [Layout.of(x)], [seed], wanted=Wanted(halves=False))
    return stage, JointEngine(stage, joint, finish)


def test_a_gradient_of_16_bits_is_given_away_before_its_cast() -> None:
    _, engine = lowered16(None)
    calls = [n.target for n in engine._input.graph.nodes if n.op == "call_function"]
    assert accumulate in calls and torch.ops.aten._to_copy.default not in calls


@pytest.mark.parametrize("finish", [None, Compiler("aot_eager")])
def test_gradients_of_16_bits_are_summed_in_32(finish: Finish) -> None:
    """To the bit what autograd makes of two micro-batches."""
    stage, engine = lowered16(finish)
    alone = copy.deepcopy(stage)
    for k, seed in enumerate(torch.randn(2, 2, 3).bfloat16()):
        x = torch.randn(2, 3)
        engine.forward(k, (x,))
        engine.backward_input(k, [seed])
        alone(x)[0].backward(seed)
    assert stage.w.grad is not None and alone.w.grad is not None
    assert torch.equal(stage.w.grad, alone.w.grad)


def test_a_hook_that_changes_a_gradient_is_heeded() -> None:
    stage = Stage()
    stage.weight.register_hook(lambda gradient: gradient / 4)
    engine = joint_engine(stage)
    engine.forward(0, arguments())
    engine.backward_input(0, [torch.tensor(10.0), None, None])
    assert stage.weight.grad is None, "it is the second half that gives it"
    engine.backward_weight(0)
    assert stage.weight.grad is not None and stage.weight.grad.item() == 5.0


class Deep(nn.Module):
    """y = tanh(tanh(x) * weight) on x [4]: dx needs both results of tanh, dw the inner one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (torch.tanh(torch.tanh(x) * self.weight),)


def deep_engine() -> JointEngine:
    x = Layout((4,), (1,), torch.float32, gradient=True)
    lowered = lowered_of(Deep())
    return JointEngine(lowered.module, split(lowered, [x], [replace(x, gradient=False)]))


def test_each_half_lets_go_of_what_no_later_one_needs() -> None:
    """With y = tanh(z): the first half makes dz of y, the second dw = dz tanh(x).

    F   tanh(x)  y            16 + 16
    I   tanh(x)  y  dz        + 16 at the most, then - 16
    W   tanh(x)     dz        - 32
    """
    engine, held = deep_engine(), []
    engine.hold = held.append
    engine.forward(0, [torch.randn(4)])
    engine.backward_input(0, [torch.ones(4)])
    engine.backward_weight(0)
    assert held == [32, 16, -16, -32]


def test_what_is_saved_goes_with_its_last_use() -> None:
    """The graphs empty the list that they are given, and hold nothing else."""
    joint = deep_engine().joint
    with torch.no_grad():
        _, *saved = joint.forward(torch.randn(4))
        for_input = [saved[n] for n in joint.to_input]
        for_weight = [saved[n] for n in joint.to_weight]
        gone = [weakref.ref(value) for value in for_input]
        del saved
        for_input.append(torch.ones(4))
        _, *stash = joint.backward_input(for_input)
        assert (for_input, [value() for value in gone]) == ([], [None, None])
        for_weight += stash
        gone = [weakref.ref(value) for value in for_weight]
        del stash
        joint.backward_weight(for_weight)
        assert (for_weight, [value() for value in gone]) == ([], [None, None])


def test_an_argument_that_lies_otherwise_is_laid_out_anew() -> None:
    engine = deep_engine()
    x = torch.randn(8)
    (y,) = engine.forward(0, [x[::2]])
    assert torch.equal(y, torch.tanh(torch.tanh(x[::2])))


def test_a_missing_gradient_beside_another_counts_as_zeros() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * self.weight, x * 3

    x = Layout((4,), (1,), torch.float32, gradient=True)
    seed = replace(x, gradient=False)
    lowered = lowered_of(Two())
    engine = JointEngine(lowered.module, split(lowered, [x], [seed, seed]))
    engine.forward(0, [torch.ones(4)])
    (dx,) = engine.backward_input(0, [None, torch.ones(4)])
    assert dx is not None and dx.tolist() == [3.0] * 4


def test_a_gradient_that_nobody_announced_is_not_lost_in_silence() -> None:
    x = Layout((4,), (1,), torch.float32, gradient=True)
    lowered = lowered_of(Deep())
    engine = JointEngine(lowered.module, split(lowered, [x], [None]))
    engine.forward(0, [torch.ones(4)])
    with pytest.raises(AssertionError, match=r"results \[0\] have a gradient"):
        engine.backward_input(0, [torch.ones(4)])


def test_a_parameters_gradient_is_its_own() -> None:
    """It may be made of the very tensor that came, which the next one must not change."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x + self.weight,)

    x = Layout((4,), (1,), torch.float32, gradient=True)
    lowered = lowered_of(stage := Shift())
    engine = JointEngine(stage, split(lowered, [x], [replace(x, gradient=False)]))
    came = torch.ones(4)
    for k in range(2):
        engine.forward(k, [torch.ones(4)])
        engine.backward_input(k, [came])
        engine.backward_weight(k)
    assert stage.weight.grad is not None
    assert came.tolist() == [1.0] * 4 and stage.weight.grad.tolist() == [2.0] * 4


@torch.library.custom_op("autopipe_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _of_doubled(ctx: object, gradient: Tensor) -> Tensor:
    """Made in two parts, as torch's own linear_cross_entropy makes it by chunks of rows."""
    made = torch.empty(gradient.shape)
    for part, given in zip(made.chunk(2), gradient.chunk(2), strict=True):
        torch.mul(given, 2.0, out=part)
    return made


doubled.register_autograd(_of_doubled)


@pytest.mark.parametrize("halves", [False, True])
def test_a_gradient_that_is_written_in_parts_is_given_away_when_it_is_whole(halves: bool) -> None:
    """Bug: the sum got what lay in the new memory before it was written."""

    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(8.0).reshape(4, 2))

        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x @ doubled(self.weight),)

    stage, x = Doubles(), torch.arange(12.0).reshape(3, 4).requires_grad_()
    seed = torch.arange(6.0).reshape(3, 2)
    wanted = Wanted(halves)
    joint = split(lowered_of(stage), [Layout.of(x)], [Layout.of(seed)], wanted=wanted)
    engine = JointEngine(stage, joint)
    expected = torch.autograd.grad(stage(x)[0], (x, stage.weight), seed)
    for k in range(3):  # the first one's becomes the sum, whole or not
        engine.forward(k, [x])
        (of_x,) = engine.backward_input(k, [seed])
        engine.backward_weight(k)
        assert of_x is not None and torch.equal(of_x, expected[0])
    assert stage.weight.grad is not None and torch.equal(stage.weight.grad, 3 * expected[1])
