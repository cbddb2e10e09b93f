"""Check that a loss does not depend on how its rows are grouped: a batch against its two halves.

    whole   loss of 4 rows        2.07     mean of the halves' losses, or it is refused:
    halves  loss of 2 rows each   2.11     their sum             it is a sum over rows
                                  2.03     a mean of the two whose weights stay the same for
                                           other random values   rows weigh unequally
                                           anything else         it compares rows with each other
                                  nan      a mean over none      rows weigh unequally

Neither the model nor its weights are needed. The results of the last ops with parameters are
replaced by random values, drawn once for all rows, and each half gets its rows of them. The rest is
computed on the example's labels and masks, on such as leave some out where these do not, and on
lower ones; in float64, so that rounding cannot explain a difference. Where that takes much memory,
as logits of many tokens and words do, it is the loss of rows with fewer tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autopipe.batch import row_length
from autopipe.batch.cut import pick_rows, slice_rows
from autopipe.batch.tree import flatten
from autopipe.errors import ModelError
from autopipe.frontend.loss import Loss
from autopipe.frontend.user_lines import begins
from autopipe.ir.dataflow import Dataflow, analyse
from autopipe.ir.graph import READ_OP, REGION_OP, Input
from autopipe.planfile.contents import BATCH as OVER_BATCH
from autopipe.planfile.contents import MICRO_BATCH
from autopipe.planfile.parts import InputSpec
from autopipe.rewriting.label_counts import LabelCounts, label_counts, leaving_out, lower
from autopipe.rows.loss_tail import loss_nodes
from autopipe.rows.row_dims import RowsUnknown
from autopipe.rows.row_mixing import puts_rows_back
from autopipe.rows.row_runs import HALF, ROWS, Leaves, Make, RowRuns
from autopipe.tracing.traced import Trace
from autopipe.util.progress import Say

MOST_BYTES = 2**28
"""Limit on the bytes of all values between the random ones and the loss: about a second's work."""

BYTES_OF_FEW, MOST_BYTES_OF_FEW = 2**26, 2**30
"""Bytes for which rows get fewer tokens; and the limit for them, since eight tokens are the fewest:
of 262,144 words they take five times as much."""

MOST_DRAWS = 16
"""Draws of small values: the mean of two of four rows is often that of one of each half."""

SIZES = (8.0, -8.0, 1 / 16)
"""Further draws have values about these: a penalty may begin beyond a threshold."""

CLOSE = 1e-6
"""Tolerance, as a share of the larger value: float64 sums in another order differ by less."""

ROUGHLY = 1e-3
"""Tolerance in further draws of what gives 32 bits: in one of many, terms may nearly cancel."""

ALIKE = 1e-4
"""Tolerance for shares, quotients of differences: a loss that runs as it is gives 32 bits."""


Short: TypeAlias = tuple[Trace, Callable[[int], Any]]
"""The model traced for rows of few tokens, and what makes a batch of given rows of them."""

Fewer: TypeAlias = Callable[[int], Short]
"""Gives that for rows of so many tokens."""


def check(
    traced: Trace,
    example: Callable[[int], Any],
    loss: Loss | None,
    loss_over: str,
    say: Say,
    fewer: Fewer | None = None,
) -> None:
    """Refuse a loss whose value depends on how rows are grouped, unless `loss_over` allows it.

    Args:
        example: makes a batch of the given number of rows.
        loss: the user's loss function, with which the trace ends.
        loss_over: "rows", "micro-batch" or "batch".
        say: receives the reason if the loss could not be checked; its own exceptions are raised.
        fewer: is asked where the last part takes much memory; None: such a loss is not checked.

    Raises:
        ModelError: names both values and what the loss does; or the loss is a sum and a count over
            the whole batch, although `loss_over` is "micro-batch".
    """
    if loss_over == MICRO_BATCH:
        if len(traced.graph.outputs) == 2:
            raise ModelError(
                "loss_over is 'micro-batch', the mean of each micro-batch's own loss, and the loss "
                "is a sum and a count, which are added over the whole batch",
                hint="return sum / count, or leave loss_over at 'rows'",
            )
        return
    if loss_over == OVER_BATCH:
        return
    found = _why_unchecked(traced, example, loss, fewer, MOST_BYTES)
    if found is not None:
        say(f"loss: not compared with that of half the rows: {found}")


