"""Batches taken apart, described, checked, cut into rows and bound to a forward."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from autopipe.batch import row_length
from autopipe.batch.arguments import forward_arguments
from autopipe.batch.cut import slice_rows
from autopipe.batch.description import count_rows, describe
from autopipe.batch.digest import digest
from autopipe.batch.tree import flatten, from_specs
from autopipe.errors import ModelError
from autopipe.planfile.parts import InputSpec


def nested(rows):
    return {
        "ids": torch.arange(rows * 3).view(rows, 3) - 1,
        "image": {"pixels": [torch.zeros(rows, 2)], "mask": torch.ones(4, dtype=torch.bool)},
        "windows": torch.zeros(5, 2 * rows),
        "mode": "train",
        "nothing": None,
    }


SPECS = describe(nested(2), nested(3), 2, 3)


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
    (spec,) = describe((torch.zeros(2, 2),), None, 2, 3)
    assert spec.shape == ("b", 2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32], ids=str)
def test_numbers_without_a_sign_have_bounds_too(dtype):
    """Tokens as they lie on disk; torch itself knows no `min` of most of these dtypes."""
    (spec,) = describe((torch.tensor([[3, 7]] * 2).to(dtype),), None, 2, 3)
    assert (spec.low, spec.high) == (3, 7)
    assert int(from_specs([spec], 3)[0].long().min()) == 3


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
        describe(two, three, 2, 3)
    assert str(error.value) == sentence


# A batch against its description.


def changed(**entries):
    return {**flatten(nested(4)), **entries}


def test_the_rows_of_a_batch():
    assert count_rows(SPECS, flatten(nested(4))) == 4


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


def test_an_infinite_number_is_to_be_a_tensor():
    """Bug: its plan was made, and then no file could hold it."""
    two, three = ({"x": torch.zeros(rows, 2), "most": float("inf")} for rows in (2, 3))
    with pytest.raises(
        ModelError, match="'most'] is inf, and a plan holds finite numbers"
    ) as found:
        describe(two, three, 2, 3)
    assert "torch.tensor(float('inf'))" in str(found.value.hint)


def test_a_number_that_changes_is_to_be_a_tensor():
    """The graph has a share that anneals as it was first; a tensor is read in each step."""
    two, three = ({"x": torch.zeros(rows, 2), "beta": 1.0} for rows in (2, 3))
    specs = describe(two, three, 2, 3)
    with pytest.raises(ModelError) as refused:
        count_rows(specs, {"x": torch.zeros(4, 2), "beta": 0.5})
    assert refused.value.hint == (
        "what changes from step to step is a tensor of no dims: torch.tensor(0.5)"
    )
    with pytest.raises(
        ModelError, match=r"is a tensor of shape \[4\]; the plan was made with 1\.0"
    ):
        count_rows(specs, {"x": torch.zeros(4, 2), "beta": torch.ones(4)})


@pytest.mark.parametrize(("entries", "sentence"), UNFIT.values(), ids=UNFIT)
def test_a_batch_that_is_not_as_described_is_refused(entries, sentence):
    with pytest.raises(ModelError) as error:
        count_rows(SPECS, changed(**entries))
    assert str(error.value) == sentence


def sentences(rows, length):
    """Tokens with their mask, beside a table that is no sequence."""
    return {
        "tokens": torch.ones(rows, length, dtype=torch.int64),
        "mask": torch.ones(rows, 1, length, dtype=torch.bool),
        "table": torch.zeros(rows, 3),
    }


LONG = describe(sentences(2, 12), sentences(3, 12), 2, 3)


def test_rows_may_be_shorter_than_described_all_by_the_same():
    assert row_length.length_of(LONG) == 12
    leaves = flatten(sentences(4, 9))
    assert row_length.length_in(LONG, leaves) == 9
    assert count_rows(LONG, leaves) == 4
    assert [spec.shape for spec in row_length.at_length(LONG, 9)] == [
        ("b", 9),
        ("b", 1, 9),
        ("b", 3),
    ]
    leaves["mask"] = sentences(4, 12)["mask"]
    with pytest.raises(ModelError) as error:
        count_rows(LONG, leaves)
    assert "batch['mask'] is bool[4, 1, 12]; the plan was made for bool[b, 1, 9]" in str(
        error.value
    )


def test_rows_may_not_be_longer_than_described():
    with pytest.raises(ModelError) as error:
        count_rows(LONG, flatten(sentences(4, 13)))
    assert str(error.value) == (
        "the batch has rows of 13 tokens, and memory is planned for rows of at most 12\n"
        "hint: plan again with rows of 13 tokens from inputs(), or cut the rows"
    )


def test_missing_and_unknown_entries_are_refused():
    with pytest.raises(ModelError, match=r"entries \['x'\], the plan was made for \['y'\]"):
        count_rows([InputSpec("y", ("b",), "float32", 0)], {"x": torch.zeros(1)})


def test_a_batch_without_rows_is_refused():
    with pytest.raises(ModelError, match="no entry of the batch has a batch dim"):
        count_rows([InputSpec("x", (3,), "float32", None)], {"x": torch.zeros(3)})


def test_rows_are_cut_along_each_tensors_own_dim():
    batch = nested(4)
    cut = slice_rows(SPECS, flatten(batch), 1, 3)
    assert torch.equal(cut["ids"], batch["ids"][1:3])
    assert torch.equal(cut["windows"], batch["windows"][:, 2:6])
    assert cut["image.mask"] is batch["image"]["mask"]
    assert cut["mode"] == "train"


def test_a_batch_from_its_description_fits_it():
    made = from_specs(SPECS, 3)
    assert count_rows(SPECS, flatten(made)) == 3
    assert made["ids"].min() == -1, "an index must be one the model allows"


def test_fingerprints_tell_values_apart():
    one, same, other = (flatten({"x": torch.tensor([1.0, n]), "y": 2}) for n in (2, 2, 3))
    assert digest(one) == digest(same) != digest(other)
    half = {"x": torch.ones(3, dtype=torch.bfloat16).expand(2, 3)[:, ::2], "s": torch.tensor(1)}
    assert 0 <= digest(half) < 2**63
    spectrum = torch.fft.fft(torch.ones(3))
    assert digest({"x": spectrum.conj()}) == digest({"x": spectrum.conj().resolve_conj()})


def test_fingerprints_of_some_values():
    """Of all rows and of different columns, also where rows are as long as a power of two."""
    one = torch.arange(512 * 64).view(512, 64) * torch.tensor([1] + 63 * [0])  # columns of zeros
    other = torch.arange(512 * 64).view(512, 64)
    some = [digest({"x": x}, 64) for x in (one, other, other.clone())]
    assert some[0] != some[1] == some[2]
    assert digest({"x": torch.tensor(1), "y": torch.zeros(0)}, 64) >= 0


# A batch against a forward.


class Model(nn.Module):
    def forward(self, tokens, mask=None):
        return tokens


def loss(outputs, batch):
    return outputs.mean()


def test_entries_the_forward_does_not_take_are_for_the_loss():
    batch = {"tokens": 1, "labels": 2}
    assert forward_arguments(Model(), batch, loss) == ((), {"tokens": 1})
    assert forward_arguments(Model(), (1, 2, 3), loss) == ((1, 2), {})


def test_a_tensor_alone_is_the_one_argument():
    x = torch.zeros(2)
    assert forward_arguments(Model(), x, None) == ((x,), {})


def test_a_forward_that_takes_all_gets_all():
    class Everything(nn.Module):
        def forward(self, *args, **kwargs):
            return None

    assert forward_arguments(Everything(), (1, 2, 3), loss) == ((1, 2, 3), {})
    assert forward_arguments(Everything(), {"a": 1}, loss) == ((), {"a": 1})


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("wrap", [torch.compile, AveragedModel])
def test_torchs_wrappers_take_what_the_wrapped_module_takes(wrap):
    """Bug: a forward(*args, **kwargs) was given the labels as well."""
    batch = {"tokens": 1, "labels": 2}
    assert forward_arguments(wrap(AveragedModel(Model())), batch, loss) == ((), {"tokens": 1})


BAD = {
    "nobody reads it": (
        {"tokens": 1, "labels": 2},
        None,
        "inputs do not fit the model: Model.forward(tokens, mask=None) takes no labels, and there "
        "is no loss(outputs, batch) that could read it\nhint: def loss(outputs, batch): return the "
        "scalar to be minimised; or leave these entries out of inputs()",
    ),
    "typo": (
        {"token": 1},
        loss,
        "inputs do not fit the model: Model.forward(tokens, mask=None) called with ['token']: "
        "missing a required argument: 'tokens'\n"
        "hint: a dict is given to forward by its names, a tuple in its order",
    ),
    "empty": (
        (),
        loss,
        "inputs do not fit the model: Model.forward(tokens, mask=None) called with 0 positional: "
        "missing a required argument: 'tokens'\n"
        "hint: a dict is given to forward by its names, a tuple in its order",
    ),
}


@pytest.mark.parametrize(("batch", "how", "sentence"), BAD.values(), ids=BAD)
def test_inputs_that_do_not_fit_the_forward_are_refused(batch, how, sentence):
    with pytest.raises(ModelError) as error:
        forward_arguments(Model(), batch, how)
    assert str(error.value) == sentence
