"""Stories of steps by every schedule, however parameters are held, in every arithmetic."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe import Pipe, Plan, PlanError
from autopipe.emit.emit import emit
from autopipe.runtime.parameters import buckets
from autopipe.runtime.step.memory_meter import Meter
from tests.support import masters
from tests.support.long import LONG, sampled
from tests.support.models import VOCABULARY
from tests.support.pipes import (
    ZOO,
    Story,
    close,
    drawn,
    full,
    own,
    piped,
    planned,
    refused,
    rows_of,
    sgd,
    story,
    together,
    whole_loss,
    without_inductor,
)  # fmt: skip

SCHEDULES = ("naive", "gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-v")


def by(schedule: str, name: str, dp: int = 1, *, zero: int = 0, precision: str = "fp32") -> Plan:
    """Two ranks to a pipeline and four micro-batches; one of two plans, edited."""
    chunks = 2 if schedule in ("interleaved", "zb-v") else None
    plan = planned(name, 2, dp, 4, "interleaved" if chunks else "1f1b", chunks=chunks)
    depth = int(schedule == "eager-1f1b")
    return replace(
        plan,
        schedule=schedule,
        precision=precision,
        boundaries=tuple(replace(boundary, depth=depth) for boundary in plan.boundaries),
        stages=tuple(replace(stage, zero=zero) for stage in plan.stages),
    )


# Two processes: a pipeline of two ranks


def bits(pipe: Pipe, batch: Any) -> dict[str, Tensor]:
    """The loss and all gradients of the model, from whichever rank."""
    mine = {"loss": pipe.step(batch)}
    mine |= {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
    everyone: list[Any] = [None] * len(pipe.plan.mesh.places)
    dist.all_gather_object(everyone, mine)
    return {name: tensor for found in everyone for name, tensor in found.items()}


def files_run_as_planned(name: str, plan: Plan) -> None:
    """What `autopipe emit` writes of a plan gives its loss and gradients, to the bit."""
    case, folder = ZOO[name], [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    if folder[0]:
        emit(case.model(), plan, Path(folder[0]), loss=case.loss, source="net.py")
    dist.broadcast_object_list(folder)
    batch = case.inputs(plan.batch.rows)
    found, expected = (bits(piped(name, plan, **of), batch) for of in ({"emitted": folder[0]}, {}))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


@story(2)
def dropout_is_bitwise_the_same_for_every_schedule() -> None:
    """Its numbers are the micro-batch's, whichever rank draws them and when."""
    found: dict[str, dict[str, Tensor]] = {}
    for schedule in sampled(SCHEDULES, of=3):
        plan = by(schedule, "dropout")
        found[schedule] = bits(piped("dropout", plan), ZOO["dropout"].inputs(plan.batch.rows))
    expected = found["naive"]
    assert expected.keys() == {"loss", *(n for n, _ in ZOO["dropout"].model().named_parameters())}
    for schedule, tensors in found.items():
        assert tensors.keys() == expected.keys(), schedule
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected[name]), f"{schedule}: {name}"


@story(2)
def recomputation_changes_no_bit() -> None:
    """Blocks that run again draw the same masks; less is kept for them, and as much as planned."""
    plan = planned("dropout", 2, 1, 4, recompute="all")
    batch = ZOO["dropout"].inputs(plan.batch.rows)
    for schedule in sampled(("zb-h1", "1f1b"), of=2):
        whole = piped("dropout", by(schedule, "dropout"))
        again = piped("dropout", replace(plan, schedule=schedule))
        whole.meter, again.meter = Meter(), Meter()
        expected, found = bits(whole, batch), bits(again, batch)
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), f"{schedule}: {name}"
        stage = again.place.pp
        most, least = (pipe.measured()[stage].memory.activations for pipe in (whole, again))
        # In halves, what the last stage makes again in I it hands on to W: one micro-batch's all.
        assert least < most or (schedule, stage) == ("zb-h1", 1), schedule
        if schedule == plan.schedule:
            assert least == plan.stages[stage].predicted.memory.activations


