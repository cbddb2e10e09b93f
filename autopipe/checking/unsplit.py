"""The reference: the user's module, loss and optimizer in one process, as plain PyTorch runs them.

    for each replica, each micro-batch in turn:   loss(model(rows)).backward(share)
    of a loss over the batch:                     loss(model(all rows)).backward()
    gradients                                     added over micro-batches, then over replicas
    the optimizer                                 one step by the gradients that the split has found

Tracing, graphs and the runtime compute nothing here, except the numbers of labels over which losses
are means (planning has compared these with halves of a batch). Parameters of 16 bits are cast
copies of the model's own, autocast is torch's. The optimizer steps by the split's gradients, once
these have been compared: Adam makes a whole step of a gradient that is pure rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopipe.batch.cut import slice_rows
from autopipe.batch.tree import flatten
from autopipe.checking.random_ops import RandomNodes, Unmatched, drawing
from autopipe.checking.subject import SEED
from autopipe.eager.assigned_buffers import buffers_of, put
from autopipe.eager.holders import modules_among
from autopipe.eager.registered import tensors_of
from autopipe.errors import ModelError
from autopipe.frontend.construct import on_cpu
from autopipe.frontend.model_file import ModelFile
from autopipe.frontend.training_mode import put_into
from autopipe.ir.graph import Graph
from autopipe.opaque import branches
from autopipe.planfile.contents import BATCH, Plan
from autopipe.rewriting.label_counts import LabelCounts
from autopipe.runtime.step.microbatches import LabelWeights, LossWeights, Microbatches
from autopipe.stages.precision import AUTOCAST, copy_dtype
from autopipe.tracing.capture.low_precision import MASTER, kept_by, lower, parameters_in
from autopipe.tracing.capture.program import Program


@dataclass
class WholeStep:
    """A step of the unsplit model: the loss, each gradient; and after and before it each replica's
    buffers, with frozen parameters."""

    loss: Tensor
    gradients: dict[str, Tensor]
    norm: Tensor
    buffers: list[dict[str, Tensor]] = field(default_factory=list)
    before: list[dict[str, Tensor]] = field(default_factory=list)


_OF_LOSS = "of the loss: "  # what the names of its buffers begin with


def built(file: ModelFile) -> nn.Module:
    """The model with the weights that the ranks of a run give it, in training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = file.model()
        if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            torch.manual_seed(SEED)
            with on_cpu():
                model = file.model()
    return put_into(model, training=True)


