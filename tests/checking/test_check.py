"""`autopipe check` as a user types it: its output, its exit codes, and what it shrinks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from autopipe.cli import check
from autopipe.planfile.contents import Plan
from autopipe.runtime.launch import spawn
from autopipe.terminal import console
from tests.support.layers_file import LAYERS
from tests.support.shell import Shell, changed


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


def test_what_a_model_file_prints_in_a_rank_is_no_data(
    autopipe: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has the stdout of the command that starts it. Bug: `--json` was no JSON."""
    (autopipe.folder / "subject.json").write_text("{}")
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setattr("autopipe.checking.split.run_rank", lambda folder: print("of the model"))
    said = autopipe("check", ".")
    assert (said.code, said.out, said.err) == (0, "", "of the model\n")


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


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (
            ("plan.json", "--pp", "2"),
            "plan.json is a plan, which decides how to split, and --pp was given as well\n\n"
            "hint: autopipe check plan.json; or plan again with --pp",
        ),
        (
            ("plan.json", "--batch", "8"),
            "plan.json is a plan, which decides how to split, and --batch was given as well\n\n"
            "hint: autopipe check plan.json; or plan again with --batch",
        ),
        (
            ("net.py", "--model", "other.py"),
            "--model other.py is for a plan whose model file has moved, and net.py is no plan\n\n"
            "hint: autopipe check other.py",
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
