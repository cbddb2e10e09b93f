"""`plan`: what a user constrains, what is chosen without constraints, and what is refused."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopipe
from autopipe import AutopipeError, InfeasibleError, ModelError, Plan
from autopipe.cluster.cluster import Cluster, Device, Group, Link, NodeGroup
from autopipe.cluster.measured import Need
from autopipe.cluster.spec import LocalSpec
from autopipe.planfile.parts import Prediction
from autopipe.planfile.predict import with_prediction
from autopipe.planners.costs.profile import Costing, Profiled
from autopipe.planners.driver import arguments as asked
from autopipe.planners.driver import refine
from autopipe.planners.driver.candidate import Candidate
from autopipe.planners.search.best import Answer
from autopipe.tracing.source import bare, trace_source
from tests.support.gpt_plans import CASE, NEAR, free, nodes_of, planned
from tests.support.inprocess import machine

pytestmark = pytest.mark.usefixtures("traces_remembered")


def rows_of_12(rows: int) -> dict[str, torch.Tensor]:
    return {"input": torch.ones(rows, 12)}


SMALL: dict[str, Any] = {
    "model": lambda: nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 8)),
    "inputs": rows_of_12,
    "loss": lambda outputs, batch: outputs.square().mean(),
}


@pytest.mark.parametrize("model", [SMALL, pytest.param({}, marks=pytest.mark.long)])
def test_the_same_problem_is_the_same_bytes(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced anew each time, too."""
    monkeypatch.setattr("autopipe.planners.driver.checked_trace.trace_source", trace_source)
    monkeypatch.setattr("autopipe.planners.driver.make_plan.bare", bare)
    for name in ("one", "two"):
        free(**model).save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert Plan.load(tmp_path / "one").planner.bound_seconds > 0


@pytest.mark.long
def test_a_pair_is_as_slow_as_the_device_that_is_slower_in_this_precision() -> None:
    """One of them is quicker in bf16 alone; a quicker partner in fp32 is no help to it."""
    slow = Device("slow", 2**30, {"fp32": 1e9, "bf16": 1e12}, 1e10, 1e-6, "made up for tests")
    quick = replace(slow, kind="quick", flops={"fp32": 1e10, "bf16": 1e11})

    def step(*devices: Device) -> float:
        node = NodeGroup(1, tuple(Group(1, device) for device in devices))
        cluster = Cluster("two", (node,), Link(1e-6, 1e9), Link(1e-6, 1e9))
        found = planned(cluster=cluster, dp=2, micro_batches=1, precision="fp32")
        return found.prediction.step_seconds

    assert step(slow, quick) == pytest.approx(step(slow, slow))
    assert step(quick, quick) < step(slow, quick) / 2


