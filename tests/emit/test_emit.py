"""A plan as files: what they look like, that they run as the plan does, how they are replaced."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopipe
from autopipe import AutopipeError, PlanError
from autopipe.emit.emit import stages, train_text
from tests.support import inprocess, zoo
from tests.support.emitted_cases import Case, case, equal
from tests.support.long import chosen
from tests.support.plans import example_plan

RUFF = (sys.executable, "-m", "ruff")


PLANS: dict[str, Callable[[], Case]] = {
    "eager-1f1b": lambda: case("gpt", 2, "eager-1f1b", depth=1, window=2),
    "skip connections": lambda: case("unet", 3),
    "masks": lambda: case("mask", 2),
    "reads, no_grad": lambda: case("llama", 2),
    "tied": lambda: case("gpt2", 2),
    "encoder and decoder": lambda: case("t5", 3),
    "interleaved, dropout": lambda: case("dropout", 2, "interleaved", chunks=2),
    "zb-v, in place": lambda: case("resnet", 2, "zb-v"),
    "recompute, batch norm": lambda: case("resnet", 2, recompute=("all",)),
    "zb-h1, opaque": lambda: case("lstm", 2, "zb-h1"),
    "bf16": lambda: case("dropout", 2, precision="bf16-autocast"),
    "a loss in parts": lambda: case("gpt2", 2, "zb-h1", loss_parts=3),
    "zb-h1, recompute, bf16": lambda: case(
        "dropout", 2, "zb-h1", precision="bf16-autocast", recompute=("all",)
    ),
}


ALWAYS = ("eager-1f1b", "skip connections", "a loss in parts", "recompute, batch norm")
"""The others run in the long run."""


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize("plan", chosen(PLANS, now=ALWAYS))
def test_files_run_as_the_plan_does(plan: str, tmp_path: Path) -> None:
    """Losses, gradients, buffers: bit by bit; and no formatter or linter has a remark."""
    made = PLANS[plan]()
    folder = made.emit(tmp_path / "out")
    assert equal(made.run(folder), made.run())
    for command in ("format --check --isolated", "check --isolated --select F,B,UP,E4,E7,E9"):
        told = subprocess.run((*RUFF, *command.split(), folder), capture_output=True, text=True)
        assert told.returncode == 0, told.stdout


@pytest.mark.long
def test_files_of_a_plan_with_master_weights(tmp_path: Path) -> None:
    """The graph has parameters of 16 bits, as when it was planned; it was refused as another."""
    made = case("gpt", 2, precision="bf16").emit(tmp_path / "out")
    assert "low(" in (made / "stage_0.py").read_text()


# What they look like


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).relu()
        return x + self.down(y)


class Dropping(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(self.up(x)), 0.5, self.training)


class Net(nn.Module):
    """Two layers, the second of which is called twice."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(), layer()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return self.layers[1](self.layers[1](x)).square().mean()


def source(layer: type[nn.Module], **constraints: Any) -> str:
    """The only stage of a net, planned for one process."""

    def inputs(rows: int) -> dict[str, Tensor]:
        return {"x": zoo.noise(rows, 4)}

    one = inprocess.machine(1)
    plan = autopipe.plan(
        lambda: Net(layer), inputs, cluster=one, batch_size=4, pp=1, micro_batches=2, **constraints
    )
    return stages(Net(layer), plan, None)["stage_0.py"]


class Words(nn.Linear):
    """A parameter whose name is a word of Python."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_parameter("lambda", nn.Parameter(torch.ones(4)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self, "lambda")


def test_names_that_are_words_of_python() -> None:
    made = source(Words)
    ast.parse(made)
    assert 'setattr(self, "lambda", parameter(4))' in made
    assert 'self["lambda"]' in made


STAGE = '''\
"""Stage 0 of 1, run by rank 0 of a pipeline.

    takes  x     float32[2, 4]  from the batch
    gives  mean  float32[]      the loss

