"""A plan that is wrong, or used with options it does not fit: one sentence, no process started."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopipe.runtime.launch import world
from tests.support.shell import NET, Shell, changed

# --- a plan that is wrong


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda plan: plan.update(format=7),
            "plan.format: this autopipe reads format 3, the file is format 7\n\n"
            "hint: make the plan again with `autopipe plan`",
        ),
        (
            lambda plan: plan.update(shedule="1f1b"),
            "plan.shedule: unknown field; Plan has format, ",
        ),
        (
            lambda plan: plan["stages"].pop(),
            "plan.stages: expected equally many on each of 2 ranks (mesh.pp), found 1",
        ),
        (
            lambda plan: plan["boundaries"].pop(),
            "plan.boundaries: expected 1, one between stages, found 0",
        ),
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
    change: Callable[[dict[str, Any]], object],
    sentence: str,
    autopipe: Shell,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(world, "spawn", None)
    autopipe.plan(4, "--pp", "2", "--dp", "2")
    autopipe.edit(change)
    assert autopipe("run", "plan.json", "--local", "4").error.startswith(sentence)


@pytest.mark.parametrize("command", ["explain", "run", "simulate"])
def test_no_plan_and_half_a_plan(command: str, autopipe: Shell) -> None:
    assert autopipe(command, "gone.json").error.startswith("gone.json: no such file, asked for the")
    autopipe.plan(1)
    autopipe.write("plan.json", Path("plan.json").read_text()[:700])
    error = autopipe(command, "plan.json").error
    assert re.match(
        r"plan.json, line \d+, column \d+: the file ends in the middle\n\nhint: ", error
    )


def test_a_plan_of_another_model(autopipe: Shell) -> None:
    """The first node that differs, and the versions."""
    autopipe.plan(1, "--batch", "4")
    autopipe.write("net.py", changed("y.relu()", "y.tanh()"))
    error = autopipe("run", "plan.json", "--steps", "1").error
    assert error.startswith("plan.fingerprint: the plan was made for another model or another ")
    assert "planned with" not in error  # no other versions
    assert "First difference: tanh/0 = aten.tanh.default" in error
    assert error.endswith("hint: plan again with `autopipe plan`")


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("nn.Linear(8, 16)", "nn.Linear(9, 16)", "the model cannot be captured: RuntimeError: "),
        ("forward(self, x)", "forward(self, image)", "inputs do not fit the model: Net.forward("),
    ],
)
def test_a_model_that_the_plans_inputs_do_not_fit(
    old: str, new: str, error: str, autopipe: Shell
) -> None:
    """It may be another one; nothing of torch's own log is shown."""
    autopipe.plan(1, "--batch", "4")
    autopipe.write("net.py", changed(old, new))
    said = autopipe("run", "plan.json", "--steps", "1")
    assert error in said.error and "\nhint: is it net.py, as it was planned?" in said.error
    assert "Traceback" not in said.err


def test_a_plan_that_was_changed_by_hand(autopipe: Shell) -> None:
    """It runs, is drawn and explained; what is predicted was so for another one."""
    autopipe.plan(1, "--batch", "4", "--micro-batches", "1")
    for command in ("explain", "simulate"):
        assert autopipe(command, "plan.json", "--quiet").err == ""
    autopipe.edit(lambda plan: plan["batch"].update(micro_batches=2))
    told = (
        "plan.batch.micro_batches was changed by hand after planning: the predicted figures are of "
        "another plan\n"
    )
    for command in (("explain",), ("simulate",), ("run", "--steps", "1")):
        said = autopipe(*command, "plan.json", "--quiet")
        assert (said.code, said.err) == (0, told)


def test_a_loss_that_was_there_at_planning(autopipe: Shell) -> None:
    autopipe.plan(1, "--batch", "4")
    autopipe.write("net.py", changed("def loss(", "def no_loss("))
    assert autopipe("run", "plan.json", "--steps", "1").error == (
        "plan.loss: the plan was made with a loss function, and none is given\n\n"
        "hint: parallelize(model, plan, loss=loss); in a model file, def loss(outputs, batch)"
    )


@pytest.mark.parametrize("word", ["first", "last"])
def test_a_stage_that_begins_or_ends_with_no_node(word: str, autopipe: Shell) -> None:
    autopipe.plan(1, "--batch", "4")
    autopipe.edit(lambda plan: plan["stages"][0].update({word: "up/conv/0"}))
    error = autopipe("run", "plan.json", "--steps", "1").error
    assert error.startswith(f"plan.stages[0].{word}: the model has no node 'up/conv/0'")


def test_batches_of_rows_that_do_not_divide(autopipe: Shell) -> None:
    """The first one is refused; later ones are left out (`test_feed`)."""
    more = "\ndef batches(batch_size):\n    return [inputs(n) for n in (3, batch_size)]\n"
    autopipe.write("net.py", NET + more)
    autopipe.plan(1, "--batch", "4", "--micro-batches", "2")
    assert autopipe("run", "plan.json").error == (
        "the batch has 3 rows, which do not divide into 2 micro-batches\n\n"
        "hint: give 2 rows, or another multiple of 2"
    )


# --- options of a run


@pytest.mark.parametrize(
    ("arguments", "change", "sentence"),
    [
        (
            "--trace gone/trace.json",
            {},
            "gone/trace.json cannot be written: there is no folder ",
        ),
        (
            "--weights gone.safetensors",
            {},
            "weights 'gone.safetensors': there is no such file or folder\n\n"
            "hint: weights are a safetensors file, a state_dict that torch.save has written, "
            "a folder of either or of torch.distributed.checkpoint, or a run's checkpoint",
        ),
        (
            "--save model.pt",
            {},
            "model.pt cannot be written: a model is saved as safetensors\n\n"
            "hint: name it model.safetensors",
        ),
        (
            "--save gone/model.safetensors",
            {},
            "gone/model.safetensors cannot be written: there is no folder ",
        ),
        ("--epochs 2", {}, "--epochs 2: "),
        ("", {"precision": "fp8"}, "plan.precision: 'fp8' was asked for; this version runs 'fp32'"),
        ("", {"schedule": "zb-h3"}, "plan.schedule: there is no schedule 'zb-h3'"),
        (
            "",
            {"programs": ["rank 0: 0F0 0F1 0B0 0B1"]},
            "plan.programs: they are for 2 micro-batches, the plan has 1",
        ),
    ],
)
def test_a_run_that_cannot_be(
    arguments: str, change: dict[str, Any], sentence: str, autopipe: Shell
) -> None:
    autopipe.plan(1, "--batch", "4", "--micro-batches", "1")
    autopipe.edit(lambda plan: plan.update(change))
    found = autopipe("run", "plan.json", "--steps", "1", *arguments.split()).error
    assert found.startswith(sentence)
    assert autopipe.files() == ["cluster.json", "net.py", "plan.json"]


# --- other processes than the plan's


@pytest.mark.parametrize(("found", "arguments"), [(1, ""), (3, "--local 3")])
def test_another_number_of_processes(found: int, arguments: str, autopipe: Shell) -> None:
    autopipe.plan(4, "--pp", "2", "--dp", "2")
    Path("plan.json").rename("my plan.json")
    assert autopipe("run", "my plan.json", *arguments.split()).error == (
        f"the plan is for 4 processes, found {found} (this is rank 0, on node 0)"
        "\n\nhint: torchrun --nproc-per-node 4 -m autopipe run 'my plan.json'\n"
        "  or: autopipe run 'my plan.json' --local 4\n"
        "  or: srun -n 4 autopipe run 'my plan.json'"
    )
