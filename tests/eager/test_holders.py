"""What a model counts in Python is found wherever it keeps it, put back, and set far ahead.

Each of these models divides by a temperature that is the same in the first ten calls: two runs make
the same calls of torch, and a graph would be that of a warm-up for good.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar
from types import SimpleNamespace

import pytest

from autopipe.eager.counts import Counts
from autopipe.eager.holders import holders_of
from autopipe.eager.kept import restoring
from autopipe.planners.driver import against_eager
from tests.support import own_schedule
from tests.support.odd_models import Net, built, inputs, refusal
from tests.support.own_schedule import next_step

STEP = 0
STATE = {"step": 0}
PLACE = SimpleNamespace(step=0)


def later(step):
    return 1.0 if step <= 10 else 2.0


class InAClass(Net):
    step = 0

    def inside(self, hidden):
        type(self).step += 1
        return self.middle(hidden) / later(self.step)


class InAGlobal(Net):
    def inside(self, hidden):
        global STEP
        STEP += 1
        return self.middle(hidden) / later(STEP)


class InAGlobalDict(Net):
    def inside(self, hidden):
        STATE["step"] += 1
        return self.middle(hidden) / later(STATE["step"])


class InAGlobalObject(Net):
    def inside(self, hidden):
        PLACE.step += 1
        return self.middle(hidden) / later(PLACE.step)


class Progress:
    step = 0


class InAnotherClass(Net):
    def inside(self, hidden):
        Progress.step += 1
        return self.middle(hidden) / later(Progress.step)


class InADict(Net):
    def begin(self):
        self.state = {"step": 0}

    def inside(self, hidden):
        self.state["step"] += 1
        return self.middle(hidden) / later(self.state["step"])


class InAList(Net):
    def begin(self):
        self.state = [0]

    def inside(self, hidden):
        self.state[0] += 1
        return self.middle(hidden) / later(self.state[0])


class Slotted:
    __slots__ = ("step",)

    def __init__(self):
        self.step = 0


class InSlots(Net):
    def begin(self):
        self.state = Slotted()

    def inside(self, hidden):
        self.state.step += 1
        return self.middle(hidden) / later(self.state.step)


class FarBelow(Net):
    def begin(self):
        self.trainer = SimpleNamespace(schedules=[SimpleNamespace(step=0)])

    def inside(self, hidden):
        schedule = self.trainer.schedules[0]
        schedule.step += 1
        return self.middle(hidden) / later(schedule.step)


def closed_over():
    step = 0

    def count():
        nonlocal step
        step += 1
        return step

    return count


class InAClosure(Net):
    count = staticmethod(closed_over())

    def inside(self, hidden):
        return self.middle(hidden) / later(self.count())


class InAFunction(Net):
    def inside(self, hidden):
        counted.step += 1
        return self.middle(hidden) / later(counted.step)


def counted():
    """Has the attribute."""


counted.step = 0


class InADefault(Net):
    def inside(self, hidden, state=[0]):  # noqa: B006 - that it is kept is the point
        state[0] += 1
        return self.middle(hidden) / later(state[0])


CONTEXT = ContextVar("context", default=0)
THREAD = threading.local()
THREAD.step = 0


class InContext(Net):
    def inside(self, hidden):
        CONTEXT.set(CONTEXT.get() + 1)
        return self.middle(hidden) / later(CONTEXT.get())


class InAThread(Net):
    def inside(self, hidden):
        THREAD.step += 1
        return self.middle(hidden) / later(THREAD.step)


class InAnotherFile(Net):
    def inside(self, hidden):
        own_schedule.STEP += 1
        return self.middle(hidden) / later(own_schedule.STEP)


class ByAnotherFile(Net):
    def inside(self, hidden):
        return self.middle(hidden) / later(next_step())


class ByAnotherFilesObject(Net):
    def inside(self, hidden):
        return self.middle(hidden) / later(own_schedule.PROGRESS.tick())


KEPT = {
    InAClass: "InAClass.step",
    InAGlobal: "tests.eager.test_holders.STEP",
    InAGlobalDict: "tests.eager.test_holders.STATE",
    InAGlobalObject: "tests.eager.test_holders.PLACE",
    InAnotherClass: "Progress.step",
    InADict: "state",
    InAList: "state",
    InSlots: "state",
    FarBelow: "trainer",
    InAClosure: "closed_over.<locals>.count",
    InAFunction: "counted",
    InADefault: "InADefault.inside",
    InContext: "tests.eager.test_holders.CONTEXT",
    InAThread: "tests.eager.test_holders.THREAD",
    InAnotherFile: "tests.support.own_schedule.STEP",
    ByAnotherFile: "tests.support.own_schedule.STEP",
    ByAnotherFilesObject: "Progress.steps",
}


def kinds():
    return pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.__name__)


@kinds()
def test_a_count_is_seen_and_put_back(kind):
    model = built(kind)
    hidden = model.up(inputs(2)["x"])
    with restoring(model) as changed:
        model.inside(hidden)
        assert changed() == (KEPT[kind],)
    counts = Counts(model)
    with restoring(model):
        model.inside(hidden)
        counts.ahead(1_000)
        found = model.inside(hidden)
    assert not counts.risen
    assert (found * 2).allclose(model.inside(hidden))


@pytest.mark.sweep(of=12)
@kinds()
def test_a_warm_up_is_refused(kind, monkeypatch):
    assert f"it keeps {KEPT[kind]}\n" in refusal(built(kind))
    monkeypatch.setattr(against_eager, "MOST_BYTES", 0)
    assert f"the model keeps {KEPT[kind]} from one call to the next" in refusal(built(kind))


class Touchy:
    """Raises if it is asked for what it does not have."""

    def __getattr__(self, name):
        raise RuntimeError(f"touched {name}")


class Mapped(dict):
    """Raises if somebody goes through it."""

    def items(self):
        raise RuntimeError("went through")


class Endless(tuple):
    """Raises if it is asked for its length, as the irreps of e3nn do."""

    def __len__(self):
        raise NotImplementedError


TOUCHY, MAPPED, FULL = Touchy(), Mapped(a=1), list(range(100_000))


def test_no_code_of_the_users_runs_to_look_at_what_is_kept():
    """Nor is a long list looked through; that it has grown is seen."""
    model = built(Net)
    model.touchy, model.later, model.full = TOUCHY, SimpleNamespace(), FULL
    model.endless = Endless([(8, [0])])
    with restoring(model) as changed:
        model.later.step = 1
        FULL.append(0)
        tuple.__getitem__(model.endless, 0)[1][0] = 1
        assert {"later", "full", "endless"} <= {*changed()}
    assert not vars(model.later) and len(FULL) == 100_000
    assert tuple.__getitem__(model.endless, 0) == (8, [0])


def test_names_of_holders():
    """Torch's own classes and files keep nothing of a model's."""
    names = {holder.name for holder in holders_of(built(InADict))}
    assert {"", "middle", "state", "InADict", "Net", "tests.support.odd_models"} <= names
    assert not any(name.startswith("torch") or name == "Module" for name in names)
