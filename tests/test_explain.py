"""What a person is shown: whole pages as they are printed, none wider than 100 columns."""

import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console, RenderableType

from autopipe import forecast
from autopipe.explain import WIDTH, compare, console, count, explain, seconds
from autopipe.explain import page as html_page
from autopipe.plan import Boundary, Memory, Plan, StagePrediction
from autopipe.schedule import format_programs
from autopipe.schedules import make
from tests.plans import chain, example_plan


def page(content: RenderableType, width: int = WIDTH) -> str:
    out = StringIO()
    Console(file=out, width=width, highlight=False).print(content)
    return out.getvalue()


PAGE = """\
1f1b on 2xA100-80GB: 2 pipeline stages (pp) x 1 replica (dp) x 1 tensor part (tp)
one step: 8 rows, 4 micro-batches of b = 2 rows on each replica
recompute: 1 block, a second time in backward
predicted: 15.5 ms a step, of which a rank idles 20% (the bubble)

predicted: one micro-batch's forward and backward; a device's memory in KiB

stage  forward  backward  bubble  peak  weights  grads  optimizer  activations  transfers
─────────────────────────────────────────────────────────────────────────────────────────
0       1.0 ms    2.0 ms     20%  18.5      4.0    4.0        8.0          2.0        0.5
1       1.0 ms    2.0 ms     20%  18.5      4.0    4.0        8.0          2.0        0.5
peak is the sum of what stands right of it: weights (with buffers), their gradients, the
optimizer's state, activations kept from forward to backward, buffers of transfers (with
those of gradients on their way into a sum)
tensors may fill 66.5 GiB of A100-80GB; the rest is a margin for CUDA's context and what the
allocator loses

stage 0: 9 nodes, 2 parameter tensors
  from embed/embedding/0
  to   block.0/add/0
  sends block.0/add/0 float32[b, 12, 32] to stage 1, its gradient comes back
  recomputed in backward: block.0
stage 1: 10 nodes, 2 parameter tensors
  from block.1/layer_norm/0
  to   head/linear/0

one step of a pipeline: F forward, B backward, numbered by micro-batch
rank 0: F0 F1       B0--- F2 B1--- F3 B2---    B3---
rank 1:    F0 B0--- F1 B1--- F2 B2--- F3 B3---

why: stage 1 is the slowest
planner dynamic: by its own, rougher estimate this plan takes 15.5 ms a step and none less than 15.0
ms, a gap of 3.3%; the longest path through its programs says 15.5 ms
why not another mesh, the nearest first:
  data parallelism alone: pp=1 dp=2 tp=1, 1 micro-batch, 1f1b: 20.0 ms, 29 % slower, by the bubble
  pp=1 dp=1 tp=2, 4 micro-batches, 1f1b: at least 12 % slower, by its bound
"""


def test_a_plan() -> None:
    assert page(explain(example_plan())) == PAGE


def test_where_there_is_no_other_mesh_nothing_is_said_of_any() -> None:
    plan = example_plan()
    alone = replace(plan.planner, next_best=None, others=())
    assert "why not another" not in page(explain(replace(plan, planner=alone)))


def test_a_plan_that_meets_its_bound_has_no_gap() -> None:
    plan = example_plan()
    met = replace(plan.planner, step_seconds=0.0155, bound_seconds=0.0155)
    text = page(explain(replace(plan, planner=met))).replace("\n", " ")
    assert "none less than 15.5 ms, a gap of 0.0%;" in text
    nothing = replace(plan.planner, step_seconds=0.0, bound_seconds=0.0)
    assert "a gap of 0.0%;" in page(explain(replace(plan, planner=nothing))).replace("\n", " ")


def test_the_bubble_of_a_stage_is_that_of_its_rank() -> None:
    """F 1 and B 2 ms in stage 0, three times as much in stage 1; of 21 ms they compute 6 and 18.

            0     1     2     4          10          12       13         19          21
    rank 0  |  F0 |  F1 |                |     B0    |                   |     B1    |
    rank 1        |    F0     |    B0    |     F1             |    B1    |
    """
    plan = chain(2, 2, lambda stage: 3e-3 if stage else 1e-3)
    rows = [line.split() for line in page(explain(plan)).splitlines() if line[:2] in ("0 ", "1 ")]
    timeline = forecast.timeline(plan)
    assert [row[5] for row in rows] == [f"{bubble:.0%}" for bubble in timeline.bubbles]
    assert timeline.bubbles == pytest.approx([1 - 6 / 21, 1 - 18 / 21])


def test_long_names_leave_the_table_as_it_is() -> None:
    plan, long = example_plan(), "model." + "encoder.layers.11." * 10 + "linear/0"
    stages = tuple(replace(stage, first=long) for stage in plan.stages)
    text = page(explain(replace(plan, stages=stages)))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.replace("\n", "").count(long) == 2
    table = PAGE[PAGE.index("stage  forward") : PAGE.index("peak is")]
    assert table in text


def drawn(plan: Plan) -> str:
    """The picture of a plan's page, with its title."""
    text = page(explain(plan))
    return text[text.index("one step of a pipeline") : text.index("\nwhy: ")]


