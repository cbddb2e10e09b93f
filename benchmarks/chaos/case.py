"""What the chaos runs are made of: two plans that have every kind of instruction, and a promise.

zb-h1   pp=4 dp=1    F I W POST WAIT SEND FREE REDUCE STEP
1f1b    pp=2 dp=2    F B   POST WAIT SEND FREE REDUCE STEP
"""

from __future__ import annotations

import os
from pathlib import Path

import autopipe
from autopipe.cluster.cluster import Cluster, Device, Group, Link, NodeGroup
from benchmarks.chaos import net
from benchmarks.chaos.story import SIZE, Story

MESHES = {"zb-h1": (4, 1), "1f1b": (2, 2)}
"""Pipeline stages and replicas of the plan for a schedule."""

MICRO_BATCHES = 8

_MOVED = ("POST", "WAIT", "SEND", "FREE", "REDUCE", "STEP")
KINDS = {"zb-h1": ("F", "I", "W", *_MOVED), "1f1b": ("F", "B", *_MOVED)}

SECONDS = {"kill": 2.0, "stop": 15.0, "raise": 15.0}
"""From the harm to the end of the last rank and its sidecar, at most."""

CODES = {"kill": {-9}, "stop": {-9}, "raise": {1, -15}}
"""How the rank that has come to harm ends; a launcher says 128 + n for a signal n. One that has
raised is ended if Python has not taken it down in `hub.LEAVE` seconds, on a crowded machine."""


def make(schedule: str, folder: Path) -> Path:
    """Plan the model for four processes of this machine, whose rates are made up."""
    pp, dp = MESHES[schedule]
    cpu = Device("cpu", 2**30, {"fp32": 1e10}, 1e10, 1e-6, "made up")
    link = Link(1e-4, 1e9)
    made = autopipe.plan(
        net.model,
        net.inputs,
        loss=net.loss,
        cluster=Cluster(f"local:{SIZE}", (NodeGroup(1, (Group(SIZE, cpu),)),), link, link),
        batch_size=2 * dp * MICRO_BATCHES,
        pp=pp,
        dp=dp,
        micro_batches=MICRO_BATCHES,
        schedule=schedule,
        source=os.path.relpath(net.__file__, folder),
    )
    path = folder / f"{schedule}.json"
    made.save(path)
    return path


def broken(story: Story, launcher: str) -> list[str]:
    """What of the promise a run has not kept, as sentences; empty if all is well."""
    event, found = story.harm.event, []
    limit, codes = SECONDS[event], CODES[event]
    if len(story.told) != 1:
        found.append(f"{story.place}: told {len(story.told)} times, expected once")
    for rank in range(SIZE):
        if rank != story.harm.rank and story.said(f"[rank{rank}]: Traceback"):
            found.append(f"rank {rank} shows where it was waiting, which explains nothing")
    if max(story.told, default=0.0) > limit:
        found.append(f"told after {story.told[0]:.2f} s, expected within {limit:g} s")
    if story.ended > limit:
        found.append(f"the last rank ended after {story.ended:.2f} s, expected {limit:g} s")
    if launcher.startswith("alone"):
        others = story.codes[: story.harm.rank] + story.codes[story.harm.rank + 1 :]
        if story.codes[story.harm.rank] not in codes or not set(others) <= {1, -15}:
            found.append(f"the ranks ended with {story.codes}")
    elif launcher.startswith("torchrun"):
        if story.codes != [1]:
            found.append(f"torchrun ended with {story.codes[0]}")
    elif story.codes[0] not in {code if code > 0 else 128 - code for code in codes}:
        found.append(f"the launcher ended with {story.codes[0]}")
    return found
