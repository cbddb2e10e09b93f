"""Modules that a script switches, swaps or hooks between two steps: plain PyTorch would follow."""

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopipe
from autopipe import ModelError
from autopipe.runtime.script.switched import check_around
from tests.support.inprocess import machine
from tests.support.odd_models import Net, built, inputs, square

CPU = torch.device("cpu")


class Dropped(Net):
    def begin(self):
        self.drop, self.act = nn.Dropout(0.5), nn.ReLU()

    def inside(self, hidden):
        return self.act(self.drop(self.middle(hidden)))


def stepped(model: nn.Module) -> Callable[[], Tensor]:
    """A function that makes a step of a pipe of one rank."""
    one = {"cluster": machine(1), "batch_size": 4, "say": [].append}
    plan = autopipe.plan(model, inputs, loss=square, **one)
    pipe = autopipe.parallelize(model, plan, inputs=inputs, loss=square)
    return lambda: pipe.step(inputs(4))


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "a part that no longer drops": (lambda model: model.drop.eval(), "'drop.training' is another"),
    "another activation": (lambda model: setattr(model, "act", nn.Tanh()), "'act' is another"),
    "another forward": (
        lambda model: setattr(model.act, "forward", lambda hidden: 2 * hidden),
        "'act.forward' is another",
    ),
    "a hook": (
        lambda model: model.act.register_forward_hook(lambda module, given, made: 2 * made),
        "'hooks of act' is another",
    ),
    "a hook on the gradient": (
        lambda model: model.act.register_full_backward_hook(
            lambda module, into, out: (2 * into[0],)
        ),
        "'hooks of act' is another",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("steps", [pytest.param(0, marks=pytest.mark.long), 1])
def test_what_the_graph_would_not_follow_is_refused(change: str, steps: int) -> None:
    """Bug: steps went on as the modules were when the model was traced, without a word."""
    model = built(Dropped)
    step = stepped(model)
    for _ in range(steps):
        step()
    do, message = CHANGES[change]
    do(model)
    with pytest.raises(ModelError, match=message) as error:
        step()
    assert error.value.hint


def by_a_flag(outputs: Tensor, batch: object) -> Tensor:
    return square(outputs, batch) * (2.0 if torch.are_deterministic_algorithms_enabled() else 1.0)


def by_an_option(outputs: Tensor, batch: object) -> Tensor:
    return square(outputs, batch) * (2.0 if "--twice" in sys.argv else 1.0)


@pytest.mark.parametrize("loss", [by_a_flag, by_an_option])
def test_a_flag_that_a_loss_asks_for(
    loss: Callable[[Tensor, object], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: steps went on with the loss of before."""
    plan = autopipe.plan(built(Net), inputs, loss=loss, cluster=machine(1), batch_size=4)
    pipe = autopipe.parallelize(built(Net), plan, inputs=inputs, loss=loss)
    pipe.step(inputs(4))
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--twice"])
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ModelError, match=r"(sys.argv|enabled\(\))' is another value than when"):
            pipe.step(inputs(4))
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_model_in_evaluation_mode_is_not_trained() -> None:
    """A loop evaluates the module, and forgets to switch it back: plain PyTorch then trains it
    without dropout."""
    model = built(Dropped)
    step = stepped(model)
    model.eval()
    with pytest.raises(ModelError, match="is in evaluation mode, and pipe.step trains it") as error:
        step()
    assert "model.train() before the step" in error.value.hint
    model.train()
    step()


def test_what_changes_no_result_is_let_be() -> None:
    """A mode that no code asks for, a hook that looks, a mode that is put back."""
    model = built(Net)
    step = stepped(model)
    model.eval()
    step()
    seen = []
    model.middle.register_forward_hook(lambda module, given, made: seen.append(module))
    step()
    dropping = built(Dropped)
    step = stepped(dropping)
    dropping.drop.eval()
    dropping.drop.train()
    step()


def test_a_model_that_was_given_in_evaluation_mode_trains_as_after_train() -> None:
    """Planning has said so; its parts are all in training then, whatever they are told before."""
    model = built(Dropped).eval()
    step = stepped(model)
    model.drop.eval()
    step()
    model.train()
    step()


class Asks(Net):
    def inside(self, hidden):
        high = torch.get_float32_matmul_precision() == "high"
        return self.middle(hidden) / 2 if high else self.middle(hidden)


def test_a_flag_that_torch_no_longer_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a script that sets torch's newer `fp32_precision` ended in torch's own error."""
    step = stepped(built(Asks))
    step()
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")
    with pytest.raises(ModelError, match=r"torch.get_float32_matmul_precision\(\)' is another"):
        step()


def test_a_step_under_autocast() -> None:
    """Bug: eager stages computed in bf16 then, compiled ones and zero-bubble's in fp32."""
    for call in ("step", "evaluate"):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ModelError) as refused:
            check_around(call, "fp32", CPU)
        assert str(refused.value).startswith(
            f"pipe.{call} was called under torch.autocast to bfloat16, and the plan says in which "
            "precision a step computes: fp32"
        )


def test_a_step_without_gradients() -> None:
    with torch.no_grad(), pytest.raises(ModelError, match=r"torch\.no_grad\(\)"):
        check_around("step", "fp32", CPU)


def test_modes_that_change_nothing() -> None:
    check_around("step", "bf16", CPU)
    with torch.no_grad():
        check_around("evaluate", "fp32", CPU)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        check_around("step", "fp32", CPU)
    with torch.autocast("cpu", torch.bfloat16):  # which no GPU's step is under
        check_around("step", "fp32", torch.device("cuda"))
