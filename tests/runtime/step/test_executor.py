"""The loop over a rank's program: which stage it calls, what it tells, and how it fails."""

import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from autopipe.runtime.comm.threads import local_network
from autopipe.runtime.launch.words import sentence
from autopipe.runtime.step.executor import Executor
from autopipe.schedules.instructions import Instruction, Kind
from tests.support import inprocess
from tests.support.inprocess import ROWS, cut, ready, run, step
from tests.support.torch_versions import NOTES_LINES_OF_LOSSES
from tests.support.zoo import ZOO


def test_a_rank_may_hold_several_stages() -> None:
    """Four stages on two ranks, as 0 1 0 1 and as the V 0 1 1 0: the gradients of four ranks."""
    split, batch = cut("gpt", 4), ZOO["gpt"].inputs(4 * ROWS)
    expected = run(split, batch, micro_batches=4)
    for schedule in ("interleaved", "zb-v"):
        found = run(split, batch, micro_batches=4, schedule=schedule, chunks=2)
        assert [sorted(executor.stages) for executor in found.executors] == {
            "interleaved": [[0, 2], [1, 3]],
            "zb-v": [[0, 3], [1, 2]],
        }[schedule]
        assert torch.stack([loss for (loss,) in found.losses]).equal(
            torch.stack([loss for (loss,) in expected.losses])
        )
        for name, gradient in expected.gradients.items():
            assert torch.equal(found.gradients[name], gradient), (schedule, name)


def test_it_tells_where_it_is_and_how_long_it_took() -> None:
    split = cut("gpt", 2)
    made, _ = ready(split, split.programs("1f1b", 2))
    places: list[int] = []
    spans: list[tuple[Instruction, float, float]] = []
    made[0].watch = places.append
    made[0].record = lambda *span: spans.append(span)
    step(made, split, ZOO["gpt"].inputs(2 * ROWS), 1 / 2)
    assert places == list(range(len(made[0].program)))
    assert [instruction for instruction, _, _ in spans] == list(made[0].program)
    assert all(began <= ended for _, began, ended in spans)
    for stage, executor in enumerate(made):
        assert executor.seconds[stage, Kind.FORWARD] > 0
        assert executor.seconds[stage, Kind.BACKWARD] > 0


def test_instructions_take_the_seconds_of_the_clock() -> None:
    """A GPU's marks are events; here the clock goes on by a second with each mark."""
    split = cut("gpt", 2)
    programs = split.programs("1f1b", 3)
    made, _ = ready(split, programs)

    class Ticking:
        ticks = 0.0

        def mark(self) -> float:
            self.ticks += 1.0
            return self.ticks

        def seconds(self, marks: Sequence[float]) -> list[float]:
            return [10.0 + mark for mark in marks]

    spans: list[tuple[Instruction, float, float]] = []
    made[0] = Executor(
        list(made[0].stages.values()), programs[0], inprocess.Unsummed(), clock=Ticking()
    )
    made[0].record = lambda *span: spans.append(span)
    step(made, split, ZOO["gpt"].inputs(3 * ROWS), 1 / 3)
    first = 11.0 + np.arange(len(programs[0]))
    assert spans == [(i, t, t + 1) for i, t in zip(programs[0], first, strict=True)]
    assert made[0].seconds[0, Kind.FORWARD] == made[0].seconds[0, Kind.BACKWARD] == 3.0


def test_reductions_begin_before_the_last_backward_and_end_with_the_step() -> None:
    split = cut("gpt", 2)
    told: list[str] = []

    class Told(inprocess.Unsummed):
        def arm(self, stage: int) -> None:
            told.append(f"arm {stage}")

        def finish(self) -> None:
            told.append("finish")

    programs = split.programs("1f1b", 3)
    made, _ = ready(split, programs)
    made[0] = Executor(list(made[0].stages.values()), programs[0], Told())
    made[0].watch = lambda position: told.append(str(programs[0][position]))
    step(made, split, ZOO["gpt"].inputs(3 * ROWS), 1 / 3)
    shown = [word for word in told if word in ("0B1", "0B2", "arm 0", "finish")]
    assert shown == ["0B1", "arm 0", "0B2", "finish"]


def test_the_first_run_may_go_over_another_transport() -> None:
    """As on GPUs, which load kernels in it: NCCL's must not be waiting there meanwhile."""
    split = cut("gpt", 2)
    programs = split.programs("1f1b", 2)
    made, _ = ready(split, programs)
    usual = local_network([0, 1])
    first = [executor.stages[rank].transport for rank, executor in enumerate(made)]
    for rank, executor in enumerate(made):
        runs = [executor.stages[rank]]
        made[rank] = Executor(runs, programs[rank], inprocess.Unsummed(), usual=usual[rank])
    used, losses = [], []
    for _ in range(3):
        used.append([executor.stages[rank].transport for rank, executor in enumerate(made)])
        losses.append(step(made, split, ZOO["gpt"].inputs(2 * ROWS), 1 / 2))
    assert used == [first, usual, usual]
    assert losses[0] == losses[1] == losses[2]


def test_an_error_in_one_stage_ends_all() -> None:
    """Whoever waits for the failed stage raises too, instead of waiting for ever."""
    split = cut("gpt", 3)
    made, _ = ready(split, split.programs("1f1b", 2))

    def fail(*_: object) -> tuple[Tensor, ...]:
        raise FloatingPointError("in stage 1")

    made[1].stages[1].engine.forward = fail  # type: ignore[method-assign]
    with pytest.raises((RuntimeError, FloatingPointError), match="in stage 1"):
        step(made, split, ZOO["gpt"].inputs(2 * ROWS), 1 / 2)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("entry", ["tokens", "labels"])
def test_an_error_of_an_op_has_the_users_line(schedule: str, entry: str) -> None:
    """What a stage runs is code that torch.fx has written: nobody looks for his mistake there.

    Bug: under zb-h1 that code is written from a trace of it with its backward, without lines.
    """
    split = cut("gpt", 1)
    made, _ = ready(split, split.programs(schedule, 1))
    batch = dict(ZOO["gpt"].inputs(ROWS))
    batch[entry] = batch[entry] + 1_000_000
    with pytest.raises(IndexError) as found:
        step(made, split, batch, 1)
    said = sentence(found.value)
    known = entry == "tokens" or NOTES_LINES_OF_LOSSES
    place = r", in the model at .+\.py:\d+" if known else ""
    assert re.fullmatch(rf"IndexError: .+{place}", said)
