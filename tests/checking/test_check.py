"""`autopipe check` as a user types it: its output, its exit codes, and what it shrinks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from autopipe.checking.check import CheckRun
from autopipe.checking.fit import Degrees
from autopipe.checking.second_look import EXACT
from autopipe.checking.sized import Sized
from autopipe.checking.subject import Smaller
from autopipe.cli import check
from autopipe.frontend import model_file
from autopipe.planfile.contents import Plan
from autopipe.runtime.launch import spawn
from autopipe.terminal import console
from tests.support import warm
from tests.support.long import chosen
from tests.support.plans import example_plan
from tests.support.shell import NET, Shell, changed


@pytest.fixture
def autopipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    """In its folder `net.py`; ranks are forks, which are there sooner."""

    def start(ranks: int, argv: Sequence[str]) -> int:
        return warm.spawn(ranks, ["-m", "autopipe", *argv], tmp_path)

    monkeypatch.setattr(check, "started", start)
    return Shell(tmp_path, monkeypatch, capsys)


def test_a_model_and_its_plan_are_the_same(autopipe: Shell) -> None:
    """Two ranks, every gradient equal in every bit; as JSON and in words."""
    said = autopipe("check", "net.py", "--json")
    assert said.code == 0, said.err
    found: dict[str, Any] = json.loads(said.out)
    assert found["same"]
    assert found["plan"]["pp"] == 2
    assert found["reduced"] == []
    assert [(row["step"], row["what"]) for row in found["rows"]] == [
        (step, what)
        for step in (1, 2)
        for what in ("loss", "gradients", "clipped norm", "buffers", "parameters")
    ]
    gradients = [row for row in found["rows"] if row["what"] == "gradients"]
    assert [(row["tensors"], row["equal"], row["allowed"]) for row in gradients] == [(4, 4, 0)] * 2


def test_a_plan_is_run_as_it_is_on_fewer_replicas(autopipe: Shell) -> None:
    """For 8 ranks as 2 x 4, with ZeRO-1: the cuts stay, two replicas are enough."""
    autopipe.plan(
        8, "--pp", "2", "--dp", "4", "--zero", "1", "--batch", "32", "--micro-batches", "2"
    )
    said = autopipe("check", "plan.json")
    assert said.code == 0, said.err
    words = " ".join(said.out.split())
    assert "pp=2 dp=2 tp=1" in words
    assert "ZeRO-1" in words
    assert "reduced: dp 4 -> 2" in words
    assert "the same: " in words
    assert Plan.load(autopipe.folder / "plan.json").mesh.dp == 4


LAYERS = """\
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.Sequential(*(Layer() for _ in range(4)))

    def forward(self, x):
        return self.h(x).square().mean()


def model():
    return Net()


def inputs(batch_size):
    return (torch.randn(batch_size, 8),)
"""


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


@pytest.mark.long
def test_statistics_that_are_a_mean_over_all_batches(autopipe: Shell) -> None:
    """Bug: the last place of a running variance was said to differ; torch divides otherwise."""
    averaged = LAYERS.replace("(Layer() for _ in range(4)))", "(Layer(), Layer()), norm())")
    norm = "def norm():\n    return nn.BatchNorm1d(8, momentum=None)\n\n\nclass Layer"
    autopipe.write(
        "net.py", averaged.replace("class Layer", norm) + '\nloss_over = "micro-batch"\n'
    )
    said = autopipe("check", "net.py", "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)["rows"]
    assert [row["tensors"] for row in found if row["what"] == "buffers"] == [3, 3]


CHOSEN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def mixed(self, hidden, chosen):
        made = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                made = made.index_add(0, rows, expert(hidden[rows]))
        return made

    def forward(self, x):
        hidden = self.up(x).tanh()
        return self.down(hidden + self.mixed(hidden, (x[:, 0] > 0).long())).square().mean()

model = Net

def inputs(rows):
    sign = 1 if torch.rand(()) < 0.5 else -1
    x = torch.randn(rows, 8)
    x[:, 0] = x[:, 0].abs() * sign
    return (x,)

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5)
"""


