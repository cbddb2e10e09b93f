"""A stage in shards, as ZeRO-3 holds it: blocks whose parameters are gathered before each use.

sharded = Sharded(Stage(), data_parallel())     this rank's rows; whole tensors have no memory
engine = sharded.by_graphs(x)                   the stage's forward and backward, with gathers
in_flight(Beginning(engine, sharded.sums), micro_batches, seed)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from autopipe.joint.joint_graph import Layout
from autopipe.joint.split_backward import split
from autopipe.joint.wanted import Wanted
from autopipe.runtime.parameters.gradient_sum import Gradients
from autopipe.runtime.parameters.row_shards import RowShards
from autopipe.runtime.parameters.zero3 import GatheredStage, ParameterShards, in_shards
from autopipe.runtime.step.engine import AutogradEngine, Engine, GatheredEngine, JointEngine
from autopipe.stages.gathering import units_of, with_gathers
from autopipe.stages.lower import Lowered
from autopipe.stages.recompute import Recomputed

aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(width, width) / width)
        self.b = nn.Parameter(torch.randn(1, width))
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(width))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        self.seen.add_(1)
        return (aten.tanh.default(self.affine(x)),)

    def affine(self, x: Tensor) -> Tensor:
        shift = aten.mul.Tensor(self.b, self.frozen)
        return aten.add.Tensor(aten.mm.default(x, self.w), shift)  # type: ignore[no-any-return]


class Stage(nn.Module):
    """Calls block a twice, and reads a parameter of b outside of it."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Parameter(torch.randn(width, width) / width)
        self.a, self.b, self.c = Block(width), Block(width), Block(width)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        x = self.a(aten.mm.default(x, self.head))[0]
        x = self.c(self.a(self.b(x)[0])[0])[0]
        return (aten.mm.default(aten.mm.default(x, self.b.w), self.head),)


class Evaluated(Stage):
    """Other blocks than in training: a's parameters are read outside of it."""

    def forward(self, x: Tensor) -> tuple[Tensor]:
        x = aten.tanh.default(self.a.affine(aten.mm.default(x, self.head)))
        x = self.c(self.a(self.b(x)[0])[0])[0]
        return (aten.mm.default(aten.mm.default(x, self.b.w), self.head),)


class _Outer(fx.Tracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return True


def graphs(stage: nn.Module, *, recompute: bool = False) -> fx.GraphModule:
    """A stage as `lower` makes it: a graph that calls a graph for each block."""
    module = fx.GraphModule(stage, _Outer().trace(stage))
    taken: set[str] = set()
    for node in module.graph.find_nodes(op="call_module"):
        block = fx.symbolic_trace(stage.get_submodule(node.target))
        while node.target in taken:
            node.target += "_again"
        taken.add(node.target)
        module.add_submodule(node.target, Recomputed(block) if recompute else block)
    module.recompile()
    return module


def data_parallel() -> dist.ProcessGroup:
    return dist.new_group(list(range(dist.get_world_size())))  # type: ignore[no-any-return]


class Sharded:
    """A stage in shards, as `hold` makes it; its parameters have no memory from now on.

    Args:
        read: the dtype in which parameters are read; those that are trained are fp32 masters.
    """

    def __init__(
        self,
        stage: nn.Module,
        group: dist.ProcessGroup,
        *,
        number: int = 0,
        read: torch.dtype | None = None,
        offload: bool = False,
        copies: Mapping[str, dist.ProcessGroup] | None = None,
    ) -> None:
        rows, parameters = {}, dict[str, nn.Parameter]()
        for name, whole in list(stage.named_parameters()):
            dtype = read or whole.dtype
            parameters[name], rows[name] = in_shards(
                whole, group, dtype, whole.dtype, offload=offload
            )
            place, _, leaf = name.rpartition(".")
            setattr(stage.get_submodule(place), leaf, parameters[name])
        held = RowShards(parameters, dict.fromkeys(parameters, group), rows)
        self.stage = stage
        self.sums = ParameterShards(held, parameters, group, {number: parameters}, copies or {})
        units = units_of(graphs(stage), parameters)
        self.gathered = GatheredStage(held, parameters, group, units)

    def with_gathers(self, module: fx.GraphModule) -> fx.GraphModule:
        return with_gathers(module, self.gathered.units, self.gathered.parameters, self.gathered)

    def by_autograd(self, *, recompute: bool = False) -> Engine:
        engine = AutogradEngine(graphs(self.stage, recompute=recompute))
        return GatheredEngine(engine, self.gathered)

    def by_graphs(self, x: Tensor, *, recompute: bool = False) -> Engine:
        """For micro-batches that look like x."""
        module = graphs(self.stage, recompute=recompute)
        lowered = Lowered(cast(Any, None), module, len(x))
        layout = Layout.of(x)
        joint = split(lowered, [replace(layout, gradient=True)], [layout], wanted=Wanted(False))
        return JointEngine(self.with_gathers(module), joint.mapped(self.with_gathers))

    def has_no_memory(self) -> None:
        for name, parameter in self.gathered.parameters.items():
            assert parameter.untyped_storage().nbytes() == 0, name


def in_flight(engine: Engine, micro_batches: Sequence[Tensor], seed: float) -> None:
    """F0 F1 F2 B0 F3 B1 B2 B3: the first of three stages under 1f1b. The loss is a sum of
    squares."""
    made: dict[int, Tensor] = {}

    def forward(k: int) -> None:
        made[k] = engine.forward(k, [micro_batches[k].clone().requires_grad_()])[0].detach()

    def backward(k: int) -> None:
        engine.backward_input(k, [seed * 2 * made.pop(k)])

    ahead = 3
    for k in range(min(ahead, len(micro_batches))):
        forward(k)
    for k in range(len(micro_batches)):
        backward(k)
        if k + ahead < len(micro_batches):
            forward(k + ahead)


def whole_of(sums: Gradients, name: str) -> Tensor:
    found = sums.master(name)
    assert isinstance(found, DTensor)
    return found.full_tensor()


class Beginning:
    """An engine as the executor runs it: backwards are told to the sums."""

    def __init__(self, engine: Engine, sums: Gradients, number: int = 0) -> None:
        self.forward = engine.forward
        self.backward_weight = engine.backward_weight
        self._engine, self._sums, self._number = engine, sums, number

    def backward_input(
        self, microbatch: int, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        self._sums.begin(self._number)
        return self._engine.backward_input(microbatch, gradients)
