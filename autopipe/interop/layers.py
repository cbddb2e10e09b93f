"""A plan's stages in whole layers, as other runtimes count them.

stage 0: embed, blocks.0, blocks.1, half of blocks.2      ->  counts (3, 2), cut ("blocks.2",)
stage 1: the other half, blocks.3, head
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from autopipe.errors import AutopipeError
from autopipe.planfile.contents import Plan


@dataclass(frozen=True)
class Layers:
    """How the repeated blocks of a model lie over its stages.

    Attributes:
        stages: the layers of each stage, by module path; a layer that is cut counts with the stage
            that has more of its parameters, the earlier one if equal.
        cut: layers of which several stages have a part.
        others: for each stage the modules outside of layers whose parameters it has first, without
            the model itself.
    """

    stages: tuple[tuple[str, ...], ...]
    cut: tuple[str, ...]
    others: tuple[tuple[str, ...], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return tuple(map(len, self.stages))

    @property
    def total(self) -> int:
        """Layers of the model."""
        return sum(self.counts)

    @property
    def even(self) -> bool:
        """Whether every stage has as many."""
        return len({*self.counts}) == 1

    def modules(self, stage: int) -> list[str]:
        """All modules of a stage: those before its layers first, where it is the first stage."""
        own, others = [*self.stages[stage]], [*self.others[stage]]
        return [*others, *own] if stage == 0 and len(self.stages) > 1 else [*own, *others]


def layers_of(plan: Plan) -> Layers:
    """The layers of a plan: the members of its largest class of blocks, and of those as large.

    A model without repeated blocks has none.

    Raises:
        AutopipeError: ranks of the plan take turns at stages, which no other tool can express.
    """
    if plan.turns:
        raise AutopipeError(
            f"ranks take turns at the plan's stages, {', '.join(map(str, plan.turns))} of them, "
            "and no other tool has stages on several ranks of a pipeline",
            hint="plan with --turns off",
        )
    most = max((len(block.members) for block in plan.blocks), default=0)
    classes = [block for block in plan.blocks if len(block.members) > 1 or most == 1]
    members = [member for block in classes for member in block.members]
    outermost = [m for m in members if not any(m.startswith(f"{other}.") for other in members)]
    held = {member: Counter[int]() for member in outermost}
    others: list[dict[str, None]] = [{} for _ in plan.stages]
    for index, stage in enumerate(plan.stages):
        for name in stage.parameters:
            layer = _layer(name, held)
            if layer is None:
                module = name.rpartition(".")[0]
                known = any(module in earlier for earlier in others[:index])  # a tied weight's
                if module and not known:
                    others[index][module] = None
            else:
                held[layer][index] += 1
    found: list[list[str]] = [[] for _ in plan.stages]
    for member, stages in held.items():
        if stages:
            found[max(stages, key=lambda stage: (stages[stage], -stage))].append(member)
    return Layers(
        tuple(map(tuple, found)),
        tuple(member for member, stages in held.items() if len(stages) > 1),
        tuple(tuple(each) for each in others),
    )


def _layer(name: str, layers: dict[str, Counter[int]]) -> str | None:
    """The layer that a parameter is of: a beginning of its path."""
    parts = name.split(".")
    paths = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
    return next((path for path in paths if path in layers), None)