@pytest.mark.parametrize("zero", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3))])
def test_experts_that_no_row_of_a_step_has_chosen(autopipe: Shell, zero: int) -> None:
    """Bug: with replicas a run ended where one got its first rows in a later step; one that got
    none had a gradient of zeros, for which AdamW changes a weight and torch would pass over it."""
    (autopipe.folder / "chosen.py").write_text(CHOSEN)
    asked = ("--pp", "1", "--dp", "2", *(("--zero", str(zero)) if zero else ()))
    said = autopipe("check", "chosen.py", *asked, "--json")
    assert said.code == 0, said.err
    found = [row for row in json.loads(said.out)["rows"] if row["what"] == "gradients"]
    assert all(row["off"] < 1e-6 for row in found)


def test_an_optimizer_that_goes_by_places_is_refused(autopipe: Shell) -> None:
    """Bug: in a run each rank gave its own first parameter what is for that of the model."""
    by_places = "def optimizer(parameters):\n    first, *rest = parameters\n"
    by_places += "    return torch.optim.SGD([{'params': first, 'lr': 0.1}, {'params': rest}])\n"
    autopipe.write("net.py", f"{LAYERS}\n\n{by_places}")
    said = autopipe("check", "net.py")
    assert said.code == 2
    assert "the split model does not run (exit code 2)" in " ".join(said.out.split())


SCALED = """
import torch
from torch import nn

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 4), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return (self.layer(x) * self.scale.exp()).square().mean()

model = Scaled

def inputs(rows):
    return {"x": torch.ones(rows, 8)}
"""


@pytest.mark.long
def test_a_scalar_is_a_row_of_one_replica(autopipe: Shell) -> None:
    """Bug: the temperature of a contrastive loss was compared as if all replicas had it whole."""
    (autopipe.folder / "scaled.py").write_text(SCALED)
    asked = ("--cluster", "local:2", "--dp", "2", "--zero", "2", "--batch", "8")
    assert autopipe("plan", "scaled.py", *asked).code == 0
    said = autopipe("check", "plan.json")
    assert (said.code, "the same: " in said.out) == (0, True), said.err


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


TEACHER = """\
import torch
from torch import nn


class Distilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.student, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for mine, followed in zip(self.teacher.parameters(), self.student.parameters()):
                mine.mul_(0.9).add_(followed, alpha=0.1)
        x = self.frozen(x).relu()
        return (self.student(x) - self.teacher(x)).square().mean()


model = Distilled


def inputs(batch_size):
    return {"x": torch.randn(batch_size, 8)}
"""


@pytest.mark.long
def test_what_is_not_trained_is_whole_and_each_replica_s_own(autopipe: Shell) -> None:
    """Bugs: frozen parameters were said to differ under ZeRO-1 and 2, and a teacher, which the
    unsplit model had moved once for each replica."""
    (autopipe.folder / "distilled.py").write_text(TEACHER)
    said = autopipe("check", "distilled.py", "--pp", "1", "--dp", "2", "--zero", "1")
    assert (said.code, "the same: " in said.out) == (0, True), said.out


def test_what_forward_moves_is_not_gathered(autopipe: Shell) -> None:
    """Bug: under ZeRO-3 a run lost what moves a teacher: it was written to what was gathered."""
    (autopipe.folder / "distilled.py").write_text(TEACHER)
    refused = autopipe("check", "distilled.py", "--pp", "1", "--dp", "2", "--zero", "3")
    assert refused.code == 2
    assert "distilled.py:14: forward writes the parameter 'teacher.weight'" in refused.error


SPARSE = """\
import torch
from torch import nn


def model():
    words = nn.Embedding(3, 8, sparse=True)
    return nn.Sequential(words, nn.Flatten(), nn.Linear(48, 8), nn.Tanh(), nn.Linear(8, 2))


def inputs(batch_size):
    return {"input": torch.arange(6 * batch_size).view(batch_size, 6) % 3}


def loss(outputs, batch):
    return outputs.square().mean()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


@pytest.mark.long
def test_sparse_gradients_are_sums_in_an_order_of_their_own(autopipe: Shell) -> None:
    """Bug: dense ones differ from them in the last place, which was a difference."""
    (autopipe.folder / "words.py").write_text(SPARSE)
    said = autopipe("check", "words.py")
    assert said.code == 0, said.err
    assert "the same: " in said.out


@pytest.mark.long
def test_another_plan_runs_the_same_ops_again(autopipe: Shell) -> None:
    """In another precision the plan is made anew, under the words that the first one stands for."""
    (autopipe.folder / "net.py").write_text(LAYERS)
    autopipe.plan(2, "--pp", "2", "--recompute", "activations", "--precision", "bf16")
    said = autopipe("check", "plan.json", "--precision", "fp32", "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert found["plan"]["precision"] == "fp32"
    assert found["plan"]["recompute"] == ["activations of 4 blocks"]


CENTRED = """
import torch
from torch import nn

