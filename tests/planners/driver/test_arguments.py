"""How `plan` reads its arguments, and which values it refuses."""

import math
from collections.abc import Iterable

import pytest
import torch
from torch import nn

from autopipe.cluster.cluster import Cluster
from autopipe.cluster.spec import LocalSpec, parse
from autopipe.errors import AutopipeError
from autopipe.planners.driver.arguments import check_numbers, limits_of, schedule_of
from autopipe.planners.driver.request import PlanRequest, as_optimizer_allows, micro_batch_rows
from autopipe.planners.model.problem import Constraints
from tests.support.inprocess import machine
from tests.support.optimizers import Lamb, Langevin, Together


@pytest.mark.parametrize(
    ("text", "bytes"),
    [
        ("24GiB", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("1.5 KiB", 1536),
        ("512M", 512 * 10**6),
        (7, 7),
        (2e9, 2 * 10**9),
    ],
)
def test_sizes(text: float | str, bytes: int) -> None:
    assert limits_of(text, machine(2)) == (bytes, bytes)


@pytest.mark.parametrize("size", [math.inf, math.nan])
def test_what_is_no_size(size: float) -> None:
    with pytest.raises(AutopipeError, match=f"memory {size} is no size"):
        limits_of(size, machine(2))


def test_numbers_are_whole_and_of_at_least_one() -> None:
    """Bugs: a batch of 0 rows was the usual one, a window of 0 was 2, 2.0 stages a TypeError."""
    check_numbers(Constraints(pp=1, depth=0), None)
    for asked, rows, sentence in (
        (Constraints(), 0, "batch_size=0 was asked for, expected a whole number of at least 1"),
        (Constraints(window=0), 8, "window=0 was asked for, expected a whole number of at least 1"),
        (
            Constraints(pp=2.0),  # type: ignore[arg-type]  # as a script may, untyped
            8,
            "pp=2.0 was asked for, expected a whole number of at least 1",
        ),
        (Constraints(depth=-1), 8, "depth=-1 was asked for, expected a whole number of at least 0"),
    ):
        with pytest.raises(AutopipeError) as refused:
            check_numbers(asked, rows)
        assert refused.value.message == sentence


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ((None, None, 0), None),
        ((None, 2, None), "interleaved"),
        ((None, None, 1), "eager-1f1b"),
        (("zb-v", 2, None), "zb-v"),
    ],
)
def test_chunks_and_depths_ask_for_the_schedule_that_they_are_for(
    asked: tuple[str | None, int | None, int | None], name: str | None
) -> None:
    """Bug: plans had one stage on each rank without a word, and of a depth "1f1b takes none"."""
    assert schedule_of(*asked) == (name, ())


def test_a_limit_for_each_device() -> None:
    assert limits_of("80GB,40GB", machine(2)) == (80 * 10**9, 40 * 10**9)
    with pytest.raises(AutopipeError, match="3 limits were given for the 2 devices"):
        limits_of([1, 2, 3], machine(2))


