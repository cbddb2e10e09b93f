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

The graphs of a stage are lowered for one number of rows, again for another, and for evaluation; the
parameters are sharded once. So they stand in a tree of plain modules at the model's paths, and the
code of each lowering runs *on* that tree: `bind`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, cast

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

from autopipe.errors import ModelError, PlanError
from autopipe.ir.graph import StateSpec
from autopipe.runtime.parameters.gradient_sum import GradientSum
from autopipe.runtime.parameters.zero1 import own_rows
from autopipe.stages import block_owners as units
from autopipe.stages.recompute import Recomputed

Code = Callable[..., Any]
"""What a graph compiles to: a function of the module that has its parameters, and its arguments."""


class _Home(nn.Module):
    """A place in the model's tree: has parameters, and runs whatever code reads them."""

    def forward(self, code: Code, *arguments: Any) -> Any:
        return code(self, *arguments)


class _On(nn.Module):
    """Code on the module that has its parameters, as a module that is called without it."""

    def __init__(self, home: nn.Module, code: Code) -> None:
        super().__init__()
        self.__dict__["home"] = home  # not a submodule: nothing here is gathered twice
        self._code = code

    def forward(self, *arguments: Any) -> Any:
        return self._code(self.home, *arguments)


def _code(piece: nn.Module, home: nn.Module) -> Code:
    """What a block's module does, as code to run on `home`.

    A recomputed block runs inside of the hooks that gather its parameters.
    """
    if not isinstance(piece, Recomputed):
        return type(piece).forward
    recomputed = Recomputed(_On(home, type(piece.block).forward))
    return lambda _, *arguments: recomputed(*arguments)


class ShardedStage:
    """The states of a stage in shards, and the lowerings that run over them; by `shard_stage`.

    Attributes:
        parameters: by name, each a DTensor on the ranks of the stage.
        units: the modules that are gathered and let go of as one, by their paths.
    """

    def __init__(
        self, root: nn.Module, units: Mapping[str, FSDPModule], owner: Mapping[str, str | None]
    ) -> None:
        self.units = units
        self._root = root
        self._owner = owner
        self._codes = count()
        self.parameters: dict[str, nn.Parameter] = {n: root.get_parameter(n) for n in owner}

    def bind(self, module: fx.GraphModule) -> nn.Module:
        """A module that runs a lowering of this stage over the shards.

        Args:
            module: any lowering of the stage; its own parameters are not used.

        Raises:
            PlanError: when called with gradients enabled, if the lowering has other blocks than the
                one that the stage was sharded by. (Without gradients, the blocks that differ are
                gathered for the whole forward.)
        """
        graph = copy.deepcopy(module.graph)
        for node in graph.find_nodes(op="call_module"):
            # The tree has the parameters and not the code: code goes in as an argument.
            path = units.home(self._root, str(node.target))
            code = _code(module.get_submodule(str(node.target)), self._root.get_submodule(path))
            name = f"autopipe_code_{next(self._codes)}"
            setattr(self._root, name, code)
            with graph.inserting_before(node):
                node.args = (graph.get_attr(name), *node.args)
            node.target = path
        strays = {
            owner
            for name, readers in units.readers(self._root, module).items()
            if (owner := self._owner.get(name)) is not None and readers != {owner}
        }
        whole = type(fx.GraphModule(self._root, graph)).forward
        return _Bound(self._root, whole, [self.units[path] for path in sorted(strays)])

    def whole(self, name: str) -> Tensor:
        """All of a parameter; every rank of the stage calls it, for the same names in one order."""
        return cast(DTensor, self.parameters[name].detach()).full_tensor()


class _Bound(nn.Module):
    def __init__(self, root: nn.Module, code: Code, strays: Sequence[FSDPModule]) -> None:
        super().__init__()
        self.root = root
        self._code = code
        self._strays = strays

    def forward(self, *arguments: Any) -> Any:
        if not self._strays:
            return self.root(self._code, *arguments)
        if torch.is_grad_enabled():
            raise PlanError(
                "a stage under ZeRO-3 was lowered for training with other blocks than it was "
                "sharded by",
                hint="shard it by the lowering for training",
            )
        for unit in self._strays:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        result = self.root(self._code, *arguments)
        for unit in self._strays:
            unit.reshard()
            unit.set_reshard_after_forward(True, recurse=False)
        return result


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
    root = _Home()
    for name, tensor in states.items():
        _install(root, name, tensor)
    names = [name for name, tensor in states.items() if isinstance(tensor, nn.Parameter)]
    owner = units.owners(root, module, names)
    blocks = _inner_first(owner.values())
    for name, path in owner.items():
        if path is None and any(name.startswith(f"{block}.") for block in blocks):
            # It stands under a block, which is to ignore it; here the root finds it.
            _install(root, f"autopipe_shared.{name.replace('.', '_')}", root.get_parameter(name))
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
    """The gradients of the sharded stages of a rank: reduced already, but for tied copies.

    Args:
        stages: this rank's stages, each in shards.
        tied: the group of each name that several stages use: the ranks of this data-parallel
            coordinate that hold one of them. Each has the same rows.

    Raises:
        ModelError: two stages of this rank use one parameter.
    """

    def __init__(
        self, stages: Mapping[int, ShardedStage], tied: Mapping[str, dist.ProcessGroup]
    ) -> None:
        self.rows: dict[str, tuple[int, int]] = {}
        self._whole: dict[str, nn.Parameter] = {}
        self._shards: dict[str, nn.Parameter] = {}
        self._tied = tied
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
        self._sum = GradientSum({n: s for n, s in self._shards.items() if n in tied}, tied, {})

    def shards(self) -> Mapping[str, nn.Parameter]:
        """By name, this rank's rows: the very memory of the DTensors, without their dispatch."""
        return self._shards

    def arm(self, stage: int) -> None:
        """Nothing: every backward has reduced its gradients."""

    def finish(self) -> None:
        """Hand the gradients to the shards, and sum those of tied copies.

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
        """Those of the shards; of tied copies, the first one's."""
        return {
            name: shard.grad
            for name, shard in self._shards.items()
            if shard.grad is not None
            and (name not in self._tied or dist.get_rank(self._tied[name]) == 0)
        }


def _install(root: nn.Module, name: str, tensor: Tensor) -> None:
    """Register a tensor under its dotted name, with homes on the way."""
    *path, leaf = name.split(".")
    module = root
    for part in path:
        if part not in dict(module.named_children()):
            module.add_module(part, _Home())
        module = module.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        if not tensor.is_contiguous():  # `fully_shard` cuts parameters by their memory
            tensor = nn.Parameter(tensor.detach().contiguous(), tensor.requires_grad)
        module.register_parameter(leaf, tensor)
    else:
        module.register_buffer(leaf, tensor)


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
