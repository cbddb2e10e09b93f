"""`Pipe`: this rank's part of a planned model, and the training step that all ranks run together.

pipe = autopipe.parallelize(model, plan)        on every rank
optimizer = torch.optim.AdamW(pipe.parameters())
loss = pipe.step(batch)                         gradients are this batch's, summed over ranks
pipe.clip_grad_norm_(1.0); optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopipe import batches, collectives, files
from autopipe.binding import Split
from autopipe.errors import ModelError
from autopipe.graph import StateSpec, shape_at
from autopipe.least import check_rows
from autopipe.partition import Stage
from autopipe.placements import I, Sharding
from autopipe.plan import Memory, StagePrediction
from autopipe.runtime import ready
from autopipe.runtime.agree import check_same
from autopipe.runtime.executor import Executor, Record
from autopipe.runtime.export import Kept, export
from autopipe.runtime.gradients import Gradients, total_norm
from autopipe.runtime.meter import Meter
from autopipe.runtime.outputs import gathered
from autopipe.runtime.ready import Rank
from autopipe.runtime.scaling import LossScale
from autopipe.runtime.stage import Step
from autopipe.runtime.watchdog import Watchdog
from autopipe.schedule import Kind


class Pipe:
    """One rank's part of a planned model; made by `autopipe.parallelize`.

    Args:
        rank: this rank's states and place.
        split: the model in training.
        gradients: how this rank holds its parameters, and sums their gradients.
        world: the process group of all ranks; None if there is one rank.
        evaluation: traces and cuts the model in evaluation on a batch, with its outputs or
            without; called at the first `evaluate` of either kind.
        seed: of dropout and every other random number of the run.
        watchdog: is told where this rank is.
        sharding: how parameters lie over tensor-parallel ranks.
        model_states: all that the model owns, whole; None: what its graph reads.
        unused: what it owns and forward does not use, on the rank that keeps it.

    Attributes:
        meter: counts the bytes of the steps that come, if there is one.
        record: as an `Executor` has it.
        loss_scale: under fp16.
    """

    def __init__(
        self,
        rank: Rank,
        split: Split,
        gradients: Gradients,
        world: dist.ProcessGroup | None,
        evaluation: Callable[[Any, bool], Split],
        seed: int,
        watchdog: Watchdog,
        sharding: Sharding | None = None,
        *,
        model_states: Mapping[str, StateSpec] | None = None,
        unused: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.plan = rank.plan
        self.place = rank.place
        self.stages: tuple[Stage, ...] = tuple(split.stages[index] for index in rank.stages)
        self.meter: Meter | None = None
        self.record: Record | None = None
        self.loss_scale = LossScale() if rank.plan.precision == "fp16" else None
        self._rank = rank
        self._split = split
        self._gradients = gradients
        self._world = world
        self._trace_evaluation = evaluation
        self._evaluations: dict[bool, Split] = {}
        self._seed = seed
        self._watchdog = watchdog
        self._sharding = sharding or Sharding(1, {}, {})
        self._model_states = model_states or split.graph.states
        self._unused = unused or {}
        self._steps = 0
        self._ready: dict[tuple[int, int, int], Executor] = {}
        self._last: Executor | None = None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What this rank's optimizer updates, under the model's own names.

        Whole parameters, or under ZeRO this rank's shards of them.
        """
        yield from self._gradients.shards().items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for an optimizer.

        A rank without any gives one of no elements: torch's optimizers refuse an empty list, and
        a training script should not have to know which stages have parameters.
        """
        own = [parameter for _, parameter in self.named_parameters()]
        yield from own or [nn.Parameter(torch.empty(0, device=self._rank.device))]

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's buffers under the model's own names."""
        for name, tensor in self._rank.states.items():
            if self._split.graph.states[name].kind == "buffer":
                yield name, tensor

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of the gradients, as `step` does by itself before it makes new ones."""
        for parameter in (*self.parameters(), *self._trainable()):
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    def train(self, mode: bool = True) -> Pipe:
        """Nothing, and the pipe: `step` trains and `evaluate` evaluates, whatever was said."""
        return self

    def eval(self) -> Pipe:
        """Nothing, and the pipe: as `train`."""
        return self

    def __repr__(self) -> str:
        mesh, place = self.plan.mesh, self.place
        stages = ", ".join(str(stage.index) for stage in self.stages)
        count = sum(parameter.numel() for _, parameter in self.named_parameters())
        return (
            f"Pipe(rank {place.rank} of {len(mesh.places)}: stage {stages} of "
            f"{len(self.plan.stages)}, replica {place.dp} of {mesh.dp}, part {place.tp} of "
            f"{mesh.tp}; {self.plan.schedule}, {self.plan.batch.micro_batches} x "
            f"{self.plan.batch.rows // (mesh.dp * self.plan.batch.micro_batches)} rows; "
            f"{count:,} parameters here)"
        )

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's parameters and persistent buffers; all ranks' together are the model's.

        A tied tensor has all its names; what forward does not use is with rank 0. Every rank calls
        it: what is dealt out over tensor-parallel ranks, or under ZeRO-1, is gathered first. Under
        ZeRO-3 the rest are DTensors, of which each rank has its part.
        """
        self._gradients.gather()
        return {
            key: tensor
            for name, names in self._saved().items()
            for tensor in [self._whole(name, self._own(name))]
            for key in names
        }

    def save(self, path: str | Path) -> None:
        """Write the whole model, by its own names, as a safetensors file; every rank calls it.

        `model.load_state_dict(safetensors.torch.load_file(path))` takes it. Rank 0 writes; no rank
        holds more than one tensor beside its own. The file is there whole or not at all.

        Raises:
            AutopipeError: it cannot be written.
        """
        path = Path(path)
        files.check_model(path)
        self._gradients.gather()
        kept = []
        for name, names in self._saved().items():
            shape = tuple(shape_at(self._model_states[name].spec, 1))
            kept.append(Kept(names, shape, self._own(name).dtype))

        def whole(name: str) -> Tensor:
            tensor = self._whole(name, self._own(name))
            return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

        export(path, kept, whole, self.place, self._world)

    def _saved(self) -> dict[str, tuple[str, ...]]:
        """All names of what a state dict has of this rank."""
        found = {}
        for name in (*self._rank.states, *self._unused):
            state = self._model_states[name]
            if state.kind == "parameter" or (state.kind == "buffer" and state.persistent):
                found[name] = (name, *state.aliases)
        return found

    def _own(self, name: str) -> Tensor:
        """What this rank has of a tensor."""
        states = self._unused if name in self._unused else self._rank.states
        return states[name].detach()

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of which each tensor-parallel rank has a part, put together."""
        lies = self._sharding.states.get(name, I)
        if not lies.sharded:
            return tensor
        if isinstance(tensor, DTensor):  # rows of a part
            tensor = tensor.full_tensor()
        return collectives.whole(tensor, collectives.TENSOR_PARALLEL, lies)

    def step(self, batch: Any, *, sharded: bool = False) -> Tensor:
        """Run forward and backward of all micro-batches; returns the mean loss, on every rank.

        Afterwards `.grad` of this rank's parameters holds the gradient of this batch alone,
        summed over data-parallel ranks and tied copies; what was in it before is gone. If the
        gradients of an fp16 step overflow, every `.grad` is None: optimizers then pass over it.

        Args:
            batch: the whole batch, the same on every rank; each takes its part.
            sharded: `batch` is this data-parallel coordinate's part already.

        Raises:
            ModelError: the batch is not what the plan was made for, its rows do not divide, or
                ranks were given different ones; no rank has sent anything then. Contents are
                compared in the first step, numbers of rows in every one.
        """
        with self._watchdog.at(self._steps):
            loss = self._step(batch, sharded)
        self._steps += 1
        return loss

    def _step(self, batch: Any, sharded: bool) -> Tensor:
        leaves = batches.flatten(batch)
        self._check_same(leaves, sharded, contents=self._steps == 0)
        rows, micro_batches = self._rows(leaves, sharded, self.plan.batch.micro_batches)
        total_rows = rows * micro_batches * self.plan.mesh.dp
        executor = self._last = self._prepare(self._split, rows, micro_batches)
        self._gradients.gather()
        for parameter in (*self.parameters(), *self._trainable()):
            parameter.grad = None
        counted = len(self._split.graph.outputs) == 2
        # A mean is seeded with its share of the batch. A sum is seeded with one over a count that
        # every rank knows before the step, the rows, and set right by the true count after it.
        seed = 1.0 / (total_rows if counted else micro_batches * self.plan.mesh.dp)
        scale = self.loss_scale.scale if self.loss_scale is not None else 1.0
        results = self._run(executor, leaves, rows, micro_batches, sharded, seed * scale)
        loss, count = self._mean(results, counted)
        if counted and count != total_rows:
            _scale(self.parameters(), total_rows / count if count else 0.0)
        if self.loss_scale is not None:
            self.loss_scale.unscale(list(self.parameters()), self._world)
        return loss

    @overload
    def evaluate(self, batch: Any, *, sharded: bool = False) -> Tensor: ...

    @overload
    def evaluate(
        self, batch: Any, *, sharded: bool = False, outputs: Literal[True]
    ) -> tuple[Tensor, Any]: ...

    @torch.no_grad()
    def evaluate(
        self, batch: Any, *, sharded: bool = False, outputs: bool = False
    ) -> Tensor | tuple[Tensor, Any]:
        """The mean loss of a batch in evaluation mode, on every rank; nothing else changes.

        The batch's rows need to divide by the data-parallel degree only.

        Args:
            outputs: whether to give, after the loss, what the model itself gave for the whole
                batch, on every rank, in host memory: a tensor [rows, ...] in the batch's order, or
                a dict of such by their paths (`logits`, `extra.0`). One without a dim of rows has
                a first dim of the micro-batches instead.

        Raises:
            ModelError: as `step`.
        """
        with self._watchdog.at(self._steps - 1):  # the last one still
            return self._evaluate(batch, sharded, outputs)

    def _evaluate(self, batch: Any, sharded: bool, outputs: bool) -> Tensor | tuple[Tensor, Any]:
        leaves = batches.flatten(batch)
        self._check_same(leaves, sharded, contents=not self._evaluations)
        if outputs not in self._evaluations:
            self._evaluations[outputs] = self._trace_evaluation(batch, outputs)
        split = self._evaluations[outputs]
        rows, micro_batches = self._rows(leaves, sharded, None)
        executor = self._prepare(split, rows, micro_batches)
        self._gradients.gather()
        results = self._run(executor, leaves, rows, micro_batches, sharded, 0.0)
        paths = split.trace.outputs
        counted = len(split.graph.outputs) - len(paths) == 2
        loss, _ = self._mean(results, counted)
        if not outputs:
            return loss
        own = [result[1 + counted :] for result in results]
        return loss, gathered(split, own, self.plan, self._rank.compute, self._world)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most `max_norm`.

        Over all stages and shards; a tied parameter counts once. Returns the norm before, as
        `torch.nn.utils.clip_grad_norm_` does for one process.
        """
        owned = self._gradients.owned_gradients().items()
        lies, first = self._sharding.states, self.place.tp == 0
        counted = [g for name, g in owned if first or lies.get(name, I) != I]
        norm = total_norm(counted, self._world, self._rank.device)
        _scale(self.parameters(), torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def measured(
        self, optimizer: torch.optim.Optimizer | None = None
    ) -> dict[int, StagePrediction]:
        """What the last step took in each stage of this rank, in the plan's own terms.

        Bytes are those of a step run with `pipe.meter = Meter()`; what two stages of a rank share
        counts with the first.
        """
        assert self._last is not None, "measured() is called after a step"
        found: dict[int, StagePrediction] = {}
        seen: set[str] = set()
        for stage in self.stages:
            own = [name for name in stage.states if name not in seen]
            seen |= set(own)
            found[stage.index] = self._measured(stage.index, own, self._last, optimizer)
        return found

    def _measured(
        self,
        stage: int,
        names: Sequence[str],
        executor: Executor,
        optimizer: torch.optim.Optimizer | None,
    ) -> StagePrediction:
        rounds = sum(i.kind is Kind.FORWARD and i.stage == stage for i in executor.program)
        backward = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        seconds = executor.seconds
        kinds = {name: self._split.graph.states[name].kind for name in names}
        shards = dict(self._gradients.shards())
        parameters = [self._rank.states[n] for n in names if kinds[n] == "parameter"]
        buffers = [self._rank.states[n] for n in names if kinds[n] != "parameter"]
        trained = [n for n in names if n in shards and shards[n].grad is not None]
        peak = self.meter.at_peak if self.meter is not None else {}
        held = optimizer.state if optimizer is not None else {}
        return StagePrediction(
            seconds[stage, Kind.FORWARD] / rounds,
            sum(seconds[stage, kind] for kind in backward) / rounds,
            Memory(
                parameters=_bytes(parameters),
                gradients=_bytes([self._rank.states[n] for n in trained]),
                optimizer=sum(
                    _bytes([t for t in held[shards[n]].values() if isinstance(t, Tensor)])
                    for n in trained
                    if shards[n] in held
                ),
                buffers=_bytes(buffers),
                activations=peak.get((stage, "activations"), 0),
                transfers=peak.get((stage, "transfers"), 0),
            ),
        )

    def _trainable(self) -> Iterator[nn.Parameter]:
        """The whole parameters that backward writes to, of which an optimizer may see shards."""
        for tensor in self._rank.states.values():
            if isinstance(tensor, nn.Parameter):
                yield tensor

    def _prepare(self, split: Split, rows: int, micro_batches: int) -> Executor:
        """What runs a batch of this shape; made once."""
        key = id(split), rows, micro_batches
        if key not in self._ready:
            if split is self._split:
                check_rows(split.graph, rows)
                made = ready.training(self._rank, split, rows, self._gradients)
            else:
                made = ready.evaluation(self._rank, split, rows, micro_batches)
            made.watch = self._watchdog.learn(made.program)
            self._ready[key] = made
        return self._ready[key]

    def _run(
        self,
        executor: Executor,
        leaves: Mapping[str, batches.Leaf],
        rows: int,
        micro_batches: int,
        sharded: bool,
        seed: float,
    ) -> list[tuple[Tensor, ...]]:
        first = 0 if sharded else self.place.dp * rows * micro_batches

        def inputs(stage: Stage, k: int) -> list[Tensor]:
            start = first + k * rows
            cut = batches.slice_rows(self.plan.inputs, leaves, start, start + rows)
            return [_tensor(cut[path]).to(self._rank.device) for path in stage.inputs]

        executor.meter = self.meter
        executor.record = self.record
        stream = (self._seed, self._steps, self.place.dp * micro_batches)
        results = executor.run(Step(inputs, seed, stream))
        self._watchdog.between()
        return results

    def _mean(self, results: Sequence[tuple[Tensor, ...]], counted: bool) -> tuple[Tensor, float]:
        """The loss of the whole batch from those of the last stages' micro-batches, everywhere."""
        sums = torch.zeros(2, dtype=torch.float64)
        dtype = torch.float32
        if results:
            dtype = results[0][0].dtype
            total = results[0][0].cpu()
            for result in results[1:]:
                total = total + result[0].cpu()
            if counted:
                sums[0], sums[1] = total.double(), sum(float(result[1]) for result in results)
            else:
                sums[0], sums[1] = (total / len(results)).double(), 1.0
        sums = self._all_reduce(sums)
        # Each tensor-parallel rank has told of the same micro-batches.
        return (sums[0] / sums[1]).to(dtype), float(sums[1]) / self.plan.mesh.tp

    def _rows(
        self, leaves: Mapping[str, batches.Leaf], sharded: bool, micro_batches: int | None
    ) -> tuple[int, int]:
        """Rows of a micro-batch, and how many; None: as many as divide, up to the plan's."""
        rows = batches.rows_of(self.plan.inputs, leaves)
        dp = 1 if sharded else self.plan.mesh.dp
        if micro_batches is None and rows % dp == 0:
            most = min(self.plan.batch.micro_batches, rows // dp)
            micro_batches = max(m for m in range(1, most + 1) if rows // dp % m == 0)
        parts = dp * (micro_batches or 1)
        if rows % parts:
            into = f"{micro_batches or 1} micro-batches" + (
                f" on each of {dp} data-parallel ranks" if dp > 1 else ""
            )
            raise ModelError(
                f"the batch has {rows} rows, which do not divide into {into}",
                hint=f"give {max(parts, rows - rows % parts)} rows, or another multiple of {parts}",
            )
        return rows // parts, micro_batches or 1

    def _check_same(
        self, leaves: Mapping[str, batches.Leaf], sharded: bool, *, contents: bool
    ) -> None:
        plan, place, world = self.plan, self.place, self._world
        check_same(plan, place, world, leaves, sharded=sharded, contents=contents)

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        if self._world is not None:
            dist.all_reduce(tensor, group=self._world)
        return tensor


def _scale(parameters: Iterable[nn.Parameter], factor: Tensor | float) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def _tensor(leaf: batches.Leaf) -> Tensor:
    assert isinstance(leaf, Tensor), "a stage's inputs are tensors; numbers are in the graph"
    return leaf


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
