"""What an optimizer changes apart, found by stepping it, and the bytes of its state."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopipe.frontend.measured_optimizer import (
    ELEMENT,
    ELSEWHERE,
    JOINED,
    MODEL,
    NOISE,
    TENSOR,
    measured_on,
    named_apart,
    optimizer_factor,
    stepped_apart,
)
from autopipe.frontend.optimizer import MakeOptimizer, without_names
from tests.support.optimizers import Lamb, Langevin, Together


class Keeping(torch.optim.SGD):
    """SGD that keeps something of each parameter, and a number of no parameter."""

    def __init__(self, parameters: Iterable[nn.Parameter], kept: Callable[[Any], Any]) -> None:
        super().__init__(parameters)
        self.kept = kept

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # SGD's has overloads
        states: Any = self.state
        for p in self.param_groups[0]["params"]:
            states.setdefault(p, self.kept(p))
        states["steps"] = states.get("steps", 0) + 1
        super().step(closure)


@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (torch.optim.AdamW, 2.0),
        (torch.optim.SGD, 0.0),
        (lambda parameters: torch.optim.SGD(parameters, momentum=0.9), 1.0),
        (lambda parameters: torch.optim.Adam(parameters, amsgrad=True), 3.0),
        (torch.optim.Adagrad, 1.0),
        (lambda parameters: Keeping(parameters, torch.zeros_like), 1.0),
        (lambda parameters: Keeping(parameters, lambda p: {"two": [p.detach() + 0] * 2}), 2.0),
    ],
)
def test_optimizer_factor(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], factor: float
) -> None:
    """Adam keeps two moments of a parameter, momentum one; the step's number is not counted. Bug: a
    state under no name, or of no parameter, ended in an AttributeError."""
    assert optimizer_factor(make) == factor


class Clipped(torch.optim.AdamW):
    """Clips gradients within its step; Adam takes no notice of a factor that is always the same."""

    def __init__(self, parameters: Iterable[nn.Parameter], clip: Callable[[Any], object]) -> None:
        super().__init__(parameters)
        self.clip = clip

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # AdamW's has overloads
        self.clip([p for group in self.param_groups for p in group["params"]])
        super().step(closure)


def each_by_its_norm(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        nn.utils.clip_grad_norm_(parameter, 0.05)


def by_layer(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """A lower rate for each earlier layer; takes names."""
    rates = [{"params": [p], "lr": 0.1 ** int(name.split(".")[0])} for name, p in named]
    return torch.optim.SGD(rates, momentum=0.9)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (torch.optim.AdamW, ELEMENT),
        (lambda parameters: torch.optim.SGD(parameters, momentum=0.9, nesterov=True), ELEMENT),
        (torch.optim.RMSprop, ELEMENT),
        (without_names(by_layer), ELEMENT),
        (torch.optim.Muon, TENSOR),
        (torch.optim.Adafactor, TENSOR),
        (Lamb, TENSOR),
        (Together, MODEL),
        (Langevin, NOISE),
        (lambda p: Clipped(p, lambda every: nn.utils.clip_grad_norm_(every, 0.05)), MODEL),
        (lambda p: Clipped(p, each_by_its_norm), TENSOR),
        (lambda p: Clipped(p, lambda every: nn.utils.clip_grad_value_(every, 0.05)), ELEMENT),
        (lambda p: Keeping(p, torch.zeros_like), ELEMENT),
    ],
)
def test_what_an_optimizer_changes_apart(make: MakeOptimizer, expected: str) -> None:
    """An element by its own gradient, or a parameter, or all of them."""
    assert stepped_apart(make) == expected


def test_an_optimizer_of_torch_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name; with a hook on the steps of all optimizers, which may clip, it is anew."""
    steps: list[object] = []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # SGD's has overloads
            steps.append(super().step(closure))

    monkeypatch.setattr(torch.optim, "SGD", Counting)
    assert named_apart("sgd") == ELEMENT
    measured = len(steps)
    assert named_apart("SGD") == ELEMENT and len(steps) == measured > 0

    def clipped(optimizer: torch.optim.Optimizer, *args: object) -> None:
        every = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(every, 0.05)

    hook = register_optimizer_step_pre_hook(clipped)
    try:
        assert named_apart("sgd") == MODEL
    finally:
        hook.remove()
    assert named_apart("sgd") == ELEMENT


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3)
        self.blocks = nn.ModuleList(nn.Linear(300, 300) for _ in range(12))
        self.head = nn.Linear(300, 1000)


