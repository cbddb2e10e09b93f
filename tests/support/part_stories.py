"""Stories of tensors that go from stage to stage in parts: to the bit what whole ones give."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from autopipe import Pipe, Plan
from autopipe.planfile import predict
from autopipe.planfile.parts import Transfer
from autopipe.runtime.step.stage import StageRun
from autopipe.schedules.instructions import Channel
from tests.support.inprocess import close_together
from tests.support.long import sampled
from tests.support.memory_stories import measured_as_planned
from tests.support.models import LENGTH, VOCABULARY, WIDTH, Block
from tests.support.pipes import ZOO, piped, planned, story, together
from tests.support.step_stories import bits, files_run_as_planned
from tests.support.zoo import Case, entropy, text


class Skipping(nn.Module):
    """tokens [b, s] -> logits [b, VOCABULARY, s]; what the first block makes is read again by the
    last one, and so is which of it was above 0, a tensor of booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.blocks[0](self.embedding(tokens) + self.position)
        above = first > 0
        for block in self.blocks[1:]:
            x = block(x)
        return self.head((x + first) * above).transpose(1, 2)


ZOO["skipping"] = Case(Skipping, text, entropy)


def in_parts(name: str, pp: int, schedule: str, **more: Any) -> Plan:
    """A plan with two tensor-parallel ranks that sends something in parts."""
    chunks = 2 if schedule in ("interleaved", "zb-v") else None
    plan = planned(
        name, pp, 1, 4, schedule, tp=2, chunks=chunks, transfers="parts",
        sequence_parallel=False, **more,
    )  # fmt: skip
    assert any(sent.part_of for stage in plan.stages for sent in stage.sends)
    return plan


def whole(plan: Plan) -> Plan:
    """The same plan, which sends everything whole."""

    def sent(transfer: Transfer) -> Transfer:
        part = transfer.part_of
        if part is None:
            return transfer
        shape = [*transfer.shape]
        shape[part.dim] = int(shape[part.dim]) * plan.mesh.tp
        return replace(transfer, name=part.tensor, shape=tuple(shape), part_of=None)

    return replace(
        plan,
        stages=tuple(
            replace(
                stage,
                receives=tuple(map(sent, stage.receives)),
                sends=tuple(map(sent, stage.sends)),
            )
            for stage in plan.stages
        ),
    )


def same_bits(name: str, plan: Plan) -> None:
    """Loss and all gradients, and the loss in evaluation, in parts and whole."""
    batch = ZOO[name].inputs(plan.batch.rows)
    one, other = piped(name, plan), piped(name, whole(plan))
    found, expected = bits(one, batch), bits(other, batch)
    assert found.keys() == expected.keys() and len(found) > 10
    for key, tensor in expected.items():
        said = f"{name}, pp={plan.mesh.pp}, {plan.schedule}, {plan.precision}: {key}"
        assert torch.equal(found[key], tensor), said
    for rows in (plan.batch.rows, 3):
        again = ZOO[name].inputs(rows)
        assert torch.equal(one.evaluate(again), other.evaluate(again)), f"{rows} rows"


def sent_in_a_step(pipe: Pipe, batch: Any) -> Counter[Channel]:
    """The bytes that this rank hands to its transport, by channel."""
    counted: Counter[Channel] = Counter()
    send = StageRun._send

    def counting(self: StageRun, channel: Channel, k: int, step: Any) -> None:
        send(self, channel, k, step)
        counted[channel] += sum(tensor.nbytes for tensor, _ in self._sending[channel, k])

    with patch.object(StageRun, "_send", counting):
        pipe.step(batch)
    return counted


# Four processes


@story(4)
def parts_are_to_the_bit_the_whole() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("1f1b", {}),
        ("zb-h1", {"precision": "bf16"}),
        ("gpipe", {"recompute": "all"}),
        ("interleaved", {}),
        ("zb-v", {"precision": "bf16-autocast"}),
        ("eager-1f1b", {"zero": 1}),
    ]
    for schedule, more in sampled(cases, of=6):
        same_bits("skipping", in_parts("skipping", 2, schedule, **more))


@story(4, long=True)
def files_send_parts_too() -> None:
    """What `autopipe emit` writes of such a plan runs as the plan does."""
    files_run_as_planned("skipping", in_parts("skipping", 2, "1f1b"))


@story(4, long=True)
def parts_of_a_tensor_whose_gradient_is_a_partial_sum() -> None:
    """It is reduce-scattered, and goes back in parts: the order of sums is another."""
    together("llama", piped("llama", in_parts("llama", 2, "1f1b", on=close_together)))


@story(4, long=True)
def compiled_parts_are_to_the_bit_the_whole() -> None:
    """By inductor, as the sums of column-parallel layers do not survive `aot_eager`."""
    same_bits("skipping", in_parts("skipping", 2, "1f1b", compile=True))


@story(4)
def bytes_sent_in_parts_are_those_planned() -> None:
    """There and back; half of what goes in parts is on its way."""
    plan = in_parts("skipping", 2, "1f1b")
    for one in (plan, whole(plan)):
        pipe, batch = piped("skipping", one), ZOO["skipping"].inputs(plan.batch.rows)
        own = {stage.index for stage in pipe.stages}
        assert sent_in_a_step(pipe, batch) == {
            channel: size * plan.batch.micro_batches
            for channel, size in predict.crossing_bytes(one).items()
            if channel.source in own
        }


@story(4)
def memory_of_parts() -> None:
    """What is received is half as much, what is gathered is whole: to the byte, as planned."""
    for schedule, precision in sampled((("1f1b", "fp32"), ("zb-h1", "bf16")), of=2):
        measured_as_planned("skipping", 4, schedule, precision, tp=2, transfers="parts")


# Eight processes


@story(8, long=True)
def parts_that_skip_stages() -> None:
    """Both later stages that read a tensor receive it in parts."""
    for schedule in sampled(("1f1b", "zb-h1"), of=2):
        plan = in_parts("skipping", 4, schedule)
        skipped = [s for n, stage in enumerate(plan.stages) for s in stage.sends if s.peer > n + 1]
        assert any(sent.part_of for sent in skipped)
        same_bits("skipping", plan)
