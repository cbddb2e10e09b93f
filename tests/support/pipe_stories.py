"""Stories of a step as its caller sees it: what goes in, what comes out, what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autopipe
from autopipe import ModelError, Pipe
from autopipe.batch.arguments import forward_arguments
from tests.support.long import sampled
from tests.support.pipes import (
    ZOO,
    close,
    close_gradients,
    drawn,
    piped,
    planned,
    refused,
    rows_of,
    sgd,
    story,
    together,
    traced_once,
    whole_loss,
)


@story(2, long=True)
def evaluation_is_that_of_the_whole_model() -> None:
    """After a step, so that batch norm has statistics; also for rows that do not divide."""
    for name in sampled(("dropout", "counted", "unet"), of=2):
        plan, case = planned(name, 2, 1, 2), ZOO[name]
        pipe = piped(name, plan)
        pipe.step(case.inputs(plan.batch.rows))
        model = case.model()
        if name == "unet":
            for k in range(2):
                whole_loss(name, model, drawn(name, 2, k))
        model.eval()
        for rows in (plan.batch.rows, 3, 1):
            with torch.no_grad():
                expected = whole_loss(name, model, case.inputs(rows))
            close(pipe.evaluate(case.inputs(rows)), expected, f"{name}, {rows} rows")


@story(2)
def what_a_model_gives_in_evaluation() -> None:
    """The same on both ranks, in the batch's order; by their paths if they are several, and the
    loss as without them."""
    for name in sampled(("dataclass", "dict", "unet", "counted"), of=4):
        case, pipe = ZOO[name], piped(name, planned(name, 2, 1, 2))
        batch, model = case.inputs(4), case.model().eval()
        args, kwargs = forward_arguments(model, batch, case.loss)
        with torch.no_grad():
            expected = model(*args, **kwargs)
        loss, found = pipe.evaluate(batch, outputs=True)
        assert torch.equal(loss, pipe.evaluate(batch))
        if name == "dict":
            assert [*found] == ["logits", "extra.0", "extra.1.0"]
            found, expected = found["logits"], expected["logits"]
        elif name == "dataclass":
            assert [*found] == ["logits", "hidden"]
            close(found["hidden"], expected.hidden, "hidden, of the first stage")
            found, expected = found["logits"], expected.logits
        close(found, expected, name)


@story(2, long=True)
def evaluation_leaves_training_untouched() -> None:
    """Buffers, gradients, dropout's numbers: one pipe evaluates, the other does not."""
    for name in ("dropout", "unet", "calls"):
        plan, case = planned(name, 2, 1, 2), ZOO[name]
        one, other = piped(name, plan), piped(name, plan)
        for number in range(2):
            batch = drawn(name, plan.batch.rows, number)
            assert torch.equal(one.step(batch), other.step(batch))
            kept = {n: p.grad.clone() for n, p in one.named_parameters() if p.grad is not None}
            one.evaluate(case.inputs(3))
            for own, parameter in one.named_parameters():
                assert parameter.grad is not None and torch.equal(parameter.grad, kept[own])
            theirs = dict(other.named_buffers())
            for own, buffer in one.named_buffers():
                assert torch.equal(buffer, theirs[own]), own


@story(2)
def an_earlier_steps_gradients_are_gone() -> None:
    plan = planned("gpt", 2, 1, 2)
    pipe, batch = piped("gpt", plan), ZOO["gpt"].inputs(plan.batch.rows)
    pipe.step(batch)
    first = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
    pipe.step(drawn("gpt", plan.batch.rows, 1))
    for parameter in pipe.parameters():
        parameter.grad = torch.full_like(parameter, 1e9)
    pipe.step(batch)
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, first[name]), name


@story(2, long=True)
def another_number_of_rows() -> None:
    """The last batch of an epoch is smaller: the stages are lowered again for it."""
    pipe, model = piped("gpt", planned("gpt", 2, 1, 2)), ZOO["gpt"].model()
    for rows in (4, 2, 12, 4):
        batch = ZOO["gpt"].inputs(rows)
        close(pipe.step(batch), whole_loss("gpt", model, batch), f"{rows} rows")


@story(2)
def a_stage_without_parameters() -> None:
    """The last one has the loss alone; an optimizer and a norm still work there."""
    pipe = piped("linear", planned("linear", 2, 1, 2))
    together("linear", pipe)
    assert [name for name, _ in pipe.named_parameters()] == [["weight", "bias"], []][pipe.place.pp]


@story(2)
def an_optimizer_of_the_modules_own_parameters() -> None:
    """Under ZeRO a rank's optimizer has rows of them: one of the whole ones would train nothing."""
    case, plan = ZOO["linear"], planned("linear", 1, 2, 1, zero=1)
    for others in (0, 1):  # another one beside the rank's own is no mistake
        model = case.model()
        pipe = autopipe.parallelize(model, plan, loss=case.loss)
        wrong, own = sgd(model.parameters()), sgd(pipe.parameters())
        pipe.step(drawn("linear", plan.batch.rows, 0))
        wrong.step()
        if others:
            own.step()
        told = "an optimizer was made of the module's own 'weight'", "pipe.parameters()"
        with nullcontext() if others else refused(ModelError, *told):
            pipe.step(drawn("linear", plan.batch.rows, 1))


