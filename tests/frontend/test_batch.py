"""Batches taken apart, described, checked, cut into rows and bound to a forward."""

from collections import Counter
from typing import NamedTuple

import pytest
import torch
from torch import nn

from autopipe.errors import ModelError
from autopipe.frontend import batch as batches
from autopipe.frontend import row_length
from autopipe.planfile.parts import InputSpec


def nested(rows):
    return {
        "ids": torch.arange(rows * 3).view(rows, 3) - 1,
        "image": {"pixels": [torch.zeros(rows, 2)], "mask": torch.ones(4, dtype=torch.bool)},
        "windows": torch.zeros(5, 2 * rows),
        "mode": "train",
        "nothing": None,
    }


SPECS = batches.describe(nested(2), nested(3), 2, 3)


def test_leaves_have_paths_in_the_order_of_the_batch():
    assert list(batches.flatten(nested(2))) == [
        "ids", "image.pixels.0", "image.mask", "windows", "mode", "nothing",
    ]  # fmt: skip
    assert list(batches.flatten((torch.ones(1), [2.0, {"a": 3}]))) == ["0", "1.0", "1.1.a"]


def test_a_rebuilt_batch_has_the_same_tree():
    batch = nested(2)
    leaves = dict.fromkeys(batches.flatten(batch), 7)
    assert batches.rebuild(batch, leaves) == {
        "ids": 7, "image": {"pixels": [7], "mask": 7}, "windows": 7, "mode": 7, "nothing": 7,
    }  # fmt: skip
    assert batches.rebuild((1, [2]), {"0": 3, "1.0": 4}) == (3, [4])


def test_a_leaf_that_is_no_tensor_number_or_text_is_refused():
    with pytest.raises(ModelError) as error:
        batches.flatten({"a": {"b": {1, 2}}})
    assert str(error.value) == (
        "batch['a.b'] is a set; a batch holds tensors, numbers, text and None in dicts, tuples "
        "and lists\nhint: let inputs() give its tensors, and forward make a set of them"
    )


def test_what_grows_with_the_rows_is_the_batch():
    assert SPECS == [
        InputSpec("ids", ("b", 3), "int64", 0, low=-1, high=4),
        InputSpec("image.pixels.0", ("b", 2), "float32", 0, within=("dict", "dict", "list")),
        InputSpec("image.mask", (4,), "bool", None, low=1, high=1),
        InputSpec("windows", (5, "2*b"), "float32", 1),  # 4 columns at 2 rows, 6 at 3
        InputSpec("mode", (), "python", None, value="train"),
        InputSpec("nothing", (), "python", None),
    ]


def test_without_a_second_batch_the_first_dim_is_taken_for_the_rows():
    (spec,) = batches.describe((torch.zeros(2, 2),), None, 2, 3)
    assert spec.shape == ("b", 2)


REFUSED = {
    "other length": (
        {"x": torch.zeros(2, 5)},
        {"x": torch.zeros(3, 7)},
        "inputs(2)['x'] has the shape (2, 5), inputs(3)['x'] (3, 7): one dim must grow in "
        "proportion to the rows and the others stay\nhint: pad to one length",
    ),
    "off by one": (
        {"x": torch.zeros(3)},
        {"x": torch.zeros(4)},
        "inputs(2)['x'] has the shape (3,), inputs(3)['x'] (4,): one dim must grow in proportion "
        "to the rows and the others stay\nhint: pad to one length",
    ),
    "other entries": (
        {"x": 1},
        {"y": 1},
        "inputs(2) has the entries ['x'], inputs(3) has ['y']: they must be the same",
    ),
    "a word for each row": (
        {"x": ["one", "two"]},
        {"x": ["one", "two", "three"]},
        "inputs(2) has the entries ['x.0', 'x.1'], inputs(3) has ['x.0', 'x.1', 'x.2']: they must "
        "be the same\nhint: a list with an entry for each row cannot be cut: make it a tensor, or "
        "leave it out, also of what batches() gives",
    ),
    "other dims": (
        {"x": torch.zeros(2)},
        {"x": torch.zeros(3, 1)},
        "inputs(2)['x'] has 1 dims, inputs(3) 2",
    ),
}


@pytest.mark.parametrize(("two", "three", "sentence"), REFUSED.values(), ids=REFUSED)
def test_inputs_that_do_not_grow_with_the_rows_are_refused(two, three, sentence):
    with pytest.raises(ModelError) as error:
        batches.describe(two, three, 2, 3)
    assert str(error.value) == sentence


# A batch against its description.


def changed(**entries):
    return {**batches.flatten(nested(4)), **entries}