Sizes are those of a micro-batch of ROWS rows. Whoever runs this puts the parameters
and buffers of the model in place; they are declared under the model's names.
"""

import torch
from torch import Tensor

from autopipe.runtime.emitted import States, parameter

aten = torch.ops.aten

ROWS = 2


class Layer(States):
    """Modules layers.0, layers.1 of the model.

    takes  x    float32[2, 4]
    gives  add  float32[2, 4]
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = States(weight=parameter(8, 4))
        self.down = States(weight=parameter(4, 8), bias=parameter(4))

    def forward(self, x: Tensor) -> Tensor:
        # test_emit.py: y = self.up(x).relu()
        up_linear = aten.linear.default(x, self.up.weight)  # [2, 8]
        relu = aten.relu.default(up_linear)
        # test_emit.py: return x + self.down(y)
        down_linear = aten.linear.default(relu, self.down.weight, self.down.bias)
        add = aten.add.Tensor(x, down_linear)
        return add


class Stage0(States):
    def __init__(self) -> None:
        super().__init__()
        self.layers = States({"0": Layer(), "1": Layer()})

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        layers_0 = self.layers["0"](x)
        layers_1 = self.layers["1"](layers_0)
        layers_1_again = self.layers["1"](layers_1)
        # test_emit.py: return self.layers[1](self.layers[1](x)).square().mean()
        square = aten.square.default(layers_1_again)
        mean = aten.mean.default(square)  # []
        return (mean,)
'''


def test_a_stage() -> None:
    """But for the numbers of the lines that it quotes."""
    assert re.sub(r"(test_emit.py):\d+", r"\1", source(Layer)) == STAGE


def test_a_module_called_again_with_other_random_numbers() -> None:
    """It has the parameters of the first call, and code of its own."""
    text = source(Dropping, recompute=("all",))
    assert "class Dropping(States):" in text and "class DroppingAgain(States):" in text
    assert 'f"{self._path}/dropout/0"' in text and 'f"{self._path}@1/dropout/0"' in text
    assert 'Recomputed(DroppingAgain("layers.1").sharing(self.layers["1"]))' in text
    assert 'layers_1_again = self.layers["1_again"](layers_1)' in text


# The folder


@pytest.mark.parametrize(
    ("source", "loaded"),
    [
        ("../net.py", "/plans/out/../net.py"),
        ("../Ann's/net.py", "/plans/out/../Ann's/net.py"),
        ('../5" disk/net.py', '/plans/out/../5" disk/net.py'),
        ("../10:30/net.py", "/plans/out/../10:30/net.py"),
        ("hf:../gpt2", "hf:/plans/out/../gpt2"),
        ("nets.small:make", "nets.small:make"),
    ],
)
def test_where_train_py_finds_the_model(source: str, loaded: str) -> None:
    """Beside its own folder, wherever it is called.

    Bugs: a quotation mark in the path was a syntax error, and a folder of transformers was looked
    for where torchrun stood.
    """
    text = train_text(replace(example_plan(), source=source))
    call = next(
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "load"
    )
    place = {"FOLDER": Path("/plans/out")}
    assert eval(ast.unparse(call.args[0]), place) == loaded
    assert "file.start()" in text  # with the folder's weights: `test_emitted_runs` runs it
    assert "file.since_planning(plan, given=" in text  # and says where it has none, as `run` does


@pytest.mark.long
def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    folder, made = tmp_path / "out", case("gpt", 2)
    folder.mkdir()
    made.emit(folder)  # an empty one is as good as none
    names = ["plan.json", "programs.txt", "stage_0.py", "stage_1.py", "train.py"]
    assert sorted(path.name for path in folder.iterdir()) == names
    (folder / "mine.txt").write_text("notes")
    with pytest.raises(PlanError, match="is there already, and not empty\nhint: --force"):
        made.emit(folder)
    assert (folder / "mine.txt").exists()
    made.emit(folder, force=True)
    assert sorted(path.name for path in folder.iterdir()) == names
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.long
def test_a_folder_that_cannot_be_written_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, folder = case("gpt", 2), tmp_path / "out"
    made.emit(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    replace_, moves = os.replace, list[str]()

    def replace(source: Path, target: Path) -> None:
        moves.append(str(target))
        if str(target) == str(folder) and len([m for m in moves if m == str(folder)]) == 1:
            raise OSError(28, "No space left on device")
        replace_(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(AutopipeError, match="cannot be written: No space left on device"):
        made.emit(folder, force=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
