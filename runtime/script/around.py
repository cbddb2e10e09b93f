"""Refuses a step under a mode of torch that would change what it computes.

with torch.no_grad(): pipe.step(batch)                        no gradients
with torch.autocast("cpu", torch.bfloat16): pipe.step(batch)  another precision than the plan's
"""

from __future__ import annotations

import torch

from autopipe.errors import ModelError


def check_around(call: str, precision: str, device: torch.device) -> None:
    """Look at the modes that a call of a pipe is made under.

    Args:
        call: `step` or `evaluate`, which needs no gradients.
        precision: the plan's, in which its bytes, transfers and compiled stages are.

    Raises:
        ModelError: gradients are off in a step, or autocast is on.
    """
    if call == "step" and not torch.is_grad_enabled():
        raise ModelError(
            "pipe.step was called under torch.no_grad() or inference_mode(): no gradients",
            hint="call it outside; pipe.evaluate(batch) gives the loss without gradients",
        )
    if torch.is_autocast_enabled(device.type):
        low = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
        raise ModelError(
            f"pipe.{call} was called under torch.autocast to {low}, and the plan says in which "
            f"precision a step computes: {precision}",
            hint="call it outside; --precision bf16-autocast plans what torch.autocast does, and "
            "--precision bf16 keeps all of a step in bf16",
        )
