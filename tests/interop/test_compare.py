"""`autopipe diff`: whether two plans train the same, how they differ, and its exit codes."""

import json
import re
from dataclasses import replace

import pytest

from autopipe.interop.compare import compare
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import BlockClass, PartOf
from tests.support.plans import chain
from tests.support.shell import Shell

PLAN = chain(2, 4)


def names(first: Plan, second: Plan) -> tuple[list[str], list[str]]:
    found = compare(first, second)
    return [entry.name for entry in found.what], [entry.name for entry in found.how]


def test_a_plan_and_itself() -> None:
    found = compare(PLAN, chain(2, 4))
    assert found.none and found.same_training


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"fingerprint": "other"}, "model"),
        ({"precision": "bf16"}, "precision"),
        ({"optimizer": "sgd"}, "optimizer"),
        ({"loss": True}, "loss"),
        ({"batch": replace(PLAN.batch, rows=8)}, "batch"),
    ],
)
def test_another_training(change: dict[str, object], what: str) -> None:
    assert names(PLAN, replace(PLAN, **change))[0] == [what]  # type: ignore[arg-type]


def test_the_same_training_in_another_way() -> None:
    what, how = names(PLAN, chain(4, 4, schedule="gpipe"))
    assert what == []
    assert {"pp", "schedule", "stages begin at", "cluster"} <= {*how}


def test_what_goes_in_parts_is_a_way() -> None:
    (sent,) = PLAN.stages[0].sends
    part = replace(sent, part_of=PartOf(sent.name, 2))
    first, *others = PLAN.stages
    other = replace(PLAN, stages=(replace(first, sends=(part,)), *others))
    found = compare(PLAN, other)
    assert [entry.name for entry in found.how] == ["sent in parts"]
    assert found.how[0].second == (f"{sent.name}, dim 2, to stage 1",)


def test_micro_batches_are_a_way_unless_the_loss_is_of_each() -> None:
    fewer = replace(PLAN, batch=replace(PLAN.batch, micro_batches=2))
    assert names(PLAN, fewer) == ([], ["micro-batches"])
    own = [replace(plan, loss_over="micro-batch") for plan in (PLAN, fewer)]
    assert names(*own) == (["micro-batches of a step"], ["micro-batches"])


def test_it_ends_as_diff_does(autopipe: Shell) -> None:
    PLAN.save("a.json")
    replace(PLAN, schedule="gpipe").save("b.json")
    replace(PLAN, fingerprint="other").save("c.json")
    same = autopipe("diff", "a.json", "a.json")
    assert (same.code, same.out) == (0, "a.json and a.json are the same plan\n")
    replace(PLAN, source="moved.py", lengths=(12,)).save("moved.json")
    moved = autopipe("diff", "a.json", "moved.json").out
    assert moved == "a.json and moved.json are the same plan, but for source, lengths\n"
    way = autopipe("diff", "a.json", "b.json")
    assert way.code == 1
    assert way.out.startswith("They train the same thing; ")
    assert "\nHow, in a.json and in b.json:\n  schedule  1f1b" in way.out
    other = autopipe("diff", "a.json", "c.json")
    assert other.code == 1 and other.out.startswith("They train different things:\n  model ")
    assert autopipe("diff", "a.json", "none.json").error.startswith("none.json: no such file")


AGAIN, AWAY = "runs again in backward (recompute)", "kept in the host's memory (offload)"


def test_each_difference_is_said_for_people(autopipe: Shell) -> None:
    """Bug: `windows 2`, `depths 0`, `ZeRO 0 3` and nothing at all for a plan of one stage."""
    deep = replace(PLAN, boundaries=(replace(PLAN.boundaries[0], window=3, depth=2),))
    dealt = tuple(replace(stage, zero=3) for stage in PLAN.stages)
    PLAN.save("a.json")
    replace(deep, stages=dealt).save("b.json")
    chain(1, 4).save("c.json")
    lines = autopipe("diff", "a.json", "b.json").out.splitlines()[3:]
    assert [re.split("  +", line)[1:] for line in lines] == [
        ["receives posted ahead (window)", "2", "3"],
        ["in flight beyond 1f1b's (depth)", "0", "2"],
        ["sharded over replicas (ZeRO)", "0: nothing", "3: parameters too"],
    ]
    one = autopipe("diff", "a.json", "c.json").out
    assert re.search(r"pipeline stages \(pp\) +2 +1\n", one)
    assert re.search(r"receives posted ahead \(window\) +2 +one stage alone\n", one)


def test_as_many_and_not_the_same_says_which() -> None:
    """Bug: `1 written program` in both columns."""
    lines = ("rank 0: 0F0 0B0", "rank 1: 1F0 1B0")
    other = replace(PLAN, programs=(lines[0], "rank 1: 1F0"))
    (entry,) = compare(replace(PLAN, programs=lines), other).how
    assert entry.shown == ("rank 1: 1F0 1B0", "rank 1: 1F0")


def test_what_runs_again_is_said_by_blocks(autopipe: Shell) -> None:
    """In one line, however many nodes that is."""
    blocks = (BlockClass("h.0", tuple(f"h.{n}" for n in range(33))),)
    nothing = tuple(replace(stage, recompute=()) for stage in PLAN.stages)
    ops = tuple(f"h.{n}.{op}" for n in range(32) for op in ("attn/softmax/0", "attn/matmul/0"))
    some = (replace(nothing[0], recompute=("h.32", *ops)), nothing[1])
    replace(PLAN, blocks=blocks, stages=nothing).save("a.json")
    replace(PLAN, blocks=blocks, stages=some).save("b.json")
    last = autopipe("diff", "a.json", "b.json").out.splitlines()[-1]
    assert re.split("  +", last) == ["", AGAIN, "nothing", "h.32; attention of h.0-31"]


def test_what_blocks_offload_is_said(autopipe: Shell) -> None:
    away = (replace(PLAN.stages[0], offload=("h.0", "h.1", "h.4")), *PLAN.stages[1:])
    PLAN.save("a.json")
    replace(PLAN, stages=away).save("b.json")
    last = autopipe("diff", "a.json", "b.json").out.splitlines()[-1]
    assert re.split("  +", last) == ["", AWAY, "nothing", "h.0-1, h.4"]


def test_what_is_too_long_for_a_column_has_lines_of_its_own(autopipe: Shell) -> None:
    """Three at most for each plan."""
    every = [f"--{number:03}--" for number in range(60)]
    PLAN.save("a.json")
    replace(PLAN, source=" ".join(every), fingerprint="0").save("b.json")
    told = autopipe("diff", "a.json", "b.json").out.splitlines()
    assert max(map(len, told)) <= 100
    *_, name, one, other, _, last = told
    assert name == "  model" and one.startswith("    in a.json: ")
    assert other.startswith("    in b.json: 0 (--000-- --001-- ") and last.endswith(" ...")


def test_as_data(autopipe: Shell) -> None:
    PLAN.save("a.json")
    replace(PLAN, schedule="gpipe").save("b.json")
    found = json.loads(autopipe("diff", "a.json", "b.json", "--json").out)
    assert found == {
        "same_training": True,
        "what": [],
        "how": [{"name": "schedule", "first": "1f1b", "second": "gpipe"}],
    }
