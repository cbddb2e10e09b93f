"""Runs one rank's program in a loop: each instruction calls a method of its stage.

0F3         stages[0].methods[FORWARD]          what a stage does is in `step.stage`
0B3         gradients.begin(0), and then that   of a backward in halves at W
0REDUCE     gradients.arm(0)                    stage 0's next backward is its last
0STEP       gradients.finish()                  all sums are there

A clock marks the moments between instructions. On a GPU, which runs behind the host, a mark is an
event in the stream that computes: instructions take its seconds, not those of asking for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from autopipe.errors import AutopipeError
from autopipe.runtime.comm.transport import Transport
from autopipe.runtime.launch.words import is_echo, place
from autopipe.runtime.step.memory_meter import Meter
from autopipe.runtime.step.stage import StageRun, StepInput
from autopipe.schedules.instructions import Instruction, Kind, Program
from autopipe.sharding.column_linear import all_sums_finished
from autopipe.stages.node_calls import place_of
from autopipe.stages.precision import FP32, Arithmetic


class Sum(Protocol):
    """What the loop needs of `gradient_sum.Gradients`."""

    def begin(self, stage: int) -> None:
        """A backward of `stage` follows, or the half of it that makes its gradients."""

    def arm(self, stage: int) -> None:
        """The next backward of `stage` is its last: what it makes is final."""

    def finish(self) -> None:
        """Return when every gradient of this rank is its sum."""


Watch = Callable[[int], None]
"""Told the position of each instruction in the program before it runs."""

Results = dict[int, tuple[Tensor, ...]]
"""What the graph returns of each micro-batch, by its number."""

Record = Callable[[Instruction, float, float], None]
"""Told after a run when each instruction began and ended, in seconds of `perf_counter`."""


@contextmanager
def _placed() -> Iterator[None]:
    """Within, an error that a stage's code raises has a note of the user's line."""
    try:
        yield
    except AutopipeError:
        raise  # which says itself where
    except Exception as error:
        if not is_echo(error) and (line := place_of(error)):
            place(error, line)
        raise


class Clock(Protocol):
    """Marks moments of what a device computes."""

    def mark(self) -> Any:
        """The moment at which all that was asked of the device by now is done."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """The marks as seconds of `perf_counter`; returns when the last one has come.

        Their differences are exact whenever it is called; what they are, if it is called at once.
        """


class _HostClock:
    """Marks are times of `perf_counter`: by then a CPU has done what it was asked for."""

    def mark(self) -> float:
        return perf_counter()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        return list(marks)


class _StreamClock:
    """Marks are events in the current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        last = marks[-1]
        last.synchronize()
        end = perf_counter()
        return [end - mark.elapsed_time(last) / 1e3 for mark in marks]


def clock_of(device: torch.device) -> Clock:
    """The clock of a rank's device."""
    return _StreamClock(device) if device.type == "cuda" else _HostClock()


class Executor:
    """One rank of one pipeline.

    Args:
        stages: those that the rank holds.
        program: its instructions, as `schedules.transfers.insert` makes them.
        gradients: None for evaluation.
        begin: what a step that begins now computes in.
        clock: of the rank's device; None: of a CPU.
        usual: carries tensors from the second run on; None: what the stages have.

    Attributes:
        first: runs before it in a step of two passes (`step.whole_loss`).
    """

    def __init__(
        self,
        stages: Sequence[StageRun],
        program: Program,
        gradients: Sum | None,
        begin: Callable[[], Arithmetic] = lambda: FP32,
        clock: Clock | None = None,
        usual: Transport | None = None,
    ) -> None:
        self.stages = {run.stage.index: run for run in stages}
        self.program = program
        self.watch: Watch | None = None
        self.record: Record | None = None
        self.first: Executor | None = None
        self._gradients = gradients
        self._begin = begin
        self._clock = clock or _HostClock()
        self._marks: list[Any] = []
        self._usual = usual
        # Looked up once: a pipeline of small micro-batches would notice.
        self._calls = [self._call(i) for i in program]

    @property
    def meter(self) -> Meter | None:
        """Counts what the stages hold, if there is one."""
        return next(iter(self.stages.values())).meter

    @meter.setter
    def meter(self, meter: Meter | None) -> None:
        for run in self.stages.values():
            run.meter = meter

    def run(self, step: StepInput) -> Results:
        """Run one step.

        Returns:
            The graph's results of each micro-batch, by its number, on the rank's device: the loss,
            of no dims, and its count or the model's outputs after it. Empty if this rank has not
            the last stage.
        """
        watch, mark = self.watch, self._clock.mark
        how = self._begin()
        for run in self.stages.values():
            run.begin(how)
        marks = [mark()]
        with all_sums_finished(), _placed():
            for position, call in enumerate(self._calls):
                if watch is not None:
                    watch(position)
                call(step)
                marks.append(mark())
        self._marks = marks
        for run in self.stages.values():
            run.transport = self._usual or run.transport
        if self.record is not None:
            for instruction, (began, ended) in self._spans():
                self.record(instruction, began, ended)
        results = [run.results for run in self.stages.values() if run.results]
        return {k: found[k] for found in results for k in sorted(found)}

    def idle(self) -> None:
        """Let go of receive buffers: another executor, of rows of another length, runs next."""
        for run in self.stages.values():
            run.pool.free.clear()

    @property
    def seconds(self) -> Mapping[tuple[int, Kind], float]:
        """Seconds of the last step, by stage and kind of instruction; a kind without any has 0."""
        found: dict[tuple[int, Kind], float] = defaultdict(float)
        for executor in (self, self.first):
            for instruction, (began, ended) in executor._spans() if executor is not None else ():
                found[instruction.stage, instruction.kind] += ended - began
        return found

    def _spans(self) -> Iterator[tuple[Instruction, tuple[float, float]]]:
        """When each instruction of the last run began and ended."""
        moments = self._clock.seconds(self._marks) if self._marks else ()
        return zip(self.program, pairwise(moments), strict=False)

    def _call(self, instruction: Instruction) -> Callable[[StepInput], None]:
        kind, stage, sums = instruction.kind, instruction.stage, self._gradients
        if kind not in (Kind.REDUCE, Kind.STEP):
            call = self.stages[stage].call(instruction)
            if sums is None or kind not in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                return call
            begin = sums.begin

            def backward(step: StepInput) -> None:
                begin(stage)
                call(step)

            return backward
        assert sums is not None, "programs of evaluation reduce nothing"
        if kind is Kind.REDUCE:
            return lambda step: sums.arm(stage)
        return lambda step: sums.finish()