def test_a_page_is_never_wider() -> None:
    for pp, micro_batches in ((1, 1), (1, 64), (2, 64), (4, 4), (8, 64), (12, 512)):
        text = page(explain(chain(pp, micro_batches)))
        assert max(map(len, text.splitlines())) <= WIDTH, (pp, micro_batches)
        assert text.count("\nrank 0: F") == (pp < 12)  # too deep to be drawn
        assert re.search(rf"\n{pp - 1:<5}   1.0 ms    2.0 ms +\d+%  70.0  ", text)
        assert "a device's memory in GiB" in text


def test_as_many_micro_batches_as_fit_are_drawn() -> None:
    """Of four ranks the seventh micro-batch ends in column 98, the eighth would in 107."""
    title, *_, last = drawn(chain(4, 64)).splitlines()
    assert title == (
        "one step of a pipeline: F forward, B backward, numbered by micro-batch, "
        "7 of 64 micro-batches"
    )
    assert last == "rank 3:          F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- F6 B6---"


def test_stages_of_very_unlike_length_are_still_drawn() -> None:
    text = page(explain(chain(2, 4, lambda stage: 1e-6 if stage else 1e-2)))
    assert "\nrank 1: " in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_a_stage_that_takes_no_time_is_not_drawn() -> None:
    text = page(explain(chain(2, 4, lambda stage: 0.0)))
    assert "one step of a pipeline" not in text and "why: " in text


def test_second_stages_of_ranks_are_in_lower_case() -> None:
    """Four stages on two ranks: micro-batch 0 goes forward in the first 4 ms, 0 1 0 1, then back.

    Stage 3 on rank 1 runs it backward from 4 to 6 ms, stage 2 on rank 0 from 6 to 8.
    """
    assert drawn(chain(2, 4, schedule="interleaved", chunks=2)) == (
        "one step of a pipeline: F forward, B backward, numbered by micro-batch\n"
        "lower case is a rank's second stage\n"
        "rank 0: F0 F1 f0 f1 F2    b0--- F3 b1--- f2 B0--- f3 B1---    b2---    b3--- B2--- B3---\n"
        "rank 1:    F0 F1 f0 b0--- f1 b1--- F2 B0--- F3 B1--- f2 b2--- f3 b3--- B2--- B3---\n"
    )


def test_backwards_in_halves() -> None:
    """I and W are half of B, 1 ms each: rank 0 has the gradient from rank 1's I0 at 3 ms."""
    assert drawn(chain(2, 2, schedule="zb-h1")) == (
        "one step of a pipeline: F forward, I, W backward, numbered by micro-batch\n"
        "I is backward for inputs, W for weights\n"
        "rank 0: F0 F1    I0 W0 I1 W1\n"
        "rank 1:    F0 I0 F1 I1 W0 W1\n"
    )


def test_more_stages_of_a_rank_have_their_number_in_front() -> None:
    assert drawn(chain(1, 1, schedule="interleaved", chunks=3)) == (
        "one step of a pipeline: F forward, B backward, numbered by micro-batch\n"
        "what stands in front is the stage\n"
        "rank 0: 0F0 1F0 2F0 2B0---- 1B0---- 0B0----\n"
    )


def test_the_table_says_which_rank_has_a_stage_and_what_it_has_in_all() -> None:
    text = page(explain(chain(2, 4, schedule="zb-v", chunks=2)))
    assert text.startswith(
        "zb-v on 2xA100-80GB: 4 pipeline stages on 2 ranks (pp) x 1 replica (dp) x 1 tensor part"
    )
    rows = [line.split("  ")[0] for line in text.splitlines() if ", rank " in line]
    assert rows[:4] == ["0, rank 0", "1, rank 1", "2, rank 1", "3, rank 0"]
    assert "stages hold together 140.0 on rank 0, 140.0 on rank 1\n" in text
    assert "\nstage 2 on rank 1: 9 nodes, 2 parameter tensors\n" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_the_widest_table_is_whole() -> None:
    """Twelve ranks of two stages, and hundreds of GiB in one."""
    plan = chain(12, 12, lambda stage: 0.1234, schedule="interleaved", chunks=2)
    huge = Memory(*(90 * 2**30,) * 6)
    stages = tuple(
        replace(stage, predicted=replace(stage.predicted, memory=huge)) for stage in plan.stages
    )
    text = page(explain(replace(plan, stages=stages)))
    assert "…" not in text
    assert "\n23, rank 11  123.4 ms  246.8 ms " in text


def test_limits_that_the_user_has_set_are_told() -> None:
    """Beside what devices leave for tensors; of a CPU nothing is known but those."""
    plan = example_plan()
    limited = replace(plan, planner=replace(plan.planner, limits=(600 * 2**20, 2 * 2**30)))
    assert "\nallocator loses\nno more than was asked for: 600 MiB, 2,048 MiB\n" in page(
        explain(limited)
    )


