"""A stage whose parameters are in shards: the tree of modules that they stand in, and the lowerings
that run over it.

The graphs of a stage are lowered for one number of rows, again for another, and for evaluation; the
parameters are sharded once. So they stand in a tree of plain modules at the model's paths, and the
code of each lowering runs *on* that tree: `bind`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from autopipe.errors import PlanError
from autopipe.stages import block_owners as units
from autopipe.stages.recompute import Recomputed

Code = Callable[..., Any]
"""What a graph compiles to: a function of the module that has its parameters, and its arguments."""


class Home(nn.Module):
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
    """The states of a stage in shards, by `zero3.shard_stage`; its lowerings run over them.

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


def install(root: nn.Module, name: str, tensor: Tensor) -> None:
    """Register a tensor under its dotted name, with homes on the way."""
    *path, leaf = name.split(".")
    module = root
    for part in path:
        if part not in dict(module.named_children()):
            module.add_module(part, Home())
        module = module.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        if not tensor.is_contiguous():  # `fully_shard` cuts parameters by their memory
            tensor = nn.Parameter(tensor.detach().contiguous(), tensor.requires_grad)
        module.register_parameter(leaf, tensor)
    else:
        module.register_buffer(leaf, tensor)
