"""Rewrite ops for a rank's shards, where sizes in the arguments change or another op is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopipe.ir.graph import Arg, Dim, Node, Ref, TensorSpec, Value
from autopipe.planfile.placements import I, P, Placement, lengths, part
from autopipe.sharding.collectives import CONVERT, TENSOR_PARALLEL
from autopipe.sharding.op import Op
from autopipe.sharding.rules_layout import segment_of
from autopipe.util.registry import entering


@dataclass(frozen=True)
class Rewriting:
    """A node with sharded tensors, to be rewritten: local tensors, but still global sizes.

    Args:
        emit: adds a node in front of this one.
    """

    op: Op
    ranks: int
    rank: int
    emit: Callable[[Node], Ref]
    inputs: Mapping[Value, Placement]
    output: Placement
    node: Node

    def with_arguments(self, **changed: Any) -> Node:
        """The node with some arguments replaced, by their names in the schema."""
        names = [argument for argument in self.op.arguments]
        args, kwargs = list(self.node.args), dict(self.node.kwargs)
        for name, value in changed.items():
            position = names.index(name)
            if position < len(args):
                args[position] = value
            else:
                kwargs[name] = value
        return replace(self.node, args=tuple(args), kwargs=kwargs)

    def before(
        self, word: str, op: str, *args: Arg, shape: Sequence[Dim], dtype: torch.dtype
    ) -> Ref:
        """Add a helper node in front of this node."""
        return self.emit(
            replace(
                self.node,
                name=f"{self.node.name}/{word}",
                op=f"aten.{op}",
                args=args,
                kwargs={},
                outputs=(TensorSpec(tuple(shape), dtype),),
                packed=False,
                stream="",
            )
        )

    def convert(self, word: str, value: Ref, spec: TensorSpec) -> Ref:
        """Convert a helper node's partial sum to the sum."""
        return self.emit(
            replace(
                self.node,
                name=f"{self.node.name}/{word}",
                op=CONVERT,
                args=(value, TENSOR_PARALLEL, P, I, 0),
                kwargs={},
                outputs=(spec,),
                packed=False,
                autocast=None,
            )
        )


LOCAL: dict[str, Callable[[Rewriting], Node]] = {}
"""The rewriting function of each op; any other op runs on shards unchanged."""


_rewrite = entering(LOCAL)


def _result_shape(rewriting: Rewriting) -> tuple[Dim, ...]:
    spec = rewriting.node.outputs[0]
    assert spec is not None
    return spec.shape


@_rewrite("view", "_unsafe_view", "expand", "reshape")
def _sizes(rewriting: Rewriting) -> Node:
    return replace(
        rewriting.node, args=(rewriting.node.args[0], _result_shape(rewriting)), kwargs={}
    )


@_rewrite("unflatten", "flatten", "squeeze")
def _reshape(rewriting: Rewriting) -> Node:
    """Of a dim of two a rank may have one, which `squeeze` would take for a dim of one."""
    return replace(_sizes(rewriting), op="aten.reshape.default")


@_rewrite("split", "split_with_sizes", "chunk")
def _split(rewriting: Rewriting) -> Node:
    dim = rewriting.op.dim(of=rewriting.op.inputs[0])
    sizes = tuple(spec.shape[dim] for spec in rewriting.node.outputs if spec is not None)
    args = (rewriting.node.args[0], sizes, dim)
    return replace(rewriting.node, op="aten.split_with_sizes.default", args=args, kwargs={})


@_rewrite("slice")
def _slice(rewriting: Rewriting) -> Node:
    (x,) = rewriting.op.inputs
    dim, placement = rewriting.op.dim(of=x), rewriting.inputs[x]
    if placement.dim != dim:
        return rewriting.node
    number = segment_of(rewriting.op, x, dim, placement)
    if number is None:  # all of it
        return rewriting.with_arguments(start=0, end=_result_shape(rewriting)[dim])
    size = rewriting.op.shape(x)[dim]
    own_sizes = [
        part(length, rewriting.ranks, rewriting.rank)[1]
        for length in lengths(size, placement.segments)
    ]
    begin = sum(own_sizes[:number])
    return rewriting.with_arguments(start=begin, end=begin + own_sizes[number])