class Unsplit:
    """The unsplit model over the steps of a check.

    Args:
        nodes: gives the random nodes of the model's graph; asked for if the model draws random
            numbers.
        labels: the labels over which the graph's loss is a mean.

    Attributes:
        model: the model with its present parameters.
        frozen: its parameters that are not trained. Each replica has its own, like buffers, since
            forward may write them (a teacher); and its own copies of other tensors that the model
            or the loss keep.
        sparse: the names of parameters whose gradients were sparse: torch adds these up in another
            order.
    """

    def __init__(
        self,
        file: ModelFile,
        plan: Plan,
        nodes: Callable[[], RandomNodes],
        labels: LabelCounts | None,
    ) -> None:
        self.model = built(file)
        self._file = file
        self._plan = plan
        self._kept = kept_by(plan)
        if self._kept is not None and self._kept.optimizer == self._kept.dtype:
            lower(self.model, self._kept.dtype)
        self._ask = nodes
        self._weights = LabelWeights(labels, labels)
        self._nodes: RandomNodes | None = None
        self.frozen = {n: p for n, p in self.model.named_parameters() if not p.requires_grad}
        self._kept_tensors = _kept_tensors(self.model, file)
        self._of_loss = nn.ModuleList(modules_among([] if file.loss is None else [file.loss]))
        self._of_replicas = [self._snapshot()] * plan.mesh.dp  # never written: they get copies
        self._steps = 0
        self._before = self._of_replicas
        self.sparse: set[str] = set()
        trained = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self._optimizer = file.make_optimizer(
            trained or [*self.model.named_parameters()], plan.optimizer
        )

    @property
    def _parts(self) -> tuple[int, int]:
        """Replicas, and micro-batches of each; (1, 1) if the loss is over the batch."""
        plan = self._plan
        return (1, 1) if plan.loss_over == BATCH else (plan.mesh.dp, plan.batch.micro_batches)

    @property
    def averaged(self) -> list[str]:
        """The statistics of batch norms with momentum=None, means over all batches: torch divides
        by a Python number, a graph by a tensor, so the last bit may differ."""
        return [
            f"{path}.{name}".lstrip(".")
            for path, module in self.model.named_modules()
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
            and module.momentum is None
            for name in ("running_mean", "running_var")
        ]

    @property
    def draws(self) -> bool:
        """Whether the steps so far have drawn random numbers."""
        return self._nodes is not None and bool(self._nodes.names)

    def step(self, batch: Any, scale: float) -> WholeStep:
        """Forward and backward of a whole batch; parameters stay as they are.

        Args:
            scale: the loss scale of the split's backward; gradients are without it.

        Raises:
            Unmatched: the model's random ops are not one for each random node of its graph.
            Unrepeatable: as `nodes`.
        """
        plan, kept = self._plan, self._kept
        dp, count = self._parts
        self._before = [*self._of_replicas]
        rows = plan.batch.rows // (dp * count)
        total: dict[str, Tensor] = {}
        results: list[tuple[Tensor, ...]] = []
        with parameters_in(self.model, kept):
            program = Program(
                self.model, batch, self._file.loss, plan.inputs, kept=kept, eager=True
            )
            leaves = flatten(batch)
            # Of all replicas already, as a batch of one replica's own is.
            every = Microbatches(plan, leaves, 0, rows, dp * count, sharded=True)
            weights = self._weights.of(every)
            for replica in range(dp):
                self._restore(self._of_replicas[replica])
                of_replica: dict[str, Tensor] = {}
                for k in range(replica * count, (replica + 1) * count):
                    part = slice_rows(plan.inputs, leaves, k * rows, (k + 1) * rows)
                    results.append(self._micro_batch(program, part, k, weights.loss(k) * scale))
                    _add(of_replica, self._take_gradients())
                self._of_replicas[replica] = self._snapshot()
                _add(total, of_replica)
            self._of_replicas[dp:] = self._of_replicas[:1] * (plan.mesh.dp - dp)  # one pass for all
        return self._finish(total, results, weights, scale)

    def _snapshot(self) -> dict[str, Tensor]:
        """Copies of the tensors that forward and the loss may write."""
        of_loss = {f"{_OF_LOSS}{n}": buffer for n, buffer in buffers_of(self._of_loss).items()}
        return _cloned({**buffers_of(self.model), **of_loss, **self.frozen, **self._kept_tensors})

    @torch.no_grad()
    def _restore(self, states: Mapping[str, Tensor]) -> None:
        """Put such copies back into the model."""
        kept = {**self.frozen, **self._kept_tensors}
        buffers = _cloned({n: s for n, s in states.items() if n not in kept})
        of_loss = {n: buffers.pop(n) for n in [*buffers] if n.startswith(_OF_LOSS)}
        put(self._of_loss, {n.removeprefix(_OF_LOSS): s for n, s in of_loss.items()})
        put(self.model, buffers)
        for name, tensor in kept.items():
            if not torch.equal(tensor, states[name]):  # one that is expanded cannot be written
                tensor.copy_(states[name])

    @torch.no_grad()
    def follow(self, other: Unsplit) -> None:
        """Take the parameters and buffers of another `Unsplit` of the same model."""
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        for parameter, source in pairs:
            parameter.copy_(source)
        self._of_replicas = [dict(buffers) for buffers in other._of_replicas]

    def nudged(self, batch: Any, scale: float, seed: int) -> dict[str, Tensor]:
        """The gradients of the last step once more, with trained parameters off by rounding.

        Each is off by up to half a unit in its last place in the plan's precision, by numbers drawn
        from `seed`. The model, its buffers and its random numbers are left as they were.

        Args:
            batch, scale: those of the last step.
        """
        dtype = copy_dtype(self._plan.precision) or torch.float32
        generator, half = torch.Generator().manual_seed(seed), torch.finfo(dtype).eps / 2
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        exact, after = [p.detach().clone() for p in parameters], self._of_replicas
        self._of_replicas, self._steps = [*self._before], self._steps - 1
        with torch.no_grad():
            for parameter in parameters:
                share = 2 * torch.rand(parameter.shape, generator=generator) - 1
                parameter.mul_(1 + half * share)
        gradients = self.step(batch, scale).gradients
        with torch.no_grad():
            for parameter, before in zip(parameters, exact, strict=True):
                parameter.copy_(before)
        self._of_replicas = after
        return gradients

    def update(self, gradients: Mapping[str, Tensor], factor: Tensor | float) -> None:
        """Step the optimizer by these gradients times `factor`; missing ones are None."""
        for name, parameter in self.model.named_parameters():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient.clone().mul_(factor)
        self._optimizer.step()
        for parameter in self.model.parameters():
            parameter.grad = None

    def _micro_batch(
        self, program: Program, part: Mapping[str, Any], k: int, scale: float
    ) -> tuple[Tensor, ...]:
        """Forward and backward of micro-batch `k` of all replicas'; its loss, or sum and count."""
        plan = self._plan
        tensors = [part[spec.path].clone() for spec in plan.inputs if spec.dtype != "python"]
        before = self._snapshot()
        try:
            found = self._forward(program, tensors, k)
        except Unmatched:
            if self._nodes is not None:
                raise
            self._nodes = self._ask()
            self._restore(before)
            found = self._forward(program, tensors, k)
        results = found if isinstance(found, tuple) else (found,)
        loss = results[0]
        if loss.requires_grad:
            loss.backward(torch.full_like(loss, 1.0 / self._share(results) * scale))
        return tuple(result.detach() for result in results)

    def _share(self, results: Sequence[Tensor]) -> int:
        """The divisor of a micro-batch's loss in the gradient."""
        return self._plan.batch.rows if len(results) > 1 else math.prod(self._parts)

    def _forward(self, program: Program, tensors: Sequence[Tensor], k: int) -> Any:
        dtype = AUTOCAST.get(self._plan.precision)
        cast = torch.autocast("cpu", dtype=dtype) if dtype is not None else nullcontext()
        with ExitStack() as until:
            until.enter_context(torch.random.fork_rng(devices=[]))
            until.enter_context(cast)
            until.enter_context(branches.as_ops(self.model))  # torch's own takes no mode beside it
            step = SEED, self._steps, k
            mode = until.enter_context(drawing(self.model, program.loss, self._nodes, step))
            found = program(*tensors)
        if self._nodes is not None and mode.drawn < len(self._nodes.names):
            raise Unmatched
        return found

    def _take_gradients(self) -> dict[str, Tensor]:
        """The gradients of the micro-batch that has just ended, in the dtype of their sums."""
        found, kept = {}, self._kept
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                if parameter.grad.is_sparse:
                    self.sparse.add(name)
                gradient = parameter.grad.to_dense()
                found[name] = (
                    gradient.to(kept.gradients)
                    if kept is not None and gradient.dtype == kept.dtype
                    else gradient
                )
                parameter.grad = None
        return found

    def _finish(
        self,
        total: dict[str, Tensor],
        results: Sequence[tuple[Tensor, ...]],
        weights: LossWeights,
        scale: float,
    ) -> WholeStep:
        self._steps += 1
        counted = len(results[0]) > 1
        # Of no labels a mean is nan, and weighs nothing.
        pairs = ((weights.loss(k), result[0].double()) for k, result in enumerate(results))
        weighed = [loss * weight if weight else torch.zeros_like(loss) for weight, loss in pairs]
        counts = [float(r[1]) if counted else weights.count(k) for k, r in enumerate(results)]
        divisor = weights.divisor(sum(counts))
        factor = self._share(results[0]) / divisor if divisor else 0.0
        if (kept := self._kept) is not None and kept.optimizer == MASTER:
            total = {n: g.to(MASTER) if g.dtype == kept.gradients else g for n, g in total.items()}
        for gradient in total.values():
            gradient.mul_(factor / scale)
        norm = nn.utils.get_total_norm([*total.values()])
        if scale != 1.0 and not all(bool(g.isfinite().all()) for g in total.values()):
            # fp16 has overflowed: a step that is passed over, whose norm a pipe calls infinite.
            total, norm = {}, torch.tensor(torch.inf)
        loss = (torch.stack(weighed).sum() / divisor).to(results[0][0].dtype)
        return WholeStep(loss, total, norm, [*self._of_replicas], [*self._before])