@pytest.mark.parametrize("here", [False, True])
@pytest.mark.parametrize(
    ("cluster", "fuses"),
    [
        (LocalSpec(2, cpu=True), (False, False)),
        (LocalSpec(1), (False, True)),
        (machine(2), (False, False)),
        (parse("2xA100-80GB"), (True, True)),
    ],
)
def test_attentions_are_fused_on_the_gpus_of_the_cluster(
    cluster: Cluster | LocalSpec,
    fuses: tuple[bool, bool],
    here: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the plan is made on a machine that has one says nothing of another one's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here)
    request = PlanRequest(
        model=nn.Identity,
        inputs=None,
        loss=None,
        optimizer="sgd",
        precision="fp32",
        cluster=cluster,
        batch_size=None,
        constraints=Constraints(),
        planner="dynamic",
        sequence_parallel=True,
        loss_over="rows",
    )
    assert request.may_fuse == fuses[here]


def test_micro_batches_have_rows_that_some_mesh_divides_the_batch_into() -> None:
    assert micro_batch_rows(12, 2, Constraints()) == [1, 2, 3, 4, 6, 12]
    assert micro_batch_rows(12, 2, Constraints(dp=2)) == [1, 2, 3, 6]
    assert micro_batch_rows(12, 2, Constraints(dp=2, micro_batches=3)) == [2]
    assert micro_batch_rows(12, 2, Constraints(micro_batch_size=3)) == [3]
    assert micro_batch_rows(12, 2, Constraints(dp=2, micro_batches=3, micro_batch_size=2)) == [2]
    with pytest.raises(AutopipeError, match="12 rows does not divide into dp=2 x micro_batches=4"):
        micro_batch_rows(12, 2, Constraints(dp=2, micro_batches=4))
    with pytest.raises(AutopipeError, match="into micro-batches of 4 rows over dp=2"):
        micro_batch_rows(12, 2, Constraints(dp=2, micro_batch_size=4))
    with pytest.raises(AutopipeError, match="micro_batches=3 of a batch of 12 rows makes micro-b"):
        micro_batch_rows(12, 2, Constraints(dp=2, micro_batches=3, micro_batch_size=1))


def test_an_optimizer_gets_no_parts_of_what_it_changes_as_a_whole() -> None:
    """ZeRO's shards of a matrix and a tensor-parallel rank's part are no matrix to Muon."""
    said: list[str] = []
    free = Constraints(pp=2)
    assert as_optimizer_allows(free, "adamw", said.append) == free
    assert said == []
    alone = Constraints(pp=2, zero=0, tp=1, ruled_out=("zero", "tp"))
    assert as_optimizer_allows(free, "muon", said.append) == alone
    assert said == [
        "optimizer: it changes each parameter as a whole, and no rank gets a part of that: without "
        "ZeRO or tensor parallelism"
    ]
    whole = Constraints(1, None, 1, zero=0, ruled_out=("zero", "tp", "pp"))
    assert as_optimizer_allows(Constraints(), Together, said.append) == whole
    for asked, make, name in (
        (Constraints(zero=1), "muon", "zero=1"),
        (Constraints(tp=2), Lamb, "tp=2"),
        (Constraints(pp=2), Together, "pp=2"),
    ):
        with pytest.raises(AutopipeError) as refused:
            as_optimizer_allows(asked, make, said.append)
        assert refused.value.message.startswith(f"{name} was asked for, and the optimizer changes ")
        assert refused.value.hint is not None and "AdamW and SGD" in refused.value.hint


def test_an_optimizer_that_draws_has_all_parameters_on_each_rank() -> None:
    """Bug: it was said to change all parameters together."""
    said: list[str] = []
    kept = as_optimizer_allows(Constraints(dp=2), Langevin, said.append)
    assert kept == Constraints(1, 2, 1, zero=0, ruled_out=("zero", "tp", "pp"))
    assert said == [
        "optimizer: it draws random numbers, and no rank gets a part of that: without ZeRO or "
        "tensor parallelism or pipelines"
    ]
    with pytest.raises(AutopipeError, match="the optimizer draws random numbers: of the part"):
        as_optimizer_allows(Constraints(tp=2), Langevin, said.append)


STEPS = {"made": 0}


def counting(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: STEPS.update(made=STEPS["made"] + 1))
    return optimizer


def test_planning_makes_steps_that_a_hook_is_not_to_have_counted() -> None:
    """Bug: a model that reads the count was traced with it, and ranks found another model."""
    as_optimizer_allows(Constraints(), counting, print)
    assert STEPS == {"made": 0}


def test_an_optimizer_that_cannot_step() -> None:
    with pytest.raises(AutopipeError) as refused:
        as_optimizer_allows(Constraints(), "lbfgs", print)
    assert str(refused.value) == (
        "optimizer: steps of 2 small parameters, by dense gradients, end in TypeError: "
        "LBFGS.step() missing 1 required positional argument: 'closure'\n"
        "hint: a run calls optimizer.step() without a closure, on each rank for its own parameters"
    )
