"""Which results are a loss, and which are refused since they can be read in two ways."""

import pytest
import torch
from torch import nn

import autopipe
from autopipe.errors import ModelError
from autopipe.frontend.loss import SumCount, check_arguments, of_targets, outputs_to_loss
from tests.support.staged import lowered, trace_model

ONE, TWO = torch.tensor(1.0), torch.tensor(2.0)
HERE = __file__


class Answer:
    loss = ONE


def of(outputs):
    """The loss that a model's outputs have."""
    return outputs_to_loss(outputs, None, None)


def returned(value):
    """The loss that a `loss()` gives."""
    return outputs_to_loss("outputs", "batch", lambda outputs, batch: value)  # this line


LINE = returned.__code__.co_firstlineno + 2


def test_a_scalar_is_a_loss_wherever_it_is_found():
    assert of(ONE) is ONE
    assert of(Answer()) is ONE
    assert of({"loss": ONE, "accuracy": TWO}) is ONE
    assert returned(ONE) is ONE


@pytest.mark.parametrize(
    "outputs",
    [
        (ONE, torch.ones(2, 3)),
        [ONE, torch.ones(2, 3), (torch.ones(2), torch.ones(2))],
        (ONE, None),
    ],
    ids=["logits", "hidden states", "nothing"],
)
def test_a_model_may_give_its_loss_before_what_it_was_made_from(outputs):
    """transformers' models do, asked for tuples."""
    assert of(outputs) is ONE


@pytest.mark.parametrize("read", [of, returned])
@pytest.mark.parametrize("count", [torch.tensor(3), 3], ids=["tensor", "int"])
def test_integers_that_are_counted_make_a_sum_of_what_stands_before(read, count):
    found = read((ONE, count))
    assert found == (1, 3) and isinstance(found, SumCount)
    assert found.count.dtype == torch.int64


@pytest.mark.parametrize("count", [TWO, 2.0, 2, torch.tensor(2.0, requires_grad=True) * 1])
def test_whoever_says_so_may_count_in_anything(count):
    found = returned(autopipe.SumCount(ONE, count))
    assert found == (1, 2)
    assert not found.count.requires_grad


@pytest.mark.parametrize(
    ("pair", "things"),
    [
        ((ONE, TWO), "2 things (a scalar of float32, a scalar of float32)"),
        ((ONE, 0.75), "2 things (a scalar of float32, a float)"),
        ((ONE, True), "2 things (a scalar of float32, a bool)"),
        ((ONE, ONE > 0), "2 things (a scalar of float32, a scalar of bool)"),
        ([ONE, TWO, 3], "3 things (a scalar of float32, a scalar of float32, an int)"),
    ],
)
@pytest.mark.parametrize("read", [of, returned])
def test_a_pair_that_may_be_read_in_two_ways_is_refused(read, pair, things):
    """`(loss, accuracy)` and `(recon, kl)`: their quotient is what nobody wants to minimise."""
    with pytest.raises(ModelError) as error:
        read(pair)
    whose = "the model" if read is of else f"{HERE}:{LINE}: loss(outputs, batch)"
    assert str(error.value) == (
        f"{whose} gives {things}: as a sum and a count? as a loss and a figure to look at?\n"
        "hint: return the one scalar that is to be minimised, or autopipe.SumCount(total, count)"
    )


@pytest.mark.parametrize(
    ("outputs", "found", "hint"),
    [
        (torch.ones(2, 3), "a tensor of shape (2, 3)", "return its mean over the rows: .mean()"),
        (None, "nothing", "does it end without a `return`?"),
        ({"logits": ONE}, "nothing", ""),
        ((torch.ones(2), ONE), "a tuple", "return the scalar tensor alone"),
        (0.5, "a float", "return the tensor itself, without .item() or float()"),
    ],
)
def test_anything_else_is_no_loss(outputs, found, hint):
    is_one = "a loss is a scalar tensor or autopipe.SumCount(sum, count)"
    with pytest.raises(ModelError) as error:
        of(outputs)
    assert str(error.value) == (
        f"the model gives {found}; {is_one}\nhint: give a loss(outputs, batch) function"
    )
    if not isinstance(outputs, dict):
        with pytest.raises(ModelError) as error:
            returned(outputs)
        whole = f"{HERE}:{LINE}: loss(outputs, batch) gives {found}; {is_one}\nhint: {hint}"
        assert str(error.value) == whole


def of_three(logits, ids, mask):
    return logits


def of_words(*, outputs, batch):
    return outputs


@pytest.mark.parametrize("loss", [of_three, lambda batch: ONE, of_words])
def test_a_loss_that_takes_other_arguments_is_refused(loss):
    """Before the model is traced, by what it takes."""
    with pytest.raises(ModelError, match="called with the model's outputs and the whole batch"):
        check_arguments(loss)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.functional.cross_entropy])
def test_a_loss_of_torch_is_shown_its_targets(loss):
    """It goes well of a batch that is one tensor: the hint is given once a call has failed."""
    assert of_targets(loss, "x, y") == (
        "a loss is given the whole batch (x, y), and torch's takes its targets: "
        "def loss(outputs, batch): return criterion(outputs, batch['y'])"
    )
    assert "(outputs, batch[1])" in of_targets(loss, "0, 1.a")
    assert of_targets(of_three, "x, y") is None


@pytest.mark.parametrize(
    "loss", [None, nn.functional.mse_loss, nn.MSELoss(), lambda *both: ONE, torch.sub]
)
def test_a_loss_of_two_arguments(loss):
    check_arguments(loss)


# Traced and run: the loss, and the gradient with it.


class Net(nn.Module):
    def __init__(self, give):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.give = give

    def forward(self, x):
        return self.give(self.layer(x))


def rows(number):
    return {"x": torch.arange(3.0 * number).reshape(number, 3)}


GIVEN = {
    "loss and logits": lambda y: (y.square().mean(), y),
    "sum and count": lambda y: SumCount(y.square().sum(), y[:, 0].numel()),
    "sum and rows": lambda y: (y.square().sum(), y.shape[0]),
    "sum and float": lambda y: SumCount(y.square().sum(), (y > 0).float().sum()),
}


@pytest.mark.parametrize("give", GIVEN.values(), ids=GIVEN)
def test_a_traced_loss_has_the_value_and_the_gradient_of_the_models_own(give):
    model = Net(give)
    found = trace_model(model, rows)
    (module,) = lowered(found, model, [], rows=4)
    expected = model(**rows(4))
    expected[0].backward()
    own = model.layer.weight.grad.clone()
    model.zero_grad()
    result = module.module(rows(4)["x"])
    assert torch.equal(result[0], expected[0])
    if len(found.graph.outputs) == 2:
        assert float(result[1]) == float(expected[1])
    result[0].backward()
    assert torch.equal(model.layer.weight.grad, own)