@story(2, long=True)
def offloading_changes_no_bit() -> None:
    """What blocks keep comes back from the host's memory as it was, random masks too."""
    plan = planned("dropout", 2, 1, 4, offload="all")
    assert all(stage.offload for stage in plan.stages)
    batch = ZOO["dropout"].inputs(plan.batch.rows)
    expected = bits(piped("dropout", by("1f1b", "dropout")), batch)
    pipe = piped("dropout", plan)
    pipe.meter = Meter()
    found = bits(pipe, batch)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    stage = pipe.place.pp
    predicted = plan.stages[stage].predicted.memory.activations
    assert pipe.measured()[stage].memory.activations == predicted


@story(2)
def compiled_stages_compute_the_same() -> None:
    """The backward in one piece and, in the long run, in halves; there by inductor."""
    with nullcontext() if LONG else without_inductor():
        for schedule in sampled(("1f1b", "zb-h1"), of=2):
            plan = replace(by(schedule, "keywords"), compiled=True)
            together("keywords", piped("keywords", plan))


@story(2)
def what_does_not_go_together() -> None:
    """Found by every rank before any of them waits for another."""
    with refused(PlanError, "zb-h1 and zero=3 do not go together"):
        piped("keywords", by("zb-h1", "keywords", zero=3))
    plan = by("zb-h1", "gpt")
    first, *others = plan.stages
    away = replace(plan, stages=(replace(first, offload=("blocks.0",)), *others))
    with refused(PlanError, "plan.stages[0].offload: 'blocks.0' is to offload what it keeps, and"):
        piped("gpt", away)


# Four processes: pipelines of two ranks, each rank on two data-parallel coordinates


def beside_one_process(schedule: str, zero: int) -> Story:
    def told() -> None:
        together("gpt", piped("gpt", by(schedule, "gpt", dp=2, zero=zero)))

    told.__doc__ = "Losses, gradients, norms and weights of three steps."
    return story(4, f"{schedule} with ZeRO {zero}", long=(schedule, zero) not in ALWAYS)(told)


ALWAYS = (("1f1b", 1), ("eager-1f1b", 0), ("interleaved", 3))
"""The others of the stories below are told in the long run."""

for _schedule in ("1f1b", "eager-1f1b", "interleaved"):
    for _zero in (0, 1, 3):
        beside_one_process(_schedule, _zero)


@story(4)
def zero_bubble_with_data_parallelism() -> None:
    """torch's zero-bubble schedules drop the all-reduce of DistributedDataParallel without a word:
    gradients of the weights never pass the hooks that start it, and replicas drift apart. Here they
    pass them, and replicas have the same gradients to the bit."""
    ways = (("zb-h1", 0), ("zb-h1", 1), ("zb-v", 1), ("zb-v", 0))
    for schedule, zero in sampled(ways, of=2):
        pipe = piped("gpt", by(schedule, "gpt", dp=2, zero=zero))
        together("gpt", pipe)
        if zero == 0:
            replicas: list[Any] = [None] * 4
            mine = {n: p.grad for n, p in pipe.named_parameters()}
            dist.all_gather_object(replicas, (pipe.place.pp, mine))
            ((_, first), (_, second)) = (r for r in replicas if r[0] == pipe.place.pp)
            assert first.keys() == second.keys() and all(
                torch.equal(first[name], second[name]) for name in first
            ), schedule


@story(4)
def tied_weights_in_shards() -> None:
    """GPT-2's embedding is its head: under ZeRO-1 its rows are dealt out over all four ranks, under
    ZeRO-2 and 3 over the replicas of each of its two stages."""
    for zero in sampled((1, 3, 2), of=3):
        pipe = piped("gpt2", by("1f1b", "gpt2", dp=2, zero=zero))
        together("gpt2", pipe)
        rows = len(dict(pipe.named_parameters())["transformer.wte.weight"])
        assert rows == VOCABULARY // (4 if zero == 1 else 2)


@story(4, long=True)
def a_sum_and_a_count_by_every_schedule() -> None:
    """The true count is known only after the step; gradients in small sums as well."""
    whole, buckets.BUCKET_BYTES = buckets.BUCKET_BYTES, 1000
    for schedule, zero in sampled((("zb-v", 1), ("1f1b", 0), ("interleaved", 3)), of=3):
        together("counted", piped("counted", by(schedule, "counted", dp=2, zero=zero)), steps=2)
    buckets.BUCKET_BYTES = whole


