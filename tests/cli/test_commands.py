"""The command line: what each command prints where. `run` has a file of its own, and so have model
files that are wrong (`test_cli_models`) and whatever else is refused (`test_cli_refusals`)."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from autopipe.cluster.cluster import Cluster
from autopipe.cluster.spec import LocalSpec
from autopipe.planfile.contents import Plan
from autopipe.runtime.probe import probe
from autopipe.schedules.registry import SCHEDULES
from autopipe.terminal.paths import relative
from autopipe.util.numbers import seconds
from tests.support.inprocess import machine, measured
from tests.support.shell import NET, ROOT, Shell, python, rank

# --- plan, trace, explain


def test_plan_needs_no_argument_but_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine's rates are in the cache; measuring them is test_probe's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "measure", lambda local, names, half, say: measured(names))
    monkeypatch.setattr(probe.torch.cuda, "device_count", lambda: 0)
    probe.local_cluster(probe.this_machine(2))

    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "net.py").write_text(NET)
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    said = rank("-m", "autopipe", "plan", "net.py", folder=tmp_path / "work", environ=environ)()
    assert (said.code, said.out) == (0, "plan.json\n")
    cluster, traced, rates, decided, speed, *idle, took = said.err.splitlines()
    assert cluster == "cluster: local:2, this machine"
    assert rates.startswith("rates of this machine: measured before, read from ")
    assert traced.startswith("traced: 6 nodes, 0.0 M parameters")
    assert re.fullmatch(
        r"plan: pp=\d dp=\d tp=1( zero=\d)?, \d+ micro-batch(es)?, [a-z0-9-]+; "
        r"predicted step [\d.]+ (us|ms), 16 rows",
        decided,
    )
    assert re.match(r"speed: [\d.,]+ rows/s/process; .* an MFU of [\d.]+ % \(fp32 measured", speed)
    phases = ("started", "traced", "costs", "search", "rehearsed", "written")
    assert re.fullmatch(f"time: {', '.join(rf'{name} [0-9.]+ s' for name in phases)}", took)
    made = Plan.load(tmp_path / "work" / "plan.json")
    # The net is so small that one of the two processes may be the quicker: then it says so.
    assert (made.source, made.batch.rows, made.cluster.num_devices) == ("net.py", 16, 2)
    assert len(idle) == (2 if len(made.mesh.places) == 1 else 0)


def test_plan_says_which_devices_stay_idle(autopipe: Shell, four: str) -> None:
    said = autopipe("plan", "net.py", "--pp", "2", "--dp", "1", "--cluster", four)
    assert (
        "\nidle: 2 of 4 devices have no work (node 0: devices 2-3)\n"
        "why: 2 of 4 devices stay idle, as pp=2 dp=1 was asked for; stage "
    ) in said.err
    assert "\nidle       2 of 4 devices have no work" in autopipe("explain", "plan.json").out


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


DEEP = """\
import torch
from torch import nn


def model():
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))


def inputs(batch_size):
    return {"input": torch.randn(batch_size, 8)}


def loss(outputs, batch):
    return outputs.square().mean()
