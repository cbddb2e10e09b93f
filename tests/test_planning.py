"""`plan`: what is asked, what is found where nothing is asked, and what is refused."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopipe
from autopipe import AutopipeError, InfeasibleError, ModelError, Plan, planning
from autopipe.cluster import Cluster
from autopipe.planning import optimizer_factor
from tests.inprocess import machine
from tests.zoo import ZOO

CASE = ZOO["gpt"]


def planned(**options: Any) -> Plan:
    """The zoo's GPT on two processes of 1 GiB, in batches of 8 rows, unless told otherwise."""
    asked: dict[str, Any] = {
        "model": CASE.model,
        "inputs": CASE.inputs,
        "loss": CASE.loss,
        "cluster": machine(2),
        "batch_size": 8,
        **options,
    }
    return autopipe.plan(asked.pop("model"), asked.pop("inputs"), **asked)


def test_the_same_problem_is_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        planned(pp=2).save(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert Plan.load(tmp_path / "one") == planned(pp=2)


def test_the_weights_are_never_touched() -> None:
    """A model that is given keeps them; a constructor's are gone as soon as they are made."""
    model = CASE.model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert planned(model=model, pp=2) == planned(pp=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training and not any(p.grad is not None for p in model.parameters())


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


@pytest.mark.parametrize("memory", [30_000, "30 KB"])
def test_too_little_memory(memory: int | str) -> None:
    """The nearest plan, its stage, the bytes it needs and lacks, and what would help."""
    with pytest.raises(InfeasibleError) as refused:
        planned(memory=memory)
    said = refused.value
    assert said.message.startswith("no plan fits 29.3 KiB a device: nearest is pp=2 dp=1 micro_")
    assert re.search(r"whose stage \d needs [\d.]+ KiB, \d+ bytes too many", said.message)
    assert said.hint


def test_who_adds_the_shortfall_gets_a_plan() -> None:
    """At once by the estimate, or at the second try by the walk through the program."""
    memory, tries = 30_000, 0
    while True:
        try:
            plan = planned(memory=memory)
            break
        except InfeasibleError as error:
            found = re.search(r"(\d+) (bytes )?too many", error.message)
            assert found is not None and tries < 2
            memory, tries = memory + int(found[1]), tries + 1
    assert max(stage.predicted.memory.peak for stage in plan.stages) == memory
    with pytest.raises(InfeasibleError):
        planned(memory=memory - 1)


@pytest.mark.parametrize(
    ("text", "bytes"),
    [("24GiB", 24 * 2**30), ("24GB", 24 * 10**9), ("1.5 KiB", 1536), ("512M", 512 * 10**6), (7, 7)],
)
def test_sizes(text: int | str, bytes: int) -> None:
    assert planning._bytes(text) == bytes


def test_memory_in_words() -> None:
    assert planned(pp=2, memory="24GiB") == planned(pp=2)
    with pytest.raises(AutopipeError, match=r"memory 'plenty' is no size\nhint: 24GiB, "):
        planned(memory="plenty")


def test_a_batch_of_the_examples_size() -> None:
    """An example batch says how many rows there are; a function does not: 8 a device."""
    assert planned(inputs=CASE.inputs(6), batch_size=None, pp=2).batch.rows == 6
    assert planned(inputs=CASE.inputs(6), batch_size=4, pp=2).batch.rows == 4
    assert planned(batch_size=None, pp=2).batch.rows == 2 * 8


def test_an_example_of_one_row() -> None:
    """Export takes a dim of 1 for a constant: it is traced with two rows, planned for one."""
    plan = planned(inputs=CASE.inputs(1), batch_size=None)
    assert plan.batch.rows == 1
    assert plan.inputs[0].shape == ("b", 12)
    assert plan.fingerprint == planned().fingerprint


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cluster: as many processes as the degrees ask for, else as there are devices."""
    probed: list[int] = []

    def local_cluster(processes: int, say: object) -> Cluster:
        probed.append(processes)
        return machine(processes)

    monkeypatch.setattr(planning, "local_cluster", local_cluster)
    monkeypatch.setattr(planning, "local_processes", lambda: 2)
    said: list[str] = []
    planned(cluster=None, say=said.append)
    planned(cluster=None, pp=2, dp=2)
    planned(cluster="local:3", pp=3)
    assert probed == [2, 4, 3]
    assert said[0] == "cluster: local:2, this machine"
    assert said[1].startswith("traced: 77 nodes, ") and said[1].endswith("blocks: 4 of blocks.0")


def test_a_cluster_nobody_has() -> None:
    plan = planned(cluster="2x2xA100-80GB", pp=2, dp=2)
    where = [(place.node, place.local, place.device) for place in plan.mesh.places]
    assert where == [(0, 0, "cuda:0"), (0, 1, "cuda:1"), (1, 0, "cuda:0"), (1, 1, "cuda:1")]


@pytest.mark.parametrize(
    ("make", "factor"),
    [
        (torch.optim.AdamW, 2.0),
        (torch.optim.SGD, 0.0),
        (lambda parameters: torch.optim.SGD(parameters, momentum=0.9), 1.0),
        (lambda parameters: torch.optim.Adam(parameters, amsgrad=True), 3.0),
        (torch.optim.Adagrad, 1.0),
    ],
)
def test_optimizer_factor(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], factor: float
) -> None:
    """Adam keeps two moments of a parameter, momentum one; the step's number is not counted."""
    assert optimizer_factor(make) == factor


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
        ({"precision": "bf16"}, "precision 'bf16' was asked for; this version runs fp32 only"),
        ({"zero": 3}, "zero=3 recompute=[] was asked for; this version has neither"),
        ({"recompute": ["blocks.0"]}, "recompute=['blocks.0'] was asked for"),
    ],
)
def test_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(AutopipeError) as refused:
        planned(**options)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "options", [{"pp": 3}, {"tp": 2}, {"micro_batches": 3}, {"schedule": "zigzag"}, {"dp": 3}]
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


def test_two_parameters_in_one_memory() -> None:
    """Tied behind torch's back: split over two stages they would drift apart."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(32, 32)
            self.two = nn.Linear(32, 32)
            self.two.weight = nn.Parameter(self.one.weight.detach())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x)).square().mean()

    with pytest.raises(ModelError, match=r"'one\.weight' and 'two\.weight' are two parameters in"):
        planned(model=Shared(), inputs=lambda rows: {"x": torch.ones(rows, 32)}, loss=None)
