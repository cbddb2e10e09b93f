"""Finds out that somebody trains, freezes or moves parameters between steps, as ranks cannot.

    backbone.requires_grad_(True)     graphs have no gradient of it, and replicas sum none
    teacher.lerp_(student, 0.01)      a rank has the teacher's layer, and the student's as it began

Plain PyTorch does both in a training loop, a scheduler or a hook of the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from torch import nn

from autopipe.errors import ModelError
from autopipe.runtime.script.copied import Sight, look_at, values_of


class MovedFrozen:
    """The parameters of modules by what is trained of them, looked at between two steps.

    Args:
        models: the module that was given, and those that the user's files keep.
        parts: whether a rank has parts of what is trained: stages, shards or rows.
        trained: what this rank's optimizer is to update, by name.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        *,
        parts: bool,
        trained: Mapping[str, nn.Parameter] = MappingProxyType({}),
    ) -> None:
        self._parts = parts
        self._own = [(name, one, one.requires_grad) for name, one in trained.items()]
        self._trained = [
            (model, {name: p.requires_grad for name, p in model.named_parameters()})
            for model in models
        ]
        self._looks: list[dict[str, Sight]] | None = None

    def note(self) -> None:
        """Take the present values as unchanged; before the first step they may be loaded."""
        if self._parts:
            self._looks = self._now()

    def check(self) -> None:
        """Compare with what was noted.

        Raises:
            ModelError: a parameter that was frozen is trained, or the reverse; or a frozen one was
                written since, and ranks have parts.
        """
        for name, one, was in self._own:  # rows of a parameter, or a copy, are none of the module's
            if one.requires_grad != was:
                raise _of_gradient(name, was)
        for model, trained in self._trained:
            for name, parameter in model.named_parameters():
                was = trained.get(name, parameter.requires_grad)
                if parameter.requires_grad != was:
                    raise _of_gradient(name, was)
        if self._looks is None:
            return
        for before, now in zip(self._looks, self._now(), strict=True):
            for name, sight in now.items():
                if name in before and not sight.unwritten_since(before[name]):
                    raise _of_write(name)

    def _now(self) -> list[dict[str, Sight]]:
        return [
            {
                name: look_at(tensor)
                for name, tensor in values_of(model).items()
                if trained.get(name) is False
            }
            for model, trained in self._trained
        ]


def _of_gradient(name: str, trained: bool) -> ModelError:
    was, now = ("trained", "frozen") if trained else ("frozen", "trained")
    return ModelError(
        f"the parameter {name!r} was {was} when the model was planned and is {now} now: its "
        "requires_grad was set between two steps",
        hint="train it from the beginning, in a group whose learning rate a scheduler holds at 0; "
        "or end the run with --save, and plan what comes after it anew",
    )


def _of_write(name: str) -> ModelError:
    return ModelError(
        f"the frozen parameter {name!r} was written between two steps, while a rank of this plan "
        "has only some of the model's weights as they are now, and others as they began",
        hint="move it in forward, under torch.no_grad(); or plan without pipelines, tensor "
        "parallelism and ZeRO: --pp 1 --tp 1 --zero 0",
    )