def check_statistics(plan: Plan, graph: Graph) -> None:
    """Refuse a batch norm with a loss over the whole batch: micro-batches have other statistics.

    Raises:
        ModelError: names the norm's line.
    """
    if plan.mesh.dp * plan.batch.micro_batches == 1:
        return
    for node in graph.nodes:
        if "batch_norm" in node.op:
            raise ModelError(
                f"{node.place}: a batch norm has the statistics of a micro-batch, and the loss is "
                "of the whole batch: the unsplit model, with one batch for both, is another one",
                hint="check with --micro-batches 1 --dp 1",
            )


def _kept_tensors(model: nn.Module, file: ModelFile) -> dict[str, Tensor]:
    """Tensors in plain attributes of model and loss, in an order that does not change."""
    known = {id(buffer) for buffer in model.buffers()}
    found = enumerate(tensors_of(model, *([] if file.loss is None else [file.loss])))
    return {f"beside {n}": tensor for n, tensor in found if id(tensor) not in known}


def _add(total: dict[str, Tensor], terms: Mapping[str, Tensor]) -> None:
    for name, tensor in terms.items():
        total[name] = total[name] + tensor if name in total else tensor


def _cloned(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors; a buffer with two names has one copy."""
    copies = {id(buffer): buffer.detach().clone() for buffer in buffers.values()}
    return {name: copies[id(buffer)] for name, buffer in buffers.items()}
