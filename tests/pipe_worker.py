"""Stories of whole training steps in real processes; a program that tells them all.

Each story is a function that every rank of its world runs. Started by `launch.spawn`, once per
rank, the program tells the stories of its world in turn; what came of each goes into a file:

    python pipe_worker.py FOLDER          FOLDER/three_steps.0: empty, or a traceback
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopipe
from autopipe import ModelError, Pipe, Plan, PlanError, batches
from autopipe.runtime import gradients
from autopipe.runtime.launch import start, world_from
from autopipe.runtime.meter import Meter
from tests import zoo
from tests.inprocess import machine
from tests.models import CLASSES, WIDTH
from tests.zoo import Batch, Case

ZOO = {
    **zoo.ZOO,
    "linear": Case(
        lambda: nn.Linear(WIDTH, CLASSES),
        lambda rows: {"input": zoo.noise(rows, WIDTH), "labels": zoo.integers(rows, below=CLASSES)},
        zoo.entropy,
    ),
}
Story = Callable[[], None]
STORIES: dict[int, list[Story]] = {2: [], 3: [], 4: []}


def story(world: int) -> Callable[[Story], Story]:
    """Enter a story under the number of processes it needs."""

    def enter(told: Story) -> Story:
        STORIES[world].append(told)
        return told

    return enter


@cache
def planned(name: str, pp: int, dp: int, micro_batches: int, schedule: str = "1f1b") -> Plan:
    case = ZOO[name]
    return autopipe.plan(
        case.model,
        case.inputs,
        loss=case.loss,
        cluster=machine(pp * dp),
        batch_size=2 * dp * micro_batches,
        pp=pp,
        dp=dp,
        micro_batches=micro_batches,
        schedule=schedule,
    )


def piped(name: str, plan: Plan, **options: Any) -> Pipe:
    """The zoo's model with the zoo's weights, as planned."""
    case = ZOO[name]
    return autopipe.parallelize(case.model(), plan, loss=case.loss, **options)


def whole_loss(name: str, model: nn.Module, batch: Batch) -> Tensor:
    """The loss of the whole batch in one process, in one go."""
    found = ZOO[name].eager(model, batch)
    return found if isinstance(found, Tensor) else found[0] / found[1]


def drawn(name: str, rows: int, number: int) -> Batch:
    """Another batch for each number: rows further down the zoo's."""
    case = ZOO[name]
    batch = case.inputs(rows * (number + 1))
    specs = batches.describe(case.inputs(2), case.inputs(3), 2, 3)
    leaves = batches.slice_rows(specs, batches.flatten(batch), rows * number, rows * (number + 1))
    return batches.rebuild(batch, leaves)  # type: ignore[no-any-return]


def close(found: Tensor, expected: Tensor, said: str = "", to: float = 1e-5) -> None:
    """Equal to a part of the largest entry."""
    most = to * float(expected.detach().abs().max().clamp_min(1e-6))
    off = float((found.detach() - expected.detach()).abs().max())
    assert off <= most, f"{said}: off by {off:.2e}, allowed {most:.2e}"


@contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """The block raises `kind`, and its sentence has these words."""
    try:
        yield
    except kind as error:
        for word in words:
            assert word in str(error), f"{word!r} is not in {error}"
        return
    raise AssertionError(f"no {kind.__name__} was raised")


def train(name: str, plan: Plan, *, steps: int = 3, clip: float = 0.5) -> Pipe:
    """So many steps beside one process: losses, gradients, norms and weights stay together."""
    pipe, model = piped(name, plan), ZOO[name].model()
    ours = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(steps):
        batch = drawn(name, plan.batch.rows, number)
        expected = whole_loss(name, model, batch)
        theirs.zero_grad()
        expected.backward()
        close(pipe.step(batch), expected, f"loss {number}")
        for own, parameter in pipe.named_parameters():
            gradient = model.get_parameter(own).grad
            if gradient is not None and parameter.grad is not None:
                close(parameter.grad, gradient, f"gradient of {own}, step {number}", 5e-5)
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        close(pipe.clip_grad_norm_(clip), norm, f"norm {number}")
        ours.step()
        theirs.step()
    for own, parameter in pipe.named_parameters():
        close(parameter, model.get_parameter(own), f"{own} after {steps} steps")
    return pipe


# Two processes: a pipeline of two stages


@story(2)
def memory_is_what_was_planned() -> None:
    """Parameters, gradients, AdamW's two moments, activations and transfers, within 5 %."""
    for name, m in (("gpt", 8), ("unet", 2)):
        plan = planned(name, 2, 1, m)
        pipe = piped(name, plan)
        pipe.meter = Meter()
        optimizer = torch.optim.AdamW(pipe.parameters())
        pipe.step(ZOO[name].inputs(plan.batch.rows))
        optimizer.step()
        predicted = plan.stages[pipe.place.pp].predicted.memory
        measured = pipe.measured(optimizer).memory
        for part in ("parameters", "gradients", "buffers", "activations", "transfers"):
            mine, planned_ = getattr(measured, part), getattr(predicted, part)
            assert mine == planned_, f"{name}: {part}: measured {mine}, planned {planned_}"
        steps = sum(4 for p in pipe.parameters() if p.grad is not None)  # AdamW counts per tensor
        assert measured.optimizer == predicted.optimizer + steps
        assert abs(measured.peak - predicted.peak) <= 0.05 * measured.peak


