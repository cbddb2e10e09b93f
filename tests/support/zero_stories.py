"""Stories of ZeRO beside tensor parallelism: replicas shard a rank's part of each tensor.

`zero1_stories` and the like tell of the sums themselves; here whole plans differ in their ZeRO
stage alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

import torch
from torch import Tensor

from autopipe import Plan
from autopipe.planfile.parts import Memory
from autopipe.runtime.step.memory_meter import Meter
from autopipe.sharding.local_graph import replicated
from autopipe.sharding.plan_io import read_back
from tests.support.inprocess import close_together, machine
from tests.support.long import LONG, sampled
from tests.support.pipes import ZOO, close, drawn, full, piped, planned, sgd, story


def under(plan: Plan, zero: int) -> Plan:
    """The same plan, cut and sharded as it is, under a ZeRO stage."""
    return replace(plan, stages=tuple(replace(stage, zero=zero) for stage in plan.stages))


def two_steps(name: str, plan: Plan) -> tuple[list[Tensor], Mapping[str, Tensor]]:
    """The losses of two steps, and all weights after them: of SGD, which is linear in gradients."""
    pipe = piped(name, plan)
    optimizer = sgd(pipe.parameters())
    losses = []
    for number in range(2):
        losses.append(pipe.step(drawn(name, plan.batch.rows, number)))
        optimizer.step()
    return losses, {key: full(tensor) for key, tensor in pipe.state_dict().items()}


def same_as_whole(name: str, plan: Plan, *zeros: int) -> None:
    """Both steps of a plan under each of these ZeRO stages beside the same one without ZeRO.

    Where a step is one micro-batch over two replicas, both add up the same two summands: bits are
    equal. Gradients that tensor-parallel ranks have parts of, and those of tied stages, are sums of
    more summands, in another order.
    """
    losses, weights = two_steps(name, under(plan, 0))
    sharding = read_back(plan)
    stages = [{*stage.parameters} for stage in plan.stages]
    exact = plan.batch.micro_batches == 1 and not replicated(sharding) & weights.keys()
    exact = exact and sum(map(len, stages)) == len(set().union(*stages))
    for zero in zeros:
        again, dealt = two_steps(name, under(plan, zero))
        said = f"{name}, ZeRO-{zero}: "
        close(torch.stack(again), torch.stack(losses), said + "losses", 0.0 if exact else 1e-5)
        assert dealt.keys() == weights.keys()
        for key, tensor in dealt.items():
            close(tensor, weights[key], said + key, 0.0 if exact else 1e-5)


@story(4, long=True)
def shards_of_parts_change_no_bit() -> None:
    """Each tensor-parallel rank's own part of a matrix, dealt out to its replicas."""
    for precision in sampled(("fp32", "bf16"), of=2):
        same_as_whole("gpt", planned("gpt", 1, 2, 1, tp=2, precision=precision), 2, 3)


@story(4, long=True)
def shards_of_partial_gradients() -> None:
    """Tokens are sharded between the layers, so that a norm's gradient is in parts on
    tensor-parallel ranks; replicas deal it out, and what they have is then summed."""
    for name, m in sampled((("gpt", 2), ("gpt2", 1), ("llama", 2)), of=3):
        plan = planned(name, 1, 2, m, on=close_together, tp=2)
        assert replicated(read_back(plan))
        same_as_whole(name, plan, *sampled((3, 2), of=2))


@story(8, long=True)
def shards_of_parts_of_stages() -> None:
    """tp=2 x dp=2 x pp=2; of GPT-2 the embedding is also the head, on the other stage."""
    for name, m in (("gpt", 1), ("gpt", 4), ("gpt2", 2)):
        for on in (machine, close_together):
            same_as_whole(name, planned(name, 2, 2, m, tp=2, on=on), 2, 3)


@story(4)
def gradients_of_stages_in_shards() -> None:
    """ZeRO-2 in a pipeline: a weight that two stages share, several stages on a rank, backwards in
    halves, compiled stages."""
    ways = (("gpt2", "1f1b"), ("gpt", "interleaved"), ("gpt", "zb-h1"), ("counted", "zb-v"))
    for name, schedule in sampled(ways, of=4):
        for precision in sampled(("fp32", "bf16"), of=2):
            chunks = 2 if schedule == "interleaved" else None
            same_as_whole(
                name, planned(name, 2, 2, 2, schedule, chunks=chunks, precision=precision), 2
            )
    if LONG:
        same_as_whole("gpt", planned("gpt", 2, 2, 1), 2)


@story(4, long=True)
def memory_of_shards_of_parts() -> None:
    """To the byte, but for AdamW's counters and for what is there only while it is gathered."""
    cases = (("gpt", "fp32", 3), ("llama", "fp32", 2), ("gpt2", "bf16", 2), ("llama", "bf16", 3))
    for name, precision, zero in sampled(cases, of=4):
        plan = planned(name, 1, 2, 2, tp=2, zero=zero, on=close_together, precision=precision)
        pipe = piped(name, plan)
        pipe.meter = Meter()
        optimizer = torch.optim.AdamW(pipe.parameters())
        pipe.step(ZOO[name].inputs(plan.batch.rows))
        optimizer.step()
        ((stage, found),) = pipe.measured(optimizer).items()
        predicted = plan.stages[stage].predicted.memory
        counters = 4 * sum(shard.numel() > 0 for shard in pipe.parameters())
        for part in {f.name for f in fields(Memory)} - {"passing", "copies" if zero == 3 else ""}:
            mine, asked = (getattr(m, part) for m in (found.memory, predicted))
            asked += counters if part == "optimizer" else 0
            assert mine == asked, f"{name}, {precision}, {part}: {mine}, planned {asked}"
