"""A schedule goes on with each parameter's own rates, whichever ranks hold each.

Ranks are pretended, one after the other: each has an optimizer with the groups of its parameters.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from autopipe import CheckpointError
from autopipe.runtime.checkpoint.content import Content, rank_file, restore
from autopipe.runtime.checkpoint.stored import Stored
from autopipe.runtime.checkpoint.write import write

Optimizer = torch.optim.Optimizer
Rates = dict[str, list[tuple[float, float]]]

PLANS = {
    "one": ["a b c d"],
    "halves": ["a b", "c d"],
    "turns": ["a c", "b d"],
    "backwards": ["b a", "d c"],
    "thirds": ["a", "b c", "d"],
    "groups without parameters": ["a - c -", "- b - d"],
}
"""For each rank its groups: of one parameter each, or of none."""

RATES = {"a": 0.8, "b": 0.4, "c": 0.2, "d": 0.1, "-": 0.05}


def of_groups(factor: float, optimizer: Optimizer) -> list[float]:
    return [factor * group["lr"] for group in optimizer.param_groups]


class Peaks(schedules.LRScheduler):
    """One of a user's own: a rate for each group, and words for all of them."""

    def __init__(self, optimizer: Optimizer, words: Sequence[str] = ("up", "down")) -> None:
        self.peaks, self.words = of_groups(2.0, optimizer), list(words)
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        return [peak / (1 + self.last_epoch) for peak in self.peaks]


class Fall:
    """A function of LambdaLR's that has a state: each group's own."""

    def __init__(self, rate: float) -> None:
        self.rate = self.last = rate

    def __call__(self, step: int) -> float:
        self.last = self.last * 0.5 + self.rate
        return self.last


Make = Callable[[Optimizer], Any]
SCHEDULES: dict[str, Make] = {
    "a function": lambda o: schedules.LambdaLR(o, lambda step: 0.9**step),
    "functions": lambda o: schedules.LambdaLR(o, [Fall(rate) for rate in of_groups(1.0, o)]),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 5),
    "cycles": lambda o: schedules.CyclicLR(o, of_groups(0.1, o), of_groups(2.0, o), 2),
    "one cycle": lambda o: schedules.OneCycleLR(o, of_groups(2.0, o), total_steps=9),
    "plateaus": lambda o: schedules.ReduceLROnPlateau(
        o, "min", 0.5, patience=1, min_lr=of_groups(0.4, o)
    ),
    "one after the other": lambda o: schedules.SequentialLR(
        o,
        [schedules.LinearLR(o, 0.1, total_iters=2), schedules.CosineAnnealingLR(o, 5)],
        [2],
    ),
    "three, with as many milestones as groups": lambda o: schedules.SequentialLR(
        o,
        [schedules.ConstantLR(o), schedules.ExponentialLR(o, 0.9), schedules.StepLR(o, 2)],
        [2, 5],
    ),
    "chained": lambda o: schedules.ChainedScheduler(
        [schedules.LinearLR(o, 0.1, total_iters=4), schedules.ExponentialLR(o, 0.9)]
    ),
    "one's own": lambda o: Peaks(o, ["up", "down", "over"]),
}


class Rank:
    """A rank that has groups of these parameters, each at the rate of its first one."""

    def __init__(self, groups: str, make: Make) -> None:
        self.named = {name: nn.Parameter(torch.zeros(2)) for name in groups if name in "abcd"}
        self.groups = [[name for name in group if name in self.named] for group in groups.split()]
        made = [
            {"params": [self.named[name] for name in names], "lr": RATES[group[0]]}
            for group, names in zip(groups.split(), self.groups, strict=True)
        ]
        self.optimizer = torch.optim.SGD(made, lr=0.1, momentum=0.9)
        self.schedule = make(self.optimizer)

    def content(self, *, alone: bool = False) -> Content:
        """What it saves: the schedule alone, or the optimizer with it."""
        optimizer = None if alone else self.optimizer
        return Content({}, self.named, self.named, optimizer, self.schedule)

    def rates(self, steps: int) -> Rates:
        """Rate and momentum of each parameter in so many steps."""
        found: Rates = {name: [] for name in self.named}
        for _ in range(steps):
            self.optimizer.step()
            plateau = isinstance(self.schedule, schedules.ReduceLROnPlateau)
            self.schedule.step(*([1.0] if plateau else []))
            for names, group in zip(self.groups, self.optimizer.param_groups, strict=True):
                for name in names:
                    found[name].append((group["lr"], group["momentum"]))
        return found


def ranks(plan: Sequence[str], make: Make) -> list[Rank]:
    return [Rank(groups, make) for groups in plan]


def saved(ranks: Sequence[Rank], folder: Path, *, alone: bool = False) -> Stored:
    """The checkpoint of these ranks after three steps."""
    folder.mkdir()
    for number, rank in enumerate(ranks):
        rank.rates(3)
        write(folder, rank_file(rank.content(alone=alone), 3, number, len(ranks), {}))
    return Stored.open(folder)


