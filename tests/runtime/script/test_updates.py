"""Several steps to an update are no accumulated gradients: the update is refused.

What else an optimizer may do to parts is told in `script_stories`, which has ranks.
"""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import autopipe
from autopipe import ModelError, Pipe
from tests.support.inprocess import machine
from tests.support.odd_models import Net, built, inputs, square

Step = Callable[[], object]


def script() -> tuple[Pipe, Step, torch.optim.Optimizer]:
    """A pipe of one rank, what makes a step of it, and an optimizer of its parameters."""
    one = {"cluster": machine(1), "batch_size": 4, "say": [].append}
    plan = autopipe.plan(lambda: built(Net), inputs, loss=square, **one)
    pipe = autopipe.parallelize(lambda: built(Net), plan, inputs=inputs, loss=square)
    return pipe, lambda: pipe.step(inputs(4)), torch.optim.SGD(pipe.parameters(), lr=0.1)


def test_gradients_are_not_accumulated() -> None:
    """Plain PyTorch would have used the sum of four steps; the parameters stay as they were."""
    pipe, step, optimizer = script()
    before = {name: one.detach().clone() for name, one in pipe.named_parameters()}
    for _ in range(4):
        step()
    with pytest.raises(ModelError, match=r"after 4 steps, .* the last one's gradients") as refused:
        optimizer.step()
    assert "give all rows to one step" in str(refused.value.hint)
    for name, one in pipe.named_parameters():
        assert torch.equal(one, before[name])


@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_whose_gradients_were_dropped(to_none: bool) -> None:
    """As where the loss was none that one trains by."""
    pipe, step, optimizer = script()
    step()
    pipe.zero_grad(set_to_none=to_none)
    step()
    optimizer.step()
    step()
    optimizer.zero_grad(set_to_none=to_none)
    step()
    optimizer.step()


def test_steps_alone() -> None:
    """As of a loop that measures their seconds, after one that trains."""
    _, step, optimizer = script()
    for _ in range(2):
        step()
        optimizer.step()
    for _ in range(3):
        step()


def test_two_optimizers_in_turn() -> None:
    pipe, step, _ = script()
    for one in pipe.parameters():
        step()
        torch.optim.SGD([one], lr=0.1).step()


def test_an_optimizer_of_others() -> None:
    """It trains something of the script's own in each step."""
    _, step, optimizer = script()
    others = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    for _ in range(2):
        step()
        others.step()
    with pytest.raises(ModelError, match="after 2 steps"):
        optimizer.step()


def test_weights_that_a_script_moves_between_two_steps() -> None:
    """SAM and extragradient use the second step's gradients alone. Bug: it was taken for a loop
    that accumulates them."""
    pipe, step, optimizer = script()
    for _ in range(2):
        step()
        begun = [one.detach().clone() for one in pipe.parameters()]
        for one in pipe.parameters():
            assert one.grad is not None
            one.data += 0.05 * one.grad
        step()
        for one, before in zip(pipe.parameters(), begun, strict=True):
            one.data.copy_(before)
        optimizer.step()


@pytest.mark.parametrize("same_rows", [True, False])
def test_gradients_that_a_script_adds_up_itself(same_rows: bool) -> None:
    """Bug: it had done what plain PyTorch does, and was refused."""
    pipe, _, optimizer = script()
    total: list[Tensor] = []
    for number in range(3):
        batch = inputs(4)
        pipe.step(batch if same_rows else {**batch, "x": batch["x"] + number})
        own = [one.grad for one in pipe.parameters() if one.grad is not None]
        total = [a + b for a, b in zip(total, own, strict=True)] if total else own
    for one, gradient in zip(pipe.parameters(), total, strict=True):
        one.grad = gradient
    optimizer.step()


def test_gradients_that_are_clipped_after_several_steps() -> None:
    pipe, step, optimizer = script()
    step()
    step()
    nn.utils.clip_grad_norm_(pipe.parameters(), 1e-3)
    with pytest.raises(ModelError, match="after 2 steps"):
        optimizer.step()


def test_a_scaler_of_torchs() -> None:
    """Bug: it divided gradients by a scale that no loss was multiplied by, and nothing was trained
    without a word."""
    _, step, optimizer = script()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    step()
    with pytest.raises(ModelError, match="GradScaler divides gradients by 65536") as refused:
        scaler.step(optimizer)
    assert "call optimizer.step() itself" in str(refused.value.hint)
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)


def test_a_pipe_that_goes_while_an_optimizer_steps() -> None:
    """Bug: its hook was taken out of torch's while torch went through them, which is an error."""
    kept, last = [script()[0]], list[object]()

    def collected(*_: object) -> None:
        if last:
            kept.clear()
            gc.collect()

    handle = register_optimizer_step_pre_hook(collected)
    _, step, optimizer = script()
    step()
    last.append(optimizer)
    optimizer.step()
    handle.remove()
    assert not kept