class Centre(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, outputs, batch):
        with torch.no_grad():
            found = (outputs - self.mean).square().mean()
            self.mean.lerp_(outputs.mean(0), 0.5)
        return (outputs - self.mean).square().mean() + found

def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

def inputs(rows):
    return {"input": torch.randn(rows, 8)}

loss_over = "micro-batch"
loss = Centre()
"""


@pytest.mark.long
def test_a_loss_that_keeps_a_mean_begins_each_run_with_the_same(autopipe: Shell) -> None:
    """Bug: a look at random numbers before tensor-parallel ranks start had moved it."""
    (autopipe.folder / "centred.py").write_text(CENTRED)
    said = autopipe("check", "centred.py", "--tp", "2")
    assert said.code == 0, said.out


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (
            ("plan.json", "--pp", "2"),
            "plan.json is a plan, which decides how to split, and --pp was given as well\n\n"
            "hint: autopipe check plan.json; or plan again with --pp",
        ),
        (("none.py",), "there is no model file 'none.py'\n\nhint: autopipe plan model.py"),
        (
            (".",),
            ". is a folder\n\nhint: autopipe check plan.json, or autopipe check model.py",
        ),
        (
            ("net.py", "--pp", "2", "--cluster", "local:3"),
            "pp=2 dp=1 tp=1 are 2 processes, and local:3 has 3\n\nhint: leave --cluster out",
        ),
    ],
)
def test_what_cannot_be_checked(autopipe: Shell, argv: tuple[str, ...], error: str) -> None:
    assert autopipe("check", *argv).error == error


@pytest.mark.parametrize(("of_ranks", "code"), [(3, 1), (2, 2)])
def test_ranks_that_do_not_run(
    of_ranks: int, code: int, autopipe: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A difference; a user's mistake, which a rank has told, if they say so by their code."""
    monkeypatch.setattr(check, "started", lambda ranks, argv: of_ranks)
    said = autopipe("check", "net.py")
    assert said.code == code
    last = said.out.splitlines()[-1]
    assert last == f"differs: the split model does not run (exit code {of_ranks})"


@pytest.mark.long
def test_norms_that_are_set_in_each_micro_batch_are_set_once(autopipe: Shell) -> None:
    """Bug: EEGNet's were told to differ, by the last bit that setting them again changes."""
    norms = "self.up.weight.data = torch.renorm(self.up.weight.data, 2, 0, 0.3)\n        "
    autopipe.write("net.py", changed("y = self.up(x)", f"{norms}y = self.up(x)"))
    said = autopipe("check", "net.py", "--batch", "8", "--micro-batches", "4")
    assert said.code == 0, said.out
    assert "forward sets norms of a parameter" in " ".join(said.out.split())


def test_a_model_that_fails_by_itself_is_told_with_its_line(
    autopipe: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: `the split model does not run (exit code 1)`, as if the split were wrong."""
    monkeypatch.setattr(check, "started", lambda ranks, argv: 1)
    text = changed("torch.randn(batch_size, 4)}", "torch.arange(batch_size)}")
    text = text.replace('((outputs - batch["target"]) ** 2).mean()', CLASSES)
    autopipe.write("net.py", text)
    said = autopipe("check", "net.py", "--batch", "8").error
    assert said == (
        f"{autopipe.folder}/net.py:{len(text.splitlines())} `return {CLASSES}`: on a batch as "
        "`inputs` gives it, the model raises IndexError: Target 4 is out of bounds.\n\nhint: a "
        "token, a label, or a position in a long row is beyond the table it is looked up in"
    )


CLASSES = 'nn.functional.cross_entropy(outputs, batch["target"])'


def test_it_leaves_nothing_behind(autopipe: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "started", lambda ranks, argv: 3)
    before = autopipe.files()
    autopipe("check", "net.py")
    assert autopipe.files() == before


ON_A_GPU = """
import torch
from torch import nn

device = torch.device("cuda")
torch.set_default_device(device)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.table = torch.linspace(0, 1, 8)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x + self.table))
        return x


