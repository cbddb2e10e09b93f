"""A plan as files: what they look like, that they run as the plan does, and what an edit does.

Steps run in this process, a thread a rank, as `support.inprocess` does it; some under torchrun.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopipe
from autopipe import AutopipeError, Plan, PlanError, ScheduleError
from autopipe.emit.emit import emit, stages
from autopipe.planfile import programs
from autopipe.runtime.comm.threads import local_network
from autopipe.runtime.parameters.hold import HeldParameters
from autopipe.runtime.parameters.part import RankPart
from autopipe.runtime.step import prepare
from autopipe.runtime.step.emitted_files import Emitted, check_whole
from autopipe.runtime.step.executor import Executor
from autopipe.schedules.instructions import holders, parse_programs
from autopipe.stages.bind import split_as_planned
from tests.support import inprocess, zoo
from tests.support.inprocess import Cut, Unsummed
from tests.support.long import chosen
from tests.support.pipes import planned, traced_once
from tests.support.shell import NET, TORCHRUN, Said, Shell, end, free_port, ranks, start
from tests.support.zoo import ZOO

RUFF = (sys.executable, "-m", "ruff")


@dataclass(frozen=True)
class Case:
    """A plan of a model of the zoo: two rows to a micro-batch, four micro-batches."""

    name: str
    plan: Plan

    def emit(self, folder: Path, **options: Any) -> Path:
        zoo = ZOO[self.name]
        with traced_once(self.name):
            emit(zoo.model(), self.plan, folder, loss=zoo.loss, source="net.py", **options)
        return folder

    def run(self, folder: Path | None = None) -> dict[str, Tensor]:
        """The losses of two steps, the gradients of the second one, and the buffers after it.

        Args:
            folder: run the files in it, and not what the plan says.
        """
        emitted = Emitted.load(folder, self.plan) if folder is not None else None
        plan = emitted.plan if emitted is not None else self.plan
        found, flow, blocks = inprocess.traced(self.name)
        split = split_as_planned(found, plan)
        cut = Cut(self.name, found, flow, blocks, split.stages, None, 2)  # type: ignore[arg-type]
        model, compute = ZOO[self.name].model(), programs.compute(plan)
        placed, device = holders(compute), torch.device("cpu")
        executors, owned = list[Executor](), list[dict[str, Tensor]]()
        for place, transport in zip(plan.mesh.places, local_network(placed), strict=True):
            own: dict[str, Tensor] = {}
            for stage in split.stages:
                if placed[stage.index] == place.pp:
                    own = inprocess.own_states(cut, stage, model) | own
            part = RankPart(plan, place, split, placed, device)
            held = HeldParameters(own, Unsummed(), {})  # type: ignore[arg-type]
            rank = prepare.Rank(part, compute, transport, held, emitted=emitted)
            executors.append(prepare.training(rank, 2))
            owned.append(own)
        results: dict[str, Tensor] = {}
        for number in range(2):
            for tensor in (tensor for own in owned for tensor in own.values()):
                tensor.grad = None
            batch = ZOO[self.name].inputs(plan.batch.rows)
            losses = inprocess.step(executors, cut, batch, 0.25, number)
            results |= {f"loss {number}.{k}": loss for k, (loss, *_) in enumerate(losses)}
        return results | inprocess.gradients(owned) | inprocess.buffers(cut, owned)


@cache
def case(name: str, pp: int, schedule: str = "1f1b", **constraints: Any) -> Case:
    """A plan for one pipeline."""
    return Case(name, planned(name, pp, 1, 4, schedule, **constraints))


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Bit by bit, and by the same names."""
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


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


# What one edits


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case("gpt", 2).emit(tmp_path_factory.mktemp("gpt") / "out")


@pytest.fixture(scope="module")
def before() -> dict[str, Tensor]:
    """What the plan computes."""
    return case("gpt", 2).run()


