"""The executor: buffers go round, what was sent is gone, and a step leaves nothing behind."""

import weakref

import pytest
import torch
from torch import Tensor

from autopipe import assemble
from autopipe.graph import Ref
from autopipe.runtime.executor import Executor, Pool
from autopipe.schedule import Flow, Instruction, Kind
from tests import inprocess
from tests.inprocess import ROWS, WINDOW, cut, ready, run, step
from tests.zoo import ZOO


def buffers(executor: Executor) -> int:
    """How many receive buffers a stage has made for activations; between steps all are free."""
    return sum(len(free) for free in executor.pool.free.values())


def tables(executor: Executor) -> dict[str, int]:
    """What the executor's tables hold."""
    names = ("_posted", "_sending", "_arrived", "_outgoing", "_unsent", "_gradients")
    return {name: len(getattr(executor, name)) for name in names}


def test_the_pool_gives_back_what_it_got() -> None:
    boundary = cut("gpt", 2).rehearsal.boundaries[cut("gpt", 2).stages[1].receives[0][0]]
    pool = Pool(torch.device("cpu"))
    first, second = pool.take(boundary), pool.take(boundary)
    assert first.data_ptr() != second.data_ptr()
    assert (first.shape, first.stride()) == (boundary.shape, boundary.strides)
    pool.give(boundary, first)
    assert pool.take(boundary) is first


@pytest.mark.parametrize("name", ["gpt", "unet", "t5"])
def test_buffers_are_as_many_as_live_and_posted(name: str) -> None:
    """1F1B, stage s of p: p - s micro-batches live and WINDOW more posted, however many there are.

    The last stage, p = 3: one computed on, two posted ahead.
    """
    split = cut(name, 3)
    for micro_batches in (8, 12):
        made, _ = ready(split)
        batch = ZOO[name].inputs(ROWS * micro_batches)
        for _ in range(2):  # a second step finds the buffers of the first
            step(made, split.programs("1f1b", micro_batches), split, batch, 1 / micro_batches)
            for executor in made:
                live = len(split.stages) - executor.stage.index
                most = (live + WINDOW) * len(executor.stage.receives)
                assert buffers(executor) <= most
                if executor.stage.index == len(split.stages) - 1:
                    tensors = len(executor.stage.receives)
                    assert buffers(executor) == (live + WINDOW) * tensors


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("name", ["gpt", "unet", "t5", "frozen", "mask"])
def test_a_step_leaves_nothing_behind(name: str, schedule: str) -> None:
    split = cut(name, 3)
    made, _ = ready(split)
    step(made, split.programs(schedule, 3), split, ZOO[name].inputs(3 * ROWS), 1 / 3)
    for executor in made:
        assert set(tables(executor).values()) == {0}, tables(executor)


def test_what_was_sent_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After FREE nobody holds an output: not the tables, not autograd's graph (edges alone)."""
    split = cut("gpt", 2)
    made, _ = ready(split)
    sent: dict[int, weakref.ref[Tensor]] = {}
    alive: list[int] = []
    leave, free = Executor._leave, Executor._free

    def note(self: Executor, flow: Flow, k: int, tensors: dict[Ref, Tensor]) -> None:
        leave(self, flow, k, tensors)
        if flow is Flow.ACTIVATION and tensors:
            sent[k] = weakref.ref(next(iter(tensors.values())))

    def look(self: Executor, instruction: Instruction, inputs: inprocess.Step) -> None:
        free(self, instruction, inputs)
        if instruction.flow is Flow.ACTIVATION and sent[instruction.microbatch]() is not None:
            alive.append(instruction.microbatch)

    monkeypatch.setattr(Executor, "_leave", note)
    monkeypatch.setattr(Executor, "_free", look)
    for executor in made:
        executor._methods[Kind.FREE] = lambda i, s, self=executor: look(self, i, s)
    step(made, split.programs("1f1b", 4), split, ZOO["gpt"].inputs(4 * ROWS), 1 / 4)
    assert len(sent) == 4 and alive == []


def test_the_second_step_is_like_the_first() -> None:
    """Buffers that are used again carry nothing over; gradients add up until somebody clears."""
    split, batch = cut("unet", 3), ZOO["unet"].inputs(4 * ROWS)
    made, owned = ready(split)
    programs = split.programs("1f1b", 4)
    step(made, programs, split, batch, 1 / 4)
    first = {n: g.clone() for n, g in inprocess.gradients(owned).items()}
    for own in owned:
        for tensor in own.values():
            tensor.grad = None
    step(made, programs, split, batch, 1 / 4)
    for name, gradient in inprocess.gradients(owned).items():
        assert torch.equal(gradient, first[name]), name


def test_results_are_those_of_the_last_stage() -> None:
    split = cut("counted", 2)
    made, _ = ready(split)
    results = step(made, split.programs("1f1b", 2), split, ZOO["counted"].inputs(2 * ROWS), 1.0)
    assert [len(result) for result in results] == [2, 2]  # (sum, count) of each micro-batch
    labels = ZOO["counted"].inputs(2 * ROWS)["labels"]  # type: ignore[call-overload]
    expected = [int((part != -100).sum()) for part in labels.split(ROWS)]
    assert [int(count) for _, count in results] == expected
    assert made[0]._results == {}


def test_evaluation_runs_forward_alone() -> None:
    """The same losses, no gradient, nothing kept; its buffers are not used again: a loss or an
    output that is still on its way may be a view of one."""
    split, batch = cut("gpt", 3), ZOO["gpt"].inputs(3 * ROWS)
    made, owned = ready(split, metered=True)
    boundaries = split.rehearsal.boundaries
    programs = assemble.evaluation_programs(split.stages, boundaries, 3, [WINDOW] * 2)
    found = step(made, programs, split, batch, 0.0, training=False)
    expected = run(split, batch, micro_batches=3).losses
    assert [loss.item() for (loss,) in found] == [loss.item() for (loss,) in expected]
    assert inprocess.gradients(owned) == {}
    for executor in made:
        assert set(tables(executor).values()) == {0}
        assert buffers(executor) == 0
        assert executor.meter is not None and executor.meter.now.total() == 0


def test_seconds_are_kept_by_kind() -> None:
    split = cut("gpt", 2)
    made, _ = ready(split)
    step(made, split.programs("1f1b", 2), split, ZOO["gpt"].inputs(2 * ROWS), 1 / 2)
    for executor in made:
        assert executor.seconds[Kind.FORWARD] > 0 and executor.seconds[Kind.BACKWARD] > 0


def test_an_error_in_one_stage_ends_all() -> None:
    """Whoever waits for the failed stage raises too, instead of waiting for ever."""
    split = cut("gpt", 3)
    made, _ = ready(split)

    def fail(*_: object) -> tuple[Tensor, ...]:
        raise FloatingPointError("in stage 1")

    made[1].engine.forward = fail  # type: ignore[method-assign]
    with pytest.raises((RuntimeError, FloatingPointError), match="in stage 1"):
        step(made, split.programs("1f1b", 2), split, ZOO["gpt"].inputs(2 * ROWS), 1 / 2)
