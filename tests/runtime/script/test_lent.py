"""A loss may read another model, as a mean teacher is: a step reads its weights as they are."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import autopipe
from autopipe import ModelError
from autopipe.runtime.script.lent import Lent
from tests.support.inprocess import machine
from tests.support.odd_models import Net, built, inputs, square
from tests.support.torch_versions import NOTES_LINES_OF_LOSSES

TEACHER = built(Net).requires_grad_(False)
OTHER = built(Net)


def near_the_teacher(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        target = TEACHER(batch["x"])
    return square(outputs, batch) + (outputs - target).square().mean()


def piped(model: nn.Module, loss=square):
    one = {"cluster": machine(1), "batch_size": 4, "say": [].append}
    plan = autopipe.plan(model, inputs, loss=loss, **one)
    return autopipe.parallelize(model, plan, inputs=inputs, loss=loss)


def follow(teacher: nn.Module, student: nn.Module) -> None:
    """The teacher goes half of the way to the student, in place."""
    with torch.no_grad():
        for to, of in zip(teacher.parameters(), student.parameters(), strict=True):
            to.lerp_(of, 0.5)


def test_a_teacher_that_is_moved_in_place_is_read_as_it_is() -> None:
    model = built(Net)
    plain, before = copy.deepcopy(model), copy.deepcopy(TEACHER.state_dict())

    def trained(net: nn.Module, step) -> list[float]:
        TEACHER.load_state_dict(before)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            losses.append(float(step()))
            optimizer.step()
            optimizer.zero_grad()
            follow(TEACHER, net)
        return losses

    def plain_step() -> Tensor:
        loss = near_the_teacher(plain(inputs(4)["x"]), inputs(4))
        loss.backward()
        return loss.detach()

    pipe = piped(model, near_the_teacher)
    ours = trained(model, lambda: pipe.step(inputs(4)))
    assert ours == pytest.approx(trained(plain, plain_step), rel=1e-5)


def test_a_teacher_whose_weights_are_replaced_is_refused() -> None:
    """`t.data = ...` gives plain PyTorch other weights, and the graph would have the old ones."""
    pipe = piped(built(Net), near_the_teacher)
    pipe.step(inputs(4))
    weight = next(TEACHER.parameters())
    weight.data = weight.data * 0.5
    with pytest.raises(ModelError, match="of another Net, which .* was replaced") as error:
        pipe.step(inputs(4))
    assert "old.lerp_(new, 0.01)" in error.value.hint


def test_another_model_of_the_same_class_that_nothing_reads_may_train() -> None:
    """A script that compares with plain PyTorch, or keeps a mean of weights, has such a model."""
    model = built(Net)
    pipe = piped(model)
    optimizer = torch.optim.SGD(OTHER.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        losses.append(float(pipe.step(inputs(4))))
        square(OTHER(inputs(4)["x"]), inputs(4)).backward()
        optimizer.step()
        follow(OTHER, model)
        OTHER.requires_grad_(requires_grad=True)
    assert all(one == two for one, two in pairwise(losses))


@pytest.mark.parametrize(("parts", "copied"), [(True, False), (False, True), (False, False)])
def test_a_part_of_what_is_trained_moves_no_teacher(*, parts: bool, copied: bool) -> None:
    """Nor does a write reach a copy, as on another device."""
    teacher = nn.Linear(4, 4)
    constants = {"weight": teacher.weight.detach()}
    held = {"weight": teacher.weight.detach().clone()} if copied else constants
    lent = Lent([teacher], constants, held, parts=parts)
    teacher.weight.data.mul_(0.5)
    lent.check()  # before the first step weights may be loaded
    lent.note()
    lent.check()
    teacher.bias.data.mul_(0.5)  # the graph does not have it
    lent.check()
    teacher.weight.data.mul_(0.5)
    if parts or copied:
        with pytest.raises(ModelError, match="'weight' of another Linear, .* was written between"):
            lent.check()
    else:
        lent.check()


HEAD = nn.Linear(4, 4)


def through_a_head(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """As a loss with centres of its own, outside of the model."""
    return square(HEAD(outputs), batch)


def near_an_unfrozen_teacher(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        target = HEAD(outputs)
    return square(outputs, batch) + (outputs - target).square().mean()


def test_an_optimizer_of_what_only_the_loss_has_is_refused() -> None:
    """Bug: it was a constant of the graph, had no gradient, and the optimizer passed it over."""
    pipe = piped(built(Net), through_a_head)
    pipe.step(inputs(4))
    place = r" \(.*test_le" if NOTES_LINES_OF_LOSSES else ""
    for trained in ([*pipe.parameters(), *HEAD.parameters()], [*HEAD.parameters()]):
        with pytest.raises(ModelError, match=rf"SGD is to train .* that the loss reads{place}"):
            torch.optim.SGD(trained, lr=0.1).step()


def test_an_optimizer_of_what_the_script_itself_has_given_gradients() -> None:
    """As of a discriminator: its own loss is none of the pipe's."""
    pipe = piped(built(Net), through_a_head)
    pipe.step(inputs(4))
    HEAD(torch.ones(4)).sum().backward()
    torch.optim.SGD(HEAD.parameters(), lr=0.1).step()
    HEAD.zero_grad()
    pipe.step(inputs(4))


def test_an_optimizer_of_what_plain_pytorch_gives_no_gradient_either() -> None:
    pipe = piped(built(Net), near_an_unfrozen_teacher)
    pipe.step(inputs(4))
    torch.optim.SGD([*pipe.parameters(), *HEAD.parameters()], lr=0.1).step()
    pipe.step(inputs(4))


def test_a_batch_that_something_else_has_computed() -> None:
    """Plain PyTorch would train the layer that has made it."""
    pipe, before = piped(built(Net)), nn.Linear(6, 6)
    batch = inputs(4)
    with pytest.raises(ModelError, match=r"batch\['x'\] was computed from tensors that require"):
        pipe.step({**batch, "x": before(batch["x"])})
    pipe.step({**batch, "x": before(batch["x"]).detach()})
    pipe.step({**batch, "x": batch["x"].clone().requires_grad_()})
