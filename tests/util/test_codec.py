"""Dataclasses on disk: they come back equal, and whatever cannot is refused by its path."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

from autopipe.errors import PlanError
from autopipe.util import codec, json_text


@dataclass(frozen=True)
class Leaf:
    """A leaf with one field of each scalar kind."""

    name: str
    size: int
    rate: float
    kept: bool
    value: bool | int | float | str | None = None


@dataclass(frozen=True)
class Tree:
    """A tree of leaves."""

    format: int
    leaves: tuple[Leaf, ...]
    shape: tuple[int | str, ...]
    rates: dict[str, float]
    best: Leaf | None


LEAF = Leaf("a", size=1, rate=0.1, kept=True)
TREE = Tree(1, (LEAF, Leaf("b", 2, 3.0, False, "x")), ("b", 12), {"fp32": 1e12}, None)


def refusal(data: Any, cls: type = Tree) -> PlanError:
    with pytest.raises(PlanError) as caught:
        codec.from_json(cls, data, "tree")
    return caught.value


def loading(path: Path, **arguments: Any) -> PlanError:
    with pytest.raises(PlanError) as caught:
        codec.load(Tree, path, root="plan", **arguments)
    return caught.value


# --- There and back ------------------------------------------------------------------------------


def test_the_text_of_a_file() -> None:
    assert codec.dumps(TREE) == (
        "{\n"
        '  "format": 1,\n'
        '  "leaves": [\n'
        '    {"name": "a", "size": 1, "rate": 0.1, "kept": true, "value": null},\n'
        '    {"name": "b", "size": 2, "rate": 3.0, "kept": false, "value": "x"}\n'
        "  ],\n"
        '  "shape": ["b", 12],\n'
        '  "rates": {"fp32": 1000000000000.0},\n'
        '  "best": null\n'
        "}\n"
    )


def test_what_is_saved_comes_back_equal(tmp_path: Path) -> None:
    codec.save(TREE, tmp_path / "tree.json")
    assert codec.load(Tree, tmp_path / "tree.json", root="tree") == TREE


@pytest.mark.parametrize("number", [0.1, 1 / 3, 1e-320, 1.7976931348623157e308, -0.0, math.pi])
def test_floats_come_back_to_the_last_bit(number: float) -> None:
    text = codec.dumps(Leaf("a", 1, number, True))
    rate = codec.from_json(Leaf, json.loads(text), "leaf").rate
    assert (rate, math.copysign(1, rate)) == (number, math.copysign(1, number))


@pytest.mark.parametrize("value", [True, 1, 1.0, "1", None])
def test_a_union_keeps_the_type(value: bool | int | float | str | None) -> None:
    leaf = codec.from_json(Leaf, codec.to_json(Leaf("a", 1, 0.5, True, value)), "leaf")
    assert (type(leaf.value), leaf.value) == (type(value), value)


def test_equal_values_are_equal_bytes() -> None:
    """An int where a float is asked, and the order in which a dict was filled, leave no trace."""
    one = Tree(1, (), (), {"bf16": 2.0, "fp32": 1.0}, None)
    other = Tree(1, (), (), {"fp32": 1, "bf16": 2}, None)
    assert one == other
    assert codec.dumps(one) == codec.dumps(other)


def test_a_subclass_of_str_is_written_as_its_text() -> None:
    """`torch.__version__` is no plain string, and a plan holds it."""
    leaf = Leaf(torch.__version__, 1, 0.5, True)
    assert codec.to_json(leaf)["name"] == str(torch.__version__)  # type: ignore[index,call-overload]


@pytest.mark.parametrize("length", range(80, 101))
def test_no_line_that_can_be_broken_is_longer_than_100_columns(length: int) -> None:
    text = json_text.layout([["x" * length, 1], {"name": ["y" * (length - 30), 2]}])
    assert json.loads(text) == [["x" * length, 1], {"name": ["y" * (length - 30), 2]}]
    for line in text.splitlines():
        assert len(line) <= 100 or line.strip().rstrip(",") == f'"{"x" * length}"'


# --- Refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, found, sentence",
    [
        ("format", True, "tree.format: expected an integer, found true"),
        ("format", 1.0, "tree.format: expected an integer, found 1.0"),
        ("leaves", {}, "tree.leaves: expected a list, found {}"),
        ("leaves.1.name", 7, "tree.leaves[1].name: expected a string, found 7"),
        ("leaves.0.kept", 1, "tree.leaves[0].kept: expected true or false, found 1"),
        ("leaves.0.rate", "1", 'tree.leaves[0].rate: expected a finite number, found "1"'),
        ("leaves.0.rate", math.nan, "tree.leaves[0].rate: expected a finite number, found NaN"),
        ("leaves.0.rate", 10**400, "tree.leaves[0].rate: expected a finite number, found Infinity"),
        ("leaves.0", None, "tree.leaves[0]: expected an object (Leaf), found null"),
        ("shape.0", None, "tree.shape[0]: expected an integer or a string, found null"),
        ("rates", [], "tree.rates: expected an object, found []"),
        ("rates.fp32", None, "tree.rates.fp32: expected a finite number, found null"),
        (
            "leaves.0.name",
            "a\x1b[2J",
            'tree.leaves[0].name: expected text that can be printed, found "\\u001b" in it',
        ),
        (
            "rates.\ud800",
            1.0,
            'tree.rates: a key: expected text that can be printed, found "\\ud800" in it',
        ),
        (
            "leaves.0.size",
            10**30,
            f"tree.leaves[0].size: expected an integer below 10^30, found {10**30}",
        ),
        ("best", 3, "tree.best: expected an object (Leaf), found 3"),
    ],
)
def test_a_wrong_type_is_named_by_its_path(path: str, found: object, sentence: str) -> None:
    data: Any = codec.to_json(TREE)
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = data
    for part in way:
        place = place[part]
    place[last] = found
    assert refusal(data).message == sentence


def test_an_unknown_field_is_answered_with_the_closest() -> None:
    data: Any = codec.to_json(LEAF)
    data["nmae"] = data.pop("name")
    error = refusal(data, Leaf)
    assert error.message == "tree.nmae: unknown field; Leaf has name, size, rate, kept, value"
    assert error.hint == "did you mean name?"


def test_a_missing_field() -> None:
    data: Any = codec.to_json(LEAF)
    del data["size"]
    assert refusal(data, Leaf).message == "tree.size: missing; expected an integer"


def test_a_field_with_a_default_may_be_missing() -> None:
    data: Any = codec.to_json(LEAF)
    del data["value"]
    assert codec.from_json(Leaf, data, "leaf") == LEAF


@pytest.mark.parametrize(
    "value, sentence",
    [
        (Leaf("a", 1, math.inf, True), "value.rate: expected a finite number, found Infinity"),
        (Leaf("a", True, 0.5, True), "value.size: expected an integer, found true"),
        (Leaf("a", torch.tensor(3), 0.5, True), "value.size: expected an integer, found tensor(3)"),  # type: ignore[arg-type]
        (
            Tree(1, [], (), {}, None),  # type: ignore[arg-type]
            "value.leaves: expected a list, found []",
        ),
    ],
)
def test_what_would_not_come_back_is_not_written(value: object, sentence: str) -> None:
    with pytest.raises(PlanError) as caught:
        codec.dumps(value)
    assert caught.value.message == sentence


# --- Files ---------------------------------------------------------------------------------------


def test_a_file_cut_anywhere_is_said_to_end_in_the_middle(tmp_path: Path) -> None:
    path, text = tmp_path / "plan.json", codec.dumps(TREE)
    for length in range(1, len(text) - 1):
        path.write_text(text[:length])
        error = loading(path)
        assert error.message.endswith(": the file ends in the middle"), text[:length]
        assert error.hint == "was it copied whole?"


def test_a_cut_file_names_the_line_and_the_column(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{\n  "format": 1,\n  "lea')
    assert loading(path).message == f"{path}, line 3, column 3: the file ends in the middle"


@pytest.mark.parametrize(
    "content, sentence",
    [
        (b"", "{path}: the plan is an empty file"),
        (b" \n", "{path}: the plan is an empty file"),
        (b"[1]", "plan: expected an object, found [1] in {path}"),
        (b"{'a': 1}", "{path}, line 1, column 2: this is no JSON: Expecting property name"),
        (b"[" * 100_000, "{path}: the plan has lists within lists without end"),
        (b"9" * 5000, "{path}: the plan has a number of thousands of digits"),
        (b"plan", "{path}, line 1, column 1: this is no JSON: Expecting value"),
        (b'{"a": 1}\n{"a": 1}', "{path}, line 2, column 1: something stands behind the end"),
        (
            b"PK\x03\x04\xff",
            "{path}: expected the plan as JSON text, found bytes",
        ),
    ],
)
def test_files_of_something_else(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    assert loading(path).message.startswith(sentence.format(path=path))
    assert loading(path).hint is not None


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    """Editors of Windows write one: it was "no JSON", and perhaps "another file"."""
    path = tmp_path / "plan.json"
    path.write_text(codec.dumps(TREE).replace("\n", "\r\n"), encoding="utf-8-sig")
    assert codec.load(Tree, path, root="tree") == TREE


def test_no_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert loading(path).message == f"{path}: no such file, asked for the plan"
    assert loading(tmp_path).message == f"{tmp_path}: the plan cannot be read: Is a directory"
    assert loading(tmp_path).hint == "name the file itself, and see that you may read it"


@pytest.mark.parametrize(
    "found, sentence",
    [
        ('"format": 2', "plan.format: this autopipe reads format 1, the file is format 2"),
        ('"format": true', "plan.format: expected an integer, found true"),
        ('"other": 1', "plan.format: missing; this autopipe reads format 1"),
    ],
)
def test_the_format_is_looked_at_before_all_else(tmp_path: Path, found: str, sentence: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(f'{{{found}, "renamed in a later format": 1}}')
    assert loading(path, format=1).message == sentence


def test_another_format_says_how_to_go_on(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"format": 2}')
    assert loading(path, format=1).hint == "make the plan again with `autopipe plan`"


# --- Schema --------------------------------------------------------------------------------------


def test_the_schema_of_a_class() -> None:
    assert codec.schema(Leaf, "a leaf") == {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "a leaf",
        "description": "A leaf with one field of each scalar kind.",
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "size": {"type": "integer"},
            "rate": {"type": "number"},
            "kept": {"type": "boolean"},
            "value": {"type": ["boolean", "integer", "number", "string", "null"]},
        },
        "required": ["name", "size", "rate", "kept"],
        "additionalProperties": False,
        "$defs": {},
    }


def test_the_schema_and_the_codec_agree() -> None:
    schema: Any = codec.schema(Tree, "a tree")
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    good: Any = codec.to_json(TREE)
    assert validator.is_valid(good)
    for field, wrong in (("format", "1"), ("leaves", [{}]), ("best", 3), ("new", 1)):
        bad = {**good, field: wrong}
        assert not validator.is_valid(bad)
        refusal(bad)
