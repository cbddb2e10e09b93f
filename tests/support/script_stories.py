"""Stories of a loop that was written for one process: what it does to a rank's part is refused.

Each would train or show something else than plain PyTorch, and no word would be said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import autopipe
from autopipe import ModelError
from tests.support.models import CLASSES
from tests.support.pipes import ZOO, close, drawn, piped, planned, refused, sgd, story, whole_loss
from tests.support.pipes import own as own_part

# Two replicas under ZeRO-1: each rank has half of the weight's rows


@story(2)
def clipping_by_the_norm_of_a_part() -> None:
    """Of any kind: ranks with rows of one weight scale its gradient alike, or are refused."""
    plan = planned("linear", 1, 2, 1, zero=1)
    for kind in (2.0, 1.0):
        pipe = autopipe.parallelize(ZOO["linear"].model(), plan, loss=ZOO["linear"].loss)
        optimizer = sgd(pipe.parameters())
        pipe.step(drawn("linear", plan.batch.rows, 0))
        nn.utils.clip_grad_norm_(pipe.parameters(), 0.001, norm_type=kind)
        optimizer.step()
        told = "ranks 0 and 1 have scaled their gradients by", "pipe.clip_grad_norm_(1.0)"
        with refused(ModelError, *told):
            pipe.step(drawn("linear", plan.batch.rows, 1))


@story(2)
def an_optimizer_of_whole_matrices() -> None:
    """The plan is one for AdamW, which changes each element by its own gradient."""
    plan = planned("linear", 1, 2, 1, zero=1)
    pipe = autopipe.parallelize(ZOO["linear"].model(), plan, loss=ZOO["linear"].loss)
    pipe.step(drawn("linear", plan.batch.rows, 0))
    weights = {name: one.detach().clone() for name, one in pipe.named_parameters()}
    told = "Adafactor changes each parameter as a whole, and the plan has zero=1", "'Adafactor'"
    with refused(ModelError, *told):
        torch.optim.Adafactor(pipe.parameters()).step()
    with refused(ModelError, "LBFGS changes all parameters together", "zero=1"):
        torch.optim.LBFGS(pipe.parameters()).step(lambda: torch.zeros(()))
    for name, one in pipe.named_parameters():
        assert torch.equal(one, weights[name]), "nothing is changed"


class Prodigious(torch.optim.AdamW):
    """One number for all parameters, and a setting that its class does not take, as Prodigy."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.param_groups[0]["d"] = 1.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # AdamW's has overloads
        (group,) = self.param_groups
        group["d"] += float(sum(p.grad.abs().sum() for p in group["params"]))
        group["lr"] = 1e-3 * group["d"]
        super().step(closure)


@story(2)
def an_optimizer_that_is_no_setting_of_its_class() -> None:
    """It cannot be made anew by its class; one that has a state of its own by no means."""
    plan = planned("linear", 1, 2, 1, zero=1)
    pipe = autopipe.parallelize(ZOO["linear"].model(), plan, loss=ZOO["linear"].loss)
    pipe.step(drawn("linear", plan.batch.rows, 0))
    told = "Prodigious changes all parameters together", "=lambda parameters: Prodigious("
    with refused(ModelError, *told):
        Prodigious(pipe.parameters()).step()
    unknown = Prodigious(pipe.parameters())
    unknown.own = torch.Generator()  # type: ignore[attr-defined]  # a script's own
    with refused(ModelError, "no second one can be made to look at: it has a Generator"):
        unknown.step()


@story(2)
def another_optimizer_than_the_function_that_was_planned_for() -> None:
    """The plan is one for a function, which made gradient descent."""
    plan = planned("linear", 1, 2, 1, zero=1, optimizer=sgd)
    assert plan.optimizer == "custom"
    pipe = autopipe.parallelize(ZOO["linear"].model(), plan, loss=ZOO["linear"].loss)
    pipe.step(drawn("linear", plan.batch.rows, 0))
    with refused(ModelError, "Prodigious changes all parameters together", "zero=1"):
        Prodigious(pipe.parameters()).step()
    sgd(pipe.parameters()).step()


