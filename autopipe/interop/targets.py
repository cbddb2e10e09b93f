"""The other runtimes by name: which function writes for each."""

from __future__ import annotations

from collections.abc import Callable

from autopipe.interop import deepspeed, flagscale, hf, megatron, pipelining, torchtitan
from autopipe.interop.exported import Exported
from autopipe.planfile.contents import Plan

RUNTIMES: dict[str, Callable[[Plan], Exported]] = {
    "megatron": megatron.arguments,
    "torchtitan": torchtitan.configs,
    "deepspeed": deepspeed.config,
    "transformers": hf.distributed_config,
    "accelerate": hf.accelerate_config,
    "pipelining": pipelining.schedule,
    "flagscale": flagscale.config,
}
"""Each raises what `programs.compute` does, of a schedule that cannot be."""