def test_the_rows_of_a_batch():
    assert batches.rows_of(SPECS, batches.flatten(nested(4))) == 4


UNFIT = {
    "dtype": (
        {"ids": torch.zeros(4, 3)},
        "batch['ids'] is float32[4, 3]; the plan was made for int64[b, 3]",
    ),
    "dims": (
        {"ids": torch.zeros(4, dtype=torch.long)},
        "batch['ids'] is int64[4]; the plan was made for int64[b, 3]",
    ),
    "size": (
        {"ids": torch.zeros(4, 9, dtype=torch.long)},
        "batch['ids'] is int64[4, 9]; the plan was made for int64[b, 3]",
    ),
    "rows": (
        {"windows": torch.zeros(5, 6)},
        "batch['windows'] is float32[5, 6]; the plan was made for float32[5, 2*b] with b = 4 as in "
        "the entries before it",
    ),
    "odd": (
        {"windows": torch.zeros(5, 9)},
        "batch['windows'] is float32[5, 9]; the plan was made for float32[5, 2*b] with b = 4 as in "
        "the entries before it",
    ),
    "python": (
        {"mode": "test"},
        "batch['mode'] is 'test'; the plan was made with 'train', which the traced graph holds as "
        "a constant",
    ),
    "no tensor": ({"ids": 3}, "batch['ids'] is 3, not a tensor int64[b, 3]"),
    "a tensor": (
        {"nothing": torch.zeros(1)},
        "batch['nothing'] is tensor([0.]); the plan was made with None, which the traced graph "
        "holds as a constant",
    ),
    "a large tensor": (
        {"mode": torch.zeros(4, 8)},
        "batch['mode'] is a tensor of shape [4, 8]; the plan was made with 'train', which the "
        "traced graph holds as a constant",
    ),
}


def test_a_number_that_changes_is_to_be_a_tensor():
    """The graph has a share that anneals as it was first; a tensor is read in each step."""
    two, three = ({"x": torch.zeros(rows, 2), "beta": 1.0} for rows in (2, 3))
    specs = batches.describe(two, three, 2, 3)
    with pytest.raises(ModelError) as refused:
        batches.rows_of(specs, {"x": torch.zeros(4, 2), "beta": 0.5})
    assert refused.value.hint == (
        "what changes from step to step is a tensor of no dims: torch.tensor(0.5)"
    )
    with pytest.raises(
        ModelError, match=r"is a tensor of shape \[4\]; the plan was made with 1\.0"
    ):
        batches.rows_of(specs, {"x": torch.zeros(4, 2), "beta": torch.ones(4)})


@pytest.mark.parametrize(("entries", "sentence"), UNFIT.values(), ids=UNFIT)
def test_a_batch_that_is_not_as_described_is_refused(entries, sentence):
    with pytest.raises(ModelError) as error:
        batches.rows_of(SPECS, changed(**entries))
    assert str(error.value) == sentence


def sentences(rows, length):
    """Tokens with their mask, beside a table that is no sequence."""
    return {
        "tokens": torch.ones(rows, length, dtype=torch.int64),
        "mask": torch.ones(rows, 1, length, dtype=torch.bool),
        "table": torch.zeros(rows, 3),
    }


LONG = batches.describe(sentences(2, 12), sentences(3, 12), 2, 3)


def test_rows_may_be_shorter_than_described_all_by_the_same():
    assert row_length.length_of(LONG) == 12
    leaves = batches.flatten(sentences(4, 9))
    assert row_length.length_in(LONG, leaves) == 9
    assert batches.rows_of(LONG, leaves) == 4
    assert [spec.shape for spec in row_length.at_length(LONG, 9)] == [
        ("b", 9),
        ("b", 1, 9),
        ("b", 3),
    ]
    leaves["mask"] = sentences(4, 12)["mask"]
    with pytest.raises(ModelError) as error:
        batches.rows_of(LONG, leaves)
    assert "batch['mask'] is bool[4, 1, 12]; the plan was made for bool[b, 1, 9]" in str(
        error.value
    )


def test_rows_may_not_be_longer_than_described():
    with pytest.raises(ModelError) as error:
        batches.rows_of(LONG, batches.flatten(sentences(4, 13)))
    assert str(error.value) == (
        "the batch has rows of 13 tokens, and memory is planned for rows of at most 12\n"
        "hint: plan again with rows of 13 tokens from inputs(), or cut the rows"
    )


def test_missing_and_unknown_entries_are_refused():
    with pytest.raises(ModelError, match=r"entries \['x'\], the plan was made for \['y'\]"):
        batches.rows_of([InputSpec("y", ("b",), "float32", 0)], {"x": torch.zeros(1)})


