"""`autopipe explain`: whole screens, as a terminal shows them."""

import re
from dataclasses import replace

import pytest

from autopipe.planfile import predict
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Memory
from autopipe.planfile.work import Spent
from autopipe.report.explain import explain
from tests.support.plans import chain, example_plan

SCREEN = """\
split      2 pipeline stages (pp) x 1 replica (dp) x 1 tensor part (tp), on all 2 devices of
           2xA100-80GB
schedule   1f1b; a step's 8 rows (96 tokens) go through in 4 micro-batches, of b = 2 rows each
predicted  15 ms a step, 532 rows/s; a device waits 20 % of it (the bubble)
speed      3,190 tokens/s/GPU; 51.8 TFLOP/s/GPU, an MFU of 16.6 % (bf16 datasheet: 312 TFLOP/s);
           87.1 GPU hours a billion tokens
memory     18.5 KiB of the 74.3 GiB that tensors may fill, on the fullest device (stage 0)
holding    at B0 of stage 0, in KiB: 4.0 parameters, 4.0 gradients, 8.0 optimizer state, 2.0
           activations (2 micro-batches in flight), 0.5 transfers; besides, 4.8 GiB of margin
recompute  1 block run a second time in backward

where a step goes, on the mean device (the optimizer's own is not counted):
matmuls at peak     ██████████                                                       2.5 ms   16.6 %
matmuls below peak            ██████████                                             2.3 ms   15.3 %
other ops                               ██████████                                   2.4 ms   16.0 %
launches of ops                                   █████                              1.2 ms    8.0 %
recomputation                                          ██████████████                3.6 ms   23.9 %
warm-up, cool-down                                                   █████████████     3 ms   19.9 %
all else                                                                         █  47.2 us    0.3 %

stage  forward  backward  bubble  peak  weights  grads  optimizer  activations  transfers
─────  ───────  ────────  ──────  ────  ───────  ─────  ─────────  ───────────  ─────────
0-1       1 ms      2 ms    20 %  18.5      4.0    4.0        8.0          2.0        0.5
forward, backward: of one micro-batch; bubble: share of a step in which the device does not compute;
peak, in KiB: a device's fullest moment, the sum of the columns after it

one step of a pipeline, to scale:
rank 0: F0 F1       B0--- F2 B1--- F3 B2---    B3---
rank 1:    F0 B0--- F1 B1--- F2 B2--- F3 B3---
F forward; B backward; after them: the number of the micro-batch; blank: nothing to do (the bubble)

why        stage 1 is the slowest
next best  pp=1 dp=2 tp=1, 1 micro-batch, 1f1b (data parallelism alone): 20 ms, 29 % slower, by the
           bubble
           pp=1 dp=1 tp=2, 4 micro-batches, 1f1b: at least 12 % slower, by its bound
"""


def test_a_plan() -> None:
    assert explain(example_plan()) == SCREEN


