"""Refuses hooks on gradients that would not be called, or would see another gradient.

    p.register_hook(clip)                               ZeRO: never called on a rank's rows
    p.register_post_accumulate_grad_hook(lambda p: optimizer.step())
                                                        called after each micro-batch, and before
                                                        replicas have summed the gradient

Plain PyTorch calls both once a step, with the gradient of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from autopipe.errors import ModelError
from autopipe.ir.torch_private import tensor_hooks
from autopipe.planfile.contents import Plan
from autopipe.runtime.script.copied import values_of


class GradientHooks:
    """Looks for hooks on this rank's parameters, and on those of the module that was given.

    Args:
        model: the module, or one without values.
        held: what this rank's stages read and write gradients of, by name.
        trained: what its optimizer is to update, by name.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        held: Mapping[str, Tensor],
        trained: Mapping[str, nn.Parameter],
    ) -> None:
        of_graphs = {id(tensor) for tensor in held.values()}
        self._called = [(n, one) for n, one in trained.items() if id(one) in of_graphs]
        self._uncalled = [
            (name, one)
            for named in (values_of(model), trained)
            for name, one in named.items()
            if name in trained and id(one) not in of_graphs
        ]
        self._several = plan.batch.micro_batches * plan.mesh.dp > 1

    def check(self) -> None:
        """Look at the hooks that are there before a step.

        Raises:
            ModelError: one would not be called; or would see a part of the gradient's sum.
        """
        for name, one in self._uncalled:
            if _users(one, 0) or _users(one, 1):
                raise ModelError(
                    f"a hook on the gradient of {name!r} would never be called: this rank's graphs "
                    "make the gradient of another tensor, of which this is a part or a copy",
                    hint="change p.grad between pipe.step and optimizer.step; or plan with "
                    "--zero 0, --tp 1 and --precision fp32",
                )
        if not self._several:
            return
        for name, one in self._called:
            if _users(one, 1):
                raise ModelError(
                    f"a hook that is called once the gradient of {name!r} is accumulated would be "
                    "called after each micro-batch, and before replicas have summed it",
                    hint="use the gradient after pipe.step(batch) has returned",
                )


def _users(parameter: Tensor, kind: int) -> list[Callable[..., object]]:
    """The hooks on a parameter's gradient that are none of this package's.

    Args:
        kind: 0: those that may change it; 1: those after it is accumulated.
    """
    return [
        hook
        for hook in tensor_hooks(parameter)[kind]
        if not (getattr(hook, "__module__", None) or "").startswith("autopipe.")
    ]