def test_what_is_not_as_usual_stands_on_top() -> None:
    plan = example_plan()
    usual = page(explain(replace(plan, stages=(plan.stages[1],) * 2)))
    assert usual.splitlines()[2].startswith("predicted: ")
    stages = tuple(replace(s, zero=3, recompute=("block.0", "block.1")) for s in plan.stages)
    unusual = replace(
        plan,
        precision="bf16",
        schedule="eager-1f1b",
        boundaries=(Boundary(window=3, depth=1),),
        stages=stages,
    )
    assert "zero:" not in page(explain(unusual)), "there are no replicas to deal out to"
    unusual = replace(unusual, mesh=replace(plan.mesh, dp=2, places=plan.mesh.places * 2))
    assert page(explain(unusual)).splitlines()[2:7] == [
        "precision: bf16 in matrix products, fp32 in all that is kept",
        "zero: 3, parameters, gradients and optimizer state are dealt out over the replicas",
        "recompute: 2 blocks, a second time in backward",
        "boundaries: 3 receives posted ahead, 1 more micro-batches in flight",
        "predicted: 15.5 ms a step, of which a rank idles 20% (the bubble)",
    ]
    slow = replace(chain(3, 4, schedule="eager-1f1b"), boundaries=(Boundary(3, 1), Boundary(2, 0)))
    assert "\nboundaries: 3 2 receives posted ahead, 1 0 more micro-batches" in page(explain(slow))


def test_a_written_schedule_is_drawn_whole() -> None:
    """There is no shorter one: it is drawn with all its micro-batches, or not at all."""
    lines = ("rank 0: 0F1 0F0 0B0 0B1", "rank 1: 1F1 1F0 1B0 1B1")
    plan = replace(chain(2, 2), schedule="written", programs=lines)
    assert drawn(plan).splitlines()[1:] == [
        "rank 0: F1 F0          B0--- B1---",
        "rank 1:    F1 F0 B0--- B1---",
    ]
    many = format_programs(make("gpipe", 2, 40)).splitlines()
    plan = replace(chain(2, 40), schedule="written", programs=tuple(many))
    assert "one step of a pipeline" not in page(explain(plan))


def test_a_long_name_has_a_line_of_its_own() -> None:
    plan = chain(2, 2)
    (sent,) = plan.stages[0].sends
    first = replace(
        plan.stages[0], sends=(replace(sent, name="model." + "layers.11." * 4 + "add"),)
    )
    text = page(explain(replace(plan, stages=(first, plan.stages[1]))))
    assert (
        "\n  sends model.layers.11.layers.11.layers.11.layers.11.add\n"
        "    float32[b, 12, 32] to stage 1, its gradient comes back\n"
    ) in text


def test_planned_beside_measured() -> None:
    planned = StagePrediction(0.012, 0.0251, Memory(2**20, 2**20, 2**21, 0, 3 * 2**20, 2**19))
    measured = StagePrediction(0.0113, 0.03, Memory(2**20, 2**20, 2**21, 0, 3 * 2**20, 2**18))
    assert page(compare([planned, planned], [measured, planned], 0.25, 1.2)) == (
        "planned / measured: one micro-batch's forward and backward; a device's memory in MiB,\n"
        "of whose peak activations and transfers are parts\n"
        "\n"
        "stage            forward           backward       peak  activations  transfers\n"
        "──────────────────────────────────────────────────────────────────────────────\n"
        "0      12.0 ms / 11.3 ms  25.1 ms / 30.0 ms  7.5 / 7.2    3.0 / 3.0  0.5 / 0.2\n"
        "1      12.0 ms / 12.0 ms  25.1 ms / 25.1 ms  7.5 / 7.5    3.0 / 3.0  0.5 / 0.5\n"
        "a step, before the optimizer's: 250.0 ms / 1.20 s\n"
    )


def test_the_page_for_a_browser_has_the_picture_and_the_words() -> None:
    """Names come from a model and from files: none of them becomes markup."""
    plan = example_plan()
    odd = replace(plan.stages[0], first="block<0>&/add/0")
    text = html_page(replace(plan, stages=(odd, plan.stages[1])), "plan <1>.json")
    assert text.startswith("<!DOCTYPE html>") and text.rstrip().endswith("</html>")
    assert "<title>plan &lt;1&gt;.json</title>" in text
    assert text.count("<svg") == text.count("</svg>") == 1
    assert "block&lt;0&gt;&amp;/add/0" in text and "block<0>" not in text
    assert "why: stage 1 is the slowest" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), "it needs no network"


def test_seconds() -> None:
    times = [0.0, 4.2e-7, 263e-6, 1e-3, 0.0155, 0.999, 1.0, 75.5]
    assert [seconds(time) for time in times] == [
        "0 us", "0 us", "263 us", "1.0 ms", "15.5 ms", "999.0 ms", "1.00 s", "75.50 s",
    ]  # fmt: skip


def test_count() -> None:
    assert count(1, "row") == "1 row"
    assert count(0, "row") == "0 rows"
    assert count(2, "micro-batch", "micro-batches") == "2 micro-batches"


@pytest.mark.parametrize(("columns", "width"), [("80", 100), ("180", 180)])
def test_a_page_is_a_hundred_columns_at_least(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert console().width == 100  # no terminal
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    assert console().width == width