NARROW = """\
split      2 pipeline stages (pp) x 1 replica (dp) x 1
           tensor part (tp), on all 2 devices of 2xA100-80GB
schedule   1f1b; a step's 8 rows (96 tokens) go through in 4
           micro-batches, of b = 2 rows each
predicted  15 ms a step, 532 rows/s; a device waits 20 % of
           it (the bubble)
speed      3,190 tokens/s/GPU; 51.8 TFLOP/s/GPU, an MFU of
           16.6 % (bf16 datasheet: 312 TFLOP/s); 87.1 GPU
           hours a billion tokens
memory     18.5 KiB of the 74.3 GiB that tensors may fill,
           on the fullest device (stage 0)
holding    at B0 of stage 0, in KiB: 4.0 parameters, 4.0
           gradients, 8.0 optimizer state, 2.0 activations
           (2 micro-batches in flight), 0.5 transfers;
           besides, 4.8 GiB of margin
recompute  1 block run a second time in backward

where a step goes, on the mean device (the optimizer's own
is not counted):
matmuls at peak     ████                     2.5 ms   16.6 %
matmuls below peak      ███                  2.3 ms   15.3 %
other ops                  ████              2.4 ms   16.0 %
launches of ops                █             1.2 ms    8.0 %
recomputation                   ██████       3.6 ms   23.9 %
warm-up, cool-down                    ████     3 ms   19.9 %
all else                                 █  47.2 us    0.3 %

stage  forward  backward  bubble  peak
─────  ───────  ────────  ──────  ────
0-1       1 ms      2 ms    20 %  18.5

stage  weights  grads  optimizer  activations  transfers
─────  ───────  ─────  ─────────  ───────────  ─────────
0-1        4.0    4.0        8.0          2.0        0.5
forward, backward: of one micro-batch; bubble: share of a
step in which the device does not compute; peak, in KiB: a
device's fullest moment, the sum of the columns after it
tensors may fill 74.3 GiB of A100-80GB; the rest is a margin
for CUDA's context and what the allocator loses

one step of a pipeline, to scale:
rank 0: F0 F1       B0--- F2 B1--- F3 B2---    B3---
rank 1:    F0 B0--- F1 B1--- F2 B2--- F3 B3---
F forward; B backward; after them: the number of the
micro-batch; blank: nothing to do (the bubble)

stage 0: 9 nodes, 2 parameter tensors
  from embed/embedding/0
  to   block.0/add/0
  sends block.0/add/0 float32[b, 12, 32] to stage 1, its
    gradient comes back
  recomputed in backward: block.0
stage 1: 10 nodes, 2 parameter tensors
  from block.1/layer_norm/0
  to   head/linear/0

why        stage 1 is the slowest
next best  pp=1 dp=2 tp=1, 1 micro-batch, 1f1b (data
           parallelism alone): 20 ms, 29 % slower, by the
           bubble
           pp=1 dp=1 tp=2, 4 micro-batches, 1f1b: at least
           12 % slower, by its bound
planner dynamic: by its own, rougher estimate this plan
takes 15.5 ms a step and none less than 15 ms, a gap of 3.3
%; the longest path through its programs says 15 ms
"""


def test_the_rest_and_a_narrow_terminal() -> None:
    """Two tables, as one has no room; every line ends before column 60."""
    assert explain(example_plan(), 60, stages=True, why=True) == NARROW


DEEP = """\
split      31 pipeline stages (pp) x 1 replica (dp) x 1 tensor part (tp), on all 31 devices of
           31xA100-80GB
schedule   1f1b; a step's 64 rows go through in 64 micro-batches, of b = 1 row each
predicted  282 ms a step, 227 rows/s; a device waits 32 % of it (the bubble)
speed      7.32 rows/s/GPU
memory     70.0 GiB of the 74.3 GiB that tensors may fill, on the fullest device (stage 0)
holding    in GiB: 20.0 parameters, 20.0 gradients, 10.0 optimizer state, 19.0 activations (31
           micro-batches in flight), 1.0 transfers; besides, 4.8 GiB of margin
recompute  1 block run a second time in backward

where a step goes, on the mean device (the optimizer's own is not counted):
computing           ███████████████████████████████████████████                      192 ms   68.1 %
warm-up, cool-down                                             ████████████████████   90 ms   31.9 %

stage  forward  backward  bubble  peak  weights  grads  optimizer  activations  transfers
─────  ───────  ────────  ──────  ────  ───────  ─────  ─────────  ───────────  ─────────
0-30      1 ms      2 ms    32 %  70.0     20.0   20.0       10.0         19.0        1.0
forward, backward: of one micro-batch; bubble: share of a step in which the device does not compute;
peak, in GiB: a device's fullest moment, the sum of the columns after it

one step of a pipeline, to scale:
rank 0:  FFFFFFFFFF                   BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBB
rank 1:  FFFFFFFFFF                   BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBB
  ...
rank 29:          FBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBB
rank 30:          FBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBB
F forward; B backward; a letter: what takes most of about 2.82 ms; blank: nothing to do (the bubble)

why        stage 1 is the slowest
next best  pp=1 dp=2 tp=1, 1 micro-batch, 1f1b (data parallelism alone): 20 ms, 29 % slower, by the
           bubble
           pp=1 dp=1 tp=2, 4 micro-batches, 1f1b: at least 12 % slower, by its bound
"""


def test_equal_stages_are_folded() -> None:
    """31 of them still fit a screen, and so does the picture."""
    assert explain(predict.with_prediction(chain(31, 64))) == DEEP
    assert len(DEEP.splitlines()) <= 40