@story(2)
def evaluation_in_inference_mode() -> None:
    """A loop may evaluate so, with a batch that was made there; the steps after it train on."""
    pipe, model = piped("gpt", planned("gpt", 2, 1, 2)), ZOO["gpt"].model()
    with torch.inference_mode():
        batch = ZOO["gpt"].inputs(4)
        close(pipe.evaluate(batch), whole_loss("gpt", model.eval(), batch))
        with refused(ModelError, "pipe.step was called under torch.no_grad() or inference_mode()"):
            pipe.step(batch)
    together("gpt", pipe)


@story(2)
def two_batches_of_one_coordinate() -> None:
    """sharded=True, and the two stages of one pipeline were given different parts."""
    plan = planned("gpt", 2, 1, 2)
    pipe = piped("gpt", plan)
    with refused(ModelError, "different batches: rank 0 and rank 1"):
        pipe.step(drawn("gpt", plan.batch.rows, pipe.place.rank), sharded=True)


# Three processes: tied weights


@story(3)
def a_tied_model() -> None:
    """GPT-2's embedding is its head: stages 0 and 2 have it, and it is the same after training."""
    for schedule in sampled(("1f1b", "gpipe"), of=2):
        plan = planned("gpt2", 3, 1, 2, schedule)
        tied = set(plan.stages[0].parameters) & set(plan.stages[2].parameters)
        assert tied == {"transformer.wte.weight"}
        pipe = piped("gpt2", plan)
        together("gpt2", pipe)
        weight = dict(pipe.named_parameters()).get("transformer.wte.weight")
        everyone: list[Any] = [None] * 3
        dist.all_gather_object(everyone, weight)
        assert everyone[1] is None and torch.equal(everyone[0], everyone[2])


@story(3)
def a_tied_parameter_counts_once() -> None:
    """The square of its gradient enters the norm once, though two ranks hold it; clipping at less
    than the norm scales all ranks alike."""
    plan = planned("gpt2", 3, 1, 2)
    pipe, model = piped("gpt2", plan), ZOO["gpt2"].model()
    batch = ZOO["gpt2"].inputs(plan.batch.rows)
    pipe.step(batch)
    whole_loss("gpt2", model, batch).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    close(pipe.clip_grad_norm_(0.01), expected)
    close(pipe.clip_grad_norm_(1.0), torch.tensor(0.01), to=1e-3)
    close_gradients(pipe, model, 1e-4)


# Four processes: two stages, each on two data-parallel ranks


@story(4)
def the_gradient_accumulation_error() -> None:
    """Rows have unequal numbers of tokens that count. A mean of micro-batches' means weighs a token
    in a short row more than one in a long row: libraries did so until 2024
    (https://unsloth.ai/blog/gradient). With (sum, count) every token weighs the same."""
    plan = planned("counted", 2, 2, 2)
    batch = ZOO["counted"].inputs(plan.batch.rows)
    labels = batch["labels"]  # type: ignore[call-overload]
    for row, keep in enumerate((1, 1, 12, 12, 12, 12, 3, 2)):
        labels[row, keep:] = -100
    assert len({int((part != -100).sum()) for part in labels.split(2)}) > 2
    pipe, model = piped("counted", plan), ZOO["counted"].model()
    expected = whole_loss("counted", model, batch)
    expected.backward()
    close(pipe.step(batch), expected)
    close_gradients(pipe, model)
    parts = [rows_of(batch, 2 * k, 2 * k + 2) for k in range(4)]
    wrong = torch.stack([whole_loss("counted", model, part) for part in parts]).mean()
    assert abs(wrong.item() - expected.item()) > 1e-3


