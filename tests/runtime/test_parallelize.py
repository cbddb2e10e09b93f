"""`parallelize` checks plan and processes at the door; what it makes is told in `pipe_stories`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import autopipe
from autopipe import AutopipeError, CaptureError, LaunchError, ModelError, Plan, PlanError
from tests.support import own_group_worker, two_pipes_worker, warm
from tests.support.inprocess import machine
from tests.support.pipes import ZOO, piped, planned, traced_once

CASE = ZOO["gpt"]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned("gpt", 1, 1, 2)


def test_another_number_of_processes() -> None:
    with pytest.raises(LaunchError) as refused:
        piped("gpt", planned("gpt", 2, 1, 2))
    assert refused.value.message == (
        "the plan is for 2 processes, found 1 (this is rank 0, on node 0)"
    )
    assert "torchrun --nproc-per-node 2" in str(refused.value.hint)


def test_a_script_may_have_opened_a_group_for_gpus_alone(tmp_path: Path) -> None:
    """Bug: `No backend type associated with device type cpu` after `init_process_group("nccl")`."""
    worker = own_group_worker
    autopipe.plan(
        worker.model, worker.inputs, loss=worker.loss, cluster=machine(4), batch_size=8,
        pp=2, dp=2, micro_batches=2,
    ).save(tmp_path / "plan.json")  # fmt: skip
    assert warm.spawn(4, [worker.__file__, str(tmp_path)]) == 0
    assert len([*tmp_path.glob("trained.*")]) == 4


def test_a_script_may_have_pipes_of_unlike_tensor_parallel_degrees(tmp_path: Path) -> None:
    """Bug: the first pipe summed over the ranks of the second, to another loss without a word."""
    worker = two_pipes_worker
    for name, tp in (("halves", 2), ("quarters", 4)):
        autopipe.plan(
            worker.model, worker.inputs, loss=worker.loss, cluster=machine(4), batch_size=8,
            pp=1, tp=tp, dp=4 // tp, micro_batches=2,
        ).save(tmp_path / f"{name}.json")  # fmt: skip
    assert warm.spawn(4, [worker.__file__, str(tmp_path)]) == 0
    assert len([*tmp_path.glob("trained.*")]) == 4


def test_a_gpu_that_is_not_there(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    place = replace(plan.mesh.places[0], device="cuda:0")
    with pytest.raises(LaunchError, match="binds rank 0 to cuda:0, and this machine has no GPU"):
        piped("gpt", replace(plan, mesh=replace(plan.mesh, places=(place,))))


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("other", ["dropout", "counted"])
def test_a_plan_of_another_model(plan: Plan, other: str) -> None:
    """The first line that differs is named; with the plan's model it would be another."""
    case = ZOO[other]
    with pytest.raises(PlanError, match="plan.fingerprint: the plan was made for another") as said:
        autopipe.parallelize(case.model(), plan, inputs=case.inputs, loss=case.loss)
    assert "torch" in str(said.value)
    if other == "dropout":  # what differs first in its graph is a node that GPT has not
        assert "First difference: dropout/dropout/0" in str(said.value)


def test_inputs_of_another_model(plan: Plan) -> None:
    with pytest.raises(
        ModelError, match=r"the entries \['input_ids', 'labels'\], the plan was made"
    ):
        autopipe.parallelize(ZOO["gpt2"].model(), plan, inputs=ZOO["gpt2"].inputs, loss=CASE.loss)


def test_without_the_loss_of_the_plan(plan: Plan) -> None:
    with pytest.raises(PlanError, match="plan.loss: the plan was made with a loss function, and"):
        autopipe.parallelize(CASE.model, plan)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda p: replace(p, stages=()), "plan.stages: expected equally many on each of 1 ranks"),
        (
            lambda p: replace(p, stages=(replace(p.stages[0], first="nowhere"),)),
            "plan.stages[0].first: the model has no node 'nowhere'",
        ),
        (
            lambda p: replace(p, stages=(replace(p.stages[0], last=p.stages[0].first),)),
            "plan.stages[0].last: the last stage ends with",
        ),
        (lambda p: replace(p, schedule="2f2b"), "there is no schedule '2f2b'"),
        (lambda p: replace(p, precision="fp8"), "plan.precision: 'fp8' was asked for"),
    ],
)
def test_an_edited_plan(plan: Plan, edit: Callable[[Plan], Plan], words: str) -> None:
    with pytest.raises(AutopipeError) as refused:
        piped("gpt", edit(plan))
    assert words in str(refused.value)


