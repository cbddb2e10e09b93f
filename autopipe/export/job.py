"""Put a plan and a user's words together for a launcher: nodes, processes on each, commands."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopipe.cluster.cluster import Cluster, NodeGroup
from autopipe.errors import AutopipeError
from autopipe.export.words import Words, check_text
from autopipe.planfile.contents import Plan
from autopipe.util.numbers import count, seconds


@dataclass(frozen=True)
class Launch:
    """The processes to start on each node.

    Attributes:
        plan: the plan.
        path: the path of the plan's file, as the nodes find it.
        words: the user's words.
        processes: the number of processes on each node, in the plan's order.
        devices: the number of devices of each of these nodes; whole nodes are asked for.
    """

    plan: Plan
    path: str
    words: Words
    processes: tuple[int, ...]
    devices: tuple[int, ...]

    @property
    def nodes(self) -> int:
        """The number of nodes with ranks."""
        return len(self.processes)

    @property
    def gpu(self) -> bool:
        """Whether its devices are GPUs."""
        return any(place.device != "cpu" for place in self.plan.mesh.places)

    @property
    def sites(self) -> int:
        """The number of sites, far apart, of its nodes."""
        return len({node.site for node in self.node_groups})

    @property
    def node_groups(self) -> list[NodeGroup]:
        """The cluster's entry for each node."""
        return _node_groups(self.plan)

    @property
    def command(self) -> tuple[str, ...]:
        """What each rank runs, without the interpreter: `autopipe run plan.json ...`."""
        words = self.words
        found = ["autopipe", "run", self.path]
        if words.checkpoints is not None:
            found += ["--checkpoints", words.checkpoints, "--resume"]
        if words.save_every:
            found += ["--save-every", str(words.save_every)]
        if words.keep:
            found += ["--keep", str(words.keep)]
        return (*found, *words.run)

    @property
    def title(self) -> str:
        """A description for the first line of a script, made of the plan's numbers only."""
        mesh, step = self.plan.mesh, self.plan.prediction.step_seconds
        spread = (
            count(self.processes[0], "process", "processes")
            if self.equal
            else " + ".join(map(str, self.processes)) + " processes"
        )
        return (
            f"pp={mesh.pp} dp={mesh.dp} tp={mesh.tp}, {count(self.nodes, 'node')} of {spread}, "
            f"planned at {seconds(step)} a step"
        )

    @property
    def equal(self) -> bool:
        """Whether every node has as many processes and devices as the others."""
        return len({*self.processes}) == 1 and len({*self.devices}) == 1

    @property
    def notice(self) -> int:
        """Seconds before a limit at which to ask for the last checkpoint: a minute, as Slurm may
        come late, another to write it, and two steps."""
        return 120 + math.ceil(2 * self.plan.prediction.step_seconds)


def job_of(plan: Plan, path: str, words: Words) -> Launch:
    """Put a job together.

    Raises:
        AutopipeError: the path cannot stand in a script.
    """
    check_text("the plan's path", path)
    if path.startswith("-"):
        path = f"./{path}"  # no option
    used = sorted({place.node for place in plan.mesh.places})
    sizes = plan.cluster.devices_per_node
    return Launch(
        plan, path, words, plan.mesh.processes_per_node, tuple(sizes[node] for node in used)
    )


def check_alike(job: Launch, target: str) -> None:
    """Refuse nodes that differ: a scheduler that assigns nodes cannot bind ranks to single ones.

    Raises:
        AutopipeError: says which nodes differ in what.
    """
    hint = "--to torchrun: a script that is started on each node with its number"
    if not job.equal:
        raise AutopipeError(
            f"{target} assigns equal nodes, and this plan has {list(job.processes)} processes on "
            f"nodes of {list(job.devices)} devices",
            hint=hint,
        )
    if job.sites > 1:
        raise AutopipeError(
            f"{target} assigns nodes of one site, and this plan's nodes are at {job.sites} sites",
            hint=hint,
        )
    kinds = [tuple(group.device.kind for group in node.groups) for node in job.node_groups]
    if len({*kinds}) > 1:
        first, other = kinds[0], next(kind for kind in kinds if kind != kinds[0])
        raise AutopipeError(
            f"{target} assigns nodes in any order, and this plan binds ranks to nodes of "
            f"{'+'.join(first)} and of {'+'.join(other)}",
            hint=hint,
        )


def _node_groups(plan: Plan) -> list[NodeGroup]:
    cluster: Cluster = plan.cluster
    every = [node for node in cluster.nodes for _ in range(node.count)]
    return [every[node] for node in sorted({place.node for place in plan.mesh.places})]
