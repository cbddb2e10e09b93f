"""`autopipe` as one types it: in this process (`Shell`), or as real ones.

Of these some begin as any program does (`python`, `start`), and what is not about their beginning
takes forks (`ranks`, `rank`), which are there sooner.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import pytest

from autopipe import cli
from autopipe.runtime.launch import voice
from autopipe.runtime.launch.spawn import free_port as free_port
from autopipe.terminal import bars
from autopipe.util import codec
from tests.support import warm
from tests.support.inprocess import machine

ROOT = Path(__file__).parents[2]
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


def changed(old: str, new: str) -> str:
    """`net.py` with other words in one place."""
    assert old in NET
    return NET.replace(old, new)


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


LAUNCHED = re.compile(r"RANK|WORLD_SIZE|LOCAL_|GROUP_|MASTER_|PET_|SLURM_|TORCHELASTIC_|OMP_")


_PLANS: dict[tuple[str, ...], str] = {}


class Shell:
    """`autopipe` in this process, in a folder of its own that holds `net.py`."""

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]
    ) -> None:
        self.folder = folder
        self._patch = patch
        self._capture = capture
        self.write("net.py", NET)
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(voice, "TURN", 0.1)
        patch.setattr(voice, "LATEST", 0.2)
        patch.setattr(bars, "SOON_SECONDS", 600.0)  # a busy machine says nothing more
        patch.delenv("COLUMNS", raising=False)  # pages are as wide as where nobody looks
        for name in filter(LAUNCHED.match, [*os.environ]):
            patch.delenv(name)

    def at_home(self) -> None:
        """Go back into the folder, which a model file may have left."""
        self._patch.chdir(self.folder)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def plan(self, processes: int, *argv: str) -> None:
        """plan.json for so many processes; of the same file and words it is made once."""
        codec.save(machine(processes), self.folder / "cluster.json")
        path = self.folder / "plan.json"
        alone = {*self.files()} <= {"cluster.json", "net.py", "plan.json"}
        asked = ((self.folder / "net.py").read_text(), str(processes), *argv)
        if alone and asked in _PLANS:
            path.write_text(_PLANS[asked])
            return
        assert self("plan", "net.py", "--cluster", "cluster.json", *argv).code == 0
        if alone and path.exists() and str(self.folder) not in (made := path.read_text()):
            _PLANS[asked] = made

    def edit(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change plan.json."""
        data = json.loads((self.folder / "plan.json").read_text())
        change(data)
        self.write("plan.json", json.dumps(data))

    def __call__(self, *argv: str) -> Said:
        self._patch.setattr(sys, "argv", ["autopipe", *argv])
        self._capture.readouterr()
        with self._remembered(argv), pytest.raises(SystemExit) as ended:
            cli.main()
            raise SystemExit(0)
        gc.enable()  # this process does not end with the command
        said = self._capture.readouterr()
        return Said(int(ended.value.code or 0), said.out, _talk(said.err))

    def _remembered(self, argv: Sequence[str]) -> AbstractContextManager[object]:
        """Plans of the same `net.py`, if it imports no file beside it, find the same."""
        path = self.folder / "net.py"
        if "net.py" not in argv or not path.exists() or [*self.folder.glob("*.py")] != [path]:
            return nullcontext()
        from tests.support.remembered import file_remembered  # torch: not every command loads it

        return file_remembered(path)

    def files(self) -> list[str]:
        """What lies in the folder; the import system's cache is Python's own."""
        return sorted(path.name for path in self.folder.iterdir() if path.name != "__pycache__")


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


def end(process: subprocess.Popen[str], timeout: float = 60) -> Said:
    out, err = process.communicate(timeout=timeout)
    return Said(process.returncode, out, _talk(err))


def ranks(processes: int, *argv: str, folder: Path) -> Said:
    """`python ARGV` as so many ranks, with the environment that torchrun and `--local` give."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        code = warm.spawn(processes, argv, folder, out.fileno(), err.fileno())
        return Said(code, _text(out), _talk(_text(err)))


def rank(*argv: str, folder: Path, environ: dict[str, str]) -> Callable[[], Said]:
    """Begin `python ARGV` as one rank that somebody else starts the others of; call it for its end.

    Nobody waits for what it writes.
    """
    clean = {name: value for name, value in os.environ.items() if not LAUNCHED.match(name)}
    out, err = TemporaryFile("w+"), TemporaryFile("w+")
    process = warm.start(argv, {**clean, **environ}, folder, out.fileno(), err.fileno())

    def ended() -> Said:
        with out, err:
            return Said(process.wait(timeout=60), _text(out), _talk(_text(err)))

    for file in (out, err):
        weakref.finalize(ended, file.close)  # of a rank whose end nobody asks for
    return ended


def _talk(err: str) -> str:
    """What was said, without how far it has come: that depends on how busy this machine is."""
    return re.sub(r"^.* s so far.*\n", "", err, flags=re.MULTILINE)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def python(*argv: str, folder: Path, environ: dict[str, str] | None = None) -> Said:
    return end(start(sys.executable, "-m", "autopipe", *argv, folder=folder, environ=environ))


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


def save_plans(folder: Path) -> Path:
    """`net.py` with three batches, and two plans for two processes: pp2.json and dp2.json."""
    import autopipe
    from autopipe.frontend import model_file

    (folder / "net.py").write_text(NET + BATCHES)
    path = sys.path.copy()
    file = model_file.load(str(folder / "net.py"))
    sys.path[:] = path
    for name, pp, dp in (("pp2", 2, 1), ("dp2", 1, 2)):
        autopipe.plan(
            file.model, file.inputs, loss=file.loss, cluster=machine(2), batch_size=8,
            pp=pp, dp=dp, micro_batches=2, source="net.py",
        ).save(folder / f"{name}.json")  # fmt: skip
    return folder


def save_killed_net(folder: Path) -> Path:
    """`net.py`, which is `killed_net`, and plan.json for its two stages."""
    import autopipe
    from autopipe.frontend import model_file
    from tests.support import killed_net

    shutil.copy(killed_net.__file__, folder / "net.py")
    path = sys.path.copy()
    file = model_file.load(str(folder / "net.py"))
    sys.path[:] = path
    autopipe.plan(
        file.model, file.inputs, loss=file.loss, optimizer=file.optimizer or "adamw",
        cluster=machine(2), batch_size=8, pp=2, dp=1, micro_batches=2, source="net.py",
    ).save(folder / "plan.json")  # fmt: skip
    return folder


def save_nodes(folder: Path, nodes: int, processes: int, **constraints: int) -> Path:
    """`net.py` with three batches, and plan.json for so many processes on each of so many nodes."""
    from dataclasses import replace

    import autopipe
    from autopipe.cluster.cluster import Group, NodeGroup
    from autopipe.frontend import model_file

    (folder / "net.py").write_text(NET + BATCHES)
    path = sys.path.copy()
    file = model_file.load(str(folder / "net.py"))
    sys.path[:] = path
    here = machine(nodes * processes)
    group = Group(processes, here.nodes[0].groups[0].device)
    cluster = replace(here, nodes=(NodeGroup(nodes, (group,)),))
    autopipe.plan(
        file.model, file.inputs, loss=file.loss, cluster=cluster, batch_size=8, micro_batches=2,
        source="net.py", **constraints,
    ).save(folder / "plan.json")  # fmt: skip
    return folder


BATCHES = """

def batches(batch_size):
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x, target = (torch.randn(batch_size, n, generator=generator) for n in (8, 4))
        yield {"x": x, "target": target}
"""
