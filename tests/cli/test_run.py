"""`autopipe run`: what it prints, in this process, in several, and under every launcher.

Which rank tells an error is in `test_voice`.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from autopipe.cli.running.ranks import world_here
from autopipe.planfile.contents import Plan
from tests.support.shell import (
    BATCHES,
    NET,
    Said,
    Shell,
    end,
    free_port,
    rank,
    ranks,
    save_plans,
    srun_environment,
    start,
)

STEP = re.compile(r"step (\d+)/?\d*  loss (\d+\.\d{3,})  [\d,.]+ (?:rows|tokens)/s")


def losses(said: Said) -> list[float]:
    return [float(match[2]) for match in STEP.finditer(said.err)]


def check_run(said: Said, stages: int) -> None:
    """A table of all stages, and the first and the last loss as the last line."""
    assert said.code == 0, said.err
    *table, last = said.out.splitlines()
    assert table[0] == "planned / measured"
    assert [line.split()[0] for line in table if re.match(r"\d", line)] == [
        *map(str, range(stages))
    ]
    assert table[-1].startswith("a step, before the optimizer's: ")
    found = re.fullmatch(r"loss (\d+\.\d{3,}) -> (\d+\.\d{3,})", last)
    assert found and float(found[1]) == losses(said)[0]
    if "/" in said.err.split()[1]:  # "step 1/3": the number of steps was known, so all were said
        assert float(found[2]) == losses(said)[-1]


def test_one_process_runs_by_itself(autopipe: Shell) -> None:
    autopipe.plan(1, "--batch", "4")
    said = autopipe("run", "plan.json", "--steps", "3")
    check_run(said, stages=1)
    assert len(losses(said)) == 3
    assert losses(autopipe("run", "plan.json", "--steps", "3", "--seed", "1")) != losses(said)


def test_a_folder_with_a_colon_in_its_name(autopipe: Shell) -> None:
    """A time, say. Bug: what stands before a colon was taken for the name of a module."""
    (autopipe.folder / "10:30").mkdir()
    autopipe.write("10:30/net.py", NET)
    planned = autopipe("plan", "10:30/net.py", "--cluster", "cpu:1", "--batch", "4")
    assert (planned.code, planned.out) == (0, "plan.json\n")
    check_run(autopipe("run", "plan.json", "--steps", "1"), stages=1)


def test_gradients_are_clipped_as_the_command_says(autopipe: Shell) -> None:
    """As by `max_grad_norm` in the file, which it comes before; SGD, as Adam knows no scale."""
    sgd = "\ndef optimizer(parameters): return torch.optim.SGD(parameters, lr=10.0)\n"
    ways = {
        "command": ("max_grad_norm = 1.0\n", ("--max-grad-norm", "0.01")),
        "file": ("max_grad_norm = 0.01\n", ()),
    }
    autopipe.write("net.py", NET + sgd)
    autopipe.plan(1, "--batch", "4")
    told = []
    for setting, words in ways.values():
        autopipe.write("net.py", NET + sgd + setting)
        Path("m.jsonl").unlink(missing_ok=True)
        assert (
            autopipe("run", "plan.json", "--steps", "3", "--metrics", "m.jsonl", *words).code == 0
        )
        lines = map(json.loads, Path("m.jsonl").read_text().splitlines())
        told.append([(line["loss"], line["grad_norm"]) for line in lines])
    assert told[0] == told[1] and len(told[0]) == 3 and all(norm > 0.01 for _, norm in told[0])
    said = autopipe("run", "plan.json", "--max-grad-norm", "0")
    assert "--max-grad-norm is 0.0, expected a number above 0" in said.error


def test_what_is_left_of_a_run_is_said(autopipe: Shell) -> None:
    autopipe.plan(1, "--batch", "4")
    said = autopipe("run", "plan.json", "--steps", "1")
    assert said.err.endswith("are not kept; --save FILE.safetensors does that\n")
    said = autopipe("run", "plan.json", "--steps", "1", "--checkpoints", "kept")
    assert said.err.endswith(
        "kept: the checkpoints; `autopipe checkpoint convert` writes the model\n"
    )


def test_a_model_that_has_moved(autopipe: Shell) -> None:
    autopipe.plan(1, "--batch", "4")
    Path("net.py").rename("moved.py")
    assert "there is no model file 'net.py'" in autopipe("run", "plan.json").error
    check_run(autopipe("run", "plan.json", "--model", "moved.py", "--steps", "2"), stages=1)


@pytest.mark.parametrize("count", [0, pytest.param(1, marks=pytest.mark.long), 3])
def test_batches_that_end_by_themselves(count: int, autopipe: Shell) -> None:
    autopipe.write(
        "net.py",
        NET + f"\ndef batches(batch_size):\n    return [inputs(batch_size)] * {count}\n",
    )
    autopipe.plan(1, "--batch", "4")
    said = autopipe("run", "plan.json")
    if count:
        check_run(said, stages=1)
        return
    place = autopipe.folder / "net.py"
    assert said == Said(0, "", f"{place}: batches(4) gave no batch, so there was no step\n")


def test_options_of_a_run(autopipe: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes where it is meant to."""
    given: dict[str, Any] = {}

    class Stop(Exception):
        pass

    def parallelize(model: object, plan: Plan, **options: Any) -> None:
        given.update(options)
        raise Stop

    monkeypatch.setattr("autopipe.cli.running.training.parallelize", parallelize)
    autopipe.plan(1, "--batch", "4")
    for options, expected in (
        ("", {"offload": False, "seed": 0, "weights": None}),
        ("--offload", {"offload": True}),
        ("--seed 7 --weights w", {"seed": 7, "weights": Path("w")}),
    ):
        assert autopipe("run", "plan.json", *options.split()).code == 1
        assert expected.items() <= given.items()


