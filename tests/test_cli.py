"""The command line: what each command prints where, and one sentence for each mistake of a user.

Most of it runs in this process (`Shell`); what is about processes starts real ones (`start`).
"""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autopipe import cli, codec, probe
from autopipe.cluster import Cluster
from autopipe.plan import Plan
from tests.inprocess import machine

ROOT = Path(__file__).parent.parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")

NET = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 4)

    def forward(self, x):
        y = self.up(x)
        return self.down(y.relu())


def model():
    return Net()


def inputs(batch_size):
    return {"x": torch.randn(batch_size, 8), "target": torch.randn(batch_size, 4)}


def loss(outputs, batch):
    return ((outputs - batch["target"]) ** 2).mean()
"""
LINE = {text: number for number, text in enumerate(NET.splitlines(), start=1)}


@dataclass(frozen=True)
class Said:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one error, its hint with it; what was said before it is left out."""
        assert self.code == 2, self
        assert "Traceback" not in self.err and self.out == ""
        assert self.err.count("error: ") == 1, self.err
        return self.err[self.err.index("error: ") + len("error: ") :].rstrip("\n")


class Shell:
    """`autopipe` in this process, in a folder of its own that holds `net.py`."""

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]
    ) -> None:
        self.folder = folder
        self._patch = patch
        self._capture = capture
        self.write("net.py", NET)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def __call__(self, *argv: str) -> Said:
        self._patch.setattr(sys, "argv", ["autopipe", *argv])
        self._capture.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
            raise SystemExit(0)
        said = self._capture.readouterr()
        return Said(int(ended.value.code or 0), said.out, said.err)

    def files(self) -> list[str]:
        """What lies in the folder; the import system's cache is Python's own."""
        return sorted(path.name for path in self.folder.iterdir() if path.name != "__pycache__")


LAUNCHED = re.compile(r"RANK|WORLD_SIZE|LOCAL_|GROUP_|MASTER_|SLURM_|TORCHELASTIC_|OMP_")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of a cluster of four processes on this machine."""
    path = tmp_path_factory.mktemp("cluster") / "four.json"
    codec.save(machine(4), path)
    return str(path)


@pytest.fixture
def autopipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(cli, "TURN", 0.1)
    for name in filter(LAUNCHED.match, [*os.environ]):
        monkeypatch.delenv(name)
    return Shell(tmp_path, monkeypatch, capsys)


def start(
    *command: str, folder: Path, environ: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not LAUNCHED.match(name)}
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**clean, "PYTHONPATH": str(ROOT), **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> Said:
    out, err = process.communicate(timeout=60)
    return Said(process.returncode, out, err)


def python(*argv: str, folder: Path, environ: dict[str, str] | None = None) -> Said:
    return end(start(sys.executable, "-m", "autopipe", *argv, folder=folder, environ=environ))


# --- plan, trace, explain


def test_plan_needs_no_argument_but_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine's rates are in the cache; measuring them is test_probe's."""
    found = machine(2)
    (group,) = found.nodes[0].groups
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "probe", lambda processes, say: (group.device, found.within))
    monkeypatch.setattr(probe.torch.cuda, "device_count", lambda: 0)
    probe.local_cluster(2)

    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "net.py").write_text(NET)
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    said = python("plan", "net.py", folder=tmp_path / "work", environ=environ)
    assert (said.code, said.out) == (0, "plan.json\n")
    cluster, rates, traced, decided = said.err.splitlines()
    assert cluster == "cluster: local:2, this machine"
    assert rates.startswith("rates of this machine: measured before, read from ")
    assert traced.startswith("traced: 6 nodes, 0.0 M parameters")
    assert re.fullmatch(
        r"plan: pp=\d dp=\d tp=1, \d+ micro-batch(es)?, (1f1b|gpipe); "
        r"predicted step [\d.]+ (us|ms), 16 rows",
        decided,
    )
    made = Plan.load(tmp_path / "work" / "plan.json")
    assert (made.source, made.batch.rows, len(made.mesh.places)) == ("net.py", 16, 2)