class Partly(torch.optim.Optimizer):
    """`Lamb` of those parameters that `chosen` says, gradient descent of the others."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], chosen: Callable[[nn.Parameter, int], bool]
    ) -> None:
        super().__init__(parameters, {"steps": 0})
        self.chosen = chosen

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                whole = self.chosen(p, group["steps"])
                p -= 1e-3 * p.grad * (p.norm() / p.grad.norm() if whole else 1)


def by_block(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """LAMB for the matrices of blocks."""
    of = {id(p): "blocks" in name and p.ndim == 2 for name, p in named}
    return Partly([p for _, p in named], lambda p, _: of[id(p)])


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (without_names(by_block), TENSOR),
        (lambda every: Partly(every, lambda p, _: p.ndim == 4), TENSOR),
        (lambda every: Partly(every, lambda p, _: p.ndim == 1), TENSOR),
        (lambda every: Partly(every, lambda _, steps: steps > 20), TENSOR),
        (lambda every: Partly(every, lambda _, steps: steps % 1000 == 0), TENSOR),
        (lambda every: Partly(every, lambda p, _: p.grad.norm() < 1), TENSOR),
        (lambda every: Partly(every, lambda p, _: p.grad.norm() > 1000), TENSOR),
        (lambda every: Partly(every, lambda _, steps: ([False] * 99)[steps]), ELEMENT),
        (lambda every: Partly(every, lambda *_: False), ELEMENT),
    ],
)
def test_an_optimizer_that_changes_some_as_a_whole(make: MakeOptimizer, expected: str) -> None:
    """Bug: all were AdamW's on two matrices without names, for three steps of large gradients."""
    assert stepped_apart(make, measured_on(Blocks().named_parameters())) == expected


class After(torch.optim.Adam):
    """Adam, after something that it does with all parameters; it keeps numbers in `kept`."""

    def __init__(self, parameters: Iterable[nn.Parameter], does: Callable[..., object]) -> None:
        super().__init__(parameters, lr=1e-3)
        self.does, self.kept = does, dict[str, float]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # Adam's has overloads
        self.does(self.kept, self.param_groups[0]["params"])
        super().step(closure)


def norm_of(tensors: Iterable[torch.Tensor | None]) -> float:
    return float(torch.stack([t.norm() for t in tensors if t is not None]).norm())


def decay_by_gradients(kept: dict[str, float], every: list[nn.Parameter]) -> None:
    """Decay over the size that all gradients have had, as AdamS has it (Zhang et al., 2025): where
    they were as large as 1 it is nothing."""
    kept["norm"] = max(kept.get("norm", 0.0), norm_of(p.grad for p in every))
    for p in every:
        p.mul_(1 - 1e-5 / (kept["norm"] + 1e-12))


def descend_across(kept: dict[str, float], every: list[nn.Parameter]) -> None:
    """As AdamP has it (Heo et al., 2021): if gradients of all rows are across the rows, as behind a
    norm layer, what lies along the weights is taken out of the change."""
    for p in every:
        assert p.grad is not None
        if p.ndim < 2:
            continue
        cosines = nn.functional.cosine_similarity(p.grad.flatten(1), p.flatten(1))
        if cosines.abs().max() < 0.1 / p[0].numel() ** 0.5:
            change = p.grad.sign()
            p.grad.copy_(change - p * (p * change).sum() / p.square().sum())