@_rewrite("conv1d", "conv2d", "conv3d")
def _convolution(rewriting: Rewriting) -> Node:
    groups = rewriting.op["groups"]
    if groups == 1:
        return rewriting.node
    return rewriting.with_arguments(groups=groups // rewriting.ranks)


@_rewrite("repeat_interleave")
def _repeat_interleave(rewriting: Rewriting) -> Node:
    kwargs = {k: v for k, v in rewriting.node.kwargs.items() if k != "output_size"}
    return replace(rewriting.node, kwargs=kwargs)


@_rewrite("mean")
def _mean(rewriting: Rewriting) -> Node:
    """With n equal parts, the mean is the sum of their means divided by n."""
    (x,) = rewriting.op.inputs
    if not rewriting.inputs[x].sharded or rewriting.output != P:
        return rewriting.node
    node, made = rewriting.node, rewriting.node.outputs[0]
    assert made is not None
    own = rewriting.emit(replace(node, name=f"{node.name}/part"))
    args = (own, rewriting.ranks)
    return replace(node, op="aten.div.Scalar", args=args, kwargs={})


@_rewrite("embedding")
def _embedding(rewriting: Rewriting) -> Node:
    """Look up rows of a sharded vocabulary; words of other ranks give zeros.

    A word that no rank has is refused by `embedding`, as without shards (`_other_ranks`).
    """
    op, node = rewriting.op, rewriting.node
    w, ids = op["weight"], op["indices"]
    if rewriting.inputs[w].dim != 0 or not rewriting.inputs[w].sharded:
        return node
    begin, length = part(op.shape(w)[0], rewriting.ranks, rewriting.rank)
    weight, indices = node.args[:2]
    ids_spec = rewriting.op.model.graph.spec(ids)
    shape, dtype = ids_spec.shape, ids_spec.dtype
    result = node.outputs[0]
    assert result is not None
    shifted = rewriting.before("own", "sub.Scalar", indices, begin, shape=shape, dtype=dtype)
    low, high = _other_ranks(begin, length, op.shape(w)[0], dtype)
    below = rewriting.before("low", "lt.Scalar", shifted, low, shape=shape, dtype=torch.bool)
    above = rewriting.before("high", "ge.Scalar", shifted, high, shape=shape, dtype=torch.bool)
    elsewhere = rewriting.before(
        "other", "logical_or.default", below, above, shape=shape, dtype=torch.bool
    )
    rows = rewriting.before(
        "rows", "masked_fill.Scalar", shifted, elsewhere, 0, shape=shape, dtype=dtype
    )
    padding = op["padding_idx"] - begin
    padding = padding if op["padding_idx"] >= 0 and 0 <= padding < length else -1
    looked_up = rewriting.before(
        "found", "embedding.default", weight, rows, padding, shape=result.shape, dtype=result.dtype
    )
    mask = rewriting.before(
        "mask", "unsqueeze.default", elsewhere, -1, shape=(*shape, 1), dtype=torch.bool
    )
    return replace(node, op="aten.masked_fill.Scalar", args=(looked_up, mask, 0.0), kwargs={})


def _other_ranks(begin: int, length: int, size: int, dtype: torch.dtype) -> tuple[int, int]:
    """The bounds of a rank's own numbers, counted from `begin`: below and from them on are numbers
    of other ranks.

    Below those of the first rank are none, nor beyond those of the last: what is there is out of
    bounds for the op that reads it.
    """
    limits = torch.iinfo(dtype)
    return 0 if begin else limits.min, length if begin + length < size else limits.max


@_rewrite("cross_entropy_loss")
def _cross_entropy(rewriting: Rewriting) -> Node:
    """log(sum(exp(x))) - x[target], with the maximum, the sum and the target's x over all ranks.

        most    = the largest x of a row                     largest over the ranks
        sum     = sum of exp(x - most)                       all-reduce
        truth   = x[target] - most, of the rank that has     all-reduce
                  this class; 0 on the others (if none has it, `gather` refuses it)
        loss    = log(sum) - truth; 0 for targets that are ignored

    Section 3 of Megatron-LM (arXiv:1909.08053). Kept for backward is one tensor of the logits'
    shape, exp(x - most).
    """
    op, node = rewriting.op, rewriting.node
    x, target = node.args[:2]
    rows, classes = op.model.graph.spec(op["self"]).shape[0], op.shape(op["self"])[1]
    begin, length = part(classes, rewriting.ranks, rewriting.rank)
    wide, block, boolean = torch.float32, (rows, length), torch.bool
    result = node.outputs[0]
    assert result is not None
    if result.dtype == torch.float64:
        wide = torch.float64

    def before(suffix: str, name: str, *args: Arg, shape: Sequence[Dim] = (rows,),
               dtype: torch.dtype = wide) -> Ref:  # fmt: skip
        return rewriting.before(suffix, name, *args, shape=shape, dtype=dtype)

    # most
    logits = before("wide", "to.dtype", x, wide, shape=block)
    detached = before("values", "detach.default", logits, shape=block)
    own_maximum = before("own most", "amax.default", detached, (1,), True, shape=(rows, 1))
    maximum = rewriting.emit(
        replace(
            node,
            name=f"{node.name}/most",
            op="autopipe.largest.default",
            args=(own_maximum, TENSOR_PARALLEL),
            kwargs={},
            outputs=(TensorSpec((rows, 1), wide),),
            packed=False,
        )  # fmt: skip
    )
    # sum
    lower = before("lower", "sub.Tensor", logits, maximum, shape=block)
    powers = before("powers", "exp.default", lower, shape=block)
    own_sum = before("own sum", "sum.dim_IntList", powers, (1,))
    spec = TensorSpec((rows,), wide)
    total = rewriting.convert("sum", own_sum, spec)
    log = before("log", "log.default", total)
    # truth
    ids = torch.int64
    ignored = before("ignored", "eq.Scalar", target, op["ignore_index"], dtype=boolean)
    shifted = before("own", "sub.Scalar", target, begin, dtype=ids)
    low, high = _other_ranks(begin, length, classes, ids)
    below = before("low", "lt.Scalar", shifted, low, dtype=boolean)
    above = before("high", "ge.Scalar", shifted, high, dtype=boolean)
    outside = before("outside", "logical_or.default", below, above, dtype=boolean)
    masked = before("other", "logical_or.default", outside, ignored, dtype=boolean)
    columns = before("columns", "masked_fill.Scalar", shifted, masked, 0, dtype=ids)
    column = before("column", "unsqueeze.default", columns, 1, shape=(rows, 1), dtype=ids)
    picked = before("picked", "gather.default", lower, 1, column, shape=(rows, 1))
    flat = before("flat", "squeeze.dim", picked, 1)
    own_target_logit = before("own truth", "masked_fill.Scalar", flat, masked, 0.0)
    target_logit = rewriting.convert("truth", own_target_logit, spec)
    # loss
    each = before("each", "sub.Tensor", log, target_logit)
    losses = before("kept", "masked_fill.Scalar", each, ignored, 0.0)
    total_loss = before("total", "sum.default", losses, shape=())
    if op["reduction"] == 1:
        count = before("counted", "logical_not.default", ignored, dtype=boolean)
        targets = before("many", "sum.default", count, shape=(), dtype=ids)
        total_loss = before("mean", "div.Tensor", total_loss, targets, shape=())
    return replace(node, op="aten.to.dtype", args=(total_loss, result.dtype), kwargs={})


@_rewrite("vocabulary_loss")
def _vocabulary_loss(rewriting: Rewriting) -> Node:
    """The op with the columns of this rank's words."""
    w = rewriting.op["weight"]
    if not rewriting.inputs[w].sharded:
        return rewriting.node
    begin, _ = part(rewriting.op.shape(w)[0], rewriting.ranks, rewriting.rank)
    return rewriting.with_arguments(begin=begin, axis=TENSOR_PARALLEL)
