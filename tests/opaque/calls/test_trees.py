"""Arguments and results of a call as text: tuples, dicts, objects; slots for tensors."""

from dataclasses import dataclass

import pytest
import torch

from autopipe.errors import PlanError
from autopipe.opaque.calls.trees import NotPlain, Slot, Struct, from_text, to_text


@dataclass
class Encoded:
    hidden: torch.Tensor
    mask: torch.Tensor | None = None


def test_trees_come_back_from_their_text():
    tree = (
        (Slot(0), None, [Slot(1), 2.5]),
        {"dim": -1, "dtype": torch.float16, "deep": {"a": True}},
        Struct(Encoded, {"hidden": Slot(2), "mask": None}),
    )
    assert from_text(to_text(tree)) == tree


@pytest.mark.parametrize(
    "text",
    [
        '{"dtype": "load"}',
        '{"dtype": ["x"]}',
        '{"tensor": "x"}',
        "{}",
        '{"call": "x"}',
        "[",
        '{"struct": ["os"]}',
    ],
)
def test_a_text_that_is_no_tree_is_refused(text):
    with pytest.raises(PlanError):
        from_text(text)


def test_a_class_that_this_process_does_not_have_is_named():
    text = to_text(Struct(Encoded, {"hidden": Slot(0), "mask": None}))
    with pytest.raises(PlanError, match=r"a Gone of tests\.\S+\.test_trees, which is no data"):
        from_text(text.replace("Encoded", "Gone"))

    @dataclass
    class Local:
        hidden: torch.Tensor

    with pytest.raises(NotPlain, match="Local, a class within a function"):
        to_text(Struct(Local, {"hidden": Slot(0)}))
