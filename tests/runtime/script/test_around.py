"""A step computes in the plan's precision: under a mode of torch that changes it, it is refused."""

import pytest
import torch

from autopipe import ModelError
from autopipe.runtime.script.around import check_around

CPU = torch.device("cpu")


def test_under_autocast() -> None:
    """Bug: eager stages computed in bf16 then, compiled ones and zero-bubble's in fp32."""
    for call in ("step", "evaluate"):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ModelError) as refused:
            check_around(call, "fp32", CPU)
        assert str(refused.value).startswith(
            f"pipe.{call} was called under torch.autocast to bfloat16, and the plan says in which "
            "precision a step computes: fp32"
        )


def test_without_gradients() -> None:
    with torch.no_grad(), pytest.raises(ModelError, match=r"torch\.no_grad\(\)"):
        check_around("step", "fp32", CPU)


def test_what_changes_nothing() -> None:
    check_around("step", "bf16", CPU)
    with torch.no_grad():
        check_around("evaluate", "fp32", CPU)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        check_around("step", "fp32", CPU)
    with torch.autocast("cpu", torch.bfloat16):  # which no GPU's step is under
        check_around("step", "fp32", torch.device("cuda"))
