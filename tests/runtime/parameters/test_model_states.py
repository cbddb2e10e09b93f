"""What a rank does to its part of a parameter that forward masks, clamps or limits in each step."""

import pytest
import torch
from torch import Tensor, nn

from autopipe.errors import ModelError
from autopipe.ir.graph import Arg, State, StateSpec, TensorSpec
from autopipe.ir.tensors import NORMALIZED
from autopipe.planfile.placements import S, Sharding, own_rows
from autopipe.runtime.parameters.model_states import ModelStates
from autopipe.sharding.collectives import in_rows, own_part

WIDE = TensorSpec((6, 4), torch.float32)
MASKS = {
    "of its shape": (torch.arange(24.0).reshape(6, 4) % 3 > 0).float(),
    "of a row": torch.tensor([True, False, True, False]),
    "of a column": torch.tensor([[1], [0], [1], [1], [0], [0]]),
}
PROJECTIONS: dict[str, tuple[str, tuple[Arg, ...]]] = {
    "a product": ("aten.mul_.Tensor", (State("mask"),)),
    "filled": ("aten.masked_fill_.Scalar", (State("mask"), 0.5)),
    "norms of rows": ("aten.renorm_.default", (2, 0, 1.0)),
    "norms of columns": ("aten.renorm_.default", (2, -1, 1.0)),
    "lengths of rows": (NORMALIZED, (2.0, (1,), 1e-12)),
    "lengths of columns": (NORMALIZED, (2.0, (0,), 0.0)),
    "clamped": ("aten.clamp_.default", (-0.5, 0.5)),
}


def states_of(what: str, mask: Tensor, lies: dict[str, object]) -> ModelStates:
    op, rest = PROJECTIONS[what]
    mask = mask.bool() if what == "filled" else mask
    specs = {
        "weight": StateSpec(WIDE, "parameter", True, projection=(op, rest)),
        "mask": StateSpec(TensorSpec(tuple(mask.shape), mask.dtype), "buffer"),
    }
    return ModelStates(specs, {"mask": mask}, {}, Sharding(2, lies, {}))  # type: ignore[arg-type]


def eager(what: str, weight: Tensor, mask: Tensor) -> Tensor:
    return {
        "a product": lambda: weight * mask,
        "filled": lambda: weight.masked_fill(mask.bool(), 0.5),
        "norms of rows": lambda: weight.renorm(2, 0, 1.0),
        "norms of columns": lambda: weight.renorm(2, 1, 1.0),
        "lengths of rows": lambda: nn.functional.normalize(weight, dim=1),
        "lengths of columns": lambda: weight / weight.norm(dim=0, keepdim=True),
        "clamped": lambda: weight.clamp(-0.5, 0.5),
    }[what]()


@pytest.mark.parametrize("what", PROJECTIONS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("replicas", [1, 4])
def test_parts_are_those_of_the_whole(what: str, mask: str, dim: int | None, replicas: int) -> None:
    """Parts of two tensor-parallel ranks, and of them rows of four replicas, one of which may have
    none; a norm of which ranks have parts is refused."""
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    lies = {} if dim is None else {"weight": S(dim)}
    states = states_of(what, MASKS[mask], lies)
    over = {"rows": 0, "columns": 1}.get(what.split(" of ")[-1])
    for rank in (0, 1):
        part = whole if dim is None else own_part(whole, S(dim), 2, rank)
        expected = eager(what, whole, MASKS[mask])
        expected = expected if dim is None else own_part(expected, S(dim), 2, rank)
        for replica in range(replicas):
            mine = own_rows(part.shape, replicas, replica)
            own = nn.Parameter(in_rows(part, mine).clone())
            rows = {"weight": mine} if replicas > 1 else {}
            if over is not None and ((rows and over != mine.dim) or dim not in (None, over)):
                with pytest.raises(ModelError, match="no rank has all of what it takes a norm of"):
                    states.project({"weight": own}, rows, rank)
            else:
                states.project({"weight": own}, rows, rank)
                assert torch.equal(own, in_rows(expected, mine))


def test_a_mask_that_lies_as_the_parameter_does_is_taken_as_it_is() -> None:
    whole, mask = torch.randn(6, 4), MASKS["of its shape"]
    both = {"weight": S(1), "mask": S(1)}
    own = nn.Parameter(whole[:, 2:].clone())
    states_of("a product", mask[:, 2:], both).project({"weight": own}, {}, 1)
    assert torch.equal(own, (whole * mask)[:, 2:])


def test_a_mask_that_would_shrink_the_parameter_in_each_micro_batch_is_refused() -> None:
    """A trace has no values of buffers; the first step has them."""
    own = nn.Parameter(torch.randn(6, 4))
    with pytest.raises(ModelError) as refused:
        states_of("a product", MASKS["of its shape"] / 2, {}).project({"weight": own}, {}, 0)
    assert str(refused.value) == (
        "forward multiplies the parameter 'weight' in place by the buffer 'mask', which holds "
        "other numbers than 0 and 1: each micro-batch would do so once more\n"
        "hint: compute with a product, and leave the parameter: weight * self.mask"
    )
