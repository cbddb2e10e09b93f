"""Runs one rank's program in a loop: each instruction calls a method of its stage.

0F3         stages[0].methods[FORWARD]          what a stage does is in `step.stage`
0B3         gradients.begin(0), and then that   of a backward in halves at W
0REDUCE     gradients.arm(0)                    stage 0's next backward is its last
0STEP       gradients.finish()                  all sums are there
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Protocol

from torch import Tensor

from autopipe.runtime.step.memory_meter import Meter
from autopipe.runtime.step.stage import StageRun, StepInput
from autopipe.schedules.instructions import Instruction, Kind, Program
from autopipe.sharding.column_linear import all_sums_finished
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
"""Told when each instruction began and ended, in seconds of `perf_counter`."""


class Executor:
    """One rank of one pipeline.

    Args:
        stages: those that the rank holds.
        program: its instructions, as `schedules.transfers.insert` makes them.
        gradients: None for evaluation.
        begin: what a step that begins now computes in.

    Attributes:
        seconds: of the last run, by stage and kind of instruction.
        first: runs before it in a step of two passes (`step.whole_loss`).
    """

    def __init__(
        self,
        stages: Sequence[StageRun],
        program: Program,
        gradients: Sum | None,
        begin: Callable[[], Arithmetic] = lambda: FP32,
    ) -> None:
        self.stages = {run.stage.index: run for run in stages}
        self.program = program
        self.seconds: Mapping[tuple[int, Kind], float] = {}
        self.watch: Watch | None = None
        self.record: Record | None = None
        self.first: Executor | None = None
        self._gradients = gradients
        self._begin = begin
        # Looked up once: a pipeline of small micro-batches would notice.
        keys = list(dict.fromkeys((i.stage, i.kind) for i in program))
        self._calls = [(self._call(i), i, keys.index((i.stage, i.kind))) for i in program]
        self._keys = keys

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
        watch, record = self.watch, self.record
        seconds = [0.0] * len(self._keys)
        how = self._begin()
        for run in self.stages.values():
            run.begin(how)
        with all_sums_finished():
            for position, (call, instruction, key) in enumerate(self._calls):
                if watch is not None:
                    watch(position)
                began = perf_counter()
                call(step)
                ended = perf_counter()
                seconds[key] += ended - began
                if record is not None:
                    record(instruction, began, ended)
        self.seconds = defaultdict(float, zip(self._keys, seconds, strict=True))
        results = [run.results for run in self.stages.values() if run.results]
        return {k: found[k] for found in results for k in sorted(found)}

    def idle(self) -> None:
        """Let go of receive buffers: another executor, of rows of another length, runs next."""
        for run in self.stages.values():
            run.pool.free.clear()

    def include(self, first: Executor) -> None:
        """Count the seconds of a pass that has run before this one with its own."""
        both = {*self.seconds, *first.seconds}
        summed = {key: self.seconds[key] + first.seconds[key] for key in both}
        self.seconds = defaultdict(float, summed)

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
