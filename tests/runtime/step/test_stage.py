"""A stage: buffers go round, what was sent is gone, and a step leaves nothing behind."""

import weakref

import pytest
import torch
from torch import Tensor

from autopipe.ir.graph import Ref
from autopipe.runtime.step.executor import Executor
from autopipe.runtime.step.stage import Pool, StageRun, StepInput
from autopipe.schedules.generators import forward_only
from autopipe.schedules.instructions import Channel, Flow
from autopipe.stages import step_programs
from tests.support import inprocess
from tests.support.inprocess import ROWS, WINDOW, cut, ready, run, step
from tests.support.long import chosen
from tests.support.zoo import ZOO


def only(executor: Executor) -> StageRun:
    """The stage of a rank that has one."""
    (run,) = executor.stages.values()
    return run


def buffers(run: StageRun) -> int:
    """How many receive buffers a stage has made for activations; between steps all are free."""
    return sum(len(free) for free in run.pool.free.values())


def tables(run: StageRun) -> dict[str, int]:
    """What a stage's tables hold."""
    names = ("_posted", "_sending", "_arrived", "_outgoing", "_unsent", "_gradients")
    return {name: len(getattr(run, name)) for name in names}


def test_the_pool_gives_back_what_it_got() -> None:
    boundary = cut("gpt", 2).rehearsal.boundaries[cut("gpt", 2).stages[1].receives[0][0]]
    pool = Pool(torch.device("cpu"))
    first, second = pool.take(boundary), pool.take(boundary)
    assert first.data_ptr() != second.data_ptr()
    assert (first.shape, first.stride()) == (boundary.shape, boundary.strides)
    pool.give(boundary, first)
    assert pool.take(boundary) is first


@pytest.mark.parametrize("name", chosen(("gpt", "unet", "t5"), now=("gpt", "unet")))
def test_buffers_are_as_many_as_live_and_posted(name: str) -> None:
    """1F1B, stage s of p: p - s micro-batches live and WINDOW more posted, however many there are.

    The last stage, p = 3: one computed on, two posted ahead.
    """
    split = cut(name, 3)
    for micro_batches in (8, 12):
        made, _ = ready(split, split.programs("1f1b", micro_batches))
        batch = ZOO[name].inputs(ROWS * micro_batches)
        for _ in range(2):  # a second step finds the buffers of the first
            step(made, split, batch, 1 / micro_batches)
            for found in map(only, made):
                live = len(split.stages) - found.stage.index
                most = (live + WINDOW) * len(found.stage.receives)
                assert buffers(found) <= most
                if found.stage.index == len(split.stages) - 1:
                    assert buffers(found) == most


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(
    "name",
    chosen(("gpt", "unet", "t5", "frozen", "mask"), now=("gpt", "unet", "frozen", "mask")),
)
def test_a_step_leaves_nothing_behind(name: str, schedule: str) -> None:
    split = cut(name, 3)
    made, _ = ready(split, split.programs(schedule, 3))
    step(made, split, ZOO[name].inputs(3 * ROWS), 1 / 3)
    for found in map(only, made):
        assert set(tables(found).values()) == {0}, tables(found)


def test_what_was_sent_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After FREE nobody holds an output: not the tables, not autograd's graph (edges alone)."""
    split = cut("gpt", 2)
    sent: dict[int, weakref.ref[Tensor]] = {}
    alive: list[int] = []
    leave, free = StageRun._leave, StageRun._free

    def note(self: StageRun, flow: Flow, k: int, tensors: dict[Ref, Tensor]) -> None:
        leave(self, flow, k, tensors)
        if flow is Flow.ACTIVATION and tensors:
            sent[k] = weakref.ref(next(iter(tensors.values())))

    def look(self: StageRun, channel: Channel, k: int, inputs: StepInput) -> None:
        free(self, channel, k, inputs)
        if channel.flow is Flow.ACTIVATION and sent[k]() is not None:
            alive.append(k)

    monkeypatch.setattr(StageRun, "_leave", note)
    monkeypatch.setattr(StageRun, "_free", look)
    made, _ = ready(split, split.programs("1f1b", 4))
    step(made, split, ZOO["gpt"].inputs(4 * ROWS), 1 / 4)
    assert len(sent) == 4 and alive == []


def test_the_second_step_is_like_the_first() -> None:
    """Buffers that are used again carry nothing over; gradients add up until somebody clears."""
    split, batch = cut("unet", 3), ZOO["unet"].inputs(4 * ROWS)
    made, owned = ready(split, split.programs("1f1b", 4))
    step(made, split, batch, 1 / 4)
    first = {n: g.clone() for n, g in inprocess.gradients(owned).items()}
    for own in owned:
        for tensor in own.values():
            tensor.grad = None
    step(made, split, batch, 1 / 4)
    for name, gradient in inprocess.gradients(owned).items():
        assert torch.equal(gradient, first[name]), name


def test_results_are_those_of_the_last_stage() -> None:
    split = cut("counted", 2)
    made, _ = ready(split, split.programs("1f1b", 2))
    results = step(made, split, ZOO["counted"].inputs(2 * ROWS), 1.0)
    assert [len(result) for result in results] == [2, 2]  # (sum, count) of each micro-batch
    labels = ZOO["counted"].inputs(2 * ROWS)["labels"]  # type: ignore[call-overload]
    expected = [int((part != -100).sum()) for part in labels.split(ROWS)]
    assert [int(count) for _, count in results] == expected
    assert only(made[0]).results == {}


def test_evaluation_runs_forward_alone() -> None:
    """The same losses, no gradient, nothing kept; its buffers are not used again: a loss or an
    output that is still on its way may be a view of one."""
    split, batch = cut("gpt", 3), ZOO["gpt"].inputs(3 * ROWS)
    boundaries, forwards = split.rehearsal.boundaries, forward_only((0, 1, 2), 3)
    programs = step_programs.step_programs(forwards, split.stages, boundaries, [WINDOW] * 2)
    made, owned = ready(split, programs, metered=True)
    found = step(made, split, batch, 0.0, training=False)
    expected = run(split, batch, micro_batches=3).losses
    assert [loss.item() for (loss,) in found] == [loss.item() for (loss,) in expected]
    assert inprocess.gradients(owned) == {}
    for executor in made:
        assert set(tables(only(executor)).values()) == {0}
        assert buffers(only(executor)) == 0
        assert executor.meter is not None and executor.meter.now.total() == 0