def odd_plans() -> list[Plan]:
    """Long names, many stages that all differ, several stages on a rank, hundreds of GiB in one."""
    plan, long = example_plan(), "model." + "encoder.layers.11." * 10 + "linear/0"
    named = tuple(replace(stage, first=long) for stage in plan.stages)
    huge = chain(12, 12, lambda stage: 0.1234, schedule="interleaved", chunks=2)
    full = Memory(*(90 * 2**30,) * 6)
    filled = tuple(
        replace(stage, predicted=replace(stage.predicted, memory=full)) for stage in huge.stages
    )
    return [
        replace(plan, stages=named),
        replace(huge, stages=filled),
        chain(1, 1),
        chain(31, 64, lambda stage: 1e-3 + 1e-5 * stage),
        chain(4, 8, schedule="zb-v", chunks=2),
        chain(2, 4, lambda stage: 0.0),
        chain(2, 4, lambda stage: 1e-6 if stage else 1e-2),
    ]


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("plan", odd_plans())
@pytest.mark.parametrize("columns", [60, 80, 100])
def test_nothing_is_wider_than_the_page_or_cut(plan: Plan, columns: int) -> None:
    screen = explain(plan, columns)
    whole = explain(plan, columns, stages=True, why=True)
    assert max(map(len, (screen + whole).splitlines())) <= columns
    assert "\u2026" not in whole
    for stage in plan.stages:
        assert stage.first in whole.replace("\n    ", "")
    assert len(screen.splitlines()) <= (42 if columns >= 80 else 48)


def test_of_many_unlike_stages_those_that_matter_are_shown() -> None:
    """The first, the slowest, the fullest and the last, here the last of all; those between share a
    row that goes from their least to their most."""
    plan = chain(31, 64, lambda stage: 1e-3 + 1e-5 * stage)
    _, _, below = explain(plan).partition("\nstage  ")
    rows = [line.split()[0] for line in below.splitlines()[2:5]]
    assert rows == ["0", "1-29", "30"]
    assert "\n1-29   1.01-1.29 ms  2.02-2.58 ms  30-45 %  70.0 " in explain(plan)
    assert "a-b: least and most of stages that differ; --stages shows each" in (
        explain(plan).replace("\n", " ")
    )
    every = explain(plan, stages=True)
    assert all(f"\n{stage:<5}  " in every for stage in range(31))


def test_stages_that_look_the_same_are_told_once() -> None:
    """Of the chain the last sends nothing; their names differ in numbers alone."""
    plan = chain(8, 8)
    named = tuple(
        replace(stage, first=f"blocks.{n}/add/0", recompute=(f"blocks.{n}",))
        for n, stage in enumerate(plan.stages)
    )
    told = explain(replace(plan, stages=named), stages=True)
    assert re.findall(r"^stages? [0-9-]+:.*$", told, flags=re.M) == [
        "stages 0-6: 9 nodes, 2 parameter tensors each; stage 0:",
        "stage 7: 9 nodes, 2 parameter tensors",
    ]
    assert told.count("recomputed in backward: blocks.") == 2
    spent = Spent(1.0, 0.0, 0.0, copying=0.002)
    away = [
        replace(stage, offload=("blocks.1", "blocks.2")[: 2 - n % 2])
        for n, stage in enumerate(named)
    ]
    away[0] = replace(away[0], predicted=replace(away[0].predicted, spent=spent))
    told = explain(replace(plan, stages=tuple(away)), stages=True)
    assert "kept in the host's memory: blocks.1-2, 2 ms a micro-batch waited for" in told
    assert told.count("kept in the host's memory: blocks.1") == 8, "of as many blocks, or not alike"


def test_where_there_is_no_other_mesh_nothing_is_said_of_any() -> None:
    plan = example_plan()
    alone = replace(plan, planner=replace(plan.planner, next_best=None, others=()))
    assert "next best" not in explain(alone, why=True)


def test_more_meshes_than_two_are_left_to_why() -> None:
    plan = example_plan()
    (other,) = plan.planner.others
    many = replace(plan, planner=replace(plan.planner, others=(other,) * 3))
    assert explain(many).endswith("by its bound\n           2 more, shown by --why\n")
    assert explain(many, why=True).count("by its bound") == 3
