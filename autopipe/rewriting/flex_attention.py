"""Call torch's flex_attention as the products and the softmax that it stands for.

    scores   = q @ k.mT * scale                        [b, heads, queries, keys], in fp32
    scores   = score_mod(score, b, head, query, key)   each score by itself
    scores   = -inf                                    where mask_mod, or its blocks, say no
    result   = softmax(scores) @ v                     0 for a query that sees no key

torch's own refuses gradients on a CPU, where models are traced and checked, and compiles itself.
Without a `score_mod` this is one `scaled_dot_product_attention`; else scores stand in memory, as in
flex_attention's own eager mode (Dong et al. 2024, arXiv 2412.05496, section 3).

A `score_mod` or a `mask_mod` is a function of numbers, which torch calls by `torch.vmap`; no trace
goes through that. Here it is called once, for all of them: its arguments are tensors
[b or 1, heads or 1, queries or 1, keys or 1], which broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex
from torch.overrides import TorchFunctionMode

from autopipe.errors import CaptureError
from autopipe.frontend import user_lines
from autopipe.ir.tensors import tensors_in
from autopipe.ir.torch_patches import replacing


@contextmanager
def written_out() -> Iterator[None]:
    """Within, this thread's calls of flex_attention are made of other ops, without blocks."""
    whole = replacing(flex.create_block_mask, _Masked)
    with replacing(flex.flex_attention, _attention), whole:
        yield


class _Masked(flex.BlockMask):
    """Stands for a block mask that forward makes: the function alone says who sees what."""

    def __init__(self, mask_mod: Callable[..., Tensor], *_sizes: Any, **_more: Any) -> None:
        self.mask_mod = mask_mod

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise CaptureError(
            f"{user_lines.here()}: .{name} of a block mask is read, which a trace does not have",
            hint="make the mask before forward is called, or take what it is made of",
        )

    def to(self, *_where: Any, **_how: Any) -> _Masked:
        """The mask itself, as torch's block masks have it: this one has no blocks to move."""
        return self


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: flex.BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: object = None,
    *,
    return_aux: Any = None,
) -> Any:
    """What flex_attention gives for the same arguments.

    Args:
        query: [b, heads, queries, e].
        key: [b or 1, heads, keys, e]; with `enable_gqa` a divisor of as many heads.
        value: [b or 1, heads, keys, v].
    """
    del kernel_options  # of GPUs' kernels
    groups = query.shape[1] // key.shape[1] if enable_gqa else 1
    numbers = _numbers(query, key)
    allowed = None if block_mask is None else _allowed(block_mask, numbers)
    if score_mod is None and not return_lse and return_aux is None:
        return F.scaled_dot_product_attention(
            query, key, value, allowed, scale=scale, enable_gqa=groups > 1
        )
    key, value = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (key, value))
    precise = query.dtype if query.dtype == torch.float64 else torch.float32
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query.to(precise) @ key.to(precise).mT * scale
    if score_mod is not None:
        scores = _of_all(score_mod, "score_mod", scores, *numbers)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    blind = scores.isneginf().all(-1, keepdim=True)
    seen = scores.masked_fill(blind, 0)  # the softmax of -inf alone is nan, as are its gradients
    found = seen.softmax(-1).masked_fill(blind, 0).to(query.dtype) @ value
    lse = seen.logsumexp(-1).masked_fill(blind.squeeze(-1), -math.inf)
    if return_aux is not None:
        most = scores.amax(-1) if return_aux.max_scores else None
        return found, flex.AuxOutput(lse if return_aux.lse else None, most)
    return (found, lse) if return_lse else found


def _numbers(query: Tensor, key: Tensor) -> list[Tensor]:
    """The number of each row, head, query and key, each along its own dim of the scores."""
    sizes = (*query.shape[:3], key.shape[2])
    shapes = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))
    made = (torch.arange(size, device=query.device) for size in sizes)
    return [each.view(shape) for each, shape in zip(made, shapes, strict=True)]