@story(4, long=True)
def recomputed_blocks_in_shards() -> None:
    plan = planned("gpt", 2, 2, 4, recompute="all", zero=3)
    together("gpt", piped("gpt", plan), steps=2)


@story(2, long=True)
def what_runs_again_or_is_compiled_in_shards() -> None:
    """Parameters are gathered by the graphs of a stage, whoever runs them."""
    again = planned("gpt", 1, 2, 2, zero=3, recompute="activations")
    assert again.stages[0].ops_again
    away = planned("gpt", 1, 2, 2, zero=3, offload="all", compile=True)
    with without_inductor():
        for plan in (again, away, planned("gpt", 1, 2, 2, zero=3, compile=True)):
            together("gpt", piped("gpt", plan), steps=2)


@story(2)
def what_autograd_runs_in_shards() -> None:
    """An LSTM has no joint graph: all of its stage is whole around each call."""
    together("lstm", piped("lstm", planned("lstm", 1, 2, 2, zero=3)), steps=2)


@story(4, long=True)
def one_process_under_autocast() -> None:
    """bf16: what one process computes in, up to roundings of sums that are cut elsewhere."""
    for schedule, zero in sampled((("interleaved", 3), ("zb-h1", 1), ("1f1b", 0)), of=3):
        plan = by(schedule, "gpt", dp=2, zero=zero, precision="bf16-autocast")
        pipe, model = piped("gpt", plan), ZOO["gpt"].model()
        ours, theirs = sgd(pipe.parameters()), sgd(model.parameters())
        for number in range(3):
            batch = drawn("gpt", plan.batch.rows, number)
            with torch.autocast("cpu", torch.bfloat16):
                expected = whole_loss("gpt", model, batch)
            theirs.zero_grad()
            expected.backward()
            said = f"{schedule}, step {number}: "
            close(pipe.step(batch), expected, said + "loss", 2e-2)
            for name, parameter in pipe.named_parameters():
                gradient = model.get_parameter(name).grad
                assert parameter.grad is not None and gradient is not None
                assert parameter.dtype == parameter.grad.dtype == torch.float32
                close(parameter.grad, own(pipe, name, gradient), said + name, 2e-2)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            close(pipe.clip_grad_norm_(0.5), norm, said + "norm", 2e-2)
            ours.step()
            theirs.step()
        with torch.no_grad():
            exact = whole_loss("gpt", ZOO["gpt"].model(), drawn("gpt", plan.batch.rows, 0))
        assert pipe.loss_scale is None and not torch.equal(expected, exact)


@story(4)
def sixteen_bits_with_masters() -> None:
    """bf16: plain PyTorch's gradients of each micro-batch, added in fp32; weights stay in fp32."""
    for schedule, zero in sampled((("zb-h1", 1), ("interleaved", 3), ("1f1b", 0)), of=3):
        plan = planned("gpt", 2, 2, 4, schedule, zero=zero, precision="bf16")
        pipe, model = piped("gpt", plan), ZOO["gpt"].model()
        ours, theirs = sgd(pipe.parameters()), sgd(model.parameters())
        for number in range(3):
            rows = plan.batch.rows
            parts = [rows_of(drawn("gpt", rows, number), n, n + 2) for n in range(0, rows, 2)]
            expected = masters.step(ZOO["gpt"], model, torch.bfloat16, parts)
            said = f"{schedule}, step {number}: "
            close(pipe.step(drawn("gpt", rows, number)), sum(expected.losses) / len(parts), said)
            for name, parameter in pipe.named_parameters():
                assert parameter.grad is not None
                assert parameter.dtype == parameter.grad.dtype == torch.float32
                close(parameter.grad, own(pipe, name, expected.gradients[name]), said + name)
            for name, weight in model.named_parameters():
                weight.grad = expected.gradients[name]
            ours.step()
            theirs.step()