def test_offload_of_a_plan_without_shards(plan: Plan) -> None:
    """Bug: it did nothing, without a word, here and under `run --offload`."""
    with pytest.raises(PlanError, match=r"ZeRO-3 .* the plan is of ZeRO-0\nhint: plan with --zero"):
        piped("gpt", plan, offload=True)


def test_a_plan_from_disk_runs_as_well(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    batch = CASE.inputs(4)
    again = piped("gpt", Plan.load(tmp_path / "plan.json"))
    assert torch.equal(piped("gpt", plan).step(batch), again.step(batch))


def test_a_model_or_its_constructor(plan: Plan) -> None:
    """The zoo seeds by itself, so both have the same weights; the model's own are taken."""
    model = CASE.model()
    with traced_once("gpt"):
        given = autopipe.parallelize(model, plan, loss=CASE.loss)
        built = autopipe.parallelize(CASE.model, plan, loss=CASE.loss)
    for (name, one), (_, other) in zip(
        given.named_parameters(), built.named_parameters(), strict=True
    ):
        assert one is model.get_parameter(name)
        assert torch.equal(one, other)


def test_weights(plan: Plan, tmp_path: Path) -> None:
    stored = {name: torch.full_like(t, 0.5) for name, t in CASE.model().state_dict().items()}
    save_file(stored, tmp_path / "model.safetensors")
    with traced_once("gpt"):
        pipe = autopipe.parallelize(
            CASE.build, plan, loss=CASE.loss, weights=tmp_path / "model.safetensors"
        )
    assert all((p == 0.5).all() for p in pipe.parameters())


def test_the_seed_is_of_weights_and_of_dropout() -> None:
    plan, case = planned("dropout", 1, 1, 2), ZOO["dropout"]

    def loss(build: Callable[[], torch.nn.Module], seed: int) -> float:
        pipe = autopipe.parallelize(build, plan, loss=case.loss, seed=seed)
        return pipe.step(case.inputs(4)).item()

    with traced_once("dropout"):
        assert loss(case.build, 1) == loss(case.build, 1)
        assert loss(case.model, 1) != loss(case.model, 2)  # the same weights: other masks


def test_every_step_drops_something_else() -> None:
    plan, case = planned("dropout", 1, 1, 2), ZOO["dropout"]
    pipe = piped("dropout", plan)
    assert pipe.step(case.inputs(4)) != pipe.step(case.inputs(4))


@pytest.mark.parametrize(
    "inputs",
    [
        pytest.param(None, marks=pytest.mark.long),  # as nearly all other tests do it
        pytest.param(CASE.inputs, marks=pytest.mark.long),
        CASE.inputs(1),
        pytest.param(CASE.inputs(8), marks=pytest.mark.long),
    ],
)
def test_the_example_batch(plan: Plan, inputs: object) -> None:
    """None: one made from the plan; a function; a batch of any number of rows."""
    pipe = autopipe.parallelize(CASE.model(), plan, inputs=inputs, loss=CASE.loss)
    assert pipe.step(CASE.inputs(4)).isfinite()


def test_a_model_that_cannot_be_captured(plan: Plan) -> None:
    class Listing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = CASE.model()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.inner(tokens[tokens > 3][None])  # as many as happen to be

    with pytest.raises(CaptureError, match=r"\.py:\d+: a size here depends on the values"):
        autopipe.parallelize(Listing(), plan, inputs=CASE.inputs, loss=CASE.loss)