def test_a_trace_into_a_folder_is_refused_before_training(autopipe: Shell) -> None:
    """Bug: the run trained to its end, failed there, and did not --save."""
    autopipe.plan(1, "--batch", "4")
    (autopipe.folder / "traces").mkdir()
    said = autopipe("run", "plan.json", "--trace", "traces", "--steps", "1")
    assert said.error == "traces cannot be written: it is a folder\n\nhint: name a file in it"


@pytest.mark.parametrize("keeps", [False, True])
def test_a_ctrl_c_says_what_is_lost(
    keeps: bool, autopipe: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process by itself; bug: it ended without a word."""
    autopipe.plan(1, "--batch", "4")

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autopipe.cli.running.training.run", interrupted)
    said = autopipe("run", "plan.json", *(["--checkpoints", "kept"] if keeps else []))
    assert said.code == 130
    assert ("what was trained is not kept" in said.err) == (not keeps)


def test_a_learning_rate_that_falls(autopipe: Shell) -> None:
    """A scheduler in the model file is stepped with every step: at rate 0 nothing changes."""
    falls = """
def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step < 2))

def batches(batch_size):
    return [inputs(batch_size)] * 5
"""
    autopipe.write("net.py", NET + falls)
    autopipe.plan(1, "--batch", "4")
    first, second, *others = losses(autopipe("run", "plan.json", "--steps", "5"))
    assert first > second > others[0] and others == 3 * others[:1]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_plans(tmp_path_factory.mktemp("run"))


SHARDED = """

def batches(batch_size, shard, num_shards):
    generator = torch.Generator().manual_seed(0)
    rows = batch_size // num_shards
    for _ in range(3):
        x, target = (torch.randn(batch_size, n, generator=generator) for n in (8, 4))
        own = slice(shard * rows, (shard + 1) * rows)
        yield {"x": x[own], "target": target[own]}
"""


RUN = ("-m", "autopipe", "run", "dp2.json", "--steps", "5")
"""The data ends after three."""


def under_torchrun(folder: Path) -> Said:
    """By its variables. (Under torchrun itself runs go on in `test_survives`.)"""
    torchrun = ranks(2, *RUN, folder=folder)
    check_run(torchrun, stages=1)
    assert len(losses(torchrun)) == 3
    return torchrun


@pytest.mark.long
def test_local_trains_as_torchrun_does(planned: Path) -> None:
    local = end(start(sys.executable, *RUN, "--local", "2", folder=planned))
    check_run(local, stages=1)
    torchrun = under_torchrun(planned)
    assert losses(local) == losses(torchrun)
    assert local.out.splitlines()[-1] == torchrun.out.splitlines()[-1]


def test_srun_trains_as_torchrun_does(planned: Path) -> None:
    """With the same batches in parts."""
    (planned / "sharded.py").write_text(NET + SHARDED)
    port = free_port()
    parts = (*RUN, "--model", "sharded.py")
    environs = (srun_environment(number, 2, port) for number in (0, 1))
    first, second = [rank(*parts, folder=planned, environ=environ) for environ in environs]
    srun, silent = first(), second()
    check_run(srun, stages=1)
    assert (silent.code, silent.out) == (0, "")
    torchrun = under_torchrun(planned)
    assert losses(srun) == losses(torchrun)
    assert srun.out.splitlines()[-1] == torchrun.out.splitlines()[-1]


def test_whose_process_a_shell_of_srun_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun --pty bash` starts one, the shell: what is called there inherits its rank."""
    for size, local, alone in ((1, 2, True), (1, 1, False), (1, None, False), (2, 2, False)):
        for name, value in srun_environment(0, size, 29500).items():
            monkeypatch.setenv(name, value)
        assert (world_here(local) is None) == alone