@story(2)
def the_module_itself() -> None:
    """It may be called before the first step, and once it has the trained weights."""
    case, plan = ZOO["linear"], planned("linear", 1, 2, 1, zero=1)
    model, batch = case.model(), drawn("linear", plan.batch.rows, 0)
    model.name_in_zoo = "linear"  # type: ignore[assignment]  # for `pipes.once`
    pipe = autopipe.parallelize(model, plan, loss=case.loss)
    optimizer = sgd(pipe.parameters())
    before = model(batch["input"])
    pipe.step(batch)
    optimizer.step()
    for read in (lambda: model(batch["input"]), model.state_dict):
        with refused(ModelError, "called, saved or given to another", "pipe.evaluate"):
            read()
    _, outputs = pipe.evaluate(batch, outputs=True)
    model.load_state_dict(pipe.state_dict())
    after = model(batch["input"])
    assert torch.equal(after, outputs) and not torch.equal(after, before)


@story(2)
def the_modules_own_parameters() -> None:
    """Each rank has half of the weight's rows: a mean of weights over the whole one, and clipping
    by its gradient, would be of what is not trained. Evaluation, which traces it, goes on."""
    case, plan = ZOO["linear"], planned("linear", 1, 2, 1, zero=3)
    model, batch = case.model(), drawn("linear", plan.batch.rows, 0)
    model.name_in_zoo = "linear"  # type: ignore[assignment]  # for `pipes.once`
    mean = torch.optim.swa_utils.AveragedModel(model)
    pipe = autopipe.parallelize(model, plan, loss=case.loss)
    mean.update_parameters(model)
    pipe.step(batch)
    for read in (
        lambda: mean.update_parameters(model),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    ):
        with refused(ModelError, "a parameter of the module itself was read", "pipe.clip_grad"):
            read()
    sgd(pipe.parameters()).step()
    pipe.evaluate(batch)
    pipe.step(batch)
    assert sum(one.numel() for one in model.parameters()) == model.weight.numel() + CLASSES


@story(2)
def a_mean_of_a_part_of_a_gradient() -> None:
    """Plain PyTorch centres the whole weight's gradient, of which each rank has half of the rows;
    its rows it has whole."""
    case, plan = ZOO["linear"], planned("linear", 1, 2, 1, zero=1)
    pipe = autopipe.parallelize(case.model(), plan, loss=case.loss)
    optimizer = sgd(pipe.parameters())
    for number, dims in enumerate(([1], [0, 1])):
        pipe.step(drawn("linear", plan.batch.rows, number))
        for one in pipe.parameters():
            if one.grad is not None and one.grad.ndim > 1:
                one.grad -= one.grad.mean(dim=dims, keepdim=True)
        told = "'weight' was changed by its mean over dim 0, of which this rank has a part"
        with refused(ModelError, told) if number else nullcontext():
            optimizer.step()


@story(2)
def updates_of_one_rank_alone() -> None:
    """Replicas would train apart: `if rank == 0:`, or a rate by a norm of a rank's own rows."""
    case, plan = ZOO["linear"], planned("linear", 1, 2, 1, zero=1)
    for alone, told in (
        (True, "rank 0 has called an optimizer's step since the last pipe.step, and rank 1"),
        (False, "ranks 0 and 1 have the same parameters, or parts of them, and have updated"),
    ):
        pipe = autopipe.parallelize(case.model(), plan, loss=case.loss)
        optimizer = sgd(pipe.parameters())
        for number in range(3):
            with refused(ModelError, told) if number == 2 else nullcontext():
                pipe.step(drawn("linear", plan.batch.rows, number))
            if number == 0 or not alone or pipe.place.rank == 0:
                optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * number * pipe.place.rank
                optimizer.step()


@story(2)
def rows_of_a_parameter_that_are_frozen() -> None:
    """They are none of the module's, whose own parameter stays trained."""
    case, plan = ZOO["linear"], planned("linear", 1, 2, 1, zero=1)
    pipe = autopipe.parallelize(case.model(), plan, loss=case.loss)
    optimizer = sgd(pipe.parameters())
    pipe.step(drawn("linear", plan.batch.rows, 0))
    optimizer.step()
    dict(pipe.named_parameters())["weight"].requires_grad_(False)
    with refused(ModelError, "'weight' was trained when the model was planned and is frozen now"):
        pipe.step(drawn("linear", plan.batch.rows, 1))


