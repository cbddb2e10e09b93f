"""The plan file: it comes back equal, its schema is current, and its parts agree."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from autopipe.errors import PlanError
from autopipe.planfile import schema
from autopipe.planfile.contents import FORMAT, Plan, check, names_plan, on_edits, signed
from autopipe.planfile.parts import Batch, Boundary, PartOf, Prediction, StagePlan
from autopipe.util import codec
from tests.support.house import ROOT
from tests.support.plans import example_plan

PLAN = example_plan()
assert PLAN.work is not None
WORK = PLAN.work


def changed(part: str, **fields: Any) -> Plan:
    """The example with fields of one part changed."""
    return replace(PLAN, **{part: replace(getattr(PLAN, part), **fields)})


def with_stage(index: int, **fields: Any) -> Plan:
    """The example with fields of one stage changed."""
    stages = list(PLAN.stages)
    stages[index] = replace(stages[index], **fields)
    return replace(PLAN, stages=tuple(stages))


def on(rank: int, **fields: Any) -> Plan:
    """The example with a rank at another place."""
    places = list(PLAN.mesh.places)
    places[rank] = replace(places[rank], **fields)
    return changed("mesh", places=tuple(places))


def test_a_saved_plan_comes_back_equal_and_is_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    PLAN.save(first)
    plan = Plan.load(first)
    assert plan == PLAN
    plan.save(second)
    assert first.read_bytes() == second.read_bytes()


def test_the_published_schema_is_current() -> None:
    assert schema.PATH.read_text() == schema.text(), (
        "the plan has changed: make plan.schema.json again with "
        "`python -m autopipe.planfile.schema`"
    )


def test_the_schema_takes_the_example() -> None:
    published = json.loads(schema.PATH.read_text())
    Draft202012Validator.check_schema(published)
    validator = Draft202012Validator(published)
    data: Any = codec.to_json(PLAN)
    validator.validate(data)
    data["stages"][1]["first"] = 7
    assert [error.json_path for error in validator.iter_errors(data)] == ["$.stages[1].first"]


def test_every_part_of_the_schema_is_described() -> None:
    published = json.loads(schema.PATH.read_text())
    for name, part in published["$defs"].items():
        # A dataclass without a docstring gets its signature for one.
        assert part["description"] and not part["description"].startswith(f"{name}(")


def test_a_wrong_type_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    path.write_text(path.read_text().replace('"block.1/layer_norm/0"', "7"))
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert caught.value.message == "plan.stages[1].first: expected a string, found 7"


def test_a_file_of_a_later_format(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    replace(PLAN, format=FORMAT + 1).save(path)
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert caught.value.message == (
        f"plan.format: this autopipe reads format {FORMAT}, the file is format {FORMAT + 1}"
    )
    assert caught.value.hint == "make the plan again with `autopipe plan`"


@pytest.mark.parametrize("field", ['"part_of": null', '"tied": 0'])
def test_a_plan_of_before_a_field_was_there_is_as_it_was(tmp_path: Path, field: str) -> None:
    """And nobody has changed it by hand, nor the demo's plan, which is of before `Link.hop`."""
    path = tmp_path / "plan.json"
    signed(PLAN).save(path)
    text = path.read_text()
    assert field in text
    path.write_text(re.sub(rf",\s*{field}", "", text))
    assert on_edits(Plan.load(ROOT / "examples" / "gpt.plan.json")) is None
    found = Plan.load(path)
    assert found == signed(PLAN) and on_edits(found) is None


def test_a_transfer_in_parts_that_was_written_by_hand_is_an_edit() -> None:
    (sent,) = PLAN.stages[0].sends
    first, *others = signed(PLAN).stages
    part = replace(first, sends=(replace(sent, part_of=PartOf(sent.name, 2)),))
    assert replace(signed(PLAN), stages=(part, *others)).edited == ("stages[].sends",)


def test_peak_memory_is_the_sum_of_its_parts() -> None:
    assert PLAN.stages[0].predicted.memory.peak == 4096 + 4096 + 8192 + 0 + 2048 + 512


SENT, RECEIVED = PLAN.stages[0].sends[0], PLAN.stages[1].receives[0]


