"""Ops whose fake kernel does not know what the real one reads or keeps: LSTM, istft, and CTC.

The CPU's LSTM (oneDNN) keeps a workspace whose size only the kernel knows; under fake tensors it is
empty, and a stage with an LSTM would be predicted at a tenth of its bytes. Such an op is run once
for real, on ones of the same shapes, and the bytes that this run saves are used.

`torch.istft` reads whether its windows, laid over each other, are 0 anywhere. Tensors without
values cannot say: what a kernel asks of them is answered as in that run.

CTC, the loss of speech models, keeps a table [b, T, 2 L + 1], L the longest target of the batch:
nobody can trace that. `ctc_loss` makes it as wide as targets are padded, 2 U + 1; its values are
the same:

    F.ctc_loss(log_probs [T, b, C], targets [b, U], lengths [b], target_lengths [b])

A cross-entropy of probabilities fixes the number of rows in a trace, before torch 2.13. There it is
traced as the ops that its kernel runs (`soft_cross_entropy`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from autopipe.ir.graph import REGION_OP
from autopipe.ir.tensors import autocast_dtype, tensors_in
from autopipe.ir.torch_private import (
    DataDependentOutputException,
    TorchDispatchMode,
    outside_fake_mode,
    storage_key,
)

KERNELS = ("aten.lstm.input", "aten.istft.default")
"""The ops that `run` runs."""

COND_OP = "autopipe.cond.default"  # functions of the user's (`opaque.branches`)

FUNCTION_OP = "autopipe.function.default"  # one of the user's autograd (`opaque.custom_functions`)

PACKED_OP = "autopipe.packed_rnn.default"  # `opaque.packed`

OPAQUE = (*KERNELS, REGION_OP, COND_OP, PACKED_OP)
"""The ops that no compiler looks into, nor any pass that runs blocks again."""

Pack = Callable[[Tensor], Tensor]
_packs: list[Pack] = []


@contextmanager
def observing(pack: Pack, unpack: Pack | None = None) -> Iterator[None]:
    """Within, `pack` gets what autograd or an opaque op's kernel saves; `unpack` what it gives."""
    _packs.append(pack)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack or _same):
            yield
    finally:
        _packs.pop()


def observed() -> bool:
    """Whether anybody wants to know what is saved: in a dry run, and not in a trace."""
    return bool(_packs)


