"""Stories of batches whose rows have other lengths from step to step, beside one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopipe import ModelError, Pipe
from autopipe.batch import row_length
from autopipe.runtime.step import ready
from tests.support.models import LENGTH
from tests.support.pipes import ZOO, close, drawn, piped, planned, refused, rows_of, story
from tests.support.zoo import Batch

SHORT = (LENGTH, 7, LENGTH)
"""Lengths of the steps of a story: the planned one, a shorter one, and one that was there."""


def cut(batch: Batch, length: int) -> dict[str, Tensor]:
    """All rows with their first tokens only."""
    assert isinstance(batch, dict)
    return {
        n: t[:, :length].contiguous() if t.shape[1:2] == (LENGTH,) else t for n, t in batch.items()
    }


def beside(name: str, pipe: Pipe, lengths: tuple[int, ...] = SHORT, *, bitwise: bool) -> None:
    """A step at each length; gradients are those of one process, micro-batch by micro-batch."""
    plan, model = pipe.plan, ZOO[name].model()
    each = plan.batch.microbatch_rows(plan.mesh.dp)
    for number, length in enumerate(lengths):
        batch = cut(drawn(name, plan.batch.rows, number), length)
        parts, total = plan.batch.rows // each, torch.zeros(())
        model.zero_grad()
        for k in range(parts):
            loss: Any = ZOO[name].eager(model, rows_of(batch, k * each, (k + 1) * each))
            (loss / parts).backward()
            total = total + loss.detach()
        close(pipe.step(batch), total / parts, f"loss at {length}")
        for key, parameter in pipe.named_parameters():
            gradient, found = model.get_parameter(key).grad, parameter.grad
            assert (found is None) == (gradient is None), key
            if gradient is None or found is None or found.shape != gradient.shape:
                continue  # a shard of it: its whole is compared where tensors are not cut
            if bitwise:
                assert torch.equal(found, gradient), f"{key} at {length}"
            else:
                close(found, gradient, f"{key} at {length}", 5e-5)


@story(2, long=True)
def lengths_in_a_pipeline() -> None:
    """ "lstm" asks for its number of tokens: traced anew. The last story has a symbolic length."""
    beside("lstm", piped("lstm", planned("lstm", 2, 1, 2)), SHORT[:2], bitwise=True)


@story(2, long=True)
def lengths_of_tied_stages() -> None:
    beside("gpt2", piped("gpt2", planned("gpt2", 2, 1, 2, "zb-h1")), bitwise=False)


@story(2, long=True)
def lengths_over_tensor_parts_and_replicas() -> None:
    beside("gpt", piped("gpt", planned("gpt", 1, 1, 2, tp=2)), bitwise=False)
    beside("gpt", piped("gpt", planned("gpt", 1, 2, 2)), bitwise=False)
    beside("gpt", piped("gpt", planned("gpt", 1, 2, 2, zero=3)), SHORT[:2], bitwise=False)


@story(2, long=True)
def replicas_may_have_rows_of_unlike_length() -> None:
    """Each goes through a pipeline of its own; the loss is the mean over the labels of both."""
    plan = planned("gpt", 1, 2, 2)
    pipe, model = piped("gpt", plan), ZOO["gpt"].model()
    whole = drawn("gpt", plan.batch.rows, 0)
    lengths = 7, LENGTH
    own = [cut(rows_of(whole, 4 * n, 4 * n + 4), length) for n, length in enumerate(lengths)]
    losses = [
        ZOO["gpt"].eager(model, part) * length for part, length in zip(own, lengths, strict=True)
    ]
    expected = sum(losses) / sum(lengths)
    expected.backward()
    close(pipe.step(own[pipe.place.dp], sharded=True), expected)
    assert pipe.row_length == sum(lengths) / 2, "what tokens of a second are counted by"
    for key, parameter in pipe.named_parameters():
        close(parameter.grad, model.get_parameter(key).grad, key, 5e-5)
    with refused(ModelError, "rows of", "tokens", "must be given the same"):
        pipe.step(cut(whole, (7, 9)[pipe.place.dp]))


@story(2, long=True)
def longer_rows_and_evaluation() -> None:
    pipe, case = piped("gpt", planned("gpt", 2, 1, 2)), ZOO["gpt"]
    batch = drawn("gpt", pipe.plan.batch.rows, 0)
    longer = {name: torch.cat([tensor, tensor], 1) for name, tensor in batch.items()}
    with refused(ModelError, f"rows of {2 * LENGTH} tokens", f"rows of at most {LENGTH}"):
        pipe.step(longer)
    model = case.model().eval()
    for length in (7, LENGTH):
        close(pipe.evaluate(cut(batch, length)), case.eager(model, cut(batch, length)))
    kept, ready.LENGTHS = ready.LENGTHS, 2
    beside("gpt", pipe, (7, 8, 9, 7, LENGTH), bitwise=True)
    assert len(pipe._prepared._splits) == 3, "those made last, and the planned one"
    ready.LENGTHS = kept
    assert row_length.length_of(pipe.plan.inputs) == LENGTH
