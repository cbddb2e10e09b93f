"""A run goes on without the fp32 masters that it had, or with new ones: states follow them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from autopipe import Pipe
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
