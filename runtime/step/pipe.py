"""`Pipe`: this rank's part of a planned model, and the training step that all ranks run together.

pipe = autopipe.parallelize(model, plan)        on every rank
optimizer = torch.optim.AdamW(pipe.parameters())
loss = pipe.step(batch)                         gradients are this batch's, summed over ranks
pipe.clip_grad_norm_(1.0); optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe.batch.tree import flatten
from autopipe.errors import AutopipeError
from autopipe.ir.graph import TensorSpec
from autopipe.ir.partition import Stage
from autopipe.planfile.parts import StagePrediction
from autopipe.runtime.launch.watchdog import Watchdog
from autopipe.runtime.parameters.gradient_sum import multiply
from autopipe.runtime.parameters.loss_scale import LossScale
from autopipe.runtime.parameters.model_states import ModelStates
from autopipe.runtime.script.clipping import Clipping
from autopipe.runtime.script.switched import check_around
from autopipe.runtime.script.updates import Since
from autopipe.runtime.step import measured
from autopipe.runtime.step.executor import Executor, Record, Results
from autopipe.runtime.step.kept import Kept
from autopipe.runtime.step.memory_meter import Meter
from autopipe.runtime.step.microbatches import EVEN, LossWeights, Microbatches, divide
from autopipe.runtime.step.outputs import gathered, mean_loss
from autopipe.runtime.step.prepare import Rank
from autopipe.runtime.step.ready import Ready
from autopipe.runtime.step.same_batch import check_same
from autopipe.runtime.step.stage import StepInput
from autopipe.runtime.step.whole_loss import LossOfStep, buffers_restored
from autopipe.stages.bind import Split
from autopipe.stages.precision import copy_dtype


class Pipe(Kept):
    """One rank's part of a planned model; made by `autopipe.parallelize`.

    Args:
        rank: this rank's part of the model, its parameters and its transport.
        own: its tensors under the model's names, also those that forward does not use.
        watchdog: is told which step this rank is in.
        world: the process group of all ranks; None if there is one rank.
        evaluation: traces and cuts the model in evaluation on a batch, with its outputs or
            without; called at the first `evaluate` of either kind and of each length.
        at_length: the same for training, on a batch whose rows have another length than planned.
        seed: the seed of dropout and of all other random numbers of the run.
        clipping: of this rank's gradients.
        unmoved: a context around each step, which may refuse it; told whether the run is resumed.
            It gives the updates since the last step, to compare with other ranks'.

    Attributes:
        device: where this rank's tensors are.
        meter: counts the bytes of the steps that come, if there is one.
        record: called for each instruction, as `Executor.record`.
        loss_scale: the loss scale, under fp16.
        kept: whether the last step's gradients were kept: not if they overflowed.
        row_length: tokens of a row in the last step, the mean over replicas; 0: no sequence.
        steps: the number of steps made, in this run and in the runs that it resumes.
    """

    def __init__(
        self,
        rank: Rank,
        own: ModelStates,
        watchdog: Watchdog,
        world: dist.ProcessGroup | None,
        evaluation: Callable[[Any, bool], Split],
        at_length: Callable[[Any, int], Split],
        seed: int,
        clipping: Clipping,
        unmoved: Callable[[bool], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.plan = rank.part.plan
        self.place = rank.part.place
        self.device = rank.part.device
        self.stages: tuple[Stage, ...] = rank.part.stages
        self.meter: Meter | None = None
        self.record: Record | None = None
        self.kept, self.row_length = True, 0.0
        self.loss_scale = LossScale() if copy_dtype(self.plan.precision) == torch.float16 else None
        self._rank = rank
        self._own = own
        self._split = rank.part.split
        self._gradients = rank.held.gradients
        self._world = world
        self._check_same = partial(check_same, self.plan, self.place, world)
        self._prepared = Ready(rank, at_length, evaluation, watchdog.learn)
        self.seed, self._clipping, self._unmoved, self._resumed = seed, clipping, unmoved, False
        self._watchdog = watchdog
        self.steps = 0
        self._compared = False
        self._evaluated = False
        self._last: Executor | None = None

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for an optimizer.

        A rank without any gives one of no elements: torch's optimizers refuse an empty list, and
        a training script should not have to know which stages have parameters.
        """
        own = [parameter for _, parameter in self.named_parameters()]
        yield from own or [nn.Parameter(torch.empty(0, device=self.device))]

    def trained_anywhere(self) -> dict[str, TensorSpec]:
        """Shape and dtype of every trained parameter of the whole model, in the model's order."""
        specs = self._own.specs.items()
        return {n: spec.held for n, spec in specs if spec.kind == "parameter" and spec.trainable}

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's buffers under the model's own names."""
        for name, tensor in self._rank.held.states.items():
            if self._split.graph.states[name].kind == "buffer":
                yield name, tensor

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as `step` does by itself before it makes new ones."""
        for parameter in (*self.parameters(), *self._trainable()):
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    def train(self, mode: bool = True) -> Pipe:
        """Return the pipe; changes nothing: `step` always trains and `evaluate` evaluates."""
        return self

    def eval(self) -> Pipe:
        """Return the pipe; changes nothing, as `train`."""
        return self

    def __repr__(self) -> str:
        mesh, place = self.plan.mesh, self.place
        stages = ", ".join(str(stage.index) for stage in self.stages)
        count = sum(parameter.numel() for _, parameter in self.named_parameters())
        return (
            f"Pipe(rank {place.rank} of {len(mesh.places)}: stage {stages} of "
            f"{len(self.plan.stages)}, replica {place.dp} of {mesh.dp}, part {place.tp} of "
            f"{mesh.tp}; {self.plan.schedule}, {self.plan.batch.micro_batches} x "
            f"{self._rank.part.rows} rows; "
            f"{count:,} parameters here)"
        )

    def step(self, batch: Any, *, sharded: bool = False) -> Tensor:
        """Run forward and backward of all micro-batches; returns the mean loss, on every rank.

        The loss is a tensor of no dims on the CPU, without a graph, in the dtype of the model's
        loss.

        Afterwards `.grad` of this rank's parameters, on their device, holds the gradient of this
        batch alone, summed over data-parallel ranks and tied copies; its earlier content is gone.
        The optimizer may keep and write it: the next step drops it and makes a new one. If the
        gradients of an fp16 step overflow, every `.grad` is None, which optimizers skip.

        Args:
            batch: the whole batch, the same on every rank; each takes its part.
            sharded: `batch` is this data-parallel coordinate's part already.

        Raises:
            ModelError: the batch is not what the plan was made for, its rows do not divide, or
                ranks were given different ones; no rank has sent anything then. All contents are
                compared in the first step, some in every one. Or gradients are off, or autocast on.
        """
        check_around("step", self.plan.precision, self.device)
        self._attach()
        with self._unmoved(self._resumed) as updates, self._watchdog.at(self.steps):
            loss = self._step(batch, sharded, updates or Since())
        self._resumed, self._compared = False, True
        self.steps += 1
        return loss

    def _step(self, batch: Any, sharded: bool, updates: Since) -> Tensor:
        leaves, first = flatten(batch), not self._compared
        self.row_length = self._check_same(leaves, sharded=sharded, contents=first, updates=updates)
        wanted = self.plan.batch.micro_batches
        parts = divide(self.plan, self.place, leaves, wanted, sharded=sharded)
        split = self._prepared.split(batch)
        executor = self._prepared.executor(split, parts.rows, parts.count, trains=True)
        if self._last is not None and self._last is not executor:
            self._last.idle()
        self._last = executor
        for parameter in (*self.parameters(), *self._trainable()):
            parameter.grad = None
        self._gradients.gather()
        scale = self.loss_scale.scale if self.loss_scale is not None else 1.0
        passes = self._one_pass if split.whole is None else self._two_passes
        loss = passes(executor, split, parts, scale)
        if self.loss_scale is not None:
            self.kept = self.loss_scale.unscale(list(self.parameters()), self._world)
        self._own.project(dict(self.named_parameters()), self._gradients.rows, self.place.tp)
        self._clipping.note()
        return loss

    def _one_pass(
        self, executor: Executor, split: Split, parts: Microbatches, scale: float
    ) -> Tensor:
        """Forward and backward of each micro-batch, and of its own loss."""
        counted = len(split.graph.outputs) == 2
        # Losses are seeded with one over what every rank knows before the step, the number of
        # micro-batches or, of sums, of rows, and set right after it by what they do add up to.
        expected = parts.count * self.plan.mesh.dp * (parts.rows if counted else 1)
        weights = self._prepared.weights(split).of(parts)
        results = self._run(executor, parts, 1.0 / expected * scale, weights)
        loss, divisor = mean_loss(results, weights, counted, self.plan.mesh.tp, self._world)
        if divisor != expected:
            multiply(self.parameters(), expected / divisor if divisor else 0.0)
        return loss

    def _two_passes(
        self, executor: Executor, split: Split, parts: Microbatches, scale: float
    ) -> Tensor:
        """Forward of all micro-batches, the loss of the whole batch, forward and backward again.

        Both forwards draw the same random numbers; buffers keep what the second one writes.
        """
        loss, first, meter = self._prepared.loss(split), executor.first, self.meter
        assert first is not None
        again = replace(parts, leaves=loss.as_given(parts))
        with torch.no_grad():
            results = self._forward(first, split, replace(parts, seeds=loss.nothing(parts)))
        scored = LossOfStep((), {})
        with loss.holding(parts.rows * parts.count, meter if results else None):
            if results:
                numbers = self.seed, self.steps
                scored = loss.score(parts, [*results.values()], numbers, scale, meter)
            self._run(executor, replace(again, seeds=scored.seeds), 1.0)
        found = {0: scored.results} if results else {}
        return mean_loss(found, EVEN, loss.whole.counted, self.plan.mesh.tp, self._world)[0]

    @overload
    def evaluate(self, batch: Any, *, sharded: bool = False) -> Tensor: ...

    @overload
    def evaluate(
        self, batch: Any, *, sharded: bool = False, outputs: Literal[True]
    ) -> tuple[Tensor, Any]: ...

    def evaluate(
        self, batch: Any, *, sharded: bool = False, outputs: bool = False
    ) -> Tensor | tuple[Tensor, Any]:
        """The mean loss of a batch in evaluation mode, a tensor of no dims on every rank's CPU.

        The batch's rows need to divide by the data-parallel degree only; under a plan whose graph
        is of one number of rows (`rows_fixed`), by that number too.

        Args:
            outputs: whether to return, after the loss, the model's own outputs for the whole batch,
                on every rank, in host memory: a tensor [rows, ...] in the batch's order, or a dict
                of such tensors by path (`logits`, `extra.0`). An output without a dim of rows, or
                in which they cannot be told apart, has a first dim of micro-batches instead.

        Raises:
            ModelError: as `step`.
        """
        check_around("evaluate", self.plan.precision, self.device)
        self._attach()
        # Steps use what is made here: no inference tensors. The watchdog is told the last step.
        with torch.inference_mode(False), torch.no_grad(), self._watchdog.at(self.steps - 1):
            return self._evaluate(batch, sharded, outputs)

    def _evaluate(self, batch: Any, sharded: bool, outputs: bool) -> Tensor | tuple[Tensor, Any]:
        leaves = flatten(batch)
        self._check_same(leaves, sharded=sharded, contents=not self._evaluated, call="evaluate")
        self._evaluated = True
        split = self._prepared.split(batch, outputs)
        parts = divide(self.plan, self.place, leaves, None, sharded=sharded)
        executor = self._prepared.executor(split, parts.rows, parts.count, trains=False)
        self._gradients.gather()
        num_outputs = len(split.trace.outputs)
        weights = self._prepared.weights(split).of(parts)
        of_batch = self._prepared.loss(split) if split.whole is not None else None
        if of_batch is not None:
            parts = replace(parts, seeds=of_batch.nothing(parts))
        results = losses = self._forward(executor, split, parts)
        counted = len(split.graph.outputs) - num_outputs == 2
        if of_batch is not None:
            every, numbers = [*results.values()], (self.seed, self.steps)
            losses = {0: of_batch.score(parts, every, numbers, None).results} if every else {}
            counted = of_batch.whole.counted
        loss, _ = mean_loss(losses, weights, counted, self.plan.mesh.tp, self._world)
        if not outputs:
            return loss
        outputs_here = [result[len(result) - num_outputs :] for result in results.values()]
        lasts = [self._rank.part.placed[s.index] for s in split.stages if s.is_last(split.graph)]
        return loss, gathered(split, outputs_here, self.plan, lasts, parts.count, self._world)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most `max_norm`.

        Every rank calls it. A tied parameter counts once. Returns the norm before, as torch's does
        for one process; infinity after a step of fp16 whose gradients overflowed, and are dropped.
        """
        self._meet("clip_grad_norm_")
        if not self.kept:
            return torch.tensor(torch.inf, device=self.device)
        return self._clipping.clip(max_norm, self.device)

    def measured(
        self, optimizer: torch.optim.Optimizer | None = None
    ) -> dict[int, StagePrediction]:
        """What the last step took in each stage of this rank, in the plan's own terms.

        Bytes are those of a step run with `pipe.meter = Meter()`; what two stages of a rank share
        counts with the first.

        Raises:
            AutopipeError: no step has run yet.
        """
        if self._last is None:
            raise AutopipeError(
                "pipe.measured() is of the last step, and none has run yet",
                hint="call pipe.step(batch) first; for bytes too, set pipe.meter = Meter() before",
            )
        return measured.stages_of_step(self._rank, self._last, self.meter, optimizer)

    def _trainable(self) -> Iterator[nn.Parameter]:
        """The whole parameters that backward writes to, of which an optimizer may see shards."""
        for tensor in self._rank.held.states.values():
            if isinstance(tensor, nn.Parameter):
                yield tensor

    def _forward(self, executor: Executor, split: Split, parts: Microbatches) -> Results:
        """The results of a pass without backward, which leaves buffers as they are."""
        with buffers_restored(split.graph, self._rank.held.states):
            return self._run(executor, parts, 0.0)

    def _run(
        self, executor: Executor, parts: Microbatches, seed: float, weights: LossWeights = EVEN
    ) -> Results:
        """The results of each micro-batch, if this rank has the last stage."""
        executor.meter = self.meter
        executor.record = self.record
        stream = (self.seed, self.steps, self.place.dp * parts.count)
        inputs = partial(parts.inputs, device=self.device)
        step = StepInput(inputs, seed, stream, weights)
        results = executor.run(step)
        self._watchdog.between()
        return results
