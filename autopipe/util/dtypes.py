"""Names of dtypes in plans (torch's, without `torch.`), and the bytes of an element."""

from __future__ import annotations

from autopipe.errors import PlanError

BYTES: dict[str, int] = {
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32", "bcomplex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of one element, by the dtype's name."""


def name_of(dtype: object) -> str:
    """The name of a dtype in plans: `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def text_of(arg: object) -> str:
    """An argument of an op as source text, with dtypes in it by name."""
    if isinstance(arg, tuple):
        return f"({', '.join(map(text_of, arg))})"
    return name_of(arg)


def bytes_of(name: str) -> int:
    """Bytes of one element of the dtype named `name`.

    Raises:
        PlanError: there is no such dtype.
    """
    if name not in BYTES:
        raise PlanError(
            f"plan: {name!r} is no dtype whose size is known",
            hint=f"it is one of {', '.join(BYTES)}; if it is right, plan again with this version",
        )
    return BYTES[name]