@pytest.mark.long
def test_the_weights_are_never_touched() -> None:
    """A model that is given keeps them; a constructor's are gone as soon as they are made."""
    model = CASE.model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert planned(model=model, pp=2) == planned(pp=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training and not any(p.grad is not None for p in model.parameters())


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize(
    ("pp", "dp", "micro_batches"), [(1, 1, 1), (1, 2, 4), (2, 1, 8), (3, 1, 2), (3, 2, 4)]
)
def test_constraints_are_met(pp: int, dp: int, micro_batches: int) -> None:
    plan = planned(cluster=machine(6), pp=pp, dp=dp, micro_batches=micro_batches)
    assert (plan.mesh.pp, plan.mesh.dp, plan.batch.micro_batches) == (pp, dp, micro_batches)
    assert [place.rank for place in plan.mesh.places] == list(range(pp * dp))
    assert plan.batch.rows == 8
    assert sum(len(set(stage.parameters)) for stage in plan.stages) == 53


@pytest.mark.parametrize(
    ("schedule", "planner"), [("1f1b", "dynamic"), ("gpipe", "exhaustive"), ("1f1b", "uniform")]
)
def test_schedules_and_planners(schedule: str, planner: str) -> None:
    found = planned(pp=2, schedule=schedule, planner=planner)
    assert (found.schedule, found.planner.name) == (schedule, planner)


def test_stages_join() -> None:
    """What a stage sends is what another one receives; every node stands once."""
    plan = planned(cluster=machine(3), pp=3)
    sent = {(t.name, s, t.peer) for s, stage in enumerate(plan.stages) for t in stage.sends}
    taken = {(t.name, t.peer, s) for s, stage in enumerate(plan.stages) for t in stage.receives}
    assert sent == taken and sent


class Reversed(nn.Sequential):
    """Three layers, before which only the batch is computed with."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = super().forward(x.flip(1).cumsum(1))
        return made


def test_a_stage_may_have_no_node() -> None:
    """What is made of the batch alone is made where it is read."""
    plan = autopipe.plan(
        Reversed(*(nn.Linear(8, 8) for _ in range(3))),
        lambda rows: {"x": torch.ones(rows, 8)},
        loss=lambda outputs, batch: outputs.square().mean(),
        cluster=machine(4),
        pp=4,
    )
    assert [stage.nodes for stage in plan.stages] == [0, 3, 1, 3]
    assert plan.stages[0].predicted.memory.peak == 0


@pytest.mark.parametrize("memory", [pytest.param(30_000, marks=pytest.mark.long), "30 KB"])
def test_too_little_memory(memory: int | str) -> None:
    """The nearest plan, its stage, the bytes it needs and lacks, and what would help."""
    with pytest.raises(InfeasibleError) as refused:
        planned(memory=memory, tp=1)
    said = refused.value
    assert said.message.startswith("no plan fits 29.3 KiB a device: nearest is pp=2 dp=1 micro_")
    assert re.search(r"whose stage \d needs [\d.]+ KiB, [\d.]+ (KiB|bytes) too many", said.message)
    assert said.hint


def test_who_adds_the_shortfall_gets_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once by the estimate, or at the second try by the walk through the program; here by the
    walk, for the estimate is made to leave something out."""

    profiled = Costing.profiled

    def without_largest(self: Costing, *, check: bool = True) -> Profiled:
        found = profiled(self, check=check)
        return found._replace(problem=replace(found.problem, largest=()))

    monkeypatch.setattr(Costing, "profiled", without_largest)
    memory, tries = 30_000, 0
    while True:
        try:
            plan = planned(memory=memory)
            break
        except InfeasibleError as error:
            assert error.shortfall > 0 and tries < 2
            memory, tries = memory + error.shortfall, tries + 1
    assert max(stage.predicted.memory.peak for stage in plan.stages) == memory
    # A byte less is refused at once: the estimate is below the walk's bytes, and came up with one
    # plan again and again, each time for a limit that was another byte lower.
    tried: list[str] = []
    write_plan = refine.write_plan

    def noting(candidate: Candidate, answer: Answer) -> Plan:
        tried.append(repr(answer.decision))
        return write_plan(candidate, answer)

    monkeypatch.setattr(refine, "write_plan", noting)
    with pytest.raises(InfeasibleError):
        planned(memory=memory - 1)
    assert tried and len(tried) == len(set(tried))


def test_memory_in_words() -> None:
    small = {**SMALL, "pp": 2}
    assert planned(**small, memory="24GiB") == planned(**small)
    assert planned(**small, memory="900MiB").planner.limits == (900 * 2**20,)
    assert planned(**small, memory="943718400 bytes").planner.limits == (900 * 2**20,)
    # Bug: a device that is as good as unlimited was told to hold more than the other's limit.
    assert planned(**small, memory=["900MiB", "2GiB"]).planner.limits == (900 * 2**20, 2**30)
    with pytest.raises(AutopipeError, match=r"memory '3 Mbytes' is no size\nhint: 24GiB, "):
        planned(**small, memory="3 Mbytes")
    with pytest.raises(AutopipeError, match=r"memory 'plenty' is no size\nhint: 24GiB, "):
        planned(**small, memory="plenty")


def test_a_batch_of_the_examples_size() -> None:
    """An example batch says how many rows there are; a function does not: 8 a device."""
    small = {**SMALL, "pp": 2}
    assert planned(**{**small, "inputs": rows_of_12(6)}, batch_size=None).batch.rows == 6
    assert planned(**{**small, "inputs": rows_of_12(6)}, batch_size=4).batch.rows == 4
    assert planned(**small, batch_size=None).batch.rows == 2 * 8


def test_an_example_of_one_row() -> None:
    """Export takes a dim of 1 for a constant: it is traced with two rows, planned for one."""
    plan = planned(**{**SMALL, "inputs": rows_of_12(1)}, batch_size=None)
    assert plan.batch.rows == 1
    assert plan.inputs[0].shape == ("b", 12)
    assert plan.fingerprint == planned(**SMALL).fingerprint


GPT_KERNELS = (
    "causal attention", "cross_entropy_loss", "dropout", "gelu", "layer_norm", "linear",
)  # fmt: skip


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cluster: as many processes as the degrees ask for, else as there are devices."""
    probed: list[str] = []
    needs: list[Need] = []

    def local_cluster(local: LocalSpec, say: object, need: Need) -> Cluster:
        probed.append(local.name)
        needs.append(need)
        return replace(machine(local.processes), name=local.name)

    monkeypatch.setattr(asked, "local_cluster", local_cluster)
    monkeypatch.setattr(asked, "this_machine", lambda processes: LocalSpec(processes or 2))
    said: list[str] = []
    planned(cluster=None, tp=None, say=said.append)
    planned(cluster=None, pp=2, dp=2)
    planned(cluster="local:3", pp=3)
    plan = planned(cluster="cpu:3", pp=3, say=said.append)
    assert probed == ["local:2", "local:4", "local:3", "cpu:3"]
    assert set(needs) == {Need(("fp32",), GPT_KERNELS)}
    assert said[0] == "cluster: local:2, this machine"
    assert said[1].startswith("traced: 77 nodes, ") and said[1].endswith("blocks: 4 of blocks.0")
    assert "cluster: cpu:3, this machine's processor" in said
    assert plan.cluster.name == "cpu:3"
    assert {place.device for place in plan.mesh.places} == {"cpu"}


@pytest.mark.long
def test_a_cluster_nobody_has() -> None:
    plan = planned(cluster="2x2xA100-80GB", pp=2, dp=2)
    where = [(place.node, place.local, place.device) for place in plan.mesh.places]
    assert where == [(0, 0, "cuda:0"), (0, 1, "cuda:1"), (1, 0, "cuda:0"), (1, 1, "cuda:1")]


@pytest.mark.parametrize(("name", "factor"), [("adamw", 2), ("SGD", 0), (torch.optim.Adagrad, 1)])
def test_the_optimizers_memory(name: Any, factor: int) -> None:
    for stage in planned(pp=2, optimizer=name).stages:
        memory = stage.predicted.memory
        assert memory.optimizer == factor * memory.parameters


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "lion"}, "torch.optim has no optimizer 'lion'"),
        ({"planner": "oracle"}, "there is no planner 'oracle'\nhint: one of dynamic, exhaustive, "),
        (
            {"precision": "fp8"},
            "there is no precision 'fp8'\n"
            "hint: one of fp32, bf16, fp16, bf16-autocast, fp16-autocast",
        ),
        ({"zero": 4}, "there is no ZeRO stage 4\nhint: one of 0, 1, 2, 3"),
        ({"recompute": "blocks.9"}, "no block and no class of blocks 'blocks.9'"),
        ({"pp": 2, "schedule": "zb-h1", "zero": 3}, "zb-h1 and zero=3 do not go together"),
        ({"pp": 2, "schedule": "1f1b", "depth": 1}, "depth=1 was asked for, and 1f1b takes none"),
        (
            {"pp": 2, "schedule": "zb-v", "chunks": 3},
            "chunks=3 was asked for, and zb-v puts 2 stages on each rank\nhint: schedule='inter",
        ),
    ],
)
def test_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(AutopipeError) as refused:
        planned(**options)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "options", [{"pp": 3}, {"tp": 3}, {"micro_batches": 3}, {"schedule": "zigzag"}, {"dp": 3}]
)
def test_constraints_that_cannot_be_met(options: dict[str, Any]) -> None:
    """More stages than devices, 3 parts of 8 rows, an unknown schedule."""
    with pytest.raises(AutopipeError) as refused:
        planned(**options)
    assert str(next(iter(options.values()))) in str(refused.value)


def test_inputs_that_do_not_fit() -> None:
    with pytest.raises(ModelError, match="inputs hold no tensor with a dim"):
        planned(inputs={"tokens": 3})
    with pytest.raises(ModelError, match=r"inputs do not fit the model: GPT\.forward.*missing"):
        planned(inputs={"labels": torch.zeros(2, 12, dtype=torch.int64)})
    with pytest.raises(ModelError, match=r"gives a dict, not an nn\.Module"):
        planned(model=dict)


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes, site, memory", [((3, 2), False, None), ((2, 1), True, None), ((4,), False, "600KB")]
)
def test_nothing_that_can_be_asked_for_is_faster_than_the_planners_own_choice(
    sizes: tuple[int, ...], site: bool, memory: str | None
) -> None:
    """What somebody asks for has been among what it chose from, by the estimate; among the best few
    the longest path has the last word."""
    links = (NEAR, Link(1e-3, 1e9))[: len(sizes)]
    shape: dict[str, Any] = {"cluster": nodes_of(*sizes, within=links, site=site), "memory": memory}

    def steps(**constraints: Any) -> tuple[float, float]:
        plan = free(**shape, **constraints)
        return plan.planner.step_seconds, plan.prediction.step_seconds

    best = steps()
    asked = ({"tp": 2}, {"pp": 2}, {"tp": 1, "zero": 3}, {"micro_batches": 4})
    for constraints in asked:
        try:
            found = steps(**constraints)
        except InfeasibleError:
            continue
        slower = [one / other for one, other in zip(found, best, strict=True)]
        assert max(slower) >= 1 - 1e-9, constraints


def test_the_prediction_is_the_longest_path_of_the_plans_own_numbers() -> None:
    plan = planned(pp=2, micro_batches=4)
    assert with_prediction(replace(plan, prediction=Prediction(0.0, 0.0))) == plan
    # No step is shorter than what its slowest stage computes.
    slowest = max(s.predicted.forward_seconds + s.predicted.backward_seconds for s in plan.stages)
    assert plan.prediction.step_seconds > 4 * slowest


@pytest.mark.parametrize(
    ("tied", "hint"),
    [
        (lambda weight: weight, "making both names the same nn.Parameter"),
        (lambda weight: weight.T, "make the view of it in forward (x @ self.table.weight.T)"),
        (lambda weight: weight[8:], "make the view of it in forward (x @ self.table.weight.T)"),
    ],
    ids=("the same", "transposed", "some rows"),
)
def test_two_parameters_in_one_memory(
    tied: Callable[[torch.Tensor], torch.Tensor], hint: str
) -> None:
    """Tied behind torch's back: split over two stages they would drift apart."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(32, 32)
            self.two = nn.Linear(32, 32)
            self.two.weight = nn.Parameter(tied(self.one.weight.detach()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x)).square().mean()

    refused = "'one.weight' and 'two.weight' are two parameters in one memory"
    with pytest.raises(ModelError, match=re.escape(refused)) as error:
        planned(model=Shared(), inputs=lambda rows: {"x": torch.ones(rows, 32)}, loss=None)
    assert error.value.hint is not None and hint in error.value.hint


def test_parameters_beside_each_other_in_one_memory_are_two() -> None:
    both = nn.Linear(8, 8).weight.detach()
    model = nn.ParameterList([nn.Parameter(both[:, :4]), nn.Parameter(both[:, 4:])])
    assert bare(model) is not None


@pytest.mark.long
def test_a_refusal_speaks_of_other_degrees() -> None:
    """What fits at another tp, where one was asked for; else the fewest devices of any degree."""
    shape: dict[str, Any] = {"pp": 1, "micro_batches": 2}
    limit = max(stage.predicted.memory.peak for stage in free(tp=2, **shape).stages)
    with pytest.raises(InfeasibleError) as refused:
        free(tp=1, **shape, zero=0, recompute="none", memory=limit)
    assert refused.value.hint is not None and "tp=2" in refused.value.hint
    assert free(tp=2, **shape, memory=limit).mesh.tp == 2


@pytest.mark.long
def test_a_refusal_speaks_of_blocks_that_were_not_to_run_again() -> None:
    """And of micro-batches of other sizes than those asked for: each fits, as it says."""

    def most(**asked: Any) -> int:
        plan = planned(pp=2, **asked)
        return max(stage.predicted.memory.peak for stage in plan.stages)

    asked: dict[str, Any] = {"pp": 2, "micro_batches": 2}
    limit = max(most(micro_batches=2, recompute="all"), most(micro_batches=8))
    assert limit < most(micro_batches=2)
    with pytest.raises(InfeasibleError) as refused:
        planned(**asked, memory=limit)
    assert refused.value.hint is not None
    assert refused.value.hint.startswith("recomputation in stage")
    assert "micro_batches=" in refused.value.hint
    assert any(stage.recompute for stage in planned(**asked, recompute=None, memory=limit).stages)
    assert planned(pp=2, memory=limit).batch.micro_batches > 2