def test_a_batch_without_rows_is_refused():
    with pytest.raises(ModelError, match="no entry of the batch has a batch dim"):
        batches.rows_of([InputSpec("x", (3,), "float32", None)], {"x": torch.zeros(3)})


def test_rows_are_cut_along_each_tensors_own_dim():
    batch = nested(4)
    cut = batches.slice_rows(SPECS, batches.flatten(batch), 1, 3)
    assert torch.equal(cut["ids"], batch["ids"][1:3])
    assert torch.equal(cut["windows"], batch["windows"][:, 2:6])
    assert cut["image.mask"] is batch["image"]["mask"]
    assert cut["mode"] == "train"


def test_a_batch_from_its_description_fits_it():
    made = batches.from_specs(SPECS, 3)
    assert batches.rows_of(SPECS, batches.flatten(made)) == 3
    assert made["ids"].min() == -1, "an index must be one the model allows"


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
        (Pair(1, [2]), {("named first second",): 1, ("named first second", "list"): 1}),
    ],
)
def test_a_tree_comes_back_from_its_description(batch, told):
    """Bug: lists came back as tuples on ranks, which traced other branches, and named tuples
    without their names."""
    specs = batches.describe(batch, None, 2, 3)
    assert Counter(spec.within for spec in specs) == told
    made = batches.from_specs(specs, 3)
    assert made == batch and (type(made) is type(batch) or made.first == 1)


def test_a_tensor_alone_is_the_first_argument():
    assert len(batches.from_specs(batches.describe(torch.zeros(2), None, 2, 3), 4)[0]) == 4


def test_fingerprints_tell_values_apart():
    one, same, other = (batches.flatten({"x": torch.tensor([1.0, n]), "y": 2}) for n in (2, 2, 3))
    assert batches.fingerprint(one) == batches.fingerprint(same) != batches.fingerprint(other)
    half = {"x": torch.ones(3, dtype=torch.bfloat16).expand(2, 3)[:, ::2], "s": torch.tensor(1)}
    assert 0 <= batches.fingerprint(half) < 2**63


def test_fingerprints_of_some_values():
    """Of all rows and of different columns, also where rows are as long as a power of two."""
    one = torch.arange(512 * 64).view(512, 64) * torch.tensor([1] + 63 * [0])  # columns of zeros
    other = torch.arange(512 * 64).view(512, 64)
    some = [batches.fingerprint({"x": x}, 64) for x in (one, other, other.clone())]
    assert some[0] != some[1] == some[2]
    assert batches.fingerprint({"x": torch.tensor(1), "y": torch.zeros(0)}, 64) >= 0


# A batch against a forward.


class Model(nn.Module):
    def forward(self, tokens, mask=None):
        return tokens


def loss(outputs, batch):
    return outputs.mean()


def test_entries_the_forward_does_not_take_are_for_the_loss():
    batch = {"tokens": 1, "labels": 2}
    assert batches.bind(Model(), batch, loss) == ((), {"tokens": 1})
    assert batches.bind(Model(), (1, 2, 3), loss) == ((1, 2), {})


def test_a_tensor_alone_is_the_one_argument():
    x = torch.zeros(2)
    assert batches.bind(Model(), x, None) == ((x,), {})


def test_a_forward_that_takes_all_gets_all():
    class Everything(nn.Module):
        def forward(self, *args, **kwargs):
            return None

    assert batches.bind(Everything(), (1, 2, 3), loss) == ((1, 2, 3), {})
    assert batches.bind(Everything(), {"a": 1}, loss) == ((), {"a": 1})


BAD = {
    "nobody reads it": (
        {"tokens": 1, "labels": 2},
        None,
        "inputs do not fit the model: Model.forward(tokens, mask=None) takes no labels, and there "
        "is no loss(outputs, batch) that could read it",
    ),
    "typo": (
        {"token": 1},
        loss,
        "inputs do not fit the model: Model.forward(tokens, mask=None) called with ['token']: "
        "missing a required argument: 'tokens'",
    ),
    "empty": (
        (),
        loss,
        "inputs do not fit the model: Model.forward(tokens, mask=None) called with 0 positional: "
        "missing a required argument: 'tokens'",
    ),
}


@pytest.mark.parametrize(("batch", "how", "sentence"), BAD.values(), ids=BAD)
def test_inputs_that_do_not_fit_the_forward_are_refused(batch, how, sentence):
    with pytest.raises(ModelError) as error:
        batches.bind(Model(), batch, how)
    assert str(error.value) == sentence