def test_constraints_reach_the_plan(autopipe: Shell, four: str) -> None:
    arguments = (
        "--pp 2 --dp 1 --micro-batches 4 --schedule gpipe --batch 8 --memory 1MiB "
        f"--planner exhaustive --cluster {four} -o sub.json"
    )
    said = autopipe("plan", "net.py", *arguments.split())
    assert (said.code, said.out) == (0, "sub.json\n")
    made = Plan.load("sub.json")
    assert (made.mesh.pp, made.mesh.dp, made.schedule) == (2, 1, "gpipe")
    assert (made.batch.rows, made.batch.micro_batches) == (8, 4)
    assert made.planner.name == "exhaustive"


def test_a_batch_size_in_the_model_file(autopipe: Shell, four: str) -> None:
    autopipe.write("net.py", NET + "batch_size = 12\n")
    autopipe("plan", "net.py", "--cluster", four)
    assert Plan.load("plan.json").batch.rows == 12
    autopipe("plan", "net.py", "--cluster", four, "--batch", "24")
    assert Plan.load("plan.json").batch.rows == 24


def test_a_plan_made_twice_is_the_same_file(autopipe: Shell, four: str) -> None:
    for name in ("one.json", "two.json"):
        assert autopipe("plan", "net.py", "--cluster", four, "-o", name).code == 0
    assert Path("one.json").read_bytes() == Path("two.json").read_bytes()
    assert autopipe.files() == ["net.py", "one.json", "two.json"]


def test_a_plan_remembers_its_model_from_its_own_folder(autopipe: Shell, four: str) -> None:
    Path("plans").mkdir()
    autopipe("plan", "net.py", "--cluster", four, "-o", "plans/net.json")
    assert Plan.load("plans/net.json").source == "../net.py"


def test_trace_prints_the_graph(autopipe: Shell) -> None:
    said = autopipe("trace", "net.py")
    assert (said.code, said.err) == (0, "")
    assert "up/linear/0 = aten.linear.default(<x>, [up.weight], [up.bias])" in said.out


def test_explain_prints_the_plan(autopipe: Shell, four: str) -> None:
    autopipe("plan", "net.py", "--cluster", four, "--pp", "2", "--dp", "2")
    said = autopipe("explain", "plan.json")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("1f1b on local:4: 2 pipeline stages (pp) x 2 replicas (dp) x 1 ")
    assert "  from up/linear/0\n" in said.out and "\nwhy: " in said.out