def run(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an opaque op on fake tensors, and pass to the observer what its real kernel saves."""
    # Autocast decides what the kernel computes in, and so what it keeps.
    low = autocast_dtype()

    def real() -> _Real:
        return _on_ones(op, low, _described(args))

    with torch.autograd.graph.saved_tensors_hooks(_same, _same):
        try:
            result = op(*args, **kwargs)
        except DataDependentOutputException:
            with _Answering(real().equal):
                result = op(*args, **kwargs)
    if _packs and torch.is_grad_enabled():
        seen, found = list(tensors_in((args, result))), real()
        keep([seen[position] for position in found.saved], found.rest, tensors_in(result))
    return result


class _Real(NamedTuple):
    """What a run of a real kernel has shown.

    Attributes:
        saved: the positions of what it saves for backward among its operands and results. The next
            op may save a result, too: the bytes of both are those of one storage.
        rest: the bytes of all else that it saves.
        equal: whether tensors were equal, each time that it asked.
    """

    saved: tuple[int, ...]
    rest: int
    equal: tuple[bool, ...]


class _Answering(TorchDispatchMode):
    """Answers `torch.equal` of tensors without values as a run with values has answered it."""

    def __init__(self, equal: Iterable[bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._equal = iter(equal)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = func is torch.ops.aten.equal.default
        return next(self._equal) if asks else func(*args, **(kwargs or {}))


class _Asked(TorchDispatchMode):
    """Notes the answer of each `torch.equal` that a kernel calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.equal: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.equal.default:
            self.equal.append(found)
        return found


def keep(tensors: Sequence[Tensor], size: int, outputs: Iterable[Tensor]) -> None:
    """Tell the observer that a real kernel saves tensors, and `size` bytes besides, for backward.

    They are kept as long as the node of any of the kernel's outputs is.
    """
    if not _packs:
        return
    room = torch.empty(size, dtype=torch.uint8)
    kept = [_packs[-1](tensor) for tensor in (*tensors, room)]
    for output in outputs:
        if output.grad_fn is not None:
            output.grad_fn.metadata["kept"] = kept  # type: ignore[index]  # typed a method


@lru_cache(maxsize=256)
def _on_ones(op: Callable[..., Any], low: torch.dtype | None, described: tuple[Any, ...]) -> _Real:
    """What the real kernel does to ones (istft refuses a window of zeros). `low`, the dtype of
    autocast around the call, is there for the cache's key."""
    with outside_fake_mode(), torch.enable_grad():
        args = _ones(described)
        kept: dict[int, int] = {}
        alive: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            alive.append(tensor)
            kept[storage_key(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, _same), _Asked() as asked:
            result = op(*args)
        # A result may lie in an operand.
        positions: dict[int, int] = {}
        for position, tensor in enumerate(tensors_in((args, result))):
            positions.setdefault(storage_key(tensor), position)
    saved = sorted(positions[key] for key in kept if key in positions)
    rest = sum(size for key, size in kept.items() if key not in positions)
    return _Real(tuple(saved), rest, tuple(asked.equal))


def _described(arg: Any) -> Any:
    """An argument with (shape, dtype, requires_grad) in place of each tensor."""
    if isinstance(arg, Tensor):
        return "tensor", tuple(arg.shape), arg.dtype, arg.requires_grad
    return tuple(map(_described, arg)) if isinstance(arg, list | tuple) else arg


def _ones(described: Any) -> Any:
    if isinstance(described, tuple) and described[:1] == ("tensor",):
        _, shape, dtype, gradient = described
        return torch.ones(shape, dtype=dtype, requires_grad=gradient)
    return tuple(map(_ones, described)) if isinstance(described, tuple) else described


def _same(tensor: Tensor) -> Tensor:
    return tensor


PLAIN = F.ctc_loss
"""torch's own function, whose calls become `ctc_loss` in a trace."""


@torch.library.custom_op("autopipe::ctc", mutates_args=())
def ctc(
    log_probs: Tensor,
    targets: Tensor,
    lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    """The loss of each row [b], and the table [b, T, 2 U + 1] that backward reads."""
    losses, table = torch.ops.aten._ctc_loss.Tensor(
        log_probs, targets, lengths, target_lengths, blank, zero_infinity
    )
    return losses, F.pad(table, (0, 2 * targets.shape[1] + 1 - table.shape[2]))


@ctc.register_fake
def _ctc_fake(log_probs: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    steps, rows, _ = log_probs.shape
    width = 2 * targets.shape[1] + 1
    return log_probs.new_empty(rows), log_probs.new_empty(rows, steps, width)


@torch.library.custom_op("autopipe::ctc_backward", mutates_args=())
def ctc_backward(
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    lengths: Tensor,
    target_lengths: Tensor,
    losses: Tensor,
    table: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The gradient of `log_probs`."""
    longest = 2 * int(target_lengths.max()) + 1
    of_it = (log_probs, targets, lengths, target_lengths, losses, table[..., :longest].contiguous())
    found: Tensor = torch.ops.aten._ctc_loss_backward.Tensor(gradient, *of_it, blank, zero_infinity)
    return found


@ctc_backward.register_fake
def _ctc_backward_fake(gradient: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _ctc_keep(ctx: Any, inputs: Any, output: Any) -> None:
    log_probs, targets, lengths, target_lengths, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(log_probs, targets, lengths, target_lengths, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _ctc_gradient(ctx: Any, gradient: Tensor | None, _: Any) -> Any:
    rest = (*ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return None if gradient is None else ctc_backward(gradient, *rest), *(None,) * 5


ctc.register_autograd(_ctc_gradient, setup_context=_ctc_keep)
for _device in ("cpu", "cuda"):  # its kernels have no 16 bits, and torch's autocast casts it too
    ctc.register_autocast(_device, torch.float32)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """What F.ctc_loss computes of targets [b, U]; its arguments."""
    losses: Tensor = ctc(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0]
    if zero_infinity:
        losses = torch.where(losses == torch.inf, torch.zeros_like(losses), losses)
    if reduction == "mean":
        losses = (losses / target_lengths.clamp_min(1)).mean()
    return losses.sum() if reduction == "sum" else losses


def can(log_probs: Any, targets: Any, lengths: Any, target_lengths: Any, *rest: Any) -> bool:
    """Whether a call of F.ctc_loss is one that `ctc_loss` computes: a batch, all tensors."""
    tensors = (log_probs, targets, lengths, target_lengths)
    if not all(isinstance(given, Tensor) for given in tensors):
        return False
    return bool(log_probs.dim() == 3 and targets.dim() == 2)


def of_labels(
    logits: Tensor,
    labels: Tensor,
    logit_lengths: Tensor,
    blank_token_id: int,
    reduction: str = "mean",
    zero_infinity: bool = False,
    ignore_index: int = -100,
    **kwargs: Any,
) -> Tensor:
    """transformers' `ForCTCLoss` with the labels that count moved to the front of each row.

    It selects them by a mask, so how many there are depends on values.
    """
    counts = (labels != ignore_index) & (labels != blank_token_id)
    order = (~counts).long().argsort(dim=1, stable=True)
    log_probs = F.log_softmax(logits, dim=-1, dtype=torch.float32).transpose(0, 1)
    return ctc_loss(
        log_probs,
        labels.gather(1, order).clamp_min(0),
        logit_lengths,
        counts.sum(-1),
        blank_token_id,
        reduction,
        zero_infinity,
    )


def distances(*args: Any, **kwargs: Any) -> Tensor:
    """`torch.cdist`, which takes products where either side has more than 25 points.

    A graph has it as one op, which asks for its sizes whenever it runs: a trace need not.
    """
    sizes: list[Any] = [size for points in tensors_in((args, kwargs)) for size in points.shape]
    symbol = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
    with symbol.node.shape_env.suppress_guards() if symbol is not None else nullcontext():
        return torch.cdist(*args, **kwargs)


def is_soft(input: Any = None, target: Any = None, *rest: Any, **kwargs: Any) -> bool:
    """Whether a call of F.cross_entropy is one that `soft_cross_entropy` is to compute."""
    given = isinstance(input, Tensor) and isinstance(target, Tensor) and len(rest) < 2
    plain = kwargs.get("size_average") is None and kwargs.get("reduce") is None
    return torch.__version__ < "2.13" and given and plain and target.is_floating_point()


def soft_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **kwargs: Any,
) -> Tensor:
    """What F.cross_entropy computes of probabilities; its arguments."""
    dim = min(input.dim() - 1, 1)
    words = input.shape[dim]
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / words
    terms = F.log_softmax(input, dim) * target
    if weight is not None:
        terms = terms * weight.view(-1, *[1] * (input.dim() - dim - 1))
    if reduction == "none":
        return -terms.sum(dim)
    return -terms.sum() / (input.numel() // words) if reduction == "mean" else -terms.sum()