"""


def test_what_a_step_is_made_of_reaches_the_plan(autopipe: Shell) -> None:
    autopipe.write("net.py", DEEP)
    more = "--pp 2 --batch 16 --micro-batches 4 --recompute 0 --recompute 2 --precision bf16"
    autopipe.plan(4, *"--schedule eager-1f1b --window 3 --depth 1 --zero 1".split(), *more.split())
    made = Plan.load("plan.json")
    assert (made.schedule, made.precision, made.zero) == ("eager-1f1b", "bf16", 1)
    assert [(b.window, b.depth) for b in made.boundaries] == [(3, 1)]
    assert [path for stage in made.stages for path in stage.recompute] == ["0", "1", "2", "3"]
    autopipe.plan(2, *"--schedule interleaved --chunks 2 --pp 2 --recompute all".split())
    made = Plan.load("plan.json")
    assert (made.mesh.pp, len(made.stages), len(made.boundaries)) == (2, 4, 3)


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


def test_costs_prints_formulas(autopipe: Shell, four: str) -> None:
    said = autopipe("costs", "net.py")
    assert (said.code, said.err) == (0, "")
    assert "up: " in said.out and "  operations   " in said.out and "the whole: " in said.out
    rank = autopipe("costs", "net.py", "--tp", "2", "--cluster", four)
    assert (rank.code, rank.err) == (0, "")
    assert "bytes sent" in rank.out and "bytes sent" not in said.out


def test_data_is_alone_on_stdout(autopipe: Shell, four: str) -> None:
    """What a model file prints is on stderr then."""
    autopipe.write("net.py", "print('hello')\n" + NET)
    said = autopipe("plan", "net.py", "--cluster", four, "--json")
    assert json.loads(said.out)["file"] == "plan.json"
    assert "hello\n" in said.err
    assert "hello" in autopipe("plan", "net.py", "--cluster", four).out


def test_explain_prints_the_plan(autopipe: Shell, four: str) -> None:
    arguments = "--pp 2 --dp 2 --schedule 1f1b --cluster".split()
    assert autopipe("plan", "net.py", *arguments, four).code == 0
    said = autopipe("explain", "plan.json")
    assert said.code == 0
    assert said.err == (
        "\nmore: --stages (nodes, parameters, what is sent), --why, --html FILE (a page)\n"
    )
    assert said.out.startswith(
        "split      2 pipeline stages (pp) x 2 replicas (dp) x 1 tensor part (tp), on all 4 devices"
    )
    assert "\nwhy  stage " in said.out and "up/linear/0" not in said.out
    assert "\n  from up/linear/0\n" in autopipe("explain", "plan.json", "--stages").out
    assert "\nplanner dynamic: by its own" in autopipe("explain", "plan.json", "--why").out


def test_explain_writes_a_page_for_a_browser(autopipe: Shell) -> None:
    autopipe.plan(2, "--pp", "2")
    said = autopipe("explain", "plan.json", "--html", "plan.html")
    assert (said.code, said.err) == (0, "plan.html: open it in a browser\n")
    assert said.out == autopipe("explain", "plan.json").out
    text = Path("plan.html").read_text()
    assert text.startswith("<!DOCTYPE html>") and "<title>plan.json</title>" in text
    assert "<svg" in text and "up/linear/0" in text


def test_probe_writes_a_cluster_file(autopipe: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def local_cluster(
        local: LocalSpec, say: Callable[[str], None], again: bool, estimate: bool
    ) -> Cluster:
        assert not estimate
        say(f"measuring {local.name}")
        return machine(local.processes)

    monkeypatch.setattr(probe, "local_cluster", local_cluster)
    said = autopipe("probe", "--processes", "3")
    assert (said.code, said.err) == (0, "measuring local:3\n")
    assert json.loads(said.out)["name"] == "local:3"
    said = autopipe("probe", "--processes", "3", "-o", "three.json")
    assert (said.code, said.out) == (0, "three.json\n")
    assert autopipe("plan", "net.py", "--cluster", "three.json").code == 0
    assert autopipe("probe", "--processes", "4", "--cpu").err == "measuring cpu:4\n"
    assert autopipe("probe", "--cpu").err == "measuring cpu:2\n"
    assert autopipe("probe", "--processes", "5000").error.startswith(
        "--processes 5000: expected at most 1,024 processes on one machine, found 5,000"
    )
    # Bug: it measured for half a minute first.
    said = autopipe("probe", "-o", "gone/three.json")
    assert said.code == 2 and "measuring" not in said.err
    assert said.error.startswith("gone/three.json cannot be written: there is no folder ")


# --- simulate


def test_simulate_draws_every_schedule(autopipe: Shell) -> None:
    said = autopipe("simulate", "--ranks", "2", "--micro-batches", "4", "--latency", "1")
    assert (said.code, said.err) == (0, "")
    heads = [line for line in said.out.splitlines() if "a step takes" in line]
    assert [head.partition(";")[0] for head in heads] == [
        f"{name}: 2 ranks, 4 micro-batches" for name in SCHEDULES
    ]
    assert said.out.count("\nrank 0: ") == said.out.count("\nrank 1: ") == len(SCHEDULES)


def test_simulate_draws_one_schedule(autopipe: Shell) -> None:
    said = autopipe("simulate", "1f1b", "--ranks", "2", "--micro-batches", "3")
    assert said.out == (
        "1f1b: 2 ranks, 3 micro-batches; a step takes 12 units, 25 % of it bubble\n"
        "micro-batches held by each rank: 2, 1\n"
        "rank 0: F0 F1       B0--- F2 B1---    B2---\n"
        "rank 1:    F0 B0--- F1 B1--- F2 B2---\n\n"
        "F forward; B backward; after them: the number of the micro-batch; blank: "
        "nothing to do (the bubble); a unit:\n"
        "that of --forward (1 without it), --backward (2), --latency (0) and --wire (0)\n"
    )


def test_what_one_asks_of_a_drawing(autopipe: Shell) -> None:
    """Three micro-batches more in flight hide most of a link as slow as two of them."""
    words = "eager-1f1b --ranks 2 --micro-batches 6 --forward 1 --backward 1 --latency 2".split()
    steps: list[float] = []
    for depth in (0, 3):
        out = autopipe("simulate", *words, "--depth", str(depth), "--window", "4").out
        steps += [float(step) for step in re.findall(r"a step takes ([\d.]+) units,", out)]
    assert steps == [27, 19]
    assert "..." in autopipe("simulate", *words, "--waits").out
    assert "\n0 to 1: " in autopipe("simulate", *words, "--transfers").out


def test_a_link_that_is_filled_by_what_it_carries(autopipe: Shell) -> None:
    """F1 is there at 1 + 2 x 3 + 1 = 8, behind F0 on the wire; B1's gradient at 18, behind B0's."""
    words = ("simulate", "gpipe", "--ranks", "2", "--micro-batches", "2", "--latency", "1")
    assert "a step takes 11 units," in autopipe(*words).out
    assert "a step takes 20 units," in autopipe(*words, "--wire", "3").out


def test_simulate_refuses_more_than_anyone_waits_for(autopipe: Shell) -> None:
    """Bug: it drew for hours, until memory was full."""
    error = autopipe("simulate", "1f1b", "--ranks", "1000000").error
    assert error.startswith(
        "--ranks 1000000 --micro-batches 8: expected at most 250,000 forwards to draw, found "
        "8,000,000: 8 on each of 1,000,000 ranks"
    )
    assert "hint: fewer of either" in error


def test_simulate_draws_a_plan(autopipe: Shell) -> None:
    """The step that the plan predicts; as an SVG as well."""
    autopipe.plan(2, "--pp", "2", "--batch", "8", "--micro-batches", "4")
    said = autopipe("simulate", "plan.json", "--svg", "step.svg")
    assert (said.code, said.err) == (0, "")
    step = Plan.load("plan.json").prediction.step_seconds
    assert said.out.startswith(
        f"plan.json: 2 ranks, 4 micro-batches; a step takes {seconds(step)}, "
    )
    drawn = ElementTree.parse("step.svg").getroot()
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
    assert "plan.json" in Path("step.svg").read_text()


def test_a_terminal_without_the_lines_of_a_table_gets_question_marks(tmp_path: Path) -> None:
    """Bug: `explain` ended in a UnicodeEncodeError under LC_ALL=en_US.ISO-8859-1."""
    plan = str(ROOT / "examples" / "gpt.plan.json")
    said = python("explain", plan, folder=tmp_path, environ={"PYTHONIOENCODING": "latin-1"})
    assert said.code == 0, said.err
    assert "stage  forward  backward" in said.out
    assert "?????  ???????  ????????" in said.out


@pytest.mark.parametrize(
    "command",
    [
        "plan net.py -o ./net.py",
        "explain net.py --html net.py",
        "simulate net.py --svg net.py",
        "export net.py --to slurm -o net.py",
    ],
)
def test_the_file_that_is_read_is_not_written_over(command: str, autopipe: Shell) -> None:
    said = autopipe(*command.split())
    assert said.error == (
        "net.py cannot be written: it is the file that is read\n\nhint: name another file"
    )
    assert (autopipe.folder / "net.py").read_text() == NET


def test_a_plan_names_the_link_to_its_model(tmp_path: Path) -> None:
    """What stands behind it may have no name of a Python file."""
    (tmp_path / "blob").write_text("")
    (tmp_path / "net.py").symlink_to("blob")
    assert relative(str(tmp_path / "net.py"), tmp_path) == "net.py"


def test_emit_replaces_nothing_that_is_read(autopipe: Shell, four: str) -> None:
    """Bug: with `--force` the model file was gone, or the folder with all that is in it; or a link
    to the model file, which the plan names."""
    autopipe("plan", "net.py", "--cluster", four)
    (autopipe.folder / "far").mkdir()
    (autopipe.folder / "far" / "link.py").symlink_to("../net.py")
    replaced = "-o {0}: the folder is replaced whole, and {1} is in it"
    for output, model, sentence in (
        ("net.py", "net.py", "-o net.py: expected a folder, found a file"),
        (".", "net.py", replaced.format(".", "net.py")),
        ("far", "far/link.py", replaced.format("far", "far/link.py")),
        ("far", "hf:far", replaced.format("far", "far")),
    ):
        said = autopipe("emit", "plan.json", "-o", output, "--force", "--model", model)
        assert said.error.startswith(sentence)
    assert autopipe.files() == ["far", "net.py", "plan.json"]


@pytest.mark.parametrize(
    "command",
    [
        "explain gone.json --html here",
        "export gone.json --to slurm -o here",
        "simulate 1f1b --svg here",
        "probe -o here",
    ],
)
def test_a_folder_is_no_file_to_write(command: str, autopipe: Shell) -> None:
    """Before anything is read or measured: the plan that is named is not even there."""
    (autopipe.folder / "here").mkdir()
    said = autopipe(*command.split())
    assert said.code == 2
    assert said.error == "here cannot be written: it is a folder\n\nhint: name a file in it"
