"""The tensors in nested arguments and results, and how their sizes are known."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import is_dataclass
from functools import cache
from typing import Any

import sympy
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from autopipe.ir.torch_private import (
    TorchDispatchMode,
    expression,
    fake_like,
    fake_mode,
    is_fake,
    no_function_modes,
    no_modes,
)

Strides = tuple[int, ...]

EMULATED: ContextVar[torch.dtype | None] = ContextVar("emulated", default=None)
"""The 16 bits of an autocast of GPUs that is emulated on a CPU (`rewriting.gpu_autocast`)."""


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's storage, or of the tensors that a sparse or nested one is made of."""
    if tensor.layout == torch.strided:
        return tensor.untyped_storage().nbytes()
    with torch.no_grad():
        if tensor.layout == torch.sparse_coo:
            tensor = tensor.coalesce()
            parts: tuple[torch.Tensor, ...] = (tensor.indices(), tensor.values())
        elif tensor.is_nested:
            parts = (tensor.offsets(), tensor.values())  # type: ignore[attr-defined]  # not in stubs
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        else:
            parts = (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
        return sum(part.nbytes for part in parts)


def autocast_dtype() -> torch.dtype | None:
    """The dtype of autocast for ops of fake tensors on a CPU; None where autocast is off."""
    on_cpu = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    return EMULATED.get() or on_cpu


def tensors_in(tree: object) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples, mappings and dataclasses, in order, repeats included."""
    found: list[torch.Tensor] = []
    _collect_tensors(tree, found)
    return iter(found)


_WITHOUT = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
"""Types that most arguments have and that hold no tensors."""


def _collect_tensors(tree: object, found: list[torch.Tensor]) -> None:
    if type(tree) in _WITHOUT:
        return
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            _collect_tensors(item, found)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            _collect_tensors(item, found)
    elif is_dataclass(tree) and not isinstance(tree, type):
        _collect_tensors(object.__getstate__(tree), found)  # an attribute's own code may raise


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """What code has set on a tensor, real or fake: `self.weight.scale = 2`."""
    return {
        name: value for name, value in vars(tensor).items() if name not in _attributes_of_fakes()
    }


@cache
def _attributes_of_fakes() -> frozenset[str]:
    fake = fake_like(fake_mode(), torch.nn.Parameter(torch.empty(0, device="cpu")))
    return frozenset(vars(fake)) | {"_is_param"}


def indexes_by_a_number(index: object) -> bool:
    """Whether an index is like that of `x[:, k]` or `x[:, :k]`, with a tensor k of one number."""
    parts = index if isinstance(index, tuple) else (index,)
    ends = [(part.start, part.stop, part.step) for part in parts if isinstance(part, slice)]
    if any(isinstance(end, torch.Tensor) for three in ends for end in three):
        return True
    numbers = [part for part in parts if isinstance(part, torch.Tensor) and part.ndim == 0]
    return any(number.dtype != torch.bool for number in numbers)


def of_unknown_size(tensor: torch.Tensor) -> bool:
    """Whether a size of a traced tensor is a symbol that stands for values of another tensor."""
    sizes: Sequence[Any] = tensor.shape
    return any(isinstance(s, torch.SymInt) and _of_values(expression(s)) for s in sizes)


@cache
def _of_values(size: sympy.Expr) -> bool:
    return any(symbol.name.startswith("u") for symbol in size.free_symbols)


_AS_IT_IS = frozenset({"to", "type", "float", "cpu", "detach", "contiguous"})
"""Methods that give a tensor's own values, where its dtype and device stay as they are."""


class OwnData:
    """Recognises an assignment of a tensor's own `.data`, which changes nothing.

        weight.data = weight.data.to(x.device)      nothing moves where all is on one device

    A trace has a new tensor for each `.data`, and for a result of `to` that eager returns as it is.
    This notes whose data each of them is.
    """

    def __init__(self) -> None:
        self._whose = WeakTensorKeyDictionary()

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The `.data` of a tensor: one without its gradient, which shares its memory."""
        data = tensor.detach()
        self._whose[data] = tensor
        return data

    def noted(self, func: Any, args: Sequence[Any], result: Any) -> Any:
        """The result of a call of torch; notes whose `.data` it is, if it may be what was given."""
        given = args[0] if args and getattr(func, "__name__", "") in _AS_IT_IS else None
        known = isinstance(given, torch.Tensor) and given in self._whose
        whose = self._whose[given] if known else None
        if not isinstance(result, torch.Tensor):  # `x.data.type()` is a word
            return result
        if whose is not None and (result.dtype, result.device) == (whose.dtype, whose.device):
            self._whose[result] = whose
        return result

    def is_of(self, tensor: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether a value that is assigned to `tensor.data` is that data already."""
        return value is tensor or (value in self._whose and self._whose[value] is tensor)


def is_another_value(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `tensor.data = value` writes a parameter: shape and dtype stay, values change."""
    parameter = isinstance(tensor, torch.nn.Parameter)
    return parameter and (tensor.shape, tensor.dtype) == (value.shape, value.dtype)


def is_one_for_all(tensor: torch.Tensor, index: Any, value: Any) -> bool:
    """Whether `tensor[index] = value` is `x[mask] = w`: x [b, s, h], mask [b, s], trained w [h]."""
    masks = isinstance(index, torch.Tensor) and index.dtype == torch.bool
    trained = isinstance(value, torch.Tensor) and value.requires_grad
    return masks and trained and value.dim() <= tensor.dim() - index.dim()


def write_one(tensor: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> None:
    """Do `tensor[mask] = value`, bit by bit, so that no size in backward depends on the mask."""
    wide = mask.reshape(*mask.shape, *[1] * (tensor.dim() - mask.dim()))
    tensor.copy_(torch.where(wide, value, tensor))


def counted(
    x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor | None:
    """`torch.bincount` by ops whose result has a fixed size: `minlength`.

    Returns None if no length is given, or an entry of x is known to be `minlength` or more. The
    entries of a fake x are not known: there, a larger one is an error of `index_add` in the run.
    """
    if isinstance(minlength, int) and not minlength:
        return None
    with no_function_modes():
        if not is_fake(x) and x.numel() and int(x.max()) >= minlength:
            return None
    if weights is None:
        each = torch.ones_like(x, dtype=torch.int64)
    else:
        single = weights.dtype == torch.float32
        each = weights.detach().to(torch.float32 if single else torch.float64)
    return each.new_zeros(minlength).index_add(0, x.long(), each)


def for_any_rows(
    func: object, args: Sequence[Any], named: Mapping[str, Any]
) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
    """The result of a call that torch itself would trace for a single number of rows only.

    It is made here of ops that hold for any number. None if it is no such call, or if all its sizes
    are plain numbers.
    """
    if (parts := _in_even_parts(func, args, named)) is not None:
        return parts
    written = _WRITTEN_OUT.get(getattr(func, "__name__", ""))
    sizes = (size for tensor in tensors_in((args, named)) for size in tensor.shape)
    if written is None or not any(isinstance(size, torch.SymInt) for size in sizes):
        return None
    return written(*args, **named)


def _along(x: torch.Tensor, indices: torch.Tensor, dim: int | None = None) -> torch.Tensor | None:
    """`take_along_dim`: other dims of 1 are as long as the other tensor's."""
    if dim is None or x.dim() != indices.dim():
        return None
    at = dim % x.dim()
    pairs = list(zip(x.shape, indices.shape, strict=True))
    sizes = [b if a == 1 else a for a, b in pairs]
    wide = x.expand(sizes[:at] + [x.shape[at]] + sizes[at + 1 :])
    return wide.gather(at, indices.expand(sizes[:at] + [indices.shape[at]] + sizes[at + 1 :]))


def _kronecker(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    dims = max(x.dim(), other.dim())
    shape = [1] * (dims - x.dim()) + list(x.shape)
    other_shape = [1] * (dims - other.dim()) + list(other.shape)
    each = x.reshape([n for size in shape for n in (size, 1)])
    product = each * other.reshape([n for size in other_shape for n in (1, size)])
    return product.reshape([a * b for a, b in zip(shape, other_shape, strict=True)])


_WRITTEN_OUT: dict[str, Callable[..., torch.Tensor | None]] = {
    "take_along_dim": _along,
    "kron": _kronecker,
}


def _in_even_parts(
    func: object, args: Sequence[Any], named: Mapping[str, Any]
) -> tuple[torch.Tensor, ...] | None:
    """The parts that `chunk` and `split` make of rows that they divide evenly.

        torch.cat([x, y]).chunk(2)     of 2 b rows: b and b
        z.split(len(x))                the same; torch would round 2 b / b, and fix b for that

    None: it is another call, or no symbol is divided, or not evenly.
    """
    if func not in _PARTING or not args:
        return None
    tensor, given, dim = (*args, *named.values(), 0)[:3]
    if "dim" in named:
        given, dim = next((n for k, n in named.items() if k != "dim"), given), named["dim"]
    size = tensor.shape[dim]
    if not isinstance(size, torch.SymInt) or not isinstance(given, int | torch.SymInt):
        return None
    share = sympy.cancel(expression(size) / _expression_of(given))
    sizes: Any
    if func in (torch.split, torch.Tensor.split):
        sizes = [given] * int(share) if share.is_Integer else []
    else:
        sizes = [size // given] * int(given) if share.is_integer else []
    return torch.split(tensor, sizes, dim) if sizes else None


_PARTING = torch.chunk, torch.Tensor.chunk, torch.split, torch.Tensor.split


def _expression_of(size: int | torch.SymInt) -> sympy.Expr:
    return expression(size) if isinstance(size, torch.SymInt) else sympy.Integer(size)


def dense_strides(tensor: torch.Tensor) -> Strides:
    """The strides of a tensor's dense copy: its own where it has no gaps and no overlaps."""
    return torch.empty_like(tensor).stride()


def is_row_major(shape: Sequence[int], *strides: Strides) -> bool:
    """Whether all of these strides are those of a tensor that nothing has transposed."""
    return {*strides} == {torch.empty(shape, device="meta").stride()}


_ROW_MAJOR = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "native_layer_norm_backward",
        *("native_batch_norm", "_native_batch_norm_legit", "native_batch_norm_backward"),
        *("_log_softmax_backward_data", "mse_loss_backward", "smooth_l1_loss_backward"),
        "huber_loss_backward",
    )
)
"""Ops whose kernels lay out their first result by themselves (aten/src/ATen/native: `empty_like`
with `LEGACY_CONTIGUOUS_MEMORY_FORMAT`). Fake ones keep the layout of an operand."""


class RowMajor(TorchDispatchMode):
    """Gives results on fake tensors the layout that real kernels give them (`_ROW_MAJOR`)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's modes have no types

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _ROW_MAJOR:
            return result
        if isinstance(result, torch.Tensor):
            return _row_major(result)
        first, *rest = result
        return (first if first is None else _row_major(first), *rest)


def _row_major(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like a fake one, whose dims lie in their order; images may lie channels last."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is not None and tensor.is_contiguous(memory_format=last):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


NORMALIZED = "normalize_"
"""The name of what `normalize_` does; no op of torch does so."""


def normalize_(tensor: torch.Tensor, order: float, over: Sequence[int], least: float) -> None:
    """Divide a tensor by its norms over some dims, in place; by `least` where they are less."""
    norms = torch.linalg.vector_norm(tensor, order, tuple(over), keepdim=True)
    tensor.div_(norms.clamp_min(least))


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage have an element in common."""
    if one.dtype != other.dtype:
        return True
    with no_function_modes():  # reads here are not the model's
        size = one.untyped_storage().nbytes() // one.itemsize
        marks = torch.zeros(size, dtype=torch.bool)
        first, second = (
            marks.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            for tensor in (one, other)
        )
        first.fill_(True)
        return bool(second.any())


_OF_NO_TRACE = threading.local()


def default_device() -> torch.device:
    """What `torch.get_default_device` says: it makes a tensor, of which no trace is to have any."""
    if not hasattr(_OF_NO_TRACE, "mode"):  # torch reads the whole stack of calls to make a mode
        _OF_NO_TRACE.mode = fake_mode()
    with no_modes(), _OF_NO_TRACE.mode:
        return torch.get_default_device()