@story(4, long=True)
def dealing_out_masters_changes_no_bit() -> None:
    """Whole, or of each replica its rows: the same losses, and the same fp32 masters in the state
    dict; also of a tied weight with rows on both its stages, and beside batch norms."""
    cases = (("gpt", "1f1b"), ("gpt2", "1f1b"), ("gpt", "zb-h1"), ("resnet", "1f1b"))
    for name, schedule in sampled(cases, of=3):
        found = []
        for zero in (0, 1):
            how: dict[str, Any] = {"zero": zero, "precision": "bf16", "planner": "uniform"}
            pipe = piped(name, planned(name, 2, 2, 2, schedule, **how))
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
            losses = []
            for number in range(2):
                losses.append(pipe.step(drawn(name, pipe.plan.batch.rows, number)))
                optimizer.step()
            found.append((losses, pipe.state_dict()))
        (whole, weights), (losses, dealt) = found
        assert losses == whole and dealt.keys() == weights.keys(), f"{name}, {schedule}"
        for key, tensor in dealt.items():
            assert tensor.dtype == weights[key].dtype and torch.equal(tensor, weights[key]), key


@story(4)
def an_overflow_is_passed_over() -> None:
    """fp16: no rank has a gradient after it, so that optimizers do nothing; the scale is halved,
    and training goes on beside a process in fp32."""
    for schedule, zero in sampled((("zb-h1", 1), ("1f1b", 0), ("interleaved", 3)), of=3):
        plan = by(schedule, "gpt", dp=2, zero=zero, precision="fp16-autocast")
        pipe, model = piped("gpt", plan), ZOO["gpt"].model()
        optimizer = sgd(pipe.parameters())
        assert pipe.loss_scale is not None
        batch = ZOO["gpt"].inputs(plan.batch.rows)
        before = {name: p.detach().clone() for name, p in pipe.named_parameters()}
        for scale in (2.0**60, 2.0**59):
            pipe.loss_scale.scale = scale
            assert pipe.step(batch).isfinite()
            assert all(parameter.grad is None for parameter in pipe.parameters())
            assert pipe.loss_scale.scale == scale / 2 and pipe.clip_grad_norm_(1.0).isinf()
            optimizer.step()
        assert all(torch.equal(p, before[name]) for name, p in pipe.named_parameters())
        pipe.loss_scale.scale = 2.0**12
        expected = whole_loss("gpt", model, batch)
        expected.backward()
        close(pipe.step(batch), expected, "loss", 5e-3)
        for name, parameter in pipe.named_parameters():
            gradient = model.get_parameter(name).grad
            assert parameter.grad is not None and gradient is not None
            close(parameter.grad, own(pipe, name, gradient), name, 2e-2)
        norm = nn.utils.clip_grad_norm_(model.parameters(), torch.inf)
        close(pipe.clip_grad_norm_(torch.inf), norm, "norm", 2e-2)
        optimizer.step()
        assert pipe.loss_scale.scale == 2.0**12 and pipe.loss_scale.good_steps == 1
        assert pipe.step(batch) < expected


@story(4)
def an_overflow_on_one_rank_is_everyones() -> None:
    """Rank 3 alone finds a gradient that is no number; all ranks pass over the step."""
    pipe = piped("gpt", by("1f1b", "gpt", dp=2, precision="fp16-autocast"))
    batch = ZOO["gpt"].inputs(pipe.plan.batch.rows)
    assert pipe.loss_scale is not None
    scale = pipe.loss_scale.scale
    infinite = None
    if pipe.place.rank == 3:
        infinite = next(pipe.parameters()).register_hook(lambda gradient: gradient * torch.inf)
    pipe.step(batch)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    assert pipe.loss_scale.scale == scale / 2
    if infinite is not None:
        infinite.remove()
    pipe.step(batch)
    assert all(parameter.grad is not None for parameter in pipe.parameters())
    assert pipe.loss_scale.scale == scale / 2


@story(4, long=True)
def evaluation_in_shards() -> None:
    """Of a fresh pipe and of a trained one: what an optimizer has changed elsewhere is fetched."""
    for zero in (1, 3):
        pipe = piped("keywords", by("1f1b", "keywords", dp=2, zero=zero))
        batch = ZOO["keywords"].inputs(8)
        optimizer = sgd(pipe.parameters())
        for _ in range(2):
            found = pipe.evaluate(batch)
            model = ZOO["keywords"].model().eval()
            everyone: list[Any] = [None] * 4
            dist.all_gather_object(everyone, {n: full(t) for n, t in pipe.state_dict().items()})
            model.load_state_dict({n: t for state in everyone for n, t in state.items()})
            with torch.no_grad():
                close(found, whole_loss("keywords", model, batch))
            pipe.step(ZOO["keywords"].inputs(pipe.plan.batch.rows))
            optimizer.step()