@story(2)
def weights_moved_by_the_norm_of_a_part() -> None:
    """SAM's first step takes the norm of all gradients, of which each rank has half of the rows.
    With the norm of the whole model it trains as in one process."""
    case, plan = ZOO["linear"], planned("linear", 1, 2, 1, zero=1)
    batches = [drawn("linear", plan.batch.rows, number) for number in range(2)]

    def sam(
        step: Callable[[Any], Any], norm: Callable[[], Tensor], own: list[nn.Parameter]
    ) -> None:
        optimizer = sgd(own)
        for batch in batches:
            step(batch)
            begun = [one.detach().clone() for one in own]
            by = 0.5 / norm()
            for one in own:
                if one.grad is not None:
                    one.data += by * one.grad
            step(batch)
            for one, before in zip(own, begun, strict=True):
                one.data.copy_(before)
            optimizer.step()

    plain = case.model()

    def plain_step(batch: Any) -> None:
        plain.zero_grad()
        case.loss(plain(batch["input"]), batch).backward()

    own_of = [*plain.parameters()]
    sam(plain_step, lambda: norm_of(own_of), own_of)

    pipe = autopipe.parallelize(case.model(), plan, loss=case.loss)
    own = [*pipe.parameters()]
    sam(pipe.step, lambda: pipe.clip_grad_norm_(float("inf")), own)
    for name, tensor in pipe.state_dict().items():
        torch.testing.assert_close(tensor, plain.get_parameter(name))

    pipe = autopipe.parallelize(case.model(), plan, loss=case.loss)
    own = [*pipe.parameters()]
    told = "ranks 0 and 1 have moved their weights along the gradients by", "float('inf')"
    with refused(ModelError, *told):
        sam(pipe.step, lambda: norm_of(own), own)


def norm_of(parameters: list[nn.Parameter]) -> Tensor:
    return nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None])


@story(2)
def weights_initialised_anew_by_random_numbers() -> None:
    """Each rank would draw for its part of the model, rows or a stage: plain PyTorch draws for all
    of it, and a whole new module by the same seed may be given. So may a part of what was loaded,
    beside batches that are drawn."""
    for name, pp, dp in (("linear", 1, 2), ("gpt", 2, 1)):
        case, plan = ZOO[name], planned(name, pp, dp, 1, zero=dp - 1)
        pipe, ninth = piped(name, plan), drawn(name, plan.batch.rows, 9)
        optimizer = sgd(pipe.parameters())
        for number in range(2):
            if number:  # before the first step, and between two
                pipe.step(drawn(name, plan.batch.rows, number))
                optimizer.step()
            torch.manual_seed(5)
            for one in pipe.parameters():
                if one.ndim > 1:
                    nn.init.xavier_uniform_(one)
            told = "written random numbers into their weights", "pipe.load_state_dict"
            with refused(ModelError, *told):
                pipe.step(drawn(name, plan.batch.rows, number))
            torch.manual_seed(5)
            new = case.model()
            pipe.load_state_dict(new.state_dict())
            close(pipe.evaluate(ninth), whole_loss(name, new, ninth))
            with torch.no_grad():
                for key, one in pipe.named_parameters():
                    one.copy_(own_part(pipe, key, torch.randn(new.get_parameter(key).shape)))


@story(2)
def noise_on_gradients() -> None:
    """Each rank has half of the weight's rows: by one seed it would be the same on both halves."""
    plan = planned("linear", 1, 2, 1, zero=1)
    for seed in (None, 7):
        pipe = piped("linear", plan)
        optimizer = sgd(pipe.parameters())
        generator = None if seed is None else torch.Generator().manual_seed(seed + pipe.place.dp)
        torch.manual_seed(5)
        pipe.step(drawn("linear", plan.batch.rows, 0))
        pipe.clip_grad_norm_(1.0)
        for one in pipe.parameters():
            if one.grad is not None and one.ndim > 1:
                one.grad += 0.01 * torch.randn(one.shape, generator=generator)
        optimizer.step()
        told = "written random numbers into their gradients", "torch.Generator().manual_seed(part)"
        with refused(ModelError, *told) if seed is None else nullcontext():
            pipe.step(drawn("linear", plan.batch.rows, 1))