@pytest.mark.parametrize(
    "plan, sentence",
    [
        (changed("mesh", tp=0), "mesh.tp: expected a degree of at least 1, found 0"),
        (
            replace(PLAN, stages=PLAN.stages[:1]),
            "stages: expected equally many on each of 2 ranks (mesh.pp), found 1",
        ),
        (
            replace(PLAN, stages=()),
            "stages: expected equally many on each of 2 ranks (mesh.pp), found 0",
        ),
        (
            with_stage(1, receives=(replace(RECEIVED, shape=("b", 13, 32)),)),
            "stages[0].sends[0]: expected what stages[1].receives has, found block.0/add/0 "
            "float32[b, 12, 32] here and block.0/add/0 float32[b, 13, 32] there",
        ),
        (
            with_stage(1, receives=()),
            "stages[0].sends[0]: expected what stages[1].receives has, found block.0/add/0 "
            "float32[b, 12, 32] here and nothing there",
        ),
        (replace(PLAN, boundaries=()), "boundaries: expected 1, one between stages, found 0"),
        (
            changed("mesh", places=PLAN.mesh.places[:1]),
            "mesh.places: expected 2 places (pp * dp * tp), found 1",
        ),
        (
            changed("mesh", places=PLAN.mesh.places[::-1]),
            "mesh.places[0]: expected rank 0 = (pp * 1 + dp) * 1 + tp, "
            "found rank 1 at pp=1 dp=0 tp=0",
        ),
        (
            replace(PLAN, batch=Batch(rows=8, micro_batches=0)),
            "batch.micro_batches: expected at least 1, found 0",
        ),
        (
            replace(PLAN, batch=Batch(rows=10, micro_batches=4)),
            "batch.rows: expected a multiple of dp * micro_batches = 4, found 10",
        ),
        (
            replace(PLAN, boundaries=(Boundary(window=0, depth=0),)),
            "boundaries[0].window: expected at least 1, found 0",
        ),
        (
            replace(PLAN, boundaries=(Boundary(window=1, depth=-1),)),
            "boundaries[0].depth: expected at least 0, found -1",
        ),
        (
            on(1, local=2),
            "mesh.places[1].local: expected one of the node's 2 devices, from 0, found 2",
        ),
        (on(1, node=1), "mesh.places[1].node: expected one of 1 nodes, from 0, found 1"),
        (
            on(1, local=0),
            "mesh.places[1]: expected a device of its own, found node 0, device 0, which is "
            "rank 0's",
        ),
        (with_stage(0, zero=4), "stages[0].zero: expected one of (0, 1, 2, 3), found 4"),
        (with_stage(1, zero=1), "stages[1].zero: expected 0, as of stage 0, found 1"),
        (
            with_stage(0, predicted=replace(PLAN.stages[0].predicted, forward_seconds=-1.0)),
            "stages[0].predicted.forward_seconds: expected at least 0, found -1.0",
        ),
        (
            with_stage(1, predicted=replace(PLAN.stages[1].predicted, backward_seconds=1e308)),
            "stages[1].predicted.backward_seconds: expected at most 1e+30, found 1e+308",
        ),
        (
            with_stage(1, predicted=replace(PLAN.stages[1].predicted, fullest="2B0")),
            "stages[1].predicted.fullest: expected an instruction of one of 2 stages, as 0F3, "
            "found '2B0'",
        ),
        (
            changed("prediction", bubble=7.0),
            "prediction.bubble: expected a share of the step, from 0 to 1, found 7.0",
        ),
        (
            changed("planner", limits=(0, 5)),
            "planner.limits: expected bytes from 1 on, found (0, 5)",
        ),
        (replace(PLAN, loss_seconds=-1.0), "loss_seconds: expected at least 0, found -1.0"),
        (
            replace(PLAN, work=replace(WORK, peaks=(1e308, 1e308))),
            "work.peaks[0]: expected at most 1e+30, found 1e+308",
        ),
        (
            with_stage(0, sends=(replace(SENT, peer=0),)),
            "stages[0].sends[0].peer: expected a later stage, found 0",
        ),
        (
            with_stage(1, receives=(replace(RECEIVED, peer=1),)),
            "stages[1].receives[0].peer: expected an earlier stage, found 1",
        ),
    ],
)
def test_parts_that_contradict_each_other(plan: Plan, sentence: str) -> None:
    with pytest.raises(PlanError) as caught:
        check(plan)
    assert caught.value.message == f"plan.{sentence}"


