"""What ZeRO-3 gathers in one go: the parameters of each block of a stage, and the root's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx, nn

from autopipe.ir.graph import Graph, StateSpec, bytes_at
from autopipe.ir.partition import Stage
from autopipe.stages.block_owners import gathered_in, owners


@dataclass(frozen=True)
class Unit:
    """The parameters that ZeRO-3 gathers in one go: a block's, or the root's."""

    states: Mapping[str, StateSpec]

    @property
    def low(self) -> bool:
        """Whether what is gathered of masters are copies in 16 bits."""
        return gathered_in(self.states.values()) is not None

    @property
    def masters(self) -> list[str]:
        """The names of its parameters that are masters."""
        return [name for name, state in self.states.items() if state.master is not None]

    @property
    def bytes(self) -> tuple[int, int]:
        """As they are gathered, and of their gradients as they are summed."""
        held = [bytes_at(state.held, 1) for state in self.states.values()]
        read = [bytes_at(state.spec, 1) for state in self.states.values()]
        summed = sum(bytes_at(s.summed, 1) for s in self.states.values() if s.trainable)
        return sum(read if self.low else held), summed


def units_of(graph: Graph, stage: Stage, module: fx.GraphModule) -> dict[str | None, Unit]:
    """By the path of the block, what ZeRO-3 gathers of a stage; None: the root's."""
    parameters = [name for name in stage.states if graph.states[name].kind == "parameter"]
    together: dict[str | None, dict[str, StateSpec]] = defaultdict(dict)
    for name, block in owners(_tree(stage.states), module, parameters).items():
        together[block][name] = graph.states[name]
    return {block: Unit(states) for block, states in together.items()}


def _tree(names: Iterable[str]) -> nn.Module:
    """Modules at the paths of the model that have these states."""
    root = nn.Module()
    for name in names:
        place = root
        for part in name.split(".")[:-1]:
            if not hasattr(place, part):
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
    return root
