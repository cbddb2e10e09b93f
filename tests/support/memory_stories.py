"""Stories of memory: what each stage holds in a step is what its plan says, to the byte."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import torch

from autopipe.planfile.parts import Memory
from autopipe.runtime.step.memory_meter import Meter
from tests.support.long import sampled
from tests.support.pipes import ZOO, piped, planned, story, without_inductor


@story(2)
def memory_is_what_was_planned() -> None:
    """Four cases, one by default."""
    cases = (
        ("gpt", 8, "1f1b"),
        ("unet", 2, "1f1b"),
        ("gpt", 4, "interleaved"),
        ("gpt", 4, "zb-h1"),
    )
    for name, m, schedule in sampled(cases, of=4):
        measured_as_planned(name, m, schedule, "fp32")


@story(2, long=True)
def memory_in_sixteen_bits() -> None:
    """Seven models: a step holds what was planned of bf16 with master weights.

    Bugs: a tied weight's copy was planned for both stages of a rank; those of autocast were not
    counted in the run.
    """
    for name in ("mask", "gpt", "unet", "llama", "resnet", "t5", "gpt2"):
        measured_as_planned(name, 4, "1f1b", "bf16")
    measured_as_planned("gpt", 4, "zb-h1", "bf16")
    for precision in ("bf16-autocast", "bf16"):
        measured_as_planned("gpt2", 4, "zb-v", precision)


@story(2, long=True)
def memory_of_compiled_stages() -> None:
    """What the plan has counted is what graphs keep, whoever compiles them; two of eight models by
    inductor, small ones, since its compiler of C++ takes longest of all here."""
    cases = ("gpt", "unet", "llama", "dropout", "dict", "t5", "gpt2", "mask")
    for number, name in enumerate(cases):
        schedule = ("1f1b", "zb-h1", "interleaved")[number % 3]
        precision = ("bf16", "fp32")[number % 2]
        with nullcontext() if name in ("dict", "mask") else without_inductor():
            measured_as_planned(name, 4, schedule, precision, compile=True)


@story(4)
def memory_of_masters_that_are_dealt_out() -> None:
    """ZeRO-1 in 16 bits: each replica has half of the masters and of their moments; a tied weight
    is dealt out to the replicas of both its stages. ZeRO-2: of the gradients too."""
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("gpt2", {"zero": 1, "grad_dtype": "bf16"}),
        ("gpt", {"zero": 1, "grad_dtype": "fp32"}),
        ("gpt", {"zero": 1, "optimizer_dtype": "bf16"}),
        ("gpt2", {"zero": 2, "grad_dtype": "bf16"}),
    )
    for name, more in sampled(cases, of=4):
        measured_as_planned(name, 2, "1f1b", "bf16", dp=2, **more)


@story(4, long=True)
def memory_of_parameters_in_shards() -> None:
    """ZeRO-3: what is gathered at once too, eager and compiled; GPT-2's tied embedding stands in
    both stages, and in both of one rank under interleaved."""
    cases: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
        ("gpt2", "interleaved", "bf16", {"compile": True}),
        ("gpt2", "1f1b", "fp32", {"recompute": "all"}),
        ("gpt", "1f1b", "bf16", {}),
        ("gpt", "interleaved", "bf16", {"compile": True}),
        ("llama", "interleaved", "bf16", {"compile": True}),
    )
    with without_inductor():
        for name, schedule, precision, more in sampled(cases, of=5):
            measured_as_planned(name, 2, schedule, precision, dp=2, zero=3, **more)


def measured_as_planned(
    name: str, m: int, schedule: str, precision: str, dp: int = 1, pp: int = 2, **more: Any
) -> None:
    """Parameters, gradients, AdamW's two moments, activations and transfers of each stage: to the
    byte, but for AdamW's counters. What two stages of a rank share counts with the first."""
    chunks = 2 if schedule == "interleaved" else None
    plan = planned(name, pp, dp, m, schedule, chunks=chunks, precision=precision, **more)
    pipe = piped(name, plan)
    pipe.meter = Meter()
    optimizer = torch.optim.AdamW(pipe.parameters())
    pipe.step(ZOO[name].inputs(plan.batch.rows))
    optimizer.step()
    measured = pipe.measured(optimizer)
    assert [*measured] == [stage.index for stage in pipe.stages]
    seen: set[str] = set()
    for stage, found in measured.items():
        predicted = plan.stages[stage].predicted.memory
        own = set(plan.stages[stage].parameters) - seen
        counters, seen = 4 * len(own), seen | own
        for part in {field.name for field in fields(Memory)} - {"passing"}:  # that is not seen
            mine, asked = (getattr(m, part) for m in (found.memory, predicted))
            asked += counters if part == "optimizer" else 0
            said = f"{name}, {schedule}, {precision}, stage {stage}: {part}"
            assert mine == asked, f"{said}: measured {mine}, planned {asked}"


@story(2, long=True)
def memory_of_blocks_that_offload() -> None:
    """What waits in the host's memory is not counted, what is on its way is; with recomputation
    beside it, compiled, and with stages of two sizes."""
    cases: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("gpt", "1f1b", {"offload": "all"}),
        ("llama", "interleaved", {"offload": "all", "compile": True}),
        ("gpt", "gpipe", {"offload": "blocks.1", "recompute": "all"}),
        ("dropout", "1f1b", {"offload": "all"}),
    )
    with without_inductor():
        for name, schedule, more in sampled(cases, of=2):
            measured_as_planned(name, 4, schedule, "fp32", **more)
