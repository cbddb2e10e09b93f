"""`Pipe`: this rank's stage of a planned model, and the training step that all ranks run together.

pipe = autopipe.parallelize(model, plan)        on every rank
optimizer = torch.optim.AdamW(pipe.parameters())
loss = pipe.step(batch)                         gradients are this batch's, summed over ranks
pipe.clip_grad_norm_(1.0); optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe import batches
from autopipe.assemble import evaluation_programs, step_programs
from autopipe.binding import Split
from autopipe.errors import ModelError
from autopipe.lower import lower
from autopipe.partition import tied_states
from autopipe.plan import Memory, Place, Plan, StagePrediction
from autopipe.rehearsal import rehearse
from autopipe.runtime.engine import AutogradEngine
from autopipe.runtime.executor import Executor, Step
from autopipe.runtime.gradients import GradientSum
from autopipe.runtime.meter import Meter
from autopipe.runtime.transport import Transport
from autopipe.schedule import Kind, Program


@dataclass(frozen=True)
class Groups:
    """The process groups of one rank; None where the rank would be alone.

    Attributes:
        world: all ranks.
        pipeline: the ranks of this data-parallel coordinate, one per stage.
        shared: of each parameter that stands on other ranks too, all ranks it stands on.
    """

    world: dist.ProcessGroup | None
    pipeline: dist.ProcessGroup | None
    shared: Mapping[str, dist.ProcessGroup]


@dataclass(frozen=True)
class _Ready:
    """A stage lowered for one number of rows and micro-batches, with the program it runs."""

    executor: Executor
    program: Program


class Pipe:
    """One rank's part of a planned model; made by `autopipe.parallelize`.

    Args:
        plan: the plan all ranks share.
        place: this rank's place in it.
        split: the model in training.
        states: this rank's parameters, buffers and constants.
        transport: carries tensors between the stages of this data-parallel coordinate.
        evaluation: traces and cuts the model in evaluation on a batch; called at the first
            `evaluate`.
        seed: of dropout and every other random number of the run.
    """

    def __init__(
        self,
        plan: Plan,
        place: Place,
        split: Split,
        states: Mapping[str, Tensor],
        transport: Transport,
        groups: Groups,
        evaluation: Callable[[Any], Split],
        seed: int,
        device: torch.device,
    ) -> None:
        self.plan = plan
        self.place = place
        self.stage = split.stages[place.pp]
        self.meter: Meter | None = None
        self._split = split
        self._states = states
        self._transport = transport
        self._groups = groups
        self._trace_evaluation = evaluation
        self._evaluation: Split | None = None
        self._seed = seed
        self._device = device
        self._steps = 0
        self._ready: dict[tuple[bool, int, int], _Ready] = {}
        self._last: _Ready | None = None
        names = [n for n, s in split.graph.states.items() if s.trainable]
        self._tied = tied_states(split.stages, names)
        self._reduce = GradientSum(
            dict(self.named_parameters()), groups.shared, frozenset(self._tied)
        )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the model's own names."""
        for name, tensor in self._states.items():
            if isinstance(tensor, nn.Parameter):
                yield name, tensor

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for an optimizer.

        A stage without any gives one of no elements: torch's optimizers refuse an empty list, and
        a training script should not have to know which stages have parameters.
        """
        own = [parameter for _, parameter in self.named_parameters()]
        yield from own or [nn.Parameter(torch.empty(0, device=self._device))]

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's buffers under the model's own names."""
        for name, tensor in self._states.items():
            if self._split.graph.states[name].kind == "buffer":
                yield name, tensor

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's parameters and persistent buffers; all ranks' together are the model's."""
        states = self._split.graph.states
        return {
            name: tensor.detach()
            for name, tensor in self._states.items()
            if states[name].kind == "parameter"
            or (states[name].kind == "buffer" and states[name].persistent)
        }

    def step(self, batch: Any, *, sharded: bool = False) -> Tensor:
        """Run forward and backward of all micro-batches; returns the mean loss, on every rank.

        Afterwards `.grad` of this rank's parameters holds the gradient of this batch alone,
        summed over data-parallel ranks and tied copies; what was in it before is gone.

        Args:
            batch: the whole batch, the same on every rank; each takes its part.
            sharded: `batch` is this data-parallel coordinate's part already.

        Raises:
            ModelError: the batch is not what the plan was made for, its rows do not divide, or
                ranks were given different ones (checked in the first step).
        """
        leaves = batches.flatten(batch)
        if self._steps == 0:
            self._check_same(leaves, sharded)  # first, so that no rank waits for one that refuses
        rows, micro_batches = self._rows(leaves, sharded, self.plan.batch.micro_batches)
        total_rows = rows * micro_batches * self.plan.mesh.dp
        ready = self._last = self._prepare(True, rows, micro_batches)
        for parameter in self.parameters():
            parameter.grad = None
        counted = len(self._split.graph.outputs) == 2
        # A mean is seeded with its share of the batch. A sum is seeded with one over a count that
        # every rank knows before the step, the rows, and set right by the true count after it.
        seed = 1.0 / (total_rows if counted else micro_batches * self.plan.mesh.dp)
        results = self._run(ready, leaves, rows, micro_batches, sharded, seed)
        loss, count = self._mean(results, counted)
        if counted:
            scale = total_rows / count if count else 0.0
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        self._steps += 1
        return loss

    @torch.no_grad()
    def evaluate(self, batch: Any, *, sharded: bool = False) -> Tensor:
        """The mean loss of a batch in evaluation mode, on every rank; nothing else changes.

        The batch's rows need to divide by the data-parallel degree only.

        Raises:
            ModelError: as `step`.
        """
        leaves = batches.flatten(batch)
        if self._evaluation is None:
            self._evaluation = self._trace_evaluation(batch)
        rows, micro_batches = self._rows(leaves, sharded, None)
        ready = self._prepare(False, rows, micro_batches)
        results = self._run(ready, leaves, rows, micro_batches, sharded, 0.0)
        return self._mean(results, len(self._evaluation.graph.outputs) == 2)[0]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most `max_norm`.

        A tied parameter counts once. Returns the norm before, as
        `torch.nn.utils.clip_grad_norm_` does for one process.
        """
        owned = [
            parameter.grad
            for name, parameter in self.named_parameters()
            if parameter.grad is not None
            and min(self._tied.get(name, (self.place.pp,))) == self.place.pp
        ]
        own = torch.nn.utils.get_total_norm(owned).to(self._device, torch.float32)
        norm = self._all_reduce(own**2, self._groups.pipeline).sqrt()
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad.dtype))
        return norm

    def measured(self, optimizer: torch.optim.Optimizer | None = None) -> StagePrediction:
        """What the last step took on this rank, in the plan's own terms.

        Bytes are those of a step run with `pipe.meter = Meter()`.
        """
        assert self._last is not None, "measured() is called after a step"
        seconds = self._last.executor.seconds
        rounds = sum(i.kind is Kind.FORWARD for i in self._last.program)
        parameters = list(self.parameters())
        trainable = [p for p in parameters if p.grad is not None]
        peak = self.meter.at_peak if self.meter is not None else {}
        states = optimizer.state.values() if optimizer is not None else ()
        return StagePrediction(
            seconds[Kind.FORWARD] / rounds,
            seconds[Kind.BACKWARD] / rounds,
            Memory(
                parameters=_bytes(parameters),
                gradients=_bytes([p.grad for p in trainable if p.grad is not None]),
                optimizer=sum(
                    _bytes([t for t in s.values() if isinstance(t, Tensor)]) for s in states
                ),
                buffers=_bytes(
                    [t for t in self._states.values() if not isinstance(t, nn.Parameter)]
                ),
                activations=peak.get("activations", 0),
                transfers=peak.get("transfers", 0),
            ),
        )

    def _prepare(self, training: bool, rows: int, micro_batches: int) -> _Ready:
        """Lower the stage for `rows` rows per micro-batch, once."""
        key = training, rows, micro_batches
        if key not in self._ready:
            split = self._split if training else self._evaluation
            assert split is not None
            stage = split.stages[self.place.pp]
            rehearsal = rehearse(split.graph, split.stages, split.blocks, rows, gradients=training)
            windows = [boundary.window for boundary in self.plan.boundaries]
            boundaries = rehearsal.boundaries
            if training:
                programs = step_programs(
                    self.plan.schedule, split.stages, boundaries, micro_batches, windows
                )
            else:
                programs = evaluation_programs(split.stages, boundaries, micro_batches, windows)
            lowered = lower(
                split.graph,
                stage,
                split.blocks,
                self._states,
                split.trace.reads,
                rows,
                last=self.place.pp == self.plan.mesh.pp - 1,
                device=self._device,
            )
            executor = Executor(
                stage,
                boundaries,
                AutogradEngine(lowered.module),
                self._transport,
                list(self._states.values()),
                self._reduce,
                self._device,
            )
            self._ready[key] = _Ready(executor, programs[self.place.pp])
        return self._ready[key]

    def _run(
        self,
        ready: _Ready,
        leaves: Mapping[str, batches.Leaf],
        rows: int,
        micro_batches: int,
        sharded: bool,
        seed: float,
    ) -> list[tuple[Tensor, ...]]:
        first = 0 if sharded else self.place.dp * rows * micro_batches
        stage = ready.executor.stage

        def inputs(k: int) -> list[Tensor]:
            start = first + k * rows
            cut = batches.slice_rows(self.plan.inputs, leaves, start, start + rows)
            return [_tensor(cut[path]).to(self._device) for path in stage.inputs]

        ready.executor.meter = self.meter
        stream = (self._seed, self._steps, self.place.dp * micro_batches)
        return ready.executor.run(ready.program, Step(inputs, seed, stream))

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
        sums = self._all_reduce(sums, self._groups.world)
        return (sums[0] / sums[1]).to(dtype), float(sums[1])

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

    def _check_same(self, leaves: Mapping[str, batches.Leaf], sharded: bool) -> None:
        """Refuse, on every rank, batches that differ between ranks which must be given the same."""
        if self._groups.world is None:
            return
        refusal: ModelError | None = None
        try:
            rows = batches.rows_of(self.plan.inputs, leaves)
        except ModelError as error:
            rows, refusal = -1, error
        mine = torch.tensor([batches.fingerprint(leaves), rows])
        found = [torch.empty_like(mine) for _ in self.plan.mesh.places]
        dist.all_gather(found, mine, group=self._groups.world)
        for place in self.plan.mesh.places:
            first = place.dp * self.plan.mesh.tp if sharded else 0
            if found[place.rank][0] != found[first][0]:
                whose = f"of data-parallel coordinate {place.dp} " if sharded else ""
                raise ModelError(
                    f"ranks {whose}were given different batches: rank {first} and rank "
                    f"{place.rank}",
                    hint="every rank passes the same batch to step; a rank that passes its own "
                    "part says step(batch, sharded=True)",
                )
        if refusal is not None:
            raise refusal
        for place in self.plan.mesh.places:
            other = int(found[place.rank][1])
            if other != rows:
                what = f"{other} rows" if other >= 0 else "a batch that does not fit the plan"
                raise ModelError(
                    f"rank {self.place.rank} was given {rows} rows, rank {place.rank} {what}: "
                    "the parts of all data-parallel coordinates must be of one size"
                )

    def _all_reduce(self, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        if group is not None:
            dist.all_reduce(tensor, group=group)
        return tensor


def _tensor(leaf: batches.Leaf) -> Tensor:
    assert isinstance(leaf, Tensor), "a stage's inputs are tensors; numbers are in the graph"
    return leaf


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
