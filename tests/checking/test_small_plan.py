"""A smaller plan keeps to the user's `--recompute`: names of blocks and ops stay the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopipe.checking.fit import Degrees
from autopipe.checking.shrink import shrunk
from autopipe.checking.small_plan import in_double, planned, words_of
from autopipe.checking.subject import Smaller
from autopipe.frontend.model_file import ModelFile
from autopipe.planfile.again import repeated
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import BlockClass
from autopipe.planners.costs.asked_ops import WORDS
from autopipe.planners.driver import make_plan
from autopipe.runtime.start import trace_planned
from tests.support.plans import example_plan

H = tuple(f"h.{number}" for number in range(8))


@pytest.mark.parametrize(
    ("again", "asked"),
    [
        ((), "none"),
        (H[:5], ["h.0"]),
        (("h.6.attn/softmax/0", "h.7.attn/softmax/0"), ["h.0.attn/softmax/0"]),
        (("h.1/add/0", "h.2.up/linear/0"), ["h.0/add/0", "h.0.up/linear/0"]),
        (("h.3", "h.4", "h.5.up/linear/0"), ["h.1", "h.0.up/linear/0"]),
        (("h.1.up/linear/0/[h.1.up.weight]>R",), ["h.0.up/linear/0/[up.weight]>R"]),
        (("alone/gelu/0",), ["alone/gelu/0"]),
    ],
    ids=["nothing", "blocks", "an op", "ops", "blocks and an op", "an exchange", "in no block"],
)
def test_what_runs_again_by_names_that_stay(again: tuple[str, ...], asked: object) -> None:
    """Of eight equal layers at least two are left."""
    plan = example_plan()
    stages = (replace(plan.stages[0], recompute=again), plan.stages[1])
    plan = replace(plan, stages=stages, blocks=(BlockClass("h.0", H),))
    assert words_of(plan)["recompute"] == asked


class Layer(nn.Module):
    """Attention of torch's ops one by one, and two products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.norm(x)
        x = x + (own @ own.mT).softmax(dim=-1) @ own
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h:
            x = layer(x)
        return x.square().mean()


def inputs(rows: int) -> tuple[torch.Tensor]:
    return (torch.arange(rows * 256).reshape(rows, 32, 8).sin(),)


@pytest.mark.long
def test_a_smaller_model_runs_the_same_ops_again() -> None:
    """Of six layers two are left, on this machine's CPU; `explain` has one sentence for both."""
    file = ModelFile("net.py", Net, inputs, None, None, None, None, None)
    plan = make_plan.plan(
        Net, inputs, cluster="1x2xA100-80GB", batch_size=8, pp=2, micro_batches=4, compile=False,
        schedule="1f1b", recompute=[*WORDS],
    )  # fmt: skip
    smaller = Smaller(layers=2)
    made = planned(shrunk(file, smaller), Degrees.of(plan), words_of(plan), lambda line: None)

    def told(of: Plan) -> list[str]:
        return [str(own) for own in repeated(of, of.stages)]

    ops = "norms, attention and activations"
    assert (told(plan), told(made)) == ([f"{ops} of 6 blocks"], [f"{ops} of 2 blocks"])


class Chosen(nn.Module):
    """Runs as it is, one op more in fp64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = x[x > 0]
        return (found * 2 if x.dtype == torch.float64 else found).sum()


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.chosen = nn.Linear(8, 8), nn.Linear(8, 8), Chosen()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean() + self.chosen(self.down(self.up(x)))


def test_in_fp64_a_part_that_runs_as_it_is_is_that_of_fp64() -> None:
    """Bug: ranks refused the plan for another model, and `check` said that a rounding differs."""
    file = ModelFile("net.py", Choosing, inputs, None, None, None, None, None)
    words, degrees = {"loss_over": "micro-batch"}, Degrees(2, 1, 1, 1, 2, 2)
    wide = shrunk(file, Smaller(double=True))
    plans = [planned(one, degrees, words, lambda line: None) for one in (file, wide)]
    assert trace_planned(wide.model, None, None, in_double(*plans)).trace.graph


class Spectral(nn.Module):
    """A weight and a buffer of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, dtype=torch.cfloat))
        self.register_buffer("turn", torch.ones(8, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight * self.turn).abs().mean()


def test_in_fp64_complex_numbers_are_as_wide() -> None:
    """Bug: `double()` leaves them, and the second look in fp64 raised."""
    file = ModelFile("net.py", Spectral, inputs, None, None, None, None, None)
    model = shrunk(file, Smaller(double=True)).model()
    assert model(inputs(2)[0]).dtype == torch.float64
    assert {one.dtype for one in (model.weight, model.turn)} == {torch.complex128}