def test_probe_writes_a_cluster_file(autopipe: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def local_cluster(processes: int, say: Callable[[str], None], again: bool) -> Cluster:
        say(f"measuring {processes}")
        return machine(processes)

    monkeypatch.setattr(probe, "local_cluster", local_cluster)
    said = autopipe("probe", "--processes", "3")
    assert (said.code, said.err) == (0, "measuring 3\n")
    assert json.loads(said.out)["name"] == "local:3"
    said = autopipe("probe", "--processes", "3", "-o", "three.json")
    assert (said.code, said.out) == (0, "three.json\n")
    assert autopipe("plan", "net.py", "--cluster", "three.json").code == 0


# --- a model file that is wrong: nothing is written


def changed(old: str, new: str) -> str:
    assert old in NET
    return NET.replace(old, new)


UP = "        y = self.up(x)\n"
FORWARD = LINE["        y = self.up(x)"]
SQUARE = """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient
"""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param("def model(:\n", "{path}:1: invalid syntax", id="syntax"),
        pytest.param(
            "import torch\nimport nothing_of_that_name\n",
            "{path}:2 `import nothing_of_that_name`: net.py cannot be run: ModuleNotFoundError: "
            "No module named 'nothing_of_that_name'",
            id="import",
        ),
        pytest.param(
            changed("def model()", "def build()"),
            "net.py has no function model(), which builds the model\n\nhint: def model(): ...",
            id="no model",
        ),
        pytest.param(
            changed("def inputs(", "def batch("),
            "net.py has no function inputs(batch_size), which gives an example batch\n\n"
            "hint: def inputs(batch_size): ...",
            id="no inputs",
        ),
        pytest.param(
            changed("return Net()", "raise OSError('no weights')"),
            f"{{path}}:{LINE['    return Net()']} `raise OSError('no weights')`: "
            "net.py: model() raised OSError: no weights",
            id="model raises",
        ),
        pytest.param(
            changed("return Net()", "Net()"),
            "net.py: model() returned None, expected nn.Module\n\n"
            "hint: does it end without a `return`?",
            id="model gives nothing",
        ),
        pytest.param(
            changed("forward(self, x)", "forward(self, x, mask)"),
            "inputs do not fit the model: Net.forward(x, mask) called with ['x', 'target']: "
            "missing a required argument: 'mask'",
            id="missing argument",
        ),
        pytest.param(
            changed("def loss(", "def unused("),
            "inputs do not fit the model: Net.forward(x) takes no target, and there is no "
            "loss(outputs, batch) that could read it",
            id="extra entry",
        ),
        pytest.param(
            changed('"x": torch.randn(batch_size, 8)', '"x": torch.randn(batch_size, 9)'),
            rf"{{path}}:{FORWARD} `y = self.up(x)`: the model cannot be captured: RuntimeError: "
            "mat1 and mat2 shapes cannot be multiplied (2x9 and 8x16)",
            id="shape",
        ),
        pytest.param(
            changed("torch.randn(batch_size, 8)", "torch.randn(batch_size, 8 * batch_size)"),
            "inputs(2)['x'] has the shape (2, 16), inputs(3)['x'] (3, 24): one dim must grow in "
            "proportion to the rows and the others stay\n\nhint: pad to one length",
            id="two dims grow",
        ),
        pytest.param(
            changed("torch.randn(batch_size, 8)", "torch.randn(batch_size + 1, 8)"),
            "inputs(2)['x'] has the shape (3, 8), inputs(3)['x'] (4, 8): one dim must grow in "
            "proportion to the rows and the others stay\n\nhint: pad to one length",
            id="grows by no factor",
        ),
        pytest.param(
            NET.replace("randn(batch_size", "randn(4"),
            "no entry of the batch has a batch dim, so it cannot be cut into rows",
            id="no dim grows",
        ),
        pytest.param(
            changed(".mean()", ""),
            "loss(outputs, batch) gives a tensor of shape (2, 4); a loss is a scalar tensor or "
            "(sum, count)",
            id="loss is a vector",
        ),
        pytest.param(
            changed('batch["target"]', 'batch["label"]'),
            f"{{path}}:{LINE['def loss(outputs, batch):'] + 1} "
            '`return ((outputs - batch["label"]) ** 2).mean()`: '
            "the model cannot be captured: KeyError: 'label'",
            id="loss raises",
        ),
        pytest.param(
            changed(UP, UP + "        y.detach().numpy()\n"),
            f"{{path}}:{FORWARD + 1} `y.detach().numpy()`: the model cannot be captured: ",
            id="numpy",
        ),
        pytest.param(
            changed(UP, UP + "        y = y * y[y > 0].mean()\n"),
            f"{{path}}:{FORWARD + 1}: a size here depends on the values of a tensor",
            id="a size that depends on values",
        ),
        pytest.param(
            changed(UP, UP.replace("self.up(x)", "Square.apply(self.up(x))")) + SQUARE,
            f"{{path}}:{FORWARD}: the model calls autopipe_model_net.Square, a custom "
            "autograd.Function; torch.export traces its forward and loses its backward\n\n"
            "hint: register it as an op with torch.library.custom_op and register_autograd",
            id="autograd.Function",
        ),
        pytest.param(
            changed(UP, UP + "        if y.sum() > 0: y = y + 1\n").replace(
                "    return Net()",
                "    built.append(None)\n"
                "    if len(built) == 2: raise MemoryError('too big for this machine')\n"
                "    return Net()\n\nbuilt = []",
            ),
            "{path}:19 `if len(built) == 2: raise MemoryError('too big for this machine')`: "
            "net.py: model() raised MemoryError: too big for this machine",
            id="a branch on weights that cannot be had",
        ),
        pytest.param(
            NET + "def optimizer(parameters): torch.optim.SGD(parameters)\n",
            "net.py: optimizer() returned None, expected torch.optim.Optimizer\n\n"
            "hint: does it end without a `return`?",
            id="no optimizer",
        ),
    ],
)
def test_a_model_file_that_is_wrong(text: str, sentence: str, autopipe: Shell, four: str) -> None:
    autopipe.write("net.py", text)
    found = autopipe("plan", "net.py", "--cluster", four).error
    assert found.startswith(sentence.replace("{path}", str(autopipe.folder / "net.py")))
    assert autopipe.files() == ["net.py"]


def test_no_model_file(autopipe: Shell) -> None:
    assert autopipe("plan", "gone.py").error == (
        "there is no model file 'gone.py'\n\nhint: autopipe plan model.py"
    )