@pytest.mark.long
def test_local_in_a_shell_that_srun_has_started(planned: Path) -> None:
    """Bug: refused as one process where the plan is for 2, with `--local 2` as the hint."""
    shell = srun_environment(0, 1, free_port())
    check_run(rank(*RUN, "--local", "2", folder=planned, environ=shell)(), stages=1)


@pytest.mark.long
def test_a_slow_device_that_comes_first_holds_a_later_stage(planned: Path) -> None:
    """A plan may deal devices out in another order than the launcher, which counts node by node."""
    plan = json.loads((planned / "pp2.json").read_text())
    for place in plan["mesh"]["places"]:
        place["local"] = 1 - place["local"]
    (planned / "crossed.json").write_text(json.dumps(plan))
    port, found = free_port(), []
    for name, table in (("pp2", 0), ("crossed", 1)):
        run = ("-m", "autopipe", "run", f"{name}.json")
        environs = (srun_environment(number, 2, port) for number in (0, 1))
        begun = [rank(*run, folder=planned, environ=environ) for environ in environs]
        said = [ended() for ended in begun]
        check_run(said[table], stages=2)  # by whoever has stage 0
        assert (said[1 - table].code, said[1 - table].out) == (0, "")
        found.append(losses(said[table]))
        port = free_port()
    assert found[0] == found[1]


WRITTEN = """\
# All forwards first, and backwards the other way round: a schedule that has no name.
rank 0: 0F0 0F1 0B1 0B0
rank 1: 1F0 1F1 1B1 1B0
"""


def test_a_schedule_of_ones_own_from_a_file_to_a_trace(autopipe: Shell) -> None:
    """Written, simulated, planned, explained and run by two processes, with a trace of both."""
    autopipe.write("steps.txt", WRITTEN)
    picture = "rank 0: F0 F1          B1--- B0---\nrank 1:    F0 F1 B1--- B0---\n"
    assert picture in autopipe("simulate", "steps.txt").out
    autopipe.write("net.py", NET + BATCHES)
    autopipe.plan(2, "--schedule", "steps.txt", "--batch", "8")
    plan = Plan.load("plan.json")
    assert (plan.mesh.pp, plan.batch.micro_batches, plan.schedule) == (2, 2, "written")
    assert "\n".join(plan.programs) in WRITTEN
    Path("steps.txt").unlink()  # the plan has it
    said = autopipe("explain", "plan.json")
    assert said.code == 0 and "\nschedule   written; a step's 8 rows" in said.out

    arguments = ("-m", "autopipe", "run", "plan.json", "--trace", "run.json")
    said = ranks(2, *arguments, folder=autopipe.folder)
    check_run(said, stages=2)
    assert "\nrun.json: open it at https://ui.perfetto.dev\n" in said.err
    assert re.search(r"transfers +bubble *\n", said.out)
    found = json.loads(Path("run.json").read_text())
    assert found["otherData"]["schedule"] == "written"
    named = {
        e["pid"]: e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"
    }
    assert [*named.values()] == ["rank 0: stage 0, replica 0", "rank 1: stage 1, replica 0"]
    for stage, pid in enumerate(named):
        own = [event.get("args", {}) for event in found["traceEvents"] if event["pid"] == pid]
        drawn = {args.get("instruction") for args in own}
        assert {f"{stage}{word}" for word in ("F0", "F1", "B0", "B1")} <= drawn
