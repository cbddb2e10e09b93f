"""Loss scaling: multiplies fp16 losses by a scale, and divides the summed gradients by it.

    seeds * scale  -->  backward in fp16  -->  sums over ranks  -->  gradients / scale

The smallest number of fp16 is 6e-8, and gradients often are smaller. The scale grows until
something overflows; that step is passed over, and the scale halved (Micikevicius et al., Mixed
Precision Training, ICLR 2018, section 3.2). All numbers are those of `torch.amp.GradScaler`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe.errors import ModelError

INITIAL = 2.0**16
GROWTH = 2.0
BACKOFF = 0.5
INTERVAL = 2000
"""Good steps in a row before the scale grows."""
LEAST = 2.0**-24
"""Gradients that are not finite at a smaller scale are so at any."""


@dataclass
class LossScale:
    """The scale of a run: the same on every rank, since all of them see the same overflows.

    Attributes:
        scale: the factor of the seeds of a step's backward; a power of two, so that it changes no
            bit of a gradient.
        good_steps: good steps in a row since the last overflow or growth.
    """

    scale: float = INITIAL
    good_steps: int = 0

    def unscale(
        self, parameters: Iterable[nn.Parameter], world: dist.ProcessGroup | None = None
    ) -> bool:
        """Divide the gradients by the scale, or drop them all if one on any rank is not finite.

        Called once a step on every rank, after gradients are summed and before they are clipped. An
        optimizer skips a parameter without a gradient, step counter included.

        Args:
            parameters: those of this rank; of a sharded one this rank's part is looked at.
            world: all ranks of the run; None: this process is alone.

        Returns:
            Whether the step is good.

        Raises:
            ModelError: the scale has been halved so often that it cannot be the reason.
        """
        trained = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = [_local(parameter.grad) for parameter in trained]
        if _overflown(gradients, world):
            for parameter in trained:
                parameter.grad = None
            self.scale *= BACKOFF
            self.good_steps = 0
            if self.scale < LEAST:
                raise ModelError(
                    f"gradients are not finite in fp16 at a loss scale of {2 * self.scale:.0e} "
                    "either: no step changes a weight any more",
                    hint="a nan in backward, as of sqrt(0) or 0 / 0, is one at every scale: "
                    "torch.autograd.set_detect_anomaly(True) on the model alone names its op; or "
                    "plan with --precision bf16",
                )
            return False
        for gradient in gradients:
            gradient.mul_(1 / self.scale)
        self.good_steps += 1
        if self.good_steps == INTERVAL:
            self.scale *= GROWTH
            self.good_steps = 0
        return True

    def state_dict(self) -> dict[str, float]:
        """The scale and its counters, for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint."""
        self.scale, self.good_steps = state["scale"], int(state["good_steps"])


def _overflown(gradients: list[Tensor], world: dist.ProcessGroup | None) -> bool:
    # The largest entry is infinite or no number if any entry is; a sum might overflow by itself.
    held = [gradient for gradient in gradients if gradient.numel()]  # a shard may have no rows
    largest = [torch.linalg.vector_norm(gradient, torch.inf).float() for gradient in held]
    finite = torch.stack(largest).isfinite().all() if largest else torch.tensor(True)
    found = (~finite).float()
    if world is not None:
        found = found.cuda() if "nccl" in dist.get_backend(world) else found.cpu()
        dist.all_reduce(found, dist.ReduceOp.MAX, world)
    return bool(found)


def _local(gradient: Tensor | None) -> Tensor:
    """This rank's part of a gradient: all of it, unless it is a DTensor."""
    assert gradient is not None
    part: Tensor = getattr(gradient, "to_local", lambda: gradient)()
    return part