@pytest.mark.sweep(of=7)
@pytest.mark.parametrize("target", PLANS)
@pytest.mark.parametrize("source", PLANS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_go_where_the_parameters_go(
    name: str, source: str, target: str, tmp_path: Path
) -> None:
    before, after = (ranks(PLANS[plan], SCHEDULES[name]) for plan in (source, target))
    stored = saved(before, tmp_path / "kept")
    found: Rates = {}
    for rank in after:
        restore(rank.content(), stored)
        found |= rank.rates(4)
    whole = Rank("a b c d", SCHEDULES[name])
    whole.rates(3)
    assert found == whole.rates(4)


def test_the_rank_that_had_the_same_groups_is_asked(tmp_path: Path) -> None:
    """Under the same plan a state may be of any form: no part of it goes elsewhere."""
    before, after = (ranks(PLANS["halves"], Peaks) for _ in range(2))
    for rank, word in zip(before, ("first", "second"), strict=True):
        rank.schedule.words = [word, "last"]
        rank.schedule.own = {"of": word}
    stored = saved(before, tmp_path / "kept")
    for rank, word in zip(after, ("first", "second"), strict=True):
        restore(rank.content(), stored)
        assert (rank.schedule.words, rank.schedule.own) == ([word, "last"], {"of": word})


def test_a_list_that_may_be_of_the_groups_or_not(tmp_path: Path) -> None:
    """Two words for two groups, which are other ones now; in the same order they are the same."""
    stored = saved(ranks(["a b", "c d"], Peaks), tmp_path / "kept")
    (rank,) = ranks(["a d"], Peaks)
    restore(rank.content(), stored)
    assert rank.schedule.words == ["up", "down"]
    (rank,) = ranks(["a c"], Peaks)
    with pytest.raises(CheckpointError, match="Peaks.words may have an entry for each") as refused:
        restore(rank.content(), stored)
    assert refused.value.hint is not None and "under the plan" in refused.value.hint


def test_a_value_that_each_rank_has_for_itself(tmp_path: Path) -> None:
    before = ranks(PLANS["halves"], Peaks)
    for number, rank in enumerate(before):
        rank.schedule.own = number
    (rank,) = ranks(PLANS["one"], Peaks)
    with pytest.raises(CheckpointError, match="Peaks.own was not the same on all ranks; the right"):
        restore(rank.content(), saved(before, tmp_path / "kept"))


def test_a_schedule_without_its_optimizer(tmp_path: Path) -> None:
    """Whose rates they are is not known; where all are alike that does no harm."""
    make = SCHEDULES["a function"]
    halves = saved(ranks(PLANS["halves"], make), tmp_path / "halves", alone=True)
    with pytest.raises(CheckpointError, match="base_lrs was not the same on all") as refused:
        restore(ranks(PLANS["turns"], make)[0].content(alone=True), halves)
    assert refused.value.hint is not None and "save the optimizer" in refused.value.hint
    one = saved(ranks(PLANS["one"], make), tmp_path / "one", alone=True)
    with pytest.raises(CheckpointError, match="base_lrs is for 4 groups, found 2; the right"):
        restore(ranks(PLANS["halves"], make)[0].content(alone=True), one)
    (rank,) = ranks(PLANS["one"], make)
    restore(rank.content(alone=True), one)
    assert rank.schedule.last_epoch == 3


def test_parameters_of_several_rates_in_one_group(tmp_path: Path) -> None:
    make = SCHEDULES["a function"]
    stored = saved(ranks(["a b", "c d"], make), tmp_path / "kept")
    (rank,) = ranks(["ab cd"], make)
    for alone, what in ((False, "options"), (True, "LambdaLR.base_lrs")):
        with pytest.raises(CheckpointError, match=f"that had other {what} in the") as refused:
            restore(rank.content(alone=alone), stored)
        assert "'weight_decay'" not in str(refused.value)  # they had the same


def test_an_optimizers_state_of_no_parameter(tmp_path: Path) -> None:
    """It goes anywhere if all ranks had the same, else to a rank with the groups of one of them."""
    before = ranks(PLANS["halves"], Peaks)

    def kept(folder: str, *values: float) -> Stored:
        for rank, value in zip(before, values, strict=True):
            states: dict[Any, Any] = rank.optimizer.state
            states["clock"] = {"steps": value}
        return saved(before, tmp_path / folder)

    def restored(stored: Stored, plan: str) -> list[Any]:
        after = ranks(PLANS[plan], Peaks)
        for rank in after:
            restore(rank.content(), stored)
        return [dict(rank.optimizer.state) for rank in after]

    steps = [{"clock": {"steps": n}} for n in (3, 4)]
    alike, unlike = kept("alike", 3, 3), kept("unlike", 3, 4)
    assert restored(alike, "one") == steps[:1]
    assert restored(unlike, "halves") == steps
    with pytest.raises(CheckpointError, match="SGD.state has 'clock', of no parameter, and ranks"):
        restored(unlike, "one")
