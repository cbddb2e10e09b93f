"""`autopipe check` tells what rounding does apart from what a split does: fp64, fp16, near ties.

Where results differ by more than sums in another order explain, `check` runs both sides once more
in a finer precision: a difference that rounding alone makes goes away there.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopipe.checking.check import CheckRun
from autopipe.checking.fit import Degrees
from autopipe.checking.second_look import EXACT
from autopipe.checking.sized import Sized
from autopipe.checking.subject import Smaller
from autopipe.frontend import model_file
from autopipe.planfile.contents import Plan
from tests.support.layers_file import LAYERS
from tests.support.plans import example_plan
from tests.support.shell import NET, Shell


@pytest.mark.long
def test_a_step_of_fp16_that_overflows_is_passed_over_on_both_sides(autopipe: Shell) -> None:
    """Bug: its norm, infinite where it is split and 0 where it is not, was said to differ."""
    autopipe.write("net.py", LAYERS.replace("square().mean()", "square().mean() * 64"))
    autopipe.plan(2, "--pp", "2", "--batch", "8", "--micro-batches", "2", "--precision", "fp16")
    said = autopipe("check", "plan.json", "--json")
    assert said.code == 0, said.err
    norms = [row for row in json.loads(said.out)["rows"] if row["what"] == "clipped norm"]
    assert [(row["equal"], row["off"]) for row in norms] == [(2, 0.0), (2, 0.0)]


@pytest.mark.long
def test_a_model_in_fp64_is_the_same(autopipe: Shell) -> None:
    """Bug: ranks without the last stage are told a loss in fp32, and it was said to differ."""
    doubles = LAYERS.replace("return Net()", "return Net().double()")
    autopipe.write("net.py", doubles.replace("8),)", "8, dtype=torch.float64),)"))
    said = autopipe("check", "net.py", "--json")
    assert said.code == 0, said.err
    gradients = [row for row in json.loads(said.out)["rows"] if row["what"] == "gradients"]
    assert [(row["off"], row["allowed"]) for row in gradients] == [(0.0, 0.0)] * 2


STEEP = """
import torch
from torch import nn

class Steep(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return torch.sin(1e5 * self.down(self.up(x).tanh())).mean()

model = Steep

def inputs(rows):
    return {"x": torch.randn(rows, 8)}
"""


@pytest.mark.long
def test_a_model_that_makes_much_of_rounding_is_split_right(autopipe: Shell) -> None:
    """A sum over two ranks is 6e-8 off; 1e5 of that moves a sine. `check` called the plan wrong."""
    (autopipe.folder / "steep.py").write_text(STEEP)
    asked = ("--cluster", "cpu:2", "--tp", "2", "--micro-batches", "2", "--batch", "8")
    assert autopipe("plan", "steep.py", *asked).code == 0
    said = autopipe("check", "plan.json", "--json")
    found = json.loads(said.out)
    assert (said.code, found["same"]) == (0, True), said.err
    assert "once more in fp64, as rounding may decide" in said.err
    assert "where rounding decides" in found["notes"][-1]
    assert max(row["off"] for row in found["rows"] if row["what"] == "gradients") < EXACT


ROUTED = """\
import torch
from torch import nn


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 128), nn.Linear(128, 32)
        self.router = nn.Linear(32, 8, bias=False)
        self.router.weight.data = self.router.weight.data[:1] + 1e-3 * self.router.weight.data
        self.experts = nn.ModuleList([nn.Linear(32, 32) for _ in range(8)])

    def forward(self, x):
        x = x + self.second(self.first(x).relu())
        chosen = self.router(x).argmax(-1)
        made = torch.stack([expert(x) for expert in self.experts], 1)
        return made.gather(1, chosen[:, None, None].expand(-1, 1, 32)).square().mean()


model = Routed

def inputs(rows):
    return {"x": torch.randn(rows, 32)}
"""


@pytest.mark.long
def test_experts_whose_scores_nearly_tie(autopipe: Shell) -> None:
    """In bf16 a sum over two ranks sends some rows to another expert, whose gradients are then off
    by half and more. So are those of one process, once its parameters are rounded otherwise."""
    (autopipe.folder / "routed.py").write_text(ROUTED)
    asked = ("--cluster", "cpu:2", "--tp", "2", "--micro-batches", "2", "--batch", "64")
    said = autopipe("check", "routed.py", *asked, "--precision", "bf16", "--json")
    found = json.loads(said.out)
    assert (said.code, found["same"]) == (0, True), said.err
    assert "what rounding to bf16 moves them" in found["notes"][1]


def test_a_case_in_fp32_stays_so_where_it_is_planned_again(tmp_path: Path) -> None:
    """The closer look at a plan in bf16 is one in fp32, and in fp64 where rounding decides that."""
    planned: list[tuple[bool, str | None]] = []

    def made(smaller: Smaller, few: Degrees, precision: str | None) -> Plan:
        planned.append((smaller.double, precision))
        return example_plan()

    (tmp_path / "net.py").write_text(NET)
    file, few = model_file.load(str(tmp_path / "net.py")), Degrees.of(example_plan())
    one = CheckRun("net.py", file, made, lambda line: None, None, closer=True)
    case = Sized(file, Smaller(), example_plan(), few, few)
    one.in_double(case)
    one.in_double(one.in_fp32(case))
    assert planned == [(True, None), (False, "fp32"), (True, "fp32")]