def test_a_plan_is_known_by_its_name_or_by_how_it_begins(tmp_path: Path) -> None:
    for name, text in (("a.plan", '\ufeff {"format": 3'), ("net.py", "import os")):
        (tmp_path / name).write_text(text)
        assert names_plan(str(tmp_path / name)) is (name == "a.plan")
    assert names_plan("gone.json") and not names_plan("gone") and not names_plan(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")  # a schedule may come through one: what is read of it is gone
    assert not names_plan(str(tmp_path / "pipe"))


def test_the_example_agrees_with_itself() -> None:
    check(PLAN)


def test_a_rank_may_hold_several_stages() -> None:
    """Four stages on two ranks, and the boundaries between them; three stages are none for two."""
    first, last = PLAN.stages

    def between(index: int) -> StagePlan:
        return replace(
            last,
            receives=(replace(RECEIVED, peer=index - 1),),
            sends=(replace(SENT, peer=index + 1),) if index < 3 else (),
        )

    stages = (first, between(1), between(2), between(3))
    four = replace(PLAN, stages=stages, boundaries=(Boundary(2, 0),) * 3)
    check(four)
    three = replace(PLAN, stages=stages[:3], boundaries=(Boundary(2, 0),) * 2)
    with pytest.raises(PlanError, match="equally many on each of 2 ranks .*, found 3"):
        check(three)


# --- what was changed by hand


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda plan: plan, None),
        (lambda plan: replace(plan, source="elsewhere.py"), None),
        (
            lambda plan: replace(plan, batch=Batch(8, 4)),
            "plan.batch.micro_batches was changed by hand after planning: the predicted figures "
            "are of another plan",
        ),
        (
            lambda plan: replace(plan, precision="bf16-autocast", schedule="gpipe"),
            "plan.precision and plan.schedule were changed by hand after planning: the predicted "
            "figures are of another plan",
        ),
        (
            lambda plan: replace(plan, loss_over="micro-batch", low_buffers=("positions",)),
            "plan.loss_over and plan.low_buffers were changed by hand after planning: the "
            "predicted figures are of another plan",
        ),
        (
            lambda plan: replace(plan, boundaries=(Boundary(1, 0),)),
            "plan.boundaries[].window was changed by hand after planning: the predicted figures "
            "are of another plan",
        ),
        (
            lambda plan: replace(
                plan, stages=tuple(replace(s, zero=1, recompute=("h.0",)) for s in plan.stages)
            ),
            "plan.stages[].recompute and plan.stages[].zero were changed by hand after planning: "
            "the predicted figures are of another plan",
        ),
        (
            lambda plan: replace(plan, prediction=Prediction(1e-9, plan.prediction.bubble)),
            "plan.prediction.step_seconds was changed by hand after planning: the predicted "
            "figures are of another plan",
        ),
    ],
)
def test_a_plan_that_was_changed_by_hand(
    change: Callable[[Plan], Plan], sentence: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    signed(replace(PLAN, batch=Batch(8, 2))).save(path)
    change(Plan.load(path)).save(path)
    assert on_edits(Plan.load(path)) == sentence


def test_who_has_not_signed_a_plan_is_not_asked() -> None:
    """Plans of earlier versions."""
    assert on_edits(PLAN) is None


def test_a_written_schedule_comes_back_with_the_plan(tmp_path: Path) -> None:
    lines = ("rank 0: 0F0 0F1 0B0 0B1", "rank 1: 1F0 1B0 1F1 1B1")
    plan = replace(PLAN, schedule="written", programs=lines, batch=Batch(8, 2))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_the_zero_stage_is_that_of_every_stage() -> None:
    assert PLAN.zero == 0
    assert replace(PLAN, stages=tuple(replace(s, zero=3) for s in PLAN.stages)).zero == 3