def model():
    return Net().to(device)


def inputs(rows):
    return {"x": torch.randn(rows, 8).cuda(), "y": torch.randn(rows, 8, device=device)}


def loss(outputs, batch):
    return nn.functional.mse_loss(outputs, batch["y"])
"""


@pytest.mark.long
def test_a_file_that_is_all_on_a_gpu_is_planned_for_two_and_checked_here(
    autopipe: Shell, tmp_path: Path
) -> None:
    """Bug: on a GPU its model could not be traced, and `check` compared tensors of two devices."""
    (tmp_path / "model.py").write_text(ON_A_GPU)
    asked = ("--cluster", "2xA100-40GB", "--pp", "2", "--precision", "fp32", "--no-compile")
    said = autopipe("plan", "model.py", *asked, "--batch", "8", "-o", "plan.json")
    assert said.code == 0, said.err
    said = autopipe("check", "plan.json")
    assert said.code == 0 and "the same: " in said.out, said.err
    assert torch.get_default_device().type == "cpu"


DROPS_LAYERS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x):
        hidden = self.up(x)
        for layer in self.layers:
            if torch.rand(()) < 0.5:
                continue
            hidden = hidden + nn.functional.dropout(layer(hidden).tanh(), 0.1)
        return nn.functional.dropout(self.down(hidden), 0.1)

class TakesTurns(Net):
    # The last of its draws decides nothing.

    def forward(self, x):
        hidden = self.up(x)
        for layer in self.layers:
            out = layer(hidden)
            hidden = out if torch.rand(1).item() < 0.5 else hidden.flip(0)
        return self.down(out)

def model():
    return Net()

def inputs(rows):
    return {"x": torch.arange(8.0 * rows).reshape(rows, 8).sin()}

def loss(outputs, batch):
    return (outputs - batch["x"]).square().mean()
"""


@pytest.mark.parametrize("kind", chosen(("Net", "TakesTurns"), now=("Net",)))
def test_layers_that_random_numbers_leave_out(autopipe: Shell, tmp_path: Path, kind: str) -> None:
    """Bug: a part that runs as it is was to draw once; one that draws for each layer, and more in
    those that it runs, could not be checked."""
    (tmp_path / "model.py").write_text(DROPS_LAYERS.replace("return Net()", f"return {kind}()"))
    said = autopipe("check", "model.py", "--pp", "2", "--micro-batches", "2", "--batch", "8")
    assert said.code == 0 and "the same: " in said.out, said.err
    assert "dropout is off" not in said.out + said.err


def test_compiled_graphs_of_gpus_run_as_they_are(autopipe: Shell, tmp_path: Path) -> None:
    """Bug: what torch writes in C++ for an LSTM under autocast does not compile, and who has no
    compiler could check no plan for GPUs."""
    (tmp_path / "model.py").write_text(ON_A_GPU)
    asked = ("--cluster", "2xA100-40GB", "--pp", "2", "--compile", "--schedule", "1f1b")
    said = autopipe("check", "model.py", *asked, "--batch", "8")
    assert said.code == 0 and "the same: " in said.out, said.err
    assert "compiled; 8 rows" in said.out
    assert "the graphs that a GPU's compiler would be given run here as they are" in said.out


def test_debug_is_asked_of_the_ranks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a rank's error ended with `hint: --debug shows where`, which `check --debug` did not."""
    given: list[Sequence[str]] = []
    monkeypatch.setattr(spawn, "spawn", lambda ranks, argv: given.append(argv))
    try:
        for debug in (False, True):
            console.ask(debug=debug, quiet=False)
            check.started(2, ["check", "folder"])
    finally:
        console.forget()
    assert given == [["check", "folder"], ["check", "folder", "--debug"]]


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
