"""Files from strangers: whatever they hold, a command says a sentence, or does what it does.

10,000 of them in the long run: plans that are exported, compared, shown and drawn, records of runs,
and checkpoints. Each is read under a fence (`tests/support/hostile.py`).
"""

import ast
import functools
import json
import random
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from autopipe.export.targets import LAUNCHERS
from autopipe.interop.targets import RUNTIMES
from autopipe.planfile import predict
from autopipe.report import perfetto, recorded
from autopipe.util import codec
from tests.support.checkpointed import Run
from tests.support.hostile import damaged, fenced, mutated
from tests.support.long import sampled
from tests.support.plans import chain, example_plan
from tests.support.scripts import commands, launchers, started
from tests.support.shell import Said, Shell
from tests.support.spread import on_cpus
from tests.support.tracked import from_timeline

PLANS = [codec.to_json(plan) for plan in (example_plan(), on_cpus(2, 2), chain(2, 2))]


@pytest.fixture
def autopipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    """In a folder within the test's own: what climbs out of it is seen."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    # The parser is made anew for each command line, which takes longer than most of what follows.
    monkeypatch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
    folder = tmp_path / "here"
    folder.mkdir()
    return Shell(folder, monkeypatch, capsys)


def told(autopipe: Shell, *argv: str) -> Said:
    """What a command says of files that may hold anything: it ends well, or with one sentence."""
    with fenced(autopipe.folder):
        said = autopipe(*argv)
    assert "Traceback" not in said.err and "--debug shows where" not in said.err, said
    assert (said.code == 2) == ("error: " in said.err), said
    if said.code == 2:
        assert said.err.count("error: ") == 1 and len(said.err) < 20_000, said
    return said


def draws(count: int, of: int) -> list[random.Random]:
    """Of each file that is tried, where its mutation is drawn from."""
    return [random.Random(seed) for seed in sampled(range(count), of=of)]


def write(path: Path, data: Any, draw: random.Random) -> None:
    """A file of JSON, with something else in one place; one of ten is damaged as bytes."""
    if draw.random() < 0.1:
        path.write_bytes(damaged(json.dumps(data).encode(), draw))
    else:
        path.write_text(json.dumps(mutated(data, draw)))


# --- plans


def test_export(autopipe: Shell) -> None:
    """What is written is read by its readers; none of it is anything but data."""
    targets, exported, texts = [*LAUNCHERS, *RUNTIMES], 0, dict[str, set[str]]()
    for draw in draws(4000, of=16):
        target = draw.choice(targets)
        write(Path("plan.json"), draw.choice(PLANS), draw)
        words = ["--image", "i"] if target in ("kubeflow", "pytorchjob", "jobset") else []
        said = told(autopipe, "export", "plan.json", "--to", target, *words)
        if said.code == 0:
            exported += 1
            texts.setdefault(target, set()).add(said.out)
    assert exported and texts.keys() == {*targets}
    programs = launchers(autopipe.folder.parent)
    for target, found in texts.items():
        for text in found:
            if target in LAUNCHERS and LAUNCHERS[target].program:
                command = started(text, autopipe.folder, programs)
                assert command[command.index("-m") :] == RUN
            else:
                READ[target](text)
    assert sorted(autopipe.files()) == ["net.py", "plan.json"]


RUN = ["-m", "autopipe", "run", "plan.json"]


def as_manifest(text: str) -> None:
    """What its containers run is what it always is."""
    found = commands(yaml.safe_load(text))
    assert found
    for command in found:
        assert command == ["python", "-m", "autopipe", "run", "/workspace/plan.json"]


def as_assignment(text: str) -> None:
    """Python that has an import and calls with literals, and nothing else."""
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.ImportFrom):
            assert statement.module == "torchtitan.config"
            continue
        assert isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)
        for word in statement.value.keywords:
            ast.literal_eval(word.value)


def as_sourced(text: str) -> None:
    """bash that is sourced: an array is set, and no command runs."""
    code = f"PATH=/none\n{text}\ndeclare -p PARALLEL"
    done = subprocess.run(["/bin/bash", "-euc", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("declare -a PARALLEL="), done


READ: dict[str, Callable[[str], object]] = {
    "kubeflow": as_manifest,
    "pytorchjob": as_manifest,
    "jobset": as_manifest,
    "megatron": as_sourced,
    "torchtitan": as_assignment,
    "deepspeed": json.loads,
    "transformers": json.loads,
    "accelerate": yaml.safe_load,
    "pipelining": str,
    "flagscale": yaml.safe_load,
}


def test_diff_and_explain(autopipe: Shell) -> None:
    codes = set()
    for draw in draws(2000, of=20):
        plan = draw.choice(PLANS)
        Path("plan.json").write_text(json.dumps(plan))
        write(Path("other.json"), plan, draw)
        pair = ["plan.json", "other.json"]
        draw.shuffle(pair)
        more = ["--json"] if draw.random() < 0.5 else []
        codes.add(told(autopipe, "diff", *pair, *more).code)
        told(autopipe, "explain", "other.json", *more)
    assert codes == {0, 1, 2}
    assert sorted(autopipe.files()) == ["net.py", "other.json", "plan.json"]


# --- what `report` reads


def record(folder: Path) -> dict[str, bytes]:
    """A run's folder, and its files."""
    plan = predict.with_prediction(chain(2, 2))
    recorded.begin(folder, leads=True, resume=False)
    plan.save(folder / recorded.PLAN)
    perfetto.save(folder / recorded.TRACE, from_timeline(predict.timeline(plan)), {})
    lines = [{"step": n, "loss": 5 - n, "seconds": 0.5} for n in (1, 2, 3)]
    (folder / recorded.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    recorded.end(folder, [stage.predicted for stage in plan.stages], 0.5, (0.1, 0.2))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_report(autopipe: Shell) -> None:
    """Of a plan, or of a run one of whose files is another."""
    files = record(autopipe.folder / "run")
    codes, page = set(), Path("page.html")
    for draw in draws(2000, of=40):
        page.unlink(missing_ok=True)
        if draw.random() < 0.3:
            write(Path("plan.json"), draw.choice(PLANS), draw)
            codes.add(told(autopipe, "report", "plan.json", "-o", "page.html").code)
            check_page(page)
            continue
        name = draw.choice(sorted(files))
        for other, data in files.items():
            (Path("run") / other).write_bytes(data)
        if name == recorded.METRICS or draw.random() < 0.2:
            (Path("run") / name).write_bytes(damaged(files[name], draw))
        else:
            write(Path("run") / name, json.loads(files[name]), draw)
        codes.add(told(autopipe, "report", "run", "-o", "page.html").code)
        check_page(page)
    told(autopipe, "report", "run", "-o", "page.html")
    assert codes == {0, 2}
    assert sorted(autopipe.files()) == ["net.py", "page.html", "plan.json", "run"]


def check_page(page: Path) -> None:
    """It has the scripts that every page has; texts of a plan are text there."""
    if page.exists():
        text = page.read_text().lower()
        assert (text.count("<script"), text.count("</script")) == (2, 2)


# --- checkpoints


def sealed(body: dict[str, Any]) -> str:
    """A manifest whose checksum is right, whatever it says."""
    body = {name: part for name, part in body.items() if name != "sum"}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({"sum": f"{zlib.crc32(canonical.encode()):08x}", **body})


@pytest.mark.long
def test_checkpoint(autopipe: Shell) -> None:
    """Info, verify and convert, of one with a file that is another."""
    run = Run(autopipe.folder / "whole")
    run.train(2)
    files = {path.name: path.read_bytes() for path in (run.folder / "step-00000001").iterdir()}
    there = Path("kept/step-00000001")
    there.mkdir(parents=True)
    codes = set()
    for draw in draws(2000, of=40):
        for other, data in files.items():
            (there / other).write_bytes(data)
        name = draw.choice(sorted(files))
        if not name.endswith(".json") or draw.random() < 0.1:
            (there / name).write_bytes(damaged(files[name], draw))
        elif name == "plan.json":
            write(there / name, json.loads(files[name]), draw)
        else:
            changed = mutated(json.loads(files[name]), draw)
            (there / name).write_text(sealed(changed))
        action = draw.choice(
            [
                ("info", "kept"),
                ("info", "kept", "--json"),
                ("verify", "kept"),
                ("verify", "kept", "whole"),
                ("convert", "kept", "-o", "model.safetensors"),
            ]
        )
        codes.add(told(autopipe, "checkpoint", *action).code)
    assert codes == {0, 1, 2}
    shutil.rmtree("kept")
    assert {*autopipe.files()} <= {"net.py", "whole", "model.safetensors"}