@story(2)
def evaluation_is_that_of_the_whole_model() -> None:
    """After a step, so that batch norm has statistics; also for rows that do not divide."""
    for name in ("dropout", "unet", "counted"):
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
def evaluation_leaves_training_untouched() -> None:
    """Buffers, gradients, dropout's numbers: one pipe evaluates, the other does not."""
    for name in ("dropout", "unet"):
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


@story(2)
def another_number_of_rows() -> None:
    """The last batch of an epoch is smaller: the stages are lowered again for it."""
    pipe, model = piped("gpt", planned("gpt", 2, 1, 2)), ZOO["gpt"].model()
    for rows in (4, 2, 12, 4):
        batch = ZOO["gpt"].inputs(rows)
        close(pipe.step(batch), whole_loss("gpt", model, batch), f"{rows} rows")


@story(2)
def a_stage_without_parameters() -> None:
    """The last one has the loss alone; an optimizer and a norm still work there."""
    pipe = train("linear", planned("linear", 2, 1, 2))
    assert [name for name, _ in pipe.named_parameters()] == [["weight", "bias"], []][pipe.place.pp]


@story(2)
def a_plan_of_another_model() -> None:
    """Every rank says the first node that differs; a plan that was edited, the field."""
    plan, case = planned("gpt", 2, 1, 2), ZOO["gpt"]

    def mean_of_squares(outputs: Tensor, batch: Any) -> Tensor:
        return outputs.square().mean()

    with refused(PlanError, "plan.fingerprint", "First difference", "loss()"):
        autopipe.parallelize(case.model(), plan, loss=mean_of_squares)
    first, last = plan.stages
    with refused(PlanError, "plan.stages[1].first: the model has no node 'nowhere'"):
        piped("gpt", replace(plan, stages=(first, replace(last, first="nowhere"))))
    with refused(PlanError, "plan.stages[1].first: stage 1 begins with", first.first):
        piped("gpt", replace(plan, stages=(first, replace(last, first=first.first))))
    with refused(PlanError, "plan.stages[1].last: the last stage ends with", last.last):
        piped("gpt", replace(plan, stages=(first, replace(last, last=last.first))))
    with refused(PlanError, "plan.stages[1].first: stage 1 begins with", "after the last node"):
        piped("gpt", replace(plan, stages=(replace(first, last=last.last), last)))
    with refused(PlanError, "plan.stages: expected 2 stages (mesh.pp), found 1"):
        piped("gpt", replace(plan, stages=(first,)))


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
    for schedule in ("1f1b", "gpipe"):
        plan = planned("gpt2", 3, 1, 2, schedule)
        tied = set(plan.stages[0].parameters) & set(plan.stages[2].parameters)
        assert tied == {"transformer.wte.weight"}
        pipe = train("gpt2", plan)
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
    for name, parameter in pipe.named_parameters():
        gradient = model.get_parameter(name).grad
        assert parameter.grad is not None and gradient is not None
        close(parameter.grad, gradient, name, 1e-4)


# Four processes: two stages, each on two data-parallel ranks


@story(4)
def three_steps_are_those_of_one_process() -> None:
    train("gpt", planned("gpt", 2, 2, 2))


@story(4)
def three_steps_of_a_sum_and_a_count() -> None:
    """Gradients in small all-reduces as well."""
    whole = gradients.BUCKET_BYTES
    gradients.BUCKET_BYTES = 1000
    train("counted", planned("counted", 2, 2, 2))
    gradients.BUCKET_BYTES = whole


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
    for name, parameter in pipe.named_parameters():
        gradient = model.get_parameter(name).grad
        assert parameter.grad is not None and gradient is not None
        close(parameter.grad, gradient, name)
    parts = [drawn_rows(batch, 2 * k, 2 * k + 2) for k in range(4)]
    wrong = torch.stack([whole_loss("counted", model, part) for part in parts]).mean()
    assert abs(wrong.item() - expected.item()) > 1e-3


def drawn_rows(batch: Any, first: int, stop: int) -> Any:
    return {key: value[first:stop] for key, value in batch.items()}


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
    for name in ("gpt", "dropout"):
        plan = planned(name, 2, 2, 2)
        one, other = piped(name, plan), piped(name, plan)
        batch = ZOO[name].inputs(plan.batch.rows)
        half = plan.batch.rows // 2
        part = drawn_rows(batch, one.place.dp * half, (one.place.dp + 1) * half)
        assert torch.equal(one.step(batch), other.step(part, sharded=True))
        theirs = dict(other.named_parameters())
        for own, parameter in one.named_parameters():
            assert parameter.grad is not None and theirs[own].grad is not None
            assert torch.equal(parameter.grad, theirs[own].grad), own
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


def main(folder: Path) -> None:
    world = world_from(os.environ)
    assert world is not None
    torch.set_num_threads(1)
    with start(world, timeout=60):
        for told in STORIES[world.size]:
            result = folder / f"{told.__name__}.{world.rank}"
            try:
                told()
            except Exception:
                result.write_text(traceback.format_exc())
                raise
            result.touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