def _allowed(mask: flex.BlockMask, numbers: list[Tensor]) -> Tensor:
    """Which keys each query sees, a bool that broadcasts to the scores."""
    allowed = _of_all(mask.mask_mod, "mask_mod", *numbers)
    if isinstance(mask, _Masked):
        return allowed
    rows, heads, queries, keys = numbers

    def listed(count: Tensor | None, columns: Tensor | None) -> Tensor | None:
        """Which pairs are in a listed block; count [B, H, rows], columns [B, H, rows, most]."""
        if count is None or columns is None:
            return None
        most = columns.shape[-1]
        here = torch.arange(most, device=columns.device) < count[..., None]
        block = torch.arange(most, device=columns.device)[:, None]
        blocks = ((columns[..., None, :] == block) & here[..., None, :]).any(-1)
        row = rows if blocks.shape[0] > 1 else 0
        head = heads if blocks.shape[1] > 1 else 0
        return blocks[row, head, queries // mask.BLOCK_SIZE[0], keys // mask.BLOCK_SIZE[1]]

    partly = listed(mask.kv_num_blocks, mask.kv_indices)
    fully = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    allowed = allowed if partly is None else allowed & partly
    return allowed if fully is None else allowed | fully


def _of_all(function: Callable[..., Any], name: str, *numbers: Tensor) -> Tensor:
    """The results of a function of row, head, query and key for all of their numbers at once."""
    with _Each(name, numbers):
        found = function(*numbers)
    if not isinstance(found, Tensor):
        raise _refusal(name, "gives something that is no number of a tensor")
    return found


class _Row:
    """A table indexed by fewer numbers than it has dims: the `table[b]` in `table[b][query]`."""

    def __init__(self, each: _Each, table: Tensor, numbers: tuple[Any, ...] = ()) -> None:
        self._each, self._table, self._numbers = each, table, numbers

    def __getitem__(self, index: Any) -> Any:
        more = index if isinstance(index, tuple) else (index,)
        numbers = (*self._numbers, *map(self._each.whole, more))
        if len(numbers) < self._table.ndim:
            return _Row(self._each, self._table, numbers)
        return self._each.noted(self._table[numbers])


class _Each(TorchFunctionMode):
    """Refuses what would not compute each number by itself; tables are read by `_Row`.

    Args:
        name: the function's, in errors.
        numbers: the tensors whose entries are numbers by themselves, of four dims.
    """

    def __init__(self, name: str, numbers: tuple[Tensor, ...]) -> None:
        super().__init__()
        self._name = name
        self._each = {id(number): number for number in numbers}  # kept: ids are used once

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = list(tensors_in((args, kwargs)))
        if not any(id(tensor) in self._each for tensor in tensors):
            return func(*args, **kwargs)
        called = _name_of(func)
        if func is Tensor.__getitem__ and id(args[0]) not in self._each:
            return _Row(self, args[0])[args[1]]
        if called == "get":  # an attribute: dtype, device
            return func(*args, **kwargs)
        if called not in _MADE and not _is_pointwise(called):
            raise _refusal(self._name, f"calls {called}")
        if any(tensor.ndim and id(tensor) not in self._each for tensor in tensors):
            raise _refusal(self._name, f"calls {called} with a whole tensor")
        found = func(*args, **kwargs)
        if isinstance(found, Tensor) and found.ndim != (0 if called in _MADE else 4):
            raise _refusal(self._name, f"calls {called} over all scores")
        return self.noted(found) if isinstance(found, Tensor) else found

    def noted(self, number: Tensor) -> Tensor:
        """The tensor, whose entries are numbers by themselves from here on."""
        self._each[id(number)] = number
        return number

    def whole(self, number: Any) -> Any:
        """A whole number, by which a table may be read."""
        if isinstance(number, Tensor) and (id(number) in self._each or number.ndim == 0):
            if number.dtype != torch.bool and not number.dtype.is_floating_point:
                return number
        elif isinstance(number, int):
            return number
        raise _refusal(self._name, f"indexes a tensor by {type(number).__name__}")


_MADE = frozenset("new_ones new_zeros new_full new_tensor".split())
_UNTAGGED = frozenset(
    "floordiv floor_divide to type float double half bfloat16 int long bool type_as clone "
    "detach".split()
)
"""Pointwise functions whose ops aten does not tag so."""

_IN_ATEN = {
    "truediv": "div",
    "mod": "remainder",
    "invert": "bitwise_not",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}


def _name_of(func: Any) -> str:
    """The name of a function of torch: `add` for s + 1 and for 1 + s."""
    name = str(func.__name__)
    turned = name.replace("__r", "__", 1)  # __radd__; __rshift__ is no such one
    return (turned if hasattr(Tensor, turned) else name).strip("_")


def _is_pointwise(called: str) -> bool:
    """Whether a function of torch takes each entry of its arguments by itself."""
    if called in _UNTAGGED:
        return True
    for name in (called, _IN_ATEN.get(called, ""), f"bitwise_{called}"):
        op = getattr(torch.ops.aten, name, None) if name else None
        if op and any(torch.Tag.pointwise in getattr(op, each).tags for each in op.overloads()):
            return True
    return False


def _refusal(name: str, what: str) -> CaptureError:
    return CaptureError(
        f"{user_lines.here()}: {name} of flex_attention {what}; it is called for all scores at "
        "once, so each has to be computed by itself",
        hint="write it with arithmetic, comparisons, torch.where and numbers of a table, table[i]",
    )
