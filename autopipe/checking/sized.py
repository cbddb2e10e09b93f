"""A model file and its plan, as small as this machine needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from autopipe.batch.tree import flatten
from autopipe.checking.fit import Degrees, smaller_models
from autopipe.checking.shrink import shrunk, skeleton, tokens
from autopipe.checking.subject import Smaller
from autopipe.errors import ModelError
from autopipe.frontend.model_file import ModelFile
from autopipe.planfile.contents import Plan
from autopipe.util.progress import Say


@dataclass(frozen=True)
class Sized:
    """A model file as it is checked, with its plan.

    Attributes:
        file: the model file, made smaller.
        wanted: the degrees before they were reduced.
        degrees: the degrees of `plan`.
        precision: the precision of `plan`, if it differs from the one asked for.
    """

    file: ModelFile
    smaller: Smaller
    plan: Plan
    wanted: Degrees
    degrees: Degrees
    precision: str | None = None

    @property
    def reduced(self) -> tuple[str, ...]:
        """What was made smaller, one phrase each."""
        found = self.degrees.changes_from(self.wanted)
        if self.smaller.layers:
            found.append(f"at most {self.smaller.layers} of each row of equal layers")
        if self.smaller.length:
            found.append(f"rows of {self.smaller.length} tokens")
        if self.smaller.width > 1:
            found.append(f"widths divided by {self.smaller.width}")
        return tuple(found)


def sized(
    file: ModelFile,
    wanted: Degrees,
    few: Degrees,
    make_plan: Callable[[Smaller, Degrees], Plan],
    say: Say,
) -> Sized:
    """The model and its plan, as small as they have to be, and no smaller.

    Raises:
        AutopipeError: nothing fits, or the cases that fit cannot be planned.
    """
    error: ModelError | None = None
    length = tokens(flatten(file.inputs(2)))
    for smaller, degrees in smaller_models(partial(skeleton, file), few, length):
        try:
            plan = make_plan(smaller, degrees)
        except ModelError as refused:
            if smaller == Smaller():
                raise
            say(f"a smaller model cannot be planned: {refused.message}")
            error = error or refused
            continue
        found = Sized(shrunk(file, smaller), smaller, plan, wanted, degrees)
        if found.reduced:
            say(f"reduced: {', '.join(found.reduced)}")
        return found
    raise ModelError(
        "the model does not fit into a check on this machine, and made smaller it cannot be planned"
        + (f": {error.message}" if error is not None else ""),
        hint="check a smaller configuration of it: a model() with fewer layers and less width",
    )