# --- words that mean nothing, and wishes that cannot be met


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "--planner best",
            "there is no planner 'best'\n\nhint: one of dynamic, exhaustive, uniform",
        ),
        ("--schedule zb-h3", "schedule='zb-h3' was asked for, and there is none of that name"),
        ("--cluster 8xA100-81GB", "'8xA100-81GB': no device 'A100-81GB' is known\n\nhint: known, "),
        ("--cluster gone.json", "gone.json: no such file, asked for the cluster"),
        ("--cluster local:x", "'local:x': expected a number of processes, found 'x'"),
        ("--memory plenty", "memory 'plenty' is no size\n\nhint: 24GiB, 512MB or bytes"),
        ("--memory 0", "memory '0' is 0 bytes, expected at least 1"),
        ("--tp 2", "tp=2 was asked for; this version plans tp=1 only"),
        ("--pp 3", "pp=3 was asked for and does not divide the 4 devices"),
        ("--dp 3", "dp=3 was asked for and does not divide the 4 devices"),
        (
            "--batch 10 --dp 4",
            "a batch of 10 rows does not divide into dp=4 equal parts\n\n"
            "hint: a batch of 8 or 12 rows does",
        ),
        (
            "--batch 10 --dp 2 --micro-batches 3",
            "a batch of 10 rows does not divide into dp=2 x micro_batches=3 equal parts\n\n"
            "hint: a batch of 6 or 12 rows does",
        ),
        (
            "--batch 2 --micro-batches 3",
            "a batch of 2 rows does not divide into micro_batches=3 equal parts\n\n"
            "hint: a batch of 3 rows does",
        ),
        ("-o gone/plan.json", "gone/plan.json cannot be written: there is no folder "),
    ],
)
def test_an_argument_that_cannot_be_met(
    arguments: str, sentence: str, autopipe: Shell, four: str
) -> None:
    cluster = [] if "--cluster" in arguments else ["--cluster", four]
    assert autopipe("plan", "net.py", *cluster, *arguments.split()).error.startswith(sentence)
    assert autopipe.files() == ["net.py"]


def test_memory_that_is_too_low(autopipe: Shell, four: str) -> None:
    """The shortfall in bytes, the stage, and what to try next."""
    said = autopipe("plan", "net.py", "--cluster", four, "--memory", "2000")
    found = re.match(
        r"no plan fits .* a device: .*pp=\d dp=\d micro_batches=\d+.* stage \d needs .*, "
        r"\d+ (bytes )?too many.*\n\nhint: ",
        said.error,
        re.DOTALL,
    )
    assert found, said.error
    assert autopipe.files() == ["net.py"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--pp 0", "Invalid value for '--pp'"),
        ("--batch many", "Invalid value for '--batch'"),
        ("--frob", "No such option: --frob"),
        ("--memory", "Option '--memory' requires an argument"),
    ],
)
def test_what_the_parser_refuses(arguments: str, reason: str, autopipe: Shell) -> None:
    said = autopipe("plan", "net.py", *arguments.split())
    assert said.code == 2 and said.out == "" and "Traceback" not in said.err
    assert reason in said.err
    assert autopipe.files() == ["net.py"]


# --- a plan that is wrong


