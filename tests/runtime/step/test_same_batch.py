"""Whether ranks were given the same batch, as each of them sees it; the others' words are made up.

What four real processes say to each other is told in `pipe_stories`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopipe import LaunchError, ModelError, Plan, PlanError
from autopipe.batch.tree import flatten
from autopipe.planfile.parts import InputSpec, Mesh
from autopipe.runtime.step.same_batch import (
    CALLS,
    check_same,
    check_same_call,
    check_same_plan,
)
from tests.support.plans import example_plan

WORLD = cast(dist.ProcessGroup, "all ranks")
Check = Callable[..., list[str]]


def plan() -> Plan:
    """Of four ranks, pp=2 dp=2; a batch is x [b, 3]."""
    made = example_plan()
    places = tuple(
        replace(made.mesh.places[0], rank=rank, pp=rank // 2, dp=rank % 2) for rank in range(4)
    )
    spec = InputSpec("x", ("b", 3), "float32", batch_dim=0)
    return replace(made, mesh=Mesh(2, 2, 1, places), inputs=(spec,))


def x(rows: int, value: float = 0.0) -> dict[str, Tensor]:
    return {"x": torch.full((rows, 3), value)}


class Heard(Exception):
    """What a rank has to say is written down."""


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Check:
    """What each of four ranks says to the batches that they are given."""

    def run(*given: dict[str, Tensor], sharded: bool = False, contents: bool = True) -> list[str]:
        words: list[Tensor] = []
        said: list[str] = []

        def all_gather(found: list[Tensor], mine: Tensor, group: dist.ProcessGroup) -> None:
            assert group is WORLD
            if len(words) < 4:
                words.append(mine)
                raise Heard
            found[:] = words

        monkeypatch.setattr(dist, "all_gather", all_gather)
        for place in 2 * plan().mesh.places:  # once to be heard, once to hear
            leaves = flatten(given[place.rank])
            try:
                check_same(plan(), place, WORLD, leaves, sharded=sharded, contents=contents)
                said.append("")
            except ModelError as error:
                said.append(error.message)
            except Heard:
                pass
        return said

    return run


FINE = ["", "", "", ""]


def test_the_same_batch(check: Check) -> None:
    assert check(x(8), x(8), x(8), x(8)) == FINE


def test_alone() -> None:
    """There is nobody to ask; what a batch looks like is for the step to check."""
    only = plan().mesh.places[0]
    check_same(plan(), only, None, flatten({}), sharded=False, contents=True)


@pytest.mark.parametrize("odd", [1, 2, 3])
def test_other_contents(odd: int, check: Check) -> None:
    """Every rank says the same."""
    given = [x(8, value=float(rank == odd)) for rank in range(4)]
    assert check(*given) == 4 * [f"ranks were given different batches: rank 0 and rank {odd}"]


def test_some_values_are_compared_in_each_step(check: Check) -> None:
    """Those of one rank's own shuffle differ nearly everywhere."""
    same = "ranks were given different batches, after batches that were the same"
    assert check(x(8), x(8, 1.0), x(8), x(8), contents=False) == 4 * [f"{same}: rank 0 and rank 1"]
    assert check(x(8), x(8), x(8), x(8), contents=False) == FINE
    assert check(x(4), x(4, 1.0), x(4), x(4, 1.0), sharded=True, contents=False) == FINE
    other_corner = x(4000)
    other_corner["x"][0, 1] = 1.0
    assert check(x(4000), x(4000), x(4000), other_corner, contents=False) == FINE, "only some"


def test_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """`if rank == 0: pipe.evaluate(batch)`: each rank says so, and waits for nobody."""

    def all_gather(found: list[Tensor], mine: Tensor, group: dist.ProcessGroup) -> None:
        found[:] = [torch.tensor([CALLS.index("evaluate"), 7, 8, 0]), mine, mine, mine]

    monkeypatch.setattr(dist, "all_gather", all_gather)
    told = "^rank 0 has called pipe.evaluate, and rank 1 pipe"
    with pytest.raises(LaunchError, match=rf"{told}\.step\nhint: each rank makes all"):
        one, leaves = plan().mesh.places[1], flatten(x(8))
        check_same(plan(), one, WORLD, leaves, sharded=False, contents=False)
    for call in ("clip_grad_norm_", "save", "load"):
        with pytest.raises(LaunchError, match=rf"{told}\.{call}"):
            check_same_call(call, plan(), WORLD)


def test_other_rows(check: Check) -> None:
    """Every rank says its own and another one's."""
    more = ": all ranks, and the parts of all data-parallel coordinates, must have as many"
    assert check(x(8), x(8), x(12), x(8), contents=False) == [
        f"rank 0 was given 8 rows, rank 2 12 rows{more}",
        f"rank 1 was given 8 rows, rank 2 12 rows{more}",
        f"rank 2 was given 12 rows, rank 0 8 rows{more}",
        f"rank 3 was given 8 rows, rank 2 12 rows{more}",
    ]


def test_a_batch_that_does_not_fit(check: Check) -> None:
    """Its rank says what is wrong with it; the others, that it is there."""
    said = check(x(8), {"y": torch.zeros(8, 3)}, x(8), x(8), contents=False)
    assert said[1].startswith("the batch has the entries ['y'], the plan was made for ['x']")
    for rank in (0, 2, 3):
        assert said[rank].startswith(
            f"rank {rank} was given 8 rows, rank 1 a batch that does not fit the plan: "
        )


def test_parts(check: Check) -> None:
    """Ranks 0 and 2 are of data-parallel coordinate 0, ranks 1 and 3 of coordinate 1."""
    assert check(x(4), x(4, 1.0), x(4), x(4, 1.0), sharded=True) == FINE
    wrong = "ranks of data-parallel coordinate 1 were given different batches: rank 1 and rank 3"
    assert check(x(4), x(4, 1.0), x(4), x(4), sharded=True) == 4 * [wrong]


def test_parts_of_unequal_size(check: Check) -> None:
    """Each divides into micro-batches, but a mean of both would weigh wrongly."""
    said = check(x(4), x(6), x(4), x(6), sharded=True)
    assert [words.partition(":")[0] for words in said] == [
        "rank 0 was given 4 rows, rank 1 6 rows",
        "rank 1 was given 6 rows, rank 0 4 rows",
        "rank 2 was given 4 rows, rank 1 6 rows",
        "rank 3 was given 6 rows, rank 0 4 rows",
    ]


def test_ranks_that_planned_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measured the machine, and one found another schedule: no rank begins."""
    plans = [plan(), plan(), replace(plan(), schedule="gpipe"), plan()]
    words: list[Tensor] = []

    def hear(found: list[Tensor], mine: Tensor, group: dist.ProcessGroup) -> None:
        words.append(mine)
        found[:] = [mine] * len(found)

    monkeypatch.setattr(dist, "all_gather", hear)
    for each in plans:
        check_same_plan(each, WORLD)

    def all_gather(found: list[Tensor], mine: Tensor, group: dist.ProcessGroup) -> None:
        found[:] = words

    monkeypatch.setattr(dist, "all_gather", all_gather)
    for each in plans:
        with pytest.raises(PlanError) as error:
            check_same_plan(each, WORLD)
        assert str(error.value) == (
            "ranks were given different plans: rank 0 and rank 2\n"
            "hint: plan once and plan.save('plan.json'); every rank takes "
            "autopipe.Plan.load('plan.json')"
        )
