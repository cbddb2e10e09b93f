"""Batches taken apart by paths, and made again: the containers stay what they are."""

from collections import Counter, UserDict
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple

import numpy as np
import pytest
import torch

from autopipe.batch.arguments import forward_arguments
from autopipe.batch.description import describe
from autopipe.batch.tree import flatten, from_specs, has_own, rebuild
from autopipe.errors import ModelError


def nested(rows):
    return {
        "ids": torch.zeros(rows, 3),
        "image": {"pixels": [torch.zeros(rows, 2)], "mask": torch.ones(4)},
        "windows": torch.zeros(5, 2 * rows),
        "mode": "train",
        "nothing": None,
    }


def test_leaves_have_paths_in_the_order_of_the_batch():
    assert list(flatten(nested(2))) == [
        "ids", "image.pixels.0", "image.mask", "windows", "mode", "nothing",
    ]  # fmt: skip
    assert list(flatten((torch.ones(1), [2.0, {"a": 3}]))) == ["0", "1.0", "1.1.a"]


def test_a_rebuilt_batch_has_the_same_tree():
    batch = nested(2)
    leaves = dict.fromkeys(flatten(batch), 7)
    assert rebuild(batch, leaves) == {
        "ids": 7, "image": {"pixels": [7], "mask": 7}, "windows": 7, "mode": 7, "nothing": 7,
    }  # fmt: skip
    assert rebuild((1, [2]), {"0": 3, "1.0": 4}) == (3, [4])


def test_a_leaf_that_is_no_tensor_number_or_text_is_refused():
    with pytest.raises(ModelError) as error:
        flatten({"a": {"b": {1, 2}}})
    assert str(error.value) == (
        "batch['a.b'] is a set; a batch holds tensors, numbers, text and None in dicts, tuples, "
        "lists and dataclasses\nhint: let inputs() give its tensors, and forward make a set of them"
    )


@pytest.mark.parametrize("batch", [{"a.b": 1, "a": {"b": 2}}, {"a": {1: 1, "1": 2}}])
def test_entries_of_one_path_are_refused(batch):
    """Bug: the model was given the last of them twice."""
    with pytest.raises(ModelError, match=r"two entries of the batch are 'a\.[b1]': the keys"):
        flatten(batch)


@pytest.mark.parametrize("under", [{"c": 1}, (1, 2), [1]])
def test_a_container_under_a_key_with_a_dot_is_refused(under):
    """Bug: `{"a.b": {"c": 1}}` came back from its description as `{"a": {"b.c": 1}}`."""
    with pytest.raises(ModelError, match=r"has a \w+ under the key 'a.b', .*\nhint: name it 'a_b'"):
        flatten({"a.b": under})


class Pair(NamedTuple):
    first: object
    second: object


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"a": (1, {"x": 2}), "b": 3}, {(): 3}),
        ((1, (2,)), {(): 2}),
        ({"a": [1, (2,)], "b": 3}, {("dict", "list"): 1, ("dict", "list", "tuple"): 1, (): 1}),
        ([{0: 1, 2: 3}], {("list", "numbered"): 2}),
        ({"0": 1, "1": 2}, {("dict",): 2}),
        ({"y.target": 1, "x": 2}, {("dict",): 1, (): 1}),
        (Pair(1, [2]), {("named first second",): 1, ("named first second", "list"): 1}),
    ],
)
def test_a_tree_comes_back_from_its_description(batch, told):
    """Bug: lists came back as tuples on ranks, which traced other branches, and named tuples
    without their names."""
    specs = describe(batch, None, 2, 3)
    assert Counter(spec.within for spec in specs) == told
    made = from_specs(specs, 3)
    assert made == batch and (type(made) is type(batch) or made.first == 1)


@dataclass(frozen=True)
class Sample:
    image: object
    label: object = None
    doubled: object = field(init=False, default=0)

    def __post_init__(self):
        object.__setattr__(self, "doubled", 2 * self.image)


class Entries(UserDict):
    """As `transformers.BatchEncoding` is: its entries are attributes too."""

    def __getattr__(self, name):
        try:
            return vars(self)["data"][name]
        except KeyError:
            raise AttributeError(name) from None


