"""ZeRO-3: shards a stage's parameters, gradients and optimizer state over its data-parallel
ranks, block by block, with torch's `fully_shard`.

    F  block 0 |gather|run|let go|  block 1 |gather|run|let go|         every micro-batch
    B  block 1 |gather|run|reduce-scatter, let go|  block 0 |...        every micro-batch

Each forward and each backward of each micro-batch gathers a block's parameters and lets go of them
after it, so that two blocks at most are whole at a time: the one that runs and, in backward, the
one that is fetched ahead. Each backward reduce-scatters: whole gradients would be as large as what
sharding saves. The sum over micro-batches is kept in the shards. Parameters outside blocks, and
those that several blocks read, form the root's group: whole during a stage's forward, and during
its backward.

Bytes of a rank, with P those of the stage's parameters, G of their gradients, O optimizer bytes per
byte of trainable parameter, n ranks, U the largest block, R the root's group:

    parameters    P/n               always
    gradients     G/n               from the first backward to the next step
    optimizer     O P/n
    in forward    R + 3 U           a block, and the buffers that its gathering goes through
    in backward   2 R + 4 U + 3 V   also its gradients, what is fetched ahead, and the buffers of
                                    the reduce-scatter
    at its end    R + 2 S + S/n     the root's gradients, which are scattered last
    on the link   2 P gathered and G reduce-scattered, per micro-batch

V and S are the bytes of U's and R's gradients as they are summed. (Measured with gloo, torch 2.13,
blocks alone: 2 U + 2 V + V/n, and up to 6.5 U in fp32; the end to the byte. gloo has a copy of what
it scatters.)

Where the parameters P are fp32 masters of 16-bit ones, shards are cast before they are gathered: U,
R and what is gathered on the link are half as large, and no rank ever has a whole master. Gradients
are made in 16 bits, and cast before they are scattered: their sums, over ranks and over
micro-batches, are of the master's dtype.

Under CPU offload the P/n, G/n and O P/n are the host's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from autopipe.errors import ModelError
from autopipe.ir.graph import StateSpec
from autopipe.runtime.parameters.gradient_sum import GradientSum
from autopipe.runtime.parameters.row_shards import own_rows
from autopipe.runtime.parameters.sharded_stage import Home, ShardedStage, install
from autopipe.stages import block_owners as units


def shard_stage(
    module: fx.GraphModule,
    states: Mapping[str, Tensor],
    group: dist.ProcessGroup,
    *,
    specs: Mapping[str, StateSpec] | None = None,
    offload: bool = False,
) -> ShardedStage:
    """Shard a stage's parameters over `group`; every rank of it calls this.

    The memory of a whole parameter is free once nobody else holds it: forget `states`.

    Args:
        module: the stage, lowered for training; its blocks say what is gathered together.
        states: its parameters, buffers and constants, by the model's names.
        group: the data-parallel ranks of the stage, in the order of their coordinates.
        specs: what the stage's nodes read of them, if some are fp32 masters of 16-bit parameters.
        offload: keep shards, their gradients and the optimizer's state in the host's memory.

    Raises:
        ModelError: the trainable parameters of a block are of different dtypes.
    """
    root = Home()
    for name, tensor in states.items():
        install(root, name, tensor)
    names = [name for name, tensor in states.items() if isinstance(tensor, nn.Parameter)]
    owner = units.owners(root, module, names)
    blocks = _inner_first(owner.values())
    for name, path in owner.items():
        if path is None and any(name.startswith(f"{block}.") for block in blocks):
            # It stands under a block, which is to ignore it; here the root finds it.
            install(root, f"autopipe_shared.{name.replace('.', '_')}", root.get_parameter(name))
    device = next(iter(states.values())).device.type
    mesh = DeviceMesh.from_group(group, device)
    policy = CPUOffloadPolicy(pin_memory=device != "cpu") if offload else OffloadPolicy()
    # It warns of every view, because one written in place later would lose its hook: such blocks
    # are no units here. For the whole process: it warns in each forward, where `catch_warnings`
    # would make every other warning new again, and is not safe with threads.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    gathered: dict[str, FSDPModule] = {}
    for path in [*blocks, None]:
        place = root.get_submodule(path or "")
        own = [name for name in names if owner[name] == path]
        _check_dtypes(path, {name: root.get_parameter(name) for name in own})
        others = {root.get_parameter(n) for n in names if path is not None and owner[n] is None}
        unit = fully_shard(
            place,
            mesh=mesh,
            reshard_after_forward=True,
            mp_policy=_precision([specs[name] for name in own] if specs else ()),
            offload_policy=policy,
            ignored_params=others,
        )
        unit.set_gradient_divide_factor(1.0)  # losses are seeded with their share: a sum
        unit.set_force_sum_reduction_for_comms(True)
        if path is not None:
            gathered[path] = unit
    return ShardedStage(root, gathered, owner)


class FullyShardedSum:
    """The gradients of the sharded stages of a rank: reduced over replicas already.

    What is left are the sums of those parameters of which several ranks of a data-parallel
    coordinate have the same rows: that stages on several ranks use, and whose gradient is in parts
    on tensor-parallel ranks.

    Args:
        stages: this rank's stages, each in shards.
        copies: the group of each of these names, which is of such ranks.

    Raises:
        ModelError: two stages of this rank use one parameter.
    """

    def __init__(
        self, stages: Mapping[int, ShardedStage], copies: Mapping[str, dist.ProcessGroup]
    ) -> None:
        self.rows: dict[str, tuple[int, int]] = {}
        self._whole: dict[str, nn.Parameter] = {}
        self._shards: dict[str, nn.Parameter] = {}
        self._copies = copies
        for number, stage in stages.items():
            for name, parameter in stage.parameters.items():
                if name in self._whole:
                    raise ModelError(
                        f"parameter {name} is used by stage {number} and by another stage of the "
                        "same rank, which ZeRO-3 would shard twice",
                        hint="plan with zero=1, or a schedule with one stage a rank",
                    )
                self._whole[name] = parameter
                whole = cast(DTensor, parameter.detach())
                ranks = whole.device_mesh
                self.rows[name] = own_rows(len(whole), ranks.size(), ranks.get_local_rank())
                self._shards[name] = nn.Parameter(whole.to_local(), parameter.requires_grad)
        copied = {n: s for n, s in self._shards.items() if n in copies}
        self._sum = GradientSum(copied, copies, {})

    def shards(self) -> Mapping[str, nn.Parameter]:
        """By name, this rank's rows: the very memory of the DTensors, without their dispatch."""
        return self._shards

    def begin(self, stage: int) -> None:
        """Nothing: `fully_shard` has its own hooks."""

    def arm(self, stage: int) -> None:
        """Nothing: every backward has reduced its gradients."""

    def finish(self) -> None:
        """Hand the gradients to the shards, and sum those of copies.

        Raises:
            LaunchError, ScheduleError: as `GradientSum.finish`.
        """
        for name, parameter in self._whole.items():
            if parameter.grad is not None:
                self._shards[name].grad = cast(DTensor, parameter.grad).to_local()
                parameter.grad = None
        self._sum.finish()

    def gather(self) -> None:
        """Nothing: every forward and backward gathers what it uses."""

    def master(self, name: str) -> None:
        """None: the stage's DTensors are what is updated."""

    def owned_gradients(self) -> dict[str, Tensor]:
        """Those of the shards; of copies, the first one's."""
        return {
            name: shard.grad
            for name, shard in self._shards.items()
            if shard.grad is not None
            and (name not in self._copies or dist.get_rank(self._copies[name]) == 0)
        }


def _precision(states: Iterable[StateSpec]) -> MixedPrecisionPolicy:
    """Gather masters in 16 bits if those are read; sum gradients as the masters say."""
    summed = {state.summed.dtype for state in states if state.master is not None}
    low = units.gathered_in(states)
    if not summed or low is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(low, summed.pop(), cast_forward_inputs=False)


def _inner_first(paths: Iterable[str | None]) -> list[str]:
    return sorted({path for path in paths if path is not None}, key=lambda p: (-p.count("."), p))


def _check_dtypes(path: str | None, parameters: Mapping[str, nn.Parameter]) -> None:
    first: dict[torch.dtype, str] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            first.setdefault(parameter.dtype, name)
    if len(first) > 1:
        found = ", ".join(f"{name} is {dtype}" for dtype, name in first.items())
        where = f"block {path}" if path is not None else "the parameters outside blocks"
        raise ModelError(
            f"ZeRO-3 gathers {where} in one go, which takes one dtype: {found}",
            hint="plan with zero=1, which takes any",
        )
