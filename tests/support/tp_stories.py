"""Stories of tensor parallelism: models nobody has prepared, beside one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autopipe.planfile.placements import S
from autopipe.runtime.comm.group_axis import GroupAxis
from autopipe.runtime.comm.shared_memory_axis import SharedAxis, open_together
from autopipe.sharding import collectives
from autopipe.sharding.collectives import convert, own_part
from tests.support.long import sampled
from tests.support.pipes import (
    ZOO,
    close,
    drawn,
    own,
    piped,
    planned,
    sgd,
    story,
    together,
    whole_loss,
)

# Two processes


@story(2, long=True)
def models_in_two_parts() -> None:
    """Fused and separate projections, a vocabulary tied to the head, relative positions.

    By default gpt2 with its loss in parts, and llama with its tokens in parts.
    """
    for name in ("gpt2", "gpt", "llama", "t5"):
        together(name, piped(name, planned(name, 1, 1, 2, tp=2)))


@story(2)
def tokens_in_two_parts() -> None:
    """Sequence parallelism: gradients of norms are then partial sums, summed once a step."""
    plan = planned("llama", 1, 1, 2, tp=2, sequence_parallel=True)
    together("llama", piped("llama", plan))


@story(2)
def a_part_in_bf16() -> None:
    """Rough, as bf16 is; what is summed over ranks is low, what is kept is not."""
    for precision in sampled(("bf16-autocast", "bf16"), of=2):
        plan = planned("gpt", 1, 1, 2, tp=2, precision=precision)
        pipe, model = piped("gpt", plan), ZOO["gpt"].model()
        batch = drawn("gpt", plan.batch.rows, 0)
        expected = whole_loss("gpt", model, batch)
        expected.backward()
        close(pipe.step(batch), expected, "loss", 1e-2)
        for name, parameter in pipe.named_parameters():
            assert parameter.grad is not None and parameter.grad.dtype == torch.float32
            gradient = model.get_parameter(name).grad
            assert gradient is not None
            close(parameter.grad, own(pipe, name, gradient), f"{precision}: {name}", 5e-2)


@story(2, long=True)
def evaluation_in_parts() -> None:
    """The graph of evaluation has no dropout, and is dealt out as the plan says all the same."""
    plan, case = planned("dropout", 1, 1, 2, tp=2), ZOO["dropout"]
    pipe, model = piped("dropout", plan), case.model().eval()
    pipe.step(case.inputs(plan.batch.rows))
    for rows in (plan.batch.rows, 3):
        with torch.no_grad():
            expected = whole_loss("dropout", model, case.inputs(rows))
        close(pipe.evaluate(case.inputs(rows)), expected, f"{rows} rows")


@story(2)
def what_is_replicated_stays_so() -> None:
    """Twenty steps with dropout, drawn apart for shards and together for the rest: to the bit."""
    plan = planned("dropout", 1, 1, 2, tp=2)
    pipe = piped("dropout", plan)
    optimizer = sgd(pipe.parameters())
    for number in range(20):
        pipe.step(drawn("dropout", plan.batch.rows, number))
        optimizer.step()
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, dict(pipe.named_parameters()))
    sharded = {s.name for s in plan.states} | {
        f"{member}.{s.name}" for block in plan.blocks for s in block.states
        for member in block.members
    }  # fmt: skip
    same = [name for name in everyone[0] if name not in sharded]
    assert same and all(torch.equal(everyone[0][name], everyone[1][name]) for name in same)


# Three processes


@story(3)
def parts_of_unequal_size() -> None:
    """Seven rows among three ranks are 3, 3 and 1, which a backend's collectives do not take."""
    for axis in axes():
        exchange(axis, 5)


@story(3)
def more_than_fits_a_slot() -> None:
    """In shared memory it goes in turns: 7 x 120,000 numbers of 8 bytes, in slots of 1 MiB."""
    for axis in axes():
        exchange(axis, 120_000)


def axes() -> list[GroupAxis]:
    """All ranks, over a process group and in shared memory."""
    group = dist.group.WORLD
    assert group is not None
    memory = open_together(group)
    assert memory is not None, "these processes are of one user, on one host"
    return [GroupAxis(group), SharedAxis(group, memory)]


def exchange(axis: GroupAxis, width: int) -> None:
    """Each conversion that sends something, of whole numbers: there is no rounding."""
    whole = torch.arange(7.0 * width, dtype=torch.float64).view(7, width)
    own, mine = own_part(whole, S(0), 3, axis.rank), whole * (axis.rank + 1)
    columns = own_part(whole, S(1), 3, axis.rank)
    with collectives.bind("tp", axis):
        assert torch.equal(convert(own, "tp", "S(0)", "I", 7), whole)
        assert torch.equal(convert(own, "tp", "S(0)", "S(1)", 7), columns)
        assert torch.equal(convert(mine, "tp", "P", "S(0)", 0), 6 * own)
        assert torch.equal(convert(mine, "tp", "P", "I", 0), 6 * whole)
        assert torch.equal(collectives.whole(own, "tp", S(0)), whole)
        assert torch.equal(collectives.largest(mine, "tp"), 3 * whole)
        began = mine.clone()
        axis.begin_all_reduce(began)()
        assert torch.equal(began, 6 * whole)


# Four processes


@story(4)
def stages_in_two_parts() -> None:
    for schedule in sampled(("zb-h1", "1f1b"), of=2):
        together("gpt", piped("gpt", planned("gpt", 2, 1, 4, schedule, tp=2)))


@story(4, long=True)
def replicas_in_two_parts() -> None:
    for zero in sampled((3, 1, 0), of=3):
        together("gpt", piped("gpt", planned("gpt", 1, 2, 2, tp=2, zero=zero)))


@story(4, long=True)
def tied_stages_in_two_parts() -> None:
    """GPT-2's embedding and head are two stages, and each has the same part of the vocabulary."""
    together("gpt2", piped("gpt2", planned("gpt2", 2, 1, 4, tp=2)))


@story(4, long=True)
def a_model_in_four_parts() -> None:
    """Llama's two heads of keys and values are not enough for four ranks."""
    together("llama", piped("llama", planned("llama", 1, 1, 2, tp=4)))