def test_containers_of_a_users_classes_are_filled_anew():
    """Bug: named tuples lost their methods, mappings their class, and dataclasses were refused."""
    batch = (Sample(3, {"x": 4}), Entries(ids=5), Pair(6, 7))
    leaves = flatten(batch)
    assert leaves == {
        "0.image": 3, "0.label.x": 4, "0.doubled": 6, "1.ids": 5, "2.0": 6, "2.1": 7,
    }  # fmt: skip
    sample, entries, pair = rebuild(batch, {path: 10 * leaf for path, leaf in leaves.items()})
    assert (type(sample), sample.image, sample.label, sample.doubled) == (Sample, 30, {"x": 40}, 60)
    assert (type(entries), entries.ids) == (Entries, 50)
    assert pair == Pair(60, 70)
    assert leaves == flatten(batch), "a new one is filled"


def test_a_plan_has_plain_containers_with_the_same_names():
    specs = describe(Sample(torch.zeros(2, 3), Entries(mask=torch.zeros(2))), None, 2, 3)
    assert specs[0].within == ("fields image label doubled",)
    assert specs[1].within == ("fields image label doubled", "mapping")
    assert has_own(specs) and not has_own(describe(nested(2), None, 2, 3))
    made = from_specs(specs, 5)
    assert made.image.shape == (5, 3) and made.label["mask"].shape == (5,)


def test_an_array_is_not_taken_for_a_tensor():
    with pytest.raises(ModelError, match="batch\\['x'\\] is a ndarray") as refused:
        flatten({"x": np.zeros(2)})
    assert "torch.from_numpy" in str(refused.value.hint)


class Mode(IntEnum):
    FAST = 1


class Word(StrEnum):
    FAST = "fast"


@pytest.mark.parametrize(("leaf", "hint"), [(b"ab", "make a bytes"), (Mode.FAST, "plain value")])
def test_what_is_nearly_a_number_or_a_text_is_refused(leaf, hint):
    """Bug: bytes were taken for a list of numbers, which a model that asks `isinstance` was given;
    of an Enum the plan was refused once it was made."""
    with pytest.raises(ModelError, match=rf"batch\['x'\] is a {type(leaf).__name__}") as refused:
        flatten({"x": leaf})
    assert hint in str(refused.value.hint)


def test_a_text_of_an_enum_is_a_text():
    assert flatten({"x": Word.FAST}) == {"x": "fast"}


@pytest.mark.parametrize("number", [np.float64(0.5), np.int32(3), np.bool_(True)])
def test_numbers_of_numpy_are_numbers(number):
    """Bug: `expected true or false or an integer or a finite number ..., found 0.5`."""
    (leaf,) = flatten({"x": number}).values()
    assert leaf == number and type(leaf) in (bool, int, float)


@pytest.mark.parametrize("inner", [{True: 1, False: 2}, {0: 1, "a": 2}, {(0, 1): 3}])
def test_keys_that_no_path_tells_need_a_batch_to_trace_with(inner):
    """Bug: ranks had texts in the place of such keys, or ended in int("True")."""
    batch = {"x": torch.zeros(2, 3), "by": inner}
    specs = describe(batch, None, 2, 3)
    assert has_own(specs) and from_specs(specs, 2)["by"]
    assert rebuild(batch, flatten(batch))["by"] == inner


class Remembers(torch.nn.Module):
    def forward(self, x, past):
        return x


@pytest.mark.parametrize("inner", [[], {}, ()])
def test_an_empty_container_for_forward_is_refused(inner):
    """Bug: it was planned, and ranks had none: `missing a required argument: 'past'`."""
    said = rf"batch\['past.0'\] is an empty {type(inner).__name__}, and a plan has tensors"
    with pytest.raises(ModelError, match=said):
        forward_arguments(Remembers(), {"x": torch.zeros(2, 3), "past": [inner]}, None)


def test_an_empty_container_for_nobody_is_taken():
    batch = {"x": torch.zeros(2, 3), "past": [1], "meta": {}}
    _, named = forward_arguments(Remembers(), batch, lambda outputs, batch: outputs.sum())
    assert [*named] == ["x", "past"] and len(describe(batch, None, 2, 3)) == 2


def test_what_is_no_batch_is_refused():
    with pytest.raises(ModelError, match="the batch is a object; a batch holds tensors"):
        flatten(object())


def test_a_tensor_alone_is_the_first_argument():
    assert len(from_specs(describe(torch.zeros(2), None, 2, 3), 4)[0]) == 4
