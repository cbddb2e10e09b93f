"""RNNs over packed sequences as ops on padded ones, whose sizes depend on no values.

    pack_padded_sequence(x [b, T, i], lengths)    a `Packed`: x and its lengths
    rnn(packed)                                   autopipe::packed_rnn(x, lengths, ...): packs, runs
                                                  torch's kernel, pads to T again
    pad_packed_sequence(packed)                   its x, cut off behind the longest row where the
                                                  user asks for no length

Packing and padding copy values and change none, so forward and gradients are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import rnn

from autopipe.errors import Uncaptured
from autopipe.frontend import user_lines
from autopipe.ir import opaque_ops
from autopipe.ir.tensors import tensors_in
from autopipe.ir.torch_patches import own_of, patched, replacing
from autopipe.ir.torch_private import is_fake
from autopipe.rewriting.gpu_autocast import autocast_inside, cast

_library = torch.library.Library("autopipe", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "packed_rnn(Tensor x, Tensor lengths, Tensor[] states, Tensor[] weights, str mode, "
    "bool biases, int layers, float dropout, bool train, bool bidirectional, "
    "bool in_order) -> Tensor[]"
)

_KERNELS: dict[str, Callable[..., Any]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}


class Packed(rnn.PackedSequence):
    """Stands for a packed sequence in a trace; its packed data cannot be read.

    Attributes:
        x: the padded rows, [T, b, n]: T tokens, b rows, n values.
        lengths: tokens of each row, [b], on the CPU.
        in_order: whether the rows have to be sorted by length.
        zeros: whether x is 0 behind the end of each row.
    """

    x: Tensor
    lengths: Tensor
    in_order: bool
    zeros: bool

    def __new__(cls, x: Tensor, lengths: Tensor, in_order: bool, zeros: bool) -> Packed:
        packed = tuple.__new__(cls, (None,) * 4)
        packed.x, packed.lengths, packed.in_order, packed.zeros = x, lengths, in_order, zeros
        return packed

    def __getattribute__(self, name: str) -> Any:
        if name in ("data", "batch_sizes", "sorted_indices", "unsorted_indices"):
            raise _refusal(f".{name} of a packed sequence is read")
        return super().__getattribute__(name)

    def __iter__(self) -> Iterator[Any]:
        raise _refusal("a packed sequence is taken apart")


def _refusal(what: str) -> Uncaptured:
    return Uncaptured(
        f"{user_lines.here()}: {what}, whose size depends on the lengths of rows",
        hint="give it to an RNN or to pad_packed_sequence, and compute on what is padded",
        lines=True,
    )


@contextmanager
def as_ops() -> Iterator[None]:
    """Within, packed sequences are padded ones with their lengths.

    Raises:
        Uncaptured: a packed sequence is used otherwise than by RNNs; names the user's line.
    """
    with ExitStack() as until:
        until.enter_context(replacing(rnn.pack_padded_sequence, _pack))
        until.enter_context(replacing(rnn.pad_packed_sequence, _pad))
        for kind in (nn.LSTM, nn.GRU, nn.RNN):
            until.enter_context(patched(kind, "forward", _taking_packed(kind.forward)))
        yield


def _pack(
    input: Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True
) -> Packed:
    if not isinstance(lengths, Tensor):
        lengths = torch.as_tensor(lengths, dtype=torch.int64)
    return Packed(input.transpose(0, 1) if batch_first else input, lengths, enforce_sorted, False)


def _pad(
    sequence: Packed,
    batch_first: bool = False,
    padding_value: float = 0.0,
    total_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    x, lengths = sequence.x, sequence.lengths
    end = int(lengths.max()) if total_length is None else x.shape[0]
    if total_length is not None and total_length != end:
        raise _refusal(f"a packed sequence is padded to {total_length}, and was {end} long")
    x = x[:end]
    if padding_value != 0.0 or not sequence.zeros:
        beyond = torch.arange(end, device=x.device)[:, None] >= lengths.to(x.device)
        x = x.masked_fill(beyond.reshape(*beyond.shape, *[1] * (x.dim() - 2)), padding_value)
    x = (x.transpose(0, 1) if batch_first else x).contiguous()  # as torch lays it out
    return x, lengths.to("cpu", torch.int64)


def _taking_packed(plain_forward: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.RNNBase, input: Any, hx: Any = None) -> Any:
        return (
            _run_module(self, input, hx)
            if isinstance(input, Packed)
            else plain_forward(self, input, hx)
        )

    return forward


def _run_module(module: nn.RNNBase, packed: Packed, hx: Any) -> tuple[Packed, Any]:
    """The result of an RNN for a packed sequence, and its last states."""
    x, both = packed.x, module.mode == "LSTM"
    if hx is None:
        size = module.num_layers * (2 if module.bidirectional else 1), x.shape[1]
        widths = (module.proj_size or module.hidden_size, module.hidden_size)
        hx = [x.new_zeros(*size, width) for width in widths[: 2 if both else 1]]
    rows, *last = torch.ops.autopipe.packed_rnn.default(
        x,
        packed.lengths,
        list(hx) if both else [hx[0] if isinstance(hx, list) else hx],
        [weight for layer in module.all_weights for weight in layer],
        module.mode,
        module.bias,
        module.num_layers,
        float(module.dropout),
        module.training,
        module.bidirectional,
        packed.in_order,
    )
    return Packed(rows, packed.lengths, packed.in_order, True), tuple(last) if both else last[0]


def _run(x: Tensor, lengths: Tensor, *rest: Any) -> list[Tensor]:
    with autocast_inside():
        if not any(map(is_fake, tensors_in((x, lengths, rest)))):
            return _packed(x, lengths.cpu(), *rest)
        if opaque_ops.observed():
            return list(opaque_ops.run(_of_full_rows, x, *rest))
        return _of_full_rows(x, *rest)


_library.impl("packed_rnn", _run, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]


def _packed(
    x: Tensor,
    lengths: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    mode: str,
    *options: Any,
) -> list[Tensor]:
    """The results of torch's kernel for packed rows, padded to [T, b, n], and the last states."""
    *settings, in_order = options
    pack, pad = own_of(rnn.pack_padded_sequence), own_of(rnn.pad_packed_sequence)
    packed = pack(x, lengths, enforce_sorted=in_order)
    order, back = packed.sorted_indices, packed.unsorted_indices
    hx = [state if order is None else state.index_select(1, order) for state in states]
    given = hx if mode == "LSTM" else hx[0]
    rows, *last = _KERNELS[mode](packed.data, packed.batch_sizes, given, list(weights), *settings)
    padded, _ = pad(
        rnn.PackedSequence(rows, packed.batch_sizes, order, back), total_length=x.shape[0]
    )
    return [padded, *(state if back is None else state.index_select(1, back) for state in last)]


def _of_full_rows(
    x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], mode: str, *options: Any
) -> list[Tensor]:
    """`_packed` for tensors without values, as if all rows had full length.

    No other lengths keep more for backward.
    """
    if not any(map(is_fake, (x, *states, *weights))):
        lengths = torch.full((x.shape[1],), x.shape[0])
        return _packed(x, lengths, states, weights, mode, *options)
    (x, states, weights), _ = cast(_KERNELS[mode], (x, states, weights), {})
    *_, bidirectional, _ = options
    width = states[0].shape[2] * (2 if bidirectional else 1)
    return list(_Shaped.apply(width, len(states), x, *states, *weights))  # type: ignore[no-untyped-call]


class _Shaped(torch.autograd.Function):
    """Gives results without values, and gradients without values in backward."""

    @staticmethod
    def forward(ctx: Any, width: Any, count: int, x: Tensor, *others: Tensor) -> Any:
        ctx.like = (x, *others)
        like = next(tensor for tensor in (x, *others) if is_fake(tensor))  # x may be of the batch
        sizes = (*x.shape[:2], width), *(state.shape for state in others[:count])
        return tuple(like.new_empty(size) for size in sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        operands = zip(ctx.like, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(torch.empty_like(t) if needed else None for t, needed in operands)