def _why_unchecked(
    traced: Trace,
    example: Callable[[int], Any],
    loss: Loss | None,
    fewer: Fewer | None,
    most: int,
) -> str | None:
    """The reason why a loss could not be checked; None if it was."""
    labels = label_counts(traced.graph)
    tail = _tail(analyse(labels.beside(traced.graph) if labels is not None else traced.graph))
    needed = sum(tail.bytes(node) for node in tail.nodes)
    if needed > most:
        # A mean over labels is known by its ops, and needs no second trace.
        asked = fewer if labels is None or labels.terms else None
        short = asked and _of_fewer_tokens(asked, traced, BYTES_OF_FEW / needed)
        if short:
            return _why_unchecked(*short, loss, None, MOST_BYTES_OF_FEW)
        return f"at {ROWS} rows its last part takes {needed / 2**20:.0f} MiB"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the same batch each time, and so the same answer
        leaves = flatten(example(2 * ROWS))
    first, second = (slice_rows(traced.inputs, leaves, n, n + ROWS) for n in (0, ROWS))
    draws = max(2, min(MOST_DRAWS, MOST_BYTES // max(needed, 1)))
    tried: list[tuple[Leaves, int, str]] = [(first, draws, "")]
    read = {v.path for node in tail.nodes for v in node.values() if isinstance(v, Input)}
    if labels is None:  # masks of two halves may count alike by chance
        apart = _apart(traced.inputs, leaves, read) if draws > 2 else ()
        tried += [(rows, 2, "") for rows in (second, *apart)]
    if labels is None or labels.terms:  # or count all
        holes = leaving_out(first, read) if not traced.reads else []
        tried += [(holed, 2, " and a batch of which masks leave some out") for holed in holes]
        tried += [(lower(first, read), 2, " and a batch of lower numbers")] if holes else []
    for rows, draws, holes_text in tried:
        halves = [slice_rows(traced.inputs, rows, n, n + HALF) for n in (0, HALF)]
        try:
            unequal = _unequal(tail, rows, halves, labels, draws)
        except RowsUnknown as why:
            return str(why)
        # A run looks at masks that leave unequally many labels.
        if unequal is not None and not (holes_text and _uneven(unequal[0], labels)):
            if puts_rows_back(traced, example):
                return None  # values were made up for rows in the batch's order
            raise _refusal(*unequal, labels, tail.nodes[-1].place or begins(loss), holes_text)
    return None


def _apart(specs: Sequence[InputSpec], leaves: Leaves, read: Collection[str]) -> Iterator[Leaves]:
    """Four rows of a batch in whose halves a mask by the values of an entry, `w > 0.5`, counts
    unequally: the least with the most, and two of much or of little; for each entry in `read`."""
    for spec in specs:
        leaf, dim = leaves[spec.path], spec.batch_dim if spec.path in read else None
        if dim is not None and isinstance(leaf, Tensor) and not leaf.is_complex():
            sizes = leaf.movedim(dim, 0).reshape(2 * ROWS, -1).double().mean(1)
            least, *some, most = sizes.argsort().tolist()
            for two in (some[-HALF:], some[:HALF]):
                yield pick_rows(specs, leaves, [least, most, *two])


def _of_fewer_tokens(fewer: Fewer, traced: Trace, share: float) -> Short | None:
    """What `fewer` gives for about this share of a row's tokens; None: the model takes no fewer."""
    tokens = row_length.length_of(traced.inputs) or 0
    some = max(row_length.SHORTEST, int(tokens * share))
    with suppress(ModelError):
        return fewer(some) if some < tokens else None
    return None


def _unequal(
    tail: RowRuns,
    leaves: Leaves,
    halves: list[dict[str, Any]],
    labels: LabelCounts | None,
    draws: int,
) -> tuple[Values, Values] | None:
    """Values of a draw in which those of the halves do not add up, and of another draw."""
    further = ROUGHLY if any(node.op == REGION_OP for node in tail.nodes) else CLOSE
    found: tuple[Values, Values] | None = None

    def losses(made_up: Make, minor: bool, seed: int) -> Values:
        runs = tail.runs(leaves, halves, made_up, minor=minor, seed=seed)
        return runs[0].outputs, runs[1].outputs, runs[2].outputs

    for made_up in (torch.randn, torch.rand):  # not every loss is defined on any number
        for minor in (False, True):
            try:
                every = [losses(made_up, minor, seed) for seed in range(draws)]
                for size in SIZES:
                    with suppress(ValueError, RuntimeError):  # it may not be defined there
                        every += [losses(_about(size, made_up), minor, n) for n in range(2)]
            except RowsUnknown:
                raise
            except Exception:  # whatever the ops of the loss raise
                break
            if labels is None and (empty := [v for v in every if _of_none(v)]):
                return empty[0], every[0]
            sound = [v for v in every if all(map(math.isfinite, chain(*v)))]
            if sound[:2] != every[:2]:
                break
            off = [CLOSE, *[further] * len(sound[1:])]
            unequal = [v for v, o in zip(sound, off, strict=True) if not _adds_up(v, labels, o)]
            if not unequal:
                return None
            found = found or (unequal[0], next(v for v in sound if v is not unequal[0]))
        if found is not None:
            return found
    return None


Values: TypeAlias = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
"""The loss of all rows and those of the halves: `(mean,)` or `(sum, count)`; with labels, `(mean,
divisor, count)` of these, or the mean and the counts of its terms."""


def _adds_up(values: Values, labels: LabelCounts | None, close: float) -> bool:
    if labels is not None:
        values = _means(values) if labels.terms else _sums(values)
    share = 0.5 if len(values[0]) == 1 else 1.0
    return all(_close(w, share * (a + b), close) for w, a, b in zip(*values, strict=True))


def _of_none(values: Values) -> bool:
    """Whether a half has no loss, as a mean over none of its rows, though the whole has one."""
    return math.isfinite(sum(values[0])) and any(map(math.isnan, chain(*values[1:])))


def _means(values: Values) -> Values:
    whole, first, second = values
    return whole[:1], first[:1], second[:1]


def _sums(values: Values) -> Values:
    """Means over labels as sums and counts; a mean over no label is nan, and has no weight."""
    whole, first, second = ((m * n if n else 0.0, count) for m, n, count in values)
    return whole, first, second


def _uneven(values: Values, labels: LabelCounts | None) -> bool:
    """Whether terms of the loss are means over other numbers of labels in each half."""
    return labels is not None and labels.terms and values[1][1:] != values[2][1:]


def _close(value: float, expected: float, close: float = CLOSE) -> bool:
    return abs(value - expected) <= close * max(abs(value), abs(expected))


def _share_of_the_first(values: Values) -> float:
    """The weight of the first half in a weighted mean of the halves that is the whole."""
    (whole,), (first,), (second,) = values
    return (whole - second) / (first - second) if first != second else math.nan


_OTHERWISE = (
    'loss_over = "micro-batch" takes the mean of each micro-batch\'s own loss, and '
    "--micro-batches 1 --dp 1 leaves the batch whole"
)

_TOGETHER = (
    'loss_over = "batch" computes it over all rows of the batch, in two passes; ' + _OTHERWISE
)


def _refusal(
    values: Values, others: Values, labels: LabelCounts | None, place: str, holes_text: str
) -> ModelError:
    """The error that says what the loss does, from its values for two draws of random numbers."""
    uneven = _uneven(values, labels)
    if labels is not None:
        values, others = _means(values), _means(others)
    whole, first, second = values
    shown = [
        f"{value[0]:.4g}" if len(value) == 1 else f"({value[0]:.4g}, {value[1]:.4g})"
        for value in values
    ]
    then = "so its value would depend on the micro-batches that the batch is cut into"
    if len(whole) == 2:
        what = "sum and count of the whole are not those of the halves added"
        then = "so it is no sum and count"
        hint = "a mean is returned alone; or autopipe.SumCount(sum over rows, what it counts)"
    elif _close(whole[0], first[0] + second[0]):
        what = "it is a sum over rows"
        hint = f"return a mean, or autopipe.SumCount(total, count); {_OTHERWISE}"
    elif uneven:
        what = "one of its terms is a mean over labels, of which rows have unequally many"
        hint = _TOGETHER
    elif _of_none(values) or abs(_share_of_the_first(values) - _share_of_the_first(others)) < ALIKE:
        what = "rows weigh unequally in it, as in a mean over unequally many tokens"
        hint = f"return autopipe.SumCount(total, count); {_OTHERWISE}"
    else:
        what = "it compares rows with each other"
        hint = _TOGETHER
    return ModelError(
        f"{place + ': ' if place else ''}the loss of {ROWS} rows is {shown[0]}, of their halves "
        f"{shown[1]} and {shown[2]} (tried on made-up numbers{holes_text}): {what}, {then}",
        hint=hint,
    )


def _about(size: float, made_up: Make) -> Make:
    """Draws values whose mean and deviation are about this size."""
    return lambda *shape, **options: size * (1 + made_up(*shape, **options))


def _tail(flow: Dataflow) -> RowRuns:
    """The nodes from which the loss is computed, back to the last ops with parameters."""
    graph, found = flow.graph, loss_nodes(flow)
    nodes = tuple(graph.nodes[p] for p in sorted(found.needed) if graph.nodes[p].op != READ_OP)
    return RowRuns(graph, nodes, frozenset(graph.nodes[p].name for p in found.last))
