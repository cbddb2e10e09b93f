"""Stories of losses beside one process: from parts of the vocabulary, of unequally many labels."""

from __future__ import annotations

import torch

from tests.support.long import LONG, sampled
from tests.support.memory_stories import measured_as_planned
from tests.support.pipes import ZOO, close, piped, planned, story, together, whole_loss


@story(2, long=True)
def parts_of_a_loss_in_a_pipeline() -> None:
    """Tied weights, then an untied head in halves of a backward; evaluation, with logits or not."""
    together("gpt2", piped("gpt2", planned("gpt2", 2, 1, 4, loss_parts=3)))
    plan = planned("llama", 2, 1, 4, "zb-h1", loss_parts=3)
    assert plan.loss_parts == 3
    pipe, batch = piped("llama", plan), ZOO["llama"].inputs(plan.batch.rows)
    together("llama", pipe)
    pipe, model = piped("llama", plan), ZOO["llama"].model().eval()
    with torch.no_grad():
        expected = whole_loss("llama", model, batch)
    close(pipe.evaluate(batch), expected)
    loss, found = pipe.evaluate(batch, outputs=True)
    close(loss, expected)
    close(found["logits"], model(batch["input_ids"]).logits, "logits")


@story(2, long=True)
def memory_of_a_loss_in_parts() -> None:
    for schedule, precision in sampled((("zb-h1", "bf16"), ("1f1b", "fp32")), of=2):
        measured_as_planned("llama", 4, schedule, precision, loss_parts=3)


@story(2)
def parts_of_a_loss_on_two_ranks() -> None:
    """Each rank has half of the vocabulary, tied or not, or a shard of every parameter."""
    for name in sampled(("gpt2", "llama"), of=2):
        plan = planned(name, 1, 1, 2, tp=2, loss_parts=3)
        head = {state.name: state.state for state in plan.states}
        assert head["transformer.wte.weight" if name == "gpt2" else "lm_head.weight"] == "S(0)"
        together(name, piped(name, plan))
    if LONG:
        together("llama", piped("llama", planned("llama", 1, 2, 2, zero=3, loss_parts=3)))


@story(2)
def labels_of_a_batch_weigh_alike() -> None:
    """Micro-batches have unequally many labels, one has none: as in one process, in one go."""
    for name, schedule in sampled((("gaps", "1f1b"), ("masked", "zb-h1")), of=2):
        plan = planned(name, 2, 1, 4, schedule)
        pipe, model = piped(name, plan), ZOO[name].model()
        batch = ZOO[name].inputs(plan.batch.rows)
        with torch.no_grad():
            expected = whole_loss(name, model, batch)
        close(pipe.evaluate(batch), expected)
        together(name, pipe)


@story(2, long=True)
def labels_on_replicas_and_shards_weigh_alike() -> None:
    """Of one micro-batch each; with gradients in shards; under a vocabulary in halves."""
    together("gaps", piped("gaps", planned("gaps", 1, 2, 1)))
    together("masked", piped("masked", planned("masked", 1, 2, 2, zero=1)))
    together("gaps", piped("gaps", planned("gaps", 1, 1, 2, tp=2, loss_parts=2)))