@story(4, long=True)
def what_replicas_give_in_evaluation() -> None:
    """Their rows one after the other, whoever has the batch whole or in parts."""
    plan, case = planned("gpt", 2, 2, 2), ZOO["gpt"]
    pipe, batch, model = piped("gpt", plan), case.inputs(plan.batch.rows), case.model().eval()
    with torch.no_grad():
        expected = model(batch["tokens"])  # type: ignore[call-overload]
    close(pipe.evaluate(batch, outputs=True)[1], expected)
    own = drawn("gpt", plan.batch.rows // 2, pipe.place.dp)
    close(pipe.evaluate(own, sharded=True, outputs=True)[1], expected)


@story(4)
def a_batch_in_which_nothing_counts() -> None:
    """The mean of no tokens is no number; the gradient is none, and the weights stay finite."""
    plan = planned("counted", 2, 2, 2)
    pipe, batch = piped("counted", plan), ZOO["counted"].inputs(plan.batch.rows)
    batch["labels"].fill_(-100)  # type: ignore[call-overload]
    assert pipe.step(batch).isnan()
    assert all((p.grad == 0).all() for _, p in pipe.named_parameters() if p.grad is not None)


@story(4)
def each_rank_may_pass_its_own_part() -> None:
    """sharded=True with halves gives what the whole batch gives, dropout's numbers included."""
    plan = planned("dropout", 2, 2, 2)
    one, other = piped("dropout", plan), piped("dropout", plan)
    batch = ZOO["dropout"].inputs(plan.batch.rows)
    half = plan.batch.rows // 2
    part = rows_of(batch, one.place.dp * half, (one.place.dp + 1) * half)
    assert torch.equal(one.step(batch), other.step(part, sharded=True))
    theirs = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        gradient = theirs[name].grad
        assert parameter.grad is not None and gradient is not None
        assert torch.equal(parameter.grad, gradient), name
    assert torch.equal(one.evaluate(batch), other.evaluate(part, sharded=True))


@cache
def refusing() -> Pipe:
    """A pipe that has not made a step; the stories below are refused at its door."""
    return piped("gpt", planned("gpt", 2, 2, 2))


@story(4)
def rows_that_do_not_divide() -> None:
    pipe = refusing()
    with refused(ModelError, "7 rows", "2 micro-batches on each of 2 data-parallel ranks"):
        pipe.step(ZOO["gpt"].inputs(7))
    with refused(ModelError, "3 rows", "on each of 2 data-parallel ranks"):
        pipe.evaluate(ZOO["gpt"].inputs(3))
    with refused(ModelError, "2 rows", "hint: give 4 rows"):
        pipe.step(ZOO["gpt"].inputs(2))


@story(4)
def parts_of_unequal_size() -> None:
    """Each coordinate's part divides into micro-batches, but a mean of both would weigh wrongly."""
    pipe = refusing()
    mine, other = pipe.place.rank, 1 - pipe.place.dp
    with refused(ModelError, f"rank {mine} was given {2 + 2 * pipe.place.dp} rows, rank {other}"):
        pipe.step(ZOO["gpt"].inputs(2 + 2 * pipe.place.dp), sharded=True)


@story(4)
def one_rank_with_a_batch_that_does_not_fit() -> None:
    """All ranks refuse, though three of the batches are in order: none waits for rank 2."""
    plan = planned("gpt", 2, 2, 2)
    pipe = refusing()
    odd = pipe.place.rank == 2
    batch = ZOO["gpt"].inputs(plan.batch.rows)
    with refused(ModelError, "different batches: rank 0 and rank 2"):
        pipe.step(ZOO["gpt"].inputs(plan.batch.rows - odd))
    with refused(ModelError, "different batches: rank 0 and rank 2"):
        pipe.step({"tokens": batch["tokens"]} if odd else batch)  # type: ignore[call-overload]


@story(4)
def other_weights_on_one_rank() -> None:
    """As of a model that each rank has drawn by itself: replicas would train apart."""
    case = ZOO["gpt"]
    model = case.model()
    if dist.get_rank() == 3:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
    with refused(ModelError, "ranks 2 and 3 have other values of the parameter"):
        with traced_once("gpt"):
            autopipe.parallelize(model, planned("gpt", 2, 2, 2), loss=case.loss)


@story(4)
def different_batches() -> None:
    """Each rank says so; none waits for the others for ever, and the next step can run."""
    plan = planned("gpt", 2, 2, 2)
    pipe = refusing()
    rank = pipe.place.rank
    with refused(ModelError, "different batches: rank 0 and rank 1", "sharded=True"):
        pipe.step(drawn("gpt", plan.batch.rows, rank))
    with refused(ModelError, "different batches", "rank 3"):
        pipe.step(drawn("gpt", plan.batch.rows, rank == 3))
    half = plan.batch.rows // 2
    with refused(ModelError, "of data-parallel coordinate 0", "rank 0 and rank 2"):
        pipe.step(drawn("gpt", half, rank), sharded=True)
    loss = pipe.step(drawn("gpt", half, pipe.place.dp), sharded=True)
    close(loss, whole_loss("gpt", ZOO["gpt"].model(), ZOO["gpt"].inputs(plan.batch.rows)))


@story(4)
def other_rows_in_a_later_step() -> None:
    """Only the first step compares all contents, but every one the rows: a rank that is sent more
    than it has room for would end inside of gloo, without a Python exception."""
    plan = planned("gpt", 2, 2, 2)
    pipe, rank = refusing(), refusing().place.rank
    batch, more = ZOO["gpt"].inputs(plan.batch.rows), ZOO["gpt"].inputs(plan.batch.rows + 4)
    expected = pipe.step(batch)
    for run in (pipe.step, pipe.evaluate):
        run(batch)
        for odd in range(4):
            mine, other = (12, 0 if odd else 1) if rank == odd else (8, odd)
            said = f"rank {rank} was given {mine} rows, rank {other} {20 - mine} rows: all ranks"
            with refused(ModelError, said, "nothing of this step was sent"):
                run(more if rank == odd else batch)
        said = "the batch has the entries ['tokens']" if rank == 2 else "rank 2 a batch that does"
        with refused(ModelError, said):
            run({"tokens": batch["tokens"]} if rank == 2 else batch)  # type: ignore[call-overload]
        with refused(ModelError, "different batches, after batches that were the same", "rank 3"):
            run(drawn("gpt", plan.batch.rows, int(rank == 3)))
    assert torch.equal(pipe.step(batch), expected)