@pytest.fixture
def edit(gpt: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the folder in which a file has another text, and stands for what `old` was."""

    def change(file: str, old: str, new: str) -> Path:
        folder = tmp_path / "edited"
        shutil.copytree(gpt, folder, dirs_exist_ok=True)
        text = (folder / file).read_text()
        assert old in text, f"{old!r} is not in {file}"
        (folder / file).write_text(text.replace(old, new))
        return folder

    return change


Edit = Callable[..., Path]


@pytest.mark.long
def test_another_order_of_programs_runs(edit: Edit, before: dict[str, Tensor]) -> None:
    """Rank 0 computes two forwards before it sends the first: later, and the same numbers."""
    folder = edit("programs.txt", "0F0 0SEND_F0>1 0F1", "0F0 0F1 0SEND_F0>1")
    changed, plan = Emitted.load(folder, case("gpt", 2).plan), case("gpt", 2).plan
    assert changed.programs != programs.step(plan)
    assert equal(case("gpt", 2).run(folder), before)


def test_a_backward_in_two_halves_runs(edit: Edit, before: dict[str, Tensor]) -> None:
    folder = edit("programs.txt", "0REDUCE 0B3", "0I3 0REDUCE 0W3")
    assert equal(case("gpt", 2).run(folder), before)


FIRST = "0SEND_F0>1 0F1 0FREE_F0>1 0SEND_F1>1"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            f"0F0 {FIRST} 0WAIT_B0<1",
            f"0F0 0WAIT_B0<1 {FIRST}",
            "deadlock: rank 0 waits at 0WAIT_B0<1 for 1SEND_B0>0, which comes after 1WAIT_F0<0 of "
            "rank 1; rank 1 waits at 1WAIT_F0<0 for 0SEND_F0>1, which comes after 0WAIT_B0<1 of "
            "rank 0",
        ),
        ("0WAIT_B0<1 ", "", "rank 0 lacks 0WAIT_B0<1"),
        (" 0STEP", " 0FREE_F9>1 0STEP", "rank 0 has no use for 0FREE_F9>1"),
        ("0F0 ", "", "rank 0: 0B0 needs 0F0 before it, which is missing"),
        ("0SEND_F0>1", "0SENT_F0>1", "rank 0: expected an instruction, found '0SENT_F0>1'"),
        ("rank 1:", "rank 2:", "expected a line `rank 1: ...`, found"),
    ],
)
def test_programs_that_cannot_be(edit: Edit, old: str, new: str, said: str) -> None:
    """They are read before anything else, and every rank reads all of them."""
    folder = edit("programs.txt", old, new)
    with pytest.raises(ScheduleError) as error:
        Emitted.load(folder, case("gpt", 2).plan)
    assert error.value.message.startswith(f"{folder / 'programs.txt'}: {said}")


def test_long_programs_are_compared_in_one_pass() -> None:
    """Of 40,000 instructions in another order; a set of all for each of them takes an hour."""
    (whole,) = parse_programs("rank 0: " + " ".join(f"0F{k} 0B{k}" for k in range(20_000)))
    check_whole((whole[::-1],), (whole,))
    with pytest.raises(ScheduleError, match="rank 0 lacks 0B19999$"):
        check_whole((whole[:-1],), (whole,))


def test_a_stage_runs_as_edited(edit: Edit, before: dict[str, Tensor]) -> None:
    """Stage 1 doubles the loss: so it is, and so are all gradients."""
    result = "return (loss_cross_entropy_loss,)"
    folder = edit("stage_1.py", result, result.replace(",)", " * 2,)"))
    found = case("gpt", 2).run(folder)
    assert equal(found, {name: 2 * tensor for name, tensor in before.items()})


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("ROWS = 2", "ROWS = 3", "it is for micro-batches of 3 rows (ROWS), and these have 2"),
        ("class Stage1(", "class Stage7(", "it has no class Stage1, an nn.Module"),
        (
            "self.norm = States(weight=parameter(32), ",
            "self.norm = States(",
            "it lacks 'norm.weight'; the stage has it as a parameter float32[32]",
        ),
        (
            "self.head = States(weight=parameter(64, 32))",
            "self.head = States(weight=parameter(64, 31))",
            "it declares 'head.weight' as float32[64, 31]; the stage has it as a parameter "
            "float32[64, 32]",
        ),
        (
            "self.head = States(",
            "self.head = States(bias=parameter(64), ",
            "it declares 'head.bias' float32[64], which the stage does not have",
        ),
        (
            "super().__init__()",
            "super().__init__(1)",
            "stage_1.py cannot be run: TypeError: 'int' object is not a mapping",
        ),
        ("import torch\n", "import torch torch\n", "invalid syntax"),
    ],
)
def test_a_stage_that_cannot_be(edit: Edit, old: str, new: str, said: str) -> None:
    """Refused by name before the first step."""
    folder = edit("stage_1.py", old, new)
    with pytest.raises(PlanError, match=re.escape(said)) as error:
        case("gpt", 2).run(folder)
    assert str(folder / "stage_1.py") in str(error.value)
    assert "emit" in str(error.value.hint) or "the model's" in str(error.value.hint)


def test_a_stage_that_is_gone(edit: Edit) -> None:
    """Bug: it was told as `stage_1.py cannot be run: PlanError: ...`, with the hint within."""
    folder = edit("stage_1.py", "import torch", "import torch")
    (folder / "stage_1.py").unlink()
    with pytest.raises(PlanError) as error:
        case("gpt", 2).run(folder)
    assert error.value.message.endswith("stage_1.py: no such file in the emitted folder")
    assert error.value.hint == "emit it again, with --force"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("return (blocks_2,)", "return (blocks_3,)", "NameError: name 'blocks_3' is not defined"),
        ("return (blocks_2,)", "return (blocks_2 @ blocks_2,)", "RuntimeError: Expected size"),
    ],
)
def test_a_stage_whose_forward_fails(edit: Edit, old: str, new: str, said: str) -> None:
    """Bug: it was told as a bug of the run, without the file and its line."""
    folder = edit("stage_0.py", old, new)
    place = rf"{folder}/stage_0.py:\d+ `{re.escape(new)}`: stage_0.py cannot be run: {said}"
    with pytest.raises(Exception, match=place):
        case("gpt", 2).run(folder)


def test_a_stage_that_gives_what_nobody_has_room_for(edit: Edit) -> None:
    folder = edit("stage_0.py", "return (blocks_2,)", "return (blocks_2[:1],)")
    said = (
        r"stage_0.py: result 0 of forward is float32\[1, 12, 32\]; the stages that it goes to "
        r"expect float32\[2, 12, 32\]"
    )
    with pytest.raises(Exception, match=said):
        case("gpt", 2).run(folder)


def test_another_plan_is_refused(edit: Edit) -> None:
    folder = edit("plan.json", '"window": 2', '"window": 1')
    with pytest.raises(PlanError, match="was emitted from another plan than the one given"):
        Emitted.load(folder, case("gpt", 2).plan)


# The folder


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


# Under torchrun


TOLD = (
    NET
    + """

class Telling(torch.optim.SGD):
    def step(self):
        gradients = [p.grad.reshape(-1).tolist() for p in self.param_groups[0]["params"]]
        with open(f"gradients.{os.environ['RANK']}", "a") as file:
            print(gradients, file=file)
        super().step()


def optimizer(parameters):
    return Telling(parameters, lr=0.1) if "RANK" in os.environ else torch.optim.SGD(parameters)
"""
)


def torchrun(*argv: str, folder: Path) -> Said:
    launcher = (*TORCHRUN, "--nproc-per-node", "2", f"--master-port={free_port()}")
    return end(start(*launcher, *argv, folder=folder))


@pytest.mark.parametrize(
    ("how", "launch"),
    [
        pytest.param(("--pp", "2"), torchrun, marks=pytest.mark.long),
        pytest.param(  # with the same environment
            ("--dp", "2", "--zero", "3"), partial(ranks, 2), marks=pytest.mark.long
        ),
        (  # ranks hold copies of what the files declare as masters
            ("--dp", "2", "--zero", "3", "--precision", "bf16"),
            partial(ranks, 2),
        ),
        pytest.param(
            ("--dp", "2", "--zero", "1", "--precision", "bf16"),
            partial(ranks, 2),
            marks=pytest.mark.long,
        ),
    ],
    ids=["torchrun", "zero 3", "zero 3, bf16", "zero 1, bf16"],
)
def test_torchrun_does_what_run_does(
    how: Sequence[str],
    launch: Callable[..., Said],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same gradients to the bit, and the same last line."""
    shell = Shell(tmp_path, monkeypatch, capsys)
    shell.write("net.py", "import os\n" + TOLD)
    shell.plan(2, *how, "--batch", "8", "--micro-batches", "2")
    assert shell("emit", "plan.json", "-o", "out").out == "out\n"
    assert Plan.load(tmp_path / "out" / "plan.json").source == "../net.py"

    def gradients() -> list[str]:
        files = [tmp_path / f"gradients.{rank}" for rank in range(2)]
        found = [file.read_text() for file in files]
        for file in files:
            file.unlink()
        return found

    run = ranks(2, "-m", "autopipe", "run", "plan.json", "--steps", "3", folder=tmp_path)
    assert run.code == 0, run.err
    expected = gradients()
    again = launch("out/train.py", "--steps", "3", folder=tmp_path)
    assert again.code == 0, again.err
    assert gradients() == expected
    assert again.out.splitlines()[-1] == run.out.splitlines()[-1]


def test_a_mistake_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `autopipe run` tells it, and with its exit code."""
    shell = Shell(tmp_path, monkeypatch, capsys)
    shell.plan(1, "--pp", "1", "--batch", "8", "--micro-batches", "2")
    assert shell("emit", "plan.json", "-o", "out").code == 0
    missing = shell("emit", "plan.json", "-o", "other", "--model", "x.py")
    assert missing.error.startswith("there is no model file 'x.py'")
    programs_ = tmp_path / "out" / "programs.txt"
    programs_.write_text(programs_.read_text().replace(" 0STEP", ""))
    said = ranks(1, "out/train.py", "--steps", "1", folder=tmp_path)
    wrong, hint = said.error.split("\n\n")
    assert wrong == f"{programs_}: rank 0 lacks 0STEP"
    assert hint == "hint: mend the file, or emit it again, with --force"
