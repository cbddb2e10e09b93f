"""The autograd engine: forward keeps the edges of its results, backward gives what they hang on."""

import weakref

import pytest
import torch
from torch import Tensor, nn

from autopipe.runtime.engine import AutogradEngine


class Stage(nn.Module):
    """(x, position) -> (x * weight, position + 1, 0.5): a tensor, an integer tensor, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, float]:
        return x * self.weight, position + 1, 0.5


def arguments(value: float = 2.0) -> tuple[Tensor, Tensor]:
    return torch.tensor(value, requires_grad=True), torch.tensor(7)


def test_forward_and_backward() -> None:
    """y = x w at x = 2, w = 3: dx = 3 dy, dw = 2 dy."""
    stage = Stage()
    engine = AutogradEngine(stage)
    y, position, number = engine.forward(0, arguments())
    assert (y.item(), position.item(), number) == (6.0, 8, 0.5)
    dx, dposition = engine.backward_input(0, [torch.tensor(10.0), None, None])
    engine.backward_weight(0)
    assert dx is not None and stage.weight.grad is not None
    assert (dx.item(), dposition, stage.weight.grad.item()) == (30.0, None, 20.0)


def test_micro_batches_in_any_order() -> None:
    """Each has its own edges and leaves; the parameters' gradients add up."""
    stage = Stage()
    engine = AutogradEngine(stage)
    for k in range(3):
        engine.forward(k, arguments(float(k)))
    for k in (1, 0, 2):
        dx, _ = engine.backward_input(k, [torch.tensor(1.0 + k), None, None])
        assert dx is not None and dx.item() == 3 * (1 + k)
    assert stage.weight.grad is not None
    assert stage.weight.grad.item() == sum(k * (1 + k) for k in range(3))


def test_results_are_not_kept() -> None:
    """Their memory goes as soon as they are sent: between F and B there is the edge alone."""
    engine = AutogradEngine(Stage())
    results = engine.forward(0, arguments())
    gone = weakref.ref(results[0])
    del results
    assert gone() is None
    assert engine.backward_input(0, [torch.tensor(1.0), None, None])[0] is not None


def test_nothing_is_kept_without_gradients() -> None:
    engine = AutogradEngine(Stage())
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


def test_no_gradient_comes_back() -> None:
    """The later stages have not used the result: nothing to do, and no gradient to give."""
    stage = Stage()
    engine = AutogradEngine(stage)
    engine.forward(0, arguments())
    assert engine.backward_input(0, [None, None, None]) == (None, None)
    assert stage.weight.grad is None
