"""A run goes on without the fp32 masters that it had, or with new ones: states follow them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import autopipe
from autopipe import Pipe
from autopipe.runtime.checkpoint.compare import differences
from autopipe.runtime.checkpoint.convert import to_file
from autopipe.runtime.checkpoint.stored import Stored
from tests.support.inprocess import machine
from tests.support.pipes import drawn, piped, planned

MODEL = "linear"
MASTERS, NONE = {"precision": "bf16"}, {"precision": "bf16", "optimizer_dtype": "bf16"}


class WideMomentum(torch.optim.SGD):
    """Sums what it has seen in fp32, whatever its parameters are in."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                seen = self.state[parameter].setdefault("seen", torch.zeros(parameter.shape))
                seen += parameter.detach().float()


def made(words: dict[str, str], kind: str) -> tuple[Pipe, torch.optim.Optimizer]:
    pipe = piped(MODEL, planned(MODEL, 1, 1, 2, **words))
    if kind == "AdamW":
        return pipe, torch.optim.AdamW(pipe.parameters(), lr=0.1)
    return pipe, WideMomentum(pipe.parameters(), lr=0.1, momentum=0.9)


def step(pipe: Pipe, optimizer: torch.optim.Optimizer, number: int) -> None:
    pipe.step(drawn(MODEL, 4, number))
    optimizer.step()


def states(pipe: Pipe, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": state.clone()
        for name, parameter in pipe.named_parameters()
        for key, state in optimizer.state[parameter].items()
    }


@pytest.mark.parametrize("kind", ["AdamW", "momentum"])
@pytest.mark.parametrize(
    ("before", "after"), [(MASTERS, NONE), (NONE, MASTERS)], ids=["go", "come"]
)
def test_masters_come_and_go(
    kind: str, before: dict[str, str], after: dict[str, str], tmp_path: Path
) -> None:
    """What was in the parameter's dtype is in its new one; counters and fp32 sums stay."""
    pipe, optimizer = made(before, kind)
    for number in range(2):
        step(pipe, optimizer, number)
    pipe.save(tmp_path / "kept", optimizer)
    had = states(pipe, optimizer)
    again, other = made(after, kind)
    again.load(tmp_path / "kept", other)
    dtype = next(again.parameters()).dtype
    found = states(again, other)
    assert found.keys() == had.keys()
    for key, state in found.items():
        stays = key.endswith("/step") or (key.endswith("/seen") and before is NONE)
        assert state.dtype == (torch.float32 if stays else dtype), key
        assert torch.equal(state, had[key].to(state.dtype)), key
    step(again, other, 2)


class Spectral(nn.Module):
    """As Fourier neural operators have it: the weights of frequencies are complex."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.modes = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.modes, n=4)


class Emptied(nn.Linear):
    """Has a parameter and a buffer without elements, as where a config asks for 0 of something."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.prompts = nn.Parameter(torch.empty(3, 0))
        self.register_buffer("seen", torch.empty(0, 2))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.prompts.sum()


def test_tensors_without_elements_are_saved_and_go_on(tmp_path: Path) -> None:
    """Bugs: the first step after a load ended in `KeyError: 'step'`, a comparison in an error of
    torch's, and a model that was converted lacked these tensors: `load_state_dict` refused it."""

    def inputs(rows: int) -> dict[str, Tensor]:
        return {"input": torch.arange(4.0 * rows).reshape(rows, 4)}

    def loss(made: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (made - batch["input"]).square().mean()

    plan = autopipe.plan(Emptied, inputs, loss=loss, cluster=machine(1), batch_size=4)
    pipe = autopipe.parallelize(Emptied(), plan, loss=loss)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
    for _ in range(2):
        pipe.step(inputs(4))
        optimizer.step()
        pipe.save(tmp_path / "kept", optimizer)
        pipe.load(tmp_path / "kept", optimizer)
    stored = Stored.open(tmp_path / "kept/step-00000002")
    assert not [*differences(stored, stored)]
    to_file(stored, tmp_path / "model.safetensors")
    Emptied().load_state_dict(load_file(tmp_path / "model.safetensors"))


def test_complex_parameters_are_saved_and_go_on(tmp_path: Path) -> None:
    """Bug: neither a file nor a checkpoint could be written, after the training."""

    def inputs(rows: int) -> dict[str, Tensor]:
        return {"x": torch.arange(4.0 * rows).reshape(rows, 4)}

    def loss(made: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (made - batch["x"]).square().mean()

    plan = autopipe.plan(Spectral, inputs, loss=loss, cluster=machine(1), batch_size=4)
    losses: dict[str, list[float]] = {"whole": [], "resumed": []}
    for kind, saves in (("whole", False), ("resumed", True)):
        pipe = autopipe.parallelize(Spectral(), plan, loss=loss)
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
        for _ in range(3):
            losses[kind].append(float(pipe.step(inputs(4))))
            optimizer.step()
            if saves:
                pipe.save(tmp_path / "kept", optimizer)
                pipe = autopipe.parallelize(Spectral(), plan, loss=loss)
                optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
                pipe.load(tmp_path / "kept", optimizer)
    assert losses["whole"] == losses["resumed"]
    pipe.save(tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")["modes"]
    assert torch.equal(found, next(pipe.parameters()).detach())
    weights = tmp_path / "model.safetensors"
    begun = autopipe.parallelize(Spectral, plan, loss=loss, weights=weights)
    assert torch.equal(found, next(begun.parameters()).detach())