def broken(autopipe: Shell, four: str, change: Callable[[dict[str, Any]], object]) -> None:
    """plan.json for 4 processes (pp=2 dp=2), changed."""
    autopipe("plan", "net.py", "--cluster", four, "--pp", "2", "--dp", "2")
    data = json.loads(Path("plan.json").read_text())
    change(data)
    autopipe.write("plan.json", json.dumps(data))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda plan: plan.update(format=7),
            "plan.format: this autopipe reads format 1, the file is format 7\n\n"
            "hint: make the plan again with `autopipe plan`",
        ),
        (
            lambda plan: plan.update(shedule="1f1b"),
            "plan.shedule: unknown field; Plan has format, ",
        ),
        (lambda plan: plan["stages"].pop(), "plan.stages: expected 2 stages (mesh.pp), found 1"),
        (lambda plan: plan["batch"].pop("rows"), "plan.batch.rows: missing; expected an integer"),
        (
            lambda plan: plan.update(source="moved.py"),
            "plan.source: there is no model file 'moved.py' in the folder of plan.json\n\n"
            "hint: autopipe run plan.json --model FILE",
        ),
        (
            lambda plan: plan.update(source=None),
            "plan.source: plan.json does not say where its model is\n\n"
            "hint: autopipe run plan.json --model FILE",
        ),
    ],
)
def test_a_plan_that_is_wrong_starts_no_process(
    change: Callable[[dict[str, Any]], object], sentence: str, autopipe: Shell, four: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(cli.launch, "spawn", None)
    broken(autopipe, four, change)
    assert autopipe("run", "plan.json", "--local", "4").error.startswith(sentence)


@pytest.mark.parametrize("command", ["explain", "run"])
def test_no_plan_and_half_a_plan(command: str, autopipe: Shell, four: str) -> None:
    assert autopipe(command, "gone.json").error.startswith("gone.json: no such file, asked for the")
    autopipe("plan", "net.py", "--cluster", four)
    autopipe.write("plan.json", Path("plan.json").read_text()[:700])
    error = autopipe(command, "plan.json").error
    assert re.match(
        r"plan.json, line \d+, column \d+: the file ends in the middle\n\nhint: ", error
    )


def alone(plan: dict[str, Any]) -> None:
    """The plan of one process: what is found when the model is traced shows without a launcher."""
    assert len(plan["mesh"]["places"]) == 1


def one(autopipe: Shell, change: Callable[[dict[str, Any]], object] = alone) -> None:
    autopipe("plan", "net.py", "--cluster", _file(autopipe, 1), "--batch", "4")
    data = json.loads(Path("plan.json").read_text())
    change(data)
    autopipe.write("plan.json", json.dumps(data))


def _file(autopipe: Shell, processes: int) -> str:
    codec.save(machine(processes), autopipe.folder / "cluster.json")
    return "cluster.json"


def test_a_plan_of_another_model(autopipe: Shell) -> None:
    """The first node that differs, and the versions."""
    one(autopipe)
    autopipe.write("net.py", changed("y.relu()", "y.tanh()"))
    error = autopipe("run", "plan.json", "--steps", "1").error
    assert error.startswith("plan.fingerprint: the plan was made for another model")
    assert "planned with torch " in error and "here torch " in error
    assert "First difference: tanh/0 = aten.tanh.default" in error
    assert error.endswith("hint: plan again with `autopipe plan`")


@pytest.mark.parametrize("word", ["first", "last"])
def test_a_stage_that_begins_or_ends_with_no_node(word: str, autopipe: Shell) -> None:
    one(autopipe, lambda plan: plan["stages"][0].update({word: "up/conv/0"}))
    error = autopipe("run", "plan.json", "--steps", "1").error
    assert error.startswith(f"plan.stages[0].{word}: the model has no node 'up/conv/0'")


# --- other processes than the plan's


def wrong_number(found: int, rank: int = 0) -> str:
    return (
        f"the plan is for 4 processes, but {found} were started (this is rank {rank}, on node 0)"
        "\n\nhint: torchrun --nproc-per-node 4 -m autopipe run plan.json\n"
        "  or: autopipe run plan.json --local 4\n"
        "  or: srun -n 4 autopipe run plan.json"
    )


def test_another_number_of_processes(autopipe: Shell, four: str) -> None:
    autopipe("plan", "net.py", "--cluster", four, "--pp", "2", "--dp", "2")
    assert autopipe("run", "plan.json").error == wrong_number(1)
    assert autopipe("run", "plan.json", "--local", "3").error == wrong_number(3)


def torchrun_environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def srun_environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_STEP_NODELIST": "here", "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("launcher", [torchrun_environment, srun_environment])
def test_two_of_a_launcher_for_a_plan_of_four(
    launcher: Callable[[int, int, int], dict[str, str]], autopipe: Shell, four: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Rank 0 tells; rank 1 ends with the same code and without a word, as rank 0 is gone."""
    autopipe("plan", "net.py", "--cluster", four, "--pp", "2", "--dp", "2")
    port = free_port()
    for rank in (0, 1):
        for name, value in launcher(rank, 2, port).items():
            monkeypatch.setenv(name, value)
        said = autopipe("run", "plan.json")
        if rank == 0:
            assert said.error == wrong_number(2)
        else:
            assert said == Said(2, "", "")


def test_what_a_rank_finds_alone_it_tells(
    autopipe: Shell, four: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 listens: it has found nothing wrong. The model file may be missing on one node."""
    autopipe("plan", "net.py", "--cluster", four, "--pp", "2", "--dp", "2")
    Path("net.py").unlink()
    with socket.create_server(("127.0.0.1", 0)) as rank_0:
        for name, value in torchrun_environment(3, 4, rank_0.getsockname()[1]).items():
            monkeypatch.setenv(name, value)
        error = autopipe("run", "plan.json").error
    assert error.startswith("rank 3: plan.source: there is no model file 'net.py'")


# --- --debug


def test_debug_may_stand_anywhere(autopipe: Shell) -> None:
    for argv in (["--debug", "plan", "gone.py"], ["plan", "gone.py", "--debug"]):
        said = autopipe(*argv)
        assert said.code == 2 and said.err.startswith("Traceback (most recent call last):\n")
        assert "\nerror: there is no model file 'gone.py'\n" in said.err
    assert "--debug" in autopipe("--help").out


def test_what_nobody_foresaw(autopipe: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code 1, not a user's mistake; the traceback is a flag away."""

    def fails(*_: object) -> None:
        raise ZeroDivisionError("division by zero\nand more")

    monkeypatch.setattr("autopipe.modelfile.load", fails)
    said = autopipe("trace", "net.py")
    assert said == Said(
        1, "", "error: ZeroDivisionError: division by zero\n\nhint: --debug shows where\n"
    )
    monkeypatch.setattr(sys, "argv", ["autopipe", "trace", "net.py", "--debug"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_a_peer_that_is_gone(autopipe: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("[../gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:3")

    monkeypatch.setattr("autopipe.modelfile.load", fails)
    monkeypatch.setenv("RANK", "2")
    said = autopipe("trace", "net.py")
    assert said == Said(1, "", "error: rank 2: another rank is gone; what it said stands above\n")


# --- run


STEP = re.compile(r"step (\d+)/?\d*  loss (\d+\.\d{3})  [\d,.]+ (?:rows|tokens)/s")


def losses(said: Said) -> list[float]:
    return [float(match[2]) for match in STEP.finditer(said.err)]


def check_run(said: Said, stages: int) -> None:
    """A table of all stages, and the first and the last loss as the last line."""
    assert said.code == 0, said.err
    *table, last = said.out.splitlines()
    assert table[0].startswith("planned / measured: ")
    assert [line.split()[0] for line in table if re.match(r"\d", line)] == [
        *map(str, range(stages))
    ]
    assert table[-1].startswith("a step, before the optimizer's: ")
    found = re.fullmatch(r"loss (\d+\.\d{3}) -> (\d+\.\d{3})", last)
    assert found and float(found[1]) == losses(said)[0]
    if "/" in said.err.split()[1]:  # "step 1/3": the number of steps was known, so all were said
        assert float(found[2]) == losses(said)[-1]


def test_one_process_runs_by_itself(autopipe: Shell) -> None:
    one(autopipe)
    said = autopipe("run", "plan.json", "--steps", "3")
    check_run(said, stages=1)
    assert len(losses(said)) == 3
    assert losses(autopipe("run", "plan.json", "--steps", "3", "--seed", "1")) != losses(said)


def test_a_model_that_has_moved(autopipe: Shell) -> None:
    one(autopipe)
    Path("net.py").rename("moved.py")
    assert "there is no model file 'net.py'" in autopipe("run", "plan.json").error
    check_run(autopipe("run", "plan.json", "--model", "moved.py", "--steps", "2"), stages=1)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_batches_that_end_by_themselves(count: int, autopipe: Shell) -> None:
    autopipe.write(
        "net.py",
        NET + f"\ndef batches(batch_size):\n    return [inputs(batch_size)] * {count}\n",
    )
    one(autopipe)
    said = autopipe("run", "plan.json")
    if count:
        check_run(said, stages=1)
        return
    place = autopipe.folder / "net.py"
    assert said == Said(0, "", f"{place}: batches(4) gave no batch, so there was no step\n")


def test_batches_whose_last_one_is_smaller(autopipe: Shell) -> None:
    """Two batches of 4 rows train; one of 3 rows does not divide."""
    more = "\ndef batches(batch_size):\n    return [inputs(n) for n in (batch_size, 3)]\n"
    autopipe.write("net.py", NET + more)
    autopipe("plan", "net.py", "--cluster", _file(autopipe, 1), "--batch", "4",
             "--micro-batches", "2")  # fmt: skip
    assert autopipe("run", "plan.json").error == (
        "the batch has 3 rows, which do not divide into 2 micro-batches\n\n"
        "hint: give 2 rows, or another multiple of 2"
    )


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with `net.py` and its plans: pp2.json, dp2.json, and four.json of pp=2 dp=2."""
    folder = tmp_path_factory.mktemp("run")
    finite = (
        "\ndef batches(batch_size):\n    for _ in range(3):\n        yield inputs(batch_size)\n"
    )
    (folder / "net.py").write_text(NET + finite)
    import autopipe
    from autopipe import modelfile

    path = sys.path.copy()
    file = modelfile.load(str(folder / "net.py"))
    sys.path[:] = path
    for name, pp, dp in (("pp2", 2, 1), ("dp2", 1, 2), ("four", 2, 2)):
        autopipe.plan(
            file.model, file.inputs, loss=file.loss, cluster=machine(pp * dp), batch_size=8,
            pp=pp, dp=dp, micro_batches=2, source="net.py",
        ).save(folder / f"{name}.json")  # fmt: skip
    yield folder


def test_every_launcher_trains_alike(planned: Path) -> None:
    """`--local 2`, torchrun and srun; the batches end after three steps."""
    run = ("-m", "autopipe", "run", "pp2.json")
    local = python("run", "pp2.json", "--local", "2", folder=planned)
    check_run(local, stages=2)
    assert len(losses(local)) == 1  # a line at every tenth step
    port = free_port()
    ranks = [
        start(sys.executable, *run, folder=planned, environ=srun_environment(rank, 2, port))
        for rank in range(2)
    ]
    first, second = map(end, ranks)
    check_run(first, stages=2)
    assert (second.code, second.out) == (0, "")
    torchrun = end(
        start(
            *TORCHRUN,
            "--nproc-per-node",
            "2",
            "--master-port",
            str(free_port()),
            *run,
            folder=planned,
        )  # fmt: skip
    )
    assert torchrun.code == 0
    last = local.out.splitlines()[-1]
    assert first.out.splitlines()[-1] == torchrun.out.splitlines()[-1] == last


SHARDED = """
def batches(batch_size, shard, num_shards):
    generator = torch.Generator().manual_seed(0)
    rows = batch_size // num_shards
    for _ in range(3):
        x, target = (torch.randn(batch_size, n, generator=generator) for n in (8, 4))
        own = slice(shard * rows, (shard + 1) * rows)
        yield {"x": x[own], "target": target[own]}
"""
WHOLE = """
def batches(batch_size):
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x, target = (torch.randn(batch_size, n, generator=generator) for n in (8, 4))
        yield {"x": x, "target": target}
"""


def test_sharded_batches_and_whole_ones_give_equal_losses(planned: Path) -> None:
    said = []
    for name, more in (("sharded.py", SHARDED), ("whole.py", WHOLE)):
        (planned / name).write_text(NET + more)
        arguments = ("run", "dp2.json", "--local", "2", "--model", name, "--steps", "3")
        said.append(python(*arguments, folder=planned))
        check_run(said[-1], stages=1)
    assert losses(said[0]) == losses(said[1])
    assert len(losses(said[0])) == 3


def test_what_every_rank_finds_is_told_once(planned: Path) -> None:
    """The model is another one than the plan's: four processes find it out."""
    (planned / "other.py").write_text(changed("y.relu()", "y.tanh()"))
    said = python("run", "four.json", "--local", "4", "--model", "other.py", folder=planned)
    assert (said.code, said.out) == (2, "")
    assert said.err.count("error: ") == 1
    assert said.err.startswith("error: plan.fingerprint: the plan was made for another model")
    assert "Traceback" not in said.err


def test_what_one_rank_finds_is_told_by_it(planned: Path) -> None:
    """It once ended without a word: only rank 0 spoke, and that one had found nothing."""
    failing = "\ndef batches(batch_size):\n    import os\n    yield inputs(batch_size)\n"
    failing += "    if os.environ['RANK'] == '1': raise OSError('disk gone')\n"
    (planned / "failing.py").write_text(NET + failing + "    yield inputs(batch_size)\n")
    said = python("run", "pp2.json", "--local", "2", "--model", "failing.py", folder=planned)
    assert said.code == 2
    (error,) = re.findall(r"^error: .*", said.err, re.MULTILINE)
    assert error.startswith(f"error: rank 1: {planned / 'failing.py'}:")
    assert error.endswith("failing.py: batches() raised OSError: disk gone")