def grow(kept: dict[str, float], every: list[nn.Parameter]) -> None:
    """Smaller gradients where all of them have grown, and the weights too."""
    now = {"weights": norm_of(every), "gradients": norm_of(p.grad for p in every)}
    if all(now[key] > 1.001 * kept.get(key, now[key]) for key in now):
        for p in every:
            assert p.grad is not None
            p.grad.mul_(kept["gradients"] / now["gradients"])
    kept.update(now)


def share_decay(kept: dict[str, float], every: list[nn.Parameter]) -> None:
    """Decay by how many parameters there are."""
    for p in every:
        p.mul_(1 - 0.01 / len(every))


@pytest.mark.parametrize(
    ("does", "expected"),
    [
        (decay_by_gradients, MODEL),
        (descend_across, TENSOR),
        (grow, MODEL),
        (share_decay, MODEL),
        (lambda *_: None, ELEMENT),
    ],
)
def test_what_is_seldom_or_little(does: Callable[..., object], expected: str) -> None:
    """Bug: each was taken for Adam, which goes element by element: it did too little in a step, or
    nothing with gradients of those sizes and directions."""
    like = measured_on(Blocks().named_parameters())
    assert stepped_apart(lambda every: After(every, does), like) == expected


class Lookahead(torch.optim.SGD):
    """Keeps parameters of its own, to which it moves those that it was given."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # SGD's has overloads
        super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                if "slow" not in self.state[parameter]:
                    self.state[parameter]["slow"] = copy.deepcopy(parameter)
                parameter.copy_(self.state[parameter]["slow"].lerp_(parameter, 0.5))


def moved_after(
    steps: Callable[[nn.Module], object], model: nn.Module | None = None
) -> MakeOptimizer:
    """SGD with a hook that does this to a model in a global."""
    kept = model or nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_post_hook(lambda *_: steps(kept))
        return optimizer

    return make


def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def scale_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.1)


@torch.no_grad()
def tie(model: nn.Module) -> None:
    model.get_parameter("1.weight").copy_(model.get_parameter("0.weight").T)


@torch.no_grad()
def clip_all(model: nn.Module) -> None:
    norm = torch.stack([parameter.norm() for parameter in model.parameters()]).norm()
    for parameter in model.parameters():
        parameter.div_(norm)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (moved_after(clamp), ELSEWHERE),
        (moved_after(scale_gradients), ELSEWHERE),
        (moved_after(tie), JOINED),
        (moved_after(clip_all), JOINED),
        (lambda _: torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1), ELSEWHERE),
        (lambda every: Lookahead(every, lr=0.1), ELEMENT),
    ],
)
def test_an_optimizer_that_reads_parameters_from_elsewhere(
    make: MakeOptimizer, expected: str
) -> None:
    """Bug: under tensor parallelism and ZeRO the model in the user's global is not what is trained:
    its gradients were None, and nothing that a hook did to them was done."""
    assert stepped_apart(make) == expected


def test_planning_leaves_the_weights_that_a_hook_writes() -> None:
    """Bug: those of a model in a global were clamped in the steps of planning."""
    kept = nn.Linear(4, 4)
    own, before = kept.weight, kept.weight.detach().clone()
    stepped_apart(moved_after(clamp, kept))
    assert kept.weight is own
    assert kept.weight.equal(before)


def test_what_a_model_s_optimizer_is_measured_on() -> None:
    """The first and the last of parameters that are alike, with at most 64 x 64 elements."""
    found = measured_on(Blocks().named_parameters())
    assert {name: list(tensor.shape) for name, tensor in found.items()} == {
        "enter.weight": [8, 3, 3, 3],
        "enter.bias": [8],
        "blocks.0.weight": [37, 75],
        "blocks.0.bias": [300],
        "blocks.11.weight": [37, 75],
        "blocks.11.bias": [300],
        "head.weight": [62, 37],
        "head.bias": [1000],
    }


def test_planning_leaves_random_numbers_where_they_were() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    stepped_apart(Langevin)
    assert torch.rand(3).equal(expected)
