"""Sentences about other meshes, and names of nodes, made of a plan's fields."""

import pytest

from autopipe.planfile.node_names import NodeName
from autopipe.planfile.parts import Alternative, PartOf, Transfer


@pytest.mark.parametrize(
    ("step", "slower", "cause", "why"),
    [
        (0.02, 0.29, "by the bubble", "29 % slower, by the bubble"),
        (None, 0.12, "by its bound", "at least 12 % slower, by its bound"),
        (None, None, "stage 0 needs 83.1 of 80.0 GiB", "stage 0 needs 83.1 of 80.0 GiB"),
        (0.02, 0.0004, "by the bubble",
         "as fast; ties go to fewer stages, then to more replicas and fewer micro-batches"),
        (None, 0.0, "by its bound", "at least 0.0 % slower, by its bound"),
    ],
)  # fmt: skip
def test_why_another_mesh_is_not_the_plan(
    step: float | None, slower: float | None, cause: str, why: str
) -> None:
    assert Alternative(2, 1, 1, 4, "1f1b", step, slower, cause).why == why


def test_what_goes_in_parts_is_told_by_the_whole_tensors_name() -> None:
    whole = Transfer("h.3/add/1", ("b", 64), "float32", 1, True)
    part = Transfer("h.3/add/1>part(1)", ("b", 32), "float32", 1, True, PartOf("h.3/add/1", 1))
    assert whole.text == "h.3/add/1 float32[b, 64]"
    assert part.text == "h.3/add/1 in parts of dim 1, each float32[b, 32]"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h.0.mlp.up/linear/0", NodeName("h.0.mlp.up", "linear", 0)),
        ("h.0@1/add/12", NodeName("h.0@1", "add", 12)),
        ("repeat/0", NodeName("", "repeat", 0)),
        ("h.0.mlp.up.weight", None),
    ],
)
def test_a_name_of_a_node_and_its_parts(text: str, name: NodeName | None) -> None:
    assert NodeName.of(text) == name
    assert name is None or str(name) == text
