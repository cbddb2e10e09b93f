"""Check that the parts of a plan agree: stages, the tensors they exchange, ranks on devices.

Each check calls `refuse` with the path of a wrong part, the expected value and the value found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autopipe.cluster.cluster import Cluster
from autopipe.errors import ScheduleError
from autopipe.planfile.parts import Boundary, Mesh, StagePlan
from autopipe.schedules.instructions import parse

ZERO = (0, 1, 2, 3)
"""The ZeRO stages, by what they shard; the lowest is preferred."""

MOST = 1e30
"""What any figure of a plan is below by far, and sums of such figures are finite."""

Refuse = Callable[[str, str, str], None]
"""Raises the error for a part of a plan: its path, what was expected there, what was found."""


def check_stages(stages: Sequence[StagePlan], refuse: Refuse) -> None:
    """Check each stage's figures: none below zero, and only stages of the plan are named; and the
    instruction at which it is fullest."""
    for index, stage in enumerate(stages):
        if stage.zero not in ZERO:
            refuse(f"stages[{index}].zero", f"one of {ZERO}", str(stage.zero))
        if stage.zero != stages[0].zero:
            refuse(f"stages[{index}].zero", f"{stages[0].zero}, as of stage 0", str(stage.zero))
        predicted = stage.predicted
        for part, figures in (("", predicted), ("memory.", predicted.memory)):
            check_figures(vars(figures), f"stages[{index}].predicted.{part}", refuse)
        if predicted.fullest and not _is_of(predicted.fullest, len(stages)):
            asked = f"an instruction of one of {len(stages)} stages, as 0F3"
            refuse(f"stages[{index}].predicted.fullest", asked, repr(predicted.fullest))
        for word in ("receives", "sends"):
            for slot, transfer in enumerate(getattr(stage, word)):
                low, high = (0, index) if word == "receives" else (index + 1, len(stages))
                if not low <= transfer.peer < high:
                    side = "an earlier" if word == "receives" else "a later"
                    refuse(
                        f"stages[{index}].{word}[{slot}].peer",
                        f"{side} stage",
                        str(transfer.peer),
                    )


def _is_of(instruction: str, stages: int) -> bool:
    """Whether a text is an instruction of one of so many stages."""
    try:
        return parse(instruction).stage < stages
    except ScheduleError:
        return False


def check_figures(figures: Mapping[str, object], path: str, refuse: Refuse) -> None:
    """Check that numbers are at least 0, and not so large that their sums are infinite.

    Args:
        path: the path in the plan that stands before their names.
    """
    for name, figure in figures.items():
        if isinstance(figure, int | float):
            if figure < 0:
                refuse(f"{path}{name}", "at least 0", str(figure))
            if figure > MOST:
                refuse(f"{path}{name}", f"at most {MOST:g}", f"{figure:g}")


def check_transfers(stages: Sequence[StagePlan], refuse: Refuse) -> None:
    """Check that what each stage receives is what another one sends to it, and the reverse."""
    for side, other_side in (("sends", "receives"), ("receives", "sends")):
        for index, stage in enumerate(stages):
            for slot, transfer in enumerate(getattr(stage, side)):
                matches = [
                    t
                    for t in getattr(stages[transfer.peer], other_side)
                    if t.name == transfer.name and t.peer == index
                ]
                if matches != [replace(transfer, peer=index)]:
                    refuse(
                        f"stages[{index}].{side}[{slot}]",
                        f"what stages[{transfer.peer}].{other_side} has",
                        f"{transfer} here and {matches[0] if matches else 'nothing'} there",
                    )


def check_mesh(mesh: Mesh, refuse: Refuse) -> None:
    """Check that the degrees are possible, and that each rank is at its coordinate."""
    for name, degree in (("pp", mesh.pp), ("dp", mesh.dp), ("tp", mesh.tp)):
        if degree < 1:
            refuse(f"mesh.{name}", "a degree of at least 1", str(degree))
    world = mesh.pp * mesh.dp * mesh.tp
    if len(mesh.places) != world:
        refuse("mesh.places", f"{world} places (pp * dp * tp)", str(len(mesh.places)))
    for rank, place in enumerate(mesh.places):
        expected = mesh.rank(place.pp, place.dp, place.tp)
        if place.rank != rank or expected != rank:
            refuse(
                f"mesh.places[{rank}]",
                f"rank {rank} = (pp * {mesh.dp} + dp) * {mesh.tp} + tp",
                f"rank {place.rank} at pp={place.pp} dp={place.dp} tp={place.tp}",
            )


def check_boundaries(boundaries: Sequence[Boundary], between: int, refuse: Refuse) -> None:
    """Check that there is one for each of the places between stages, with possible figures."""
    if len(boundaries) != between:
        refuse("boundaries", f"{between}, one between stages", str(len(boundaries)))
    for index, boundary in enumerate(boundaries):
        if boundary.window < 1:
            refuse(f"boundaries[{index}].window", "at least 1", str(boundary.window))
        if boundary.depth < 0:
            refuse(f"boundaries[{index}].depth", "at least 0", str(boundary.depth))


def check_devices(mesh: Mesh, cluster: Cluster, refuse: Refuse) -> None:
    """Check that every rank has a device of its own, and that the cluster has that device."""
    sizes, ranks = cluster.devices_per_node, dict[tuple[int, int], int]()
    for rank, place in enumerate(mesh.places):
        path = f"mesh.places[{rank}]"
        if not 0 <= place.node < len(sizes):
            refuse(f"{path}.node", f"one of {len(sizes)} nodes, from 0", str(place.node))
        if not 0 <= place.local < sizes[place.node]:
            local = str(place.local)
            refuse(f"{path}.local", f"one of the node's {sizes[place.node]} devices, from 0", local)
        holder = ranks.setdefault((place.node, place.local), rank)
        if holder != rank:
            where = f"node {place.node}, device {place.local}"
            refuse(path, "a device of its own", f"{where}, which is rank {holder}'s")
