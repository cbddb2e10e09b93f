"""What Python reads is a constant of a graph: a step is refused once something else changes it.

Plain PyTorch reads such a number in each step; what a model's own calls change, planning sees.
"""

import os
import sys
from argparse import Namespace
from collections import deque
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import autopipe
from autopipe import ModelError
from autopipe.runtime.script import unmoved
from autopipe.runtime.script.between import Between
from tests.support import phases
from tests.support.inprocess import machine
from tests.support.long import sampled
from tests.support.odd_models import Net, built, inputs, square

ANNEAL = {"beta": 0.0}
SCALE = torch.ones(())
CALLS = 0
KEPT = []


def piped(model, loss=square, **words):
    """A pipe of one rank, and a function that makes a step of it and gives its gradients."""
    one = {"cluster": machine(1), "batch_size": 4, "say": [].append}
    plan = autopipe.plan(model, inputs, loss=loss, **one, **words)
    pipe = autopipe.parallelize(model, plan, inputs=inputs, loss=loss)

    def step():
        pipe.step(inputs(4))
        return {name: p.grad.clone() for name, p in pipe.named_parameters()}

    return step


def kept(kind):
    """A `model()` that notes what it has built, as for `batches` to set something there."""

    def model():
        KEPT[:] = [built(kind)]
        return KEPT[0]

    return model


class Tempered(Net):
    tau = 1.0

    def inside(self, hidden):
        return self.middle(hidden) / self.tau


class Scaled(Net):
    def inside(self, hidden):
        return self.middle(hidden) * SCALE


class Logs(Net):
    def inside(self, hidden):
        if CALLS == 1_000_000:
            print("so many")
        return self.middle(hidden)


def annealed(outputs, batch):
    return square(outputs, batch) + ANNEAL["beta"] * outputs.square().mean()


def test_an_attribute_that_the_loop_of_a_script_sets() -> None:
    model = built(Tempered)
    step = piped(model)
    step()
    model.tau = 0.5
    with pytest.raises(
        ModelError, match=r"'tau' is another value than when .* aten.div.* 0.5"
    ) as e:
        step()
    assert "in the batch, as a tensor of no dims" in e.value.hint


def test_an_attribute_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    step = piped(lambda: built(Tempered))
    step()
    monkeypatch.setattr(Tempered, "tau", 0.5)
    with pytest.raises(ModelError, match="'Tempered.tau' is another value"):
        step()


def test_a_dict_of_the_file_that_the_loss_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    step = piped(lambda: built(Net), annealed)
    step()
    monkeypatch.setitem(ANNEAL, "beta", 0.5)
    with pytest.raises(ModelError, match="test_unmoved.ANNEAL' is another value"):
        step()


def test_a_tensor_of_the_file_that_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SCALE", torch.ones(()))
    step = piped(lambda: built(Scaled))
    step()
    SCALE.fill_(0.5)
    with pytest.raises(ModelError, match="test_unmoved.SCALE' is another value"):
        step()


@pytest.mark.parametrize("change", ["memory", "elements"])
def test_a_tensor_of_the_file_that_is_changed_through_data(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Bug: autograd counts no such write, and the graph went on with the old values."""
    monkeypatch.setitem(globals(), "SCALE", torch.ones(()))
    step = piped(lambda: built(Scaled))
    step()
    if change == "memory":
        SCALE.data = torch.tensor(0.5)
    else:
        SCALE.data.fill_(0.5)
    with pytest.raises(ModelError, match="test_unmoved.SCALE' is another value"):
        step()


def test_a_tensor_of_the_model_that_is_changed_through_data() -> None:
    class Masked(Net):
        def begin(self):
            self.mask = torch.ones(8)

        def inside(self, hidden):
            return self.middle(hidden) * self.mask

    model = built(Masked)
    step = piped(model)
    step()
    model.mask.data[:4] = 0
    with pytest.raises(ModelError, match="'mask' is another value"):
        step()


class Weighed(Net):
    def begin(self):
        self.array, self.queue, self.active = np.array([1.0, 0.5]), deque([1.0]), {"all"}
        self.scale_1 = 1.0

    def inside(self, hidden):
        hidden = self.middle(hidden) * float(self.array[0]) * self.queue[0]
        hidden = hidden if "all" in self.active else 2 * hidden
        return hidden * getattr(self, f"scale_{len(self.queue)}")


WRITES = {
    "array": lambda model: model.array.fill(0.25),
    "queue": lambda model: (model.queue.append(0.25), model.queue.popleft()),
    "active": lambda model: model.active.discard("all"),
    "scale_1": lambda model: setattr(model, "scale_1", 0.25),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_in_place_or_read_by_text(name: str) -> None:
    """Bug: an array, a deque and a set stay the same objects, and no code has the name of an
    attribute that it puts together."""
    model = built(Weighed)
    step = piped(model)
    step()
    WRITES[name](model)
    with pytest.raises(ModelError, match=f"'{name}' is another value"):
        step()


def test_a_list_that_is_a_default_of_the_loss() -> None:
    weights = [1.0]

    def loss(outputs, batch, own=weights):
        return square(outputs, batch) * own[0]

    step = piped(built(Net), loss)
    step()
    weights[0] = 0.5
    with pytest.raises(ModelError, match="loss' is another value"):
        step()


def test_a_tensor_that_is_made_anew_with_the_same_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """As once an epoch; it is no change that another trace would have to look at."""
    monkeypatch.setitem(globals(), "SCALE", torch.ones(()))
    step = piped(lambda: built(Scaled))
    first = step()
    for _ in range(3):
        monkeypatch.setitem(globals(), "SCALE", torch.ones(()))
        assert all(torch.equal(first[name], gradient) for name, gradient in step().items())
    monkeypatch.setitem(globals(), "SCALE", torch.full((), 0.5))
    with pytest.raises(ModelError, match="test_unmoved.SCALE' is another value"):
        step()


def test_a_phase_that_begins_with_an_epoch() -> None:
    """Bug: a value was looked at at its first, second, fourth change, and the fifth epoch trained
    on without its phase."""

    class Phased(Net):
        epoch = 0

        def inside(self, hidden):
            hidden = self.middle(hidden)
            return 2 * hidden if self.epoch >= 5 else hidden

    model = built(Phased)
    step = piped(model)
    for epoch in range(5):
        model.epoch = epoch
        step()
    model.epoch = 5
    with pytest.raises(ModelError, match="'epoch' is another value"):
        step()


def test_a_value_that_nobody_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: once the traces for a value that changes in each step had taken their time, steps
    trained on an old one without a word."""

    class Phased(Net):
        epoch = 0

        def inside(self, hidden):
            hidden = self.middle(hidden)
            return 2 * hidden if self.epoch >= 5 else hidden

    monkeypatch.setattr(unmoved, "SECONDS", 0.0)
    monkeypatch.setattr(unmoved, "SHARE", 0.0)
    model = built(Phased)
    step = piped(model)
    for epoch in range(2):  # looked at at its first and second change
        model.epoch = epoch
        step()
    model.epoch = 2
    with pytest.warns(UserWarning, match=r"'epoch' has changed 3 times, .* at change 4") as told:
        step()
    assert "hint: give what changes from step to step in the batch" in str(told[0].message)
    for epoch in (3, 4, 5, 6):  # said once
        model.epoch = epoch
        step()
    model.epoch = 7
    with pytest.raises(ModelError, match=r"the graph has the old one, and the 3 steps before, for"):
        step()


def weighed_by_a_rate(outputs, batch):
    rate = optimizer.param_groups[0]["lr"] if optimizer is not None else 0.1
    return square(outputs, batch) * rate


def weighed_by_a_schedule(outputs, batch):
    return square(outputs, batch) * (schedule.get_last_lr()[0] if schedule is not None else 0.1)


optimizer = schedule = None


@pytest.mark.parametrize("loss", [weighed_by_a_rate, weighed_by_a_schedule])
def test_a_rate_that_the_loss_reads(loss, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a loss that is weighed by the learning rate trained on with the first one. The optimizer
    is made after the pipe; while the rate stays, steps go on."""
    monkeypatch.setattr(sys.modules[__name__], "optimizer", None)
    step = piped(built(Net), loss)
    made = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    monkeypatch.setattr(sys.modules[__name__], "optimizer", made)
    made_too = torch.optim.lr_scheduler.StepLR(made, 1)
    monkeypatch.setattr(sys.modules[__name__], "schedule", made_too)
    step()
    step()
    made.step()
    made_too.step()
    name = "optimizer.param_groups" if loss is weighed_by_a_rate else "schedule._last_lr"
    with pytest.raises(
        ModelError, match=rf"{name}.* is another value than when .* aten.mul.* 0.01"
    ):
        step()


class Weighing:
    """A loss that is an object, and counts its steps elsewhere."""

    step = seen = 0

    def __init__(self):
        self.weights = [1.0, 0.5]

    def __call__(self, outputs, batch):
        return square(outputs, batch) * self.weight()

    def weight(self):
        return self.weights[self.step]

    def fit(self):
        self.seen += 1


NAMESPACE = Namespace(beta=1.0)


def by_namespace(outputs, batch):
    return square(outputs, batch) * NAMESPACE.beta


@cache
def cached():
    return NAMESPACE.beta


def by_cache(outputs, batch):
    return square(outputs, batch) * cached()


def by_another_file(outputs, batch):
    return square(outputs, batch) * phases.weight()


class Attributes(dict):
    __getattr__ = dict.__getitem__


CONFIGURED = Attributes(beta=1.0)


def by_attributes(outputs, batch):
    return square(outputs, batch) * CONFIGURED.beta


class Scheduled:
    def weight(self):
        return self.factor()


class ByNamespace(Scheduled):
    def factor(self):
        return NAMESPACE.beta


class ByAnotherFile(Scheduled):
    def factor(self):
        return phases.weight()


BY_NAMESPACE, BY_ANOTHER_FILE = ByNamespace(), ByAnotherFile()


def by_both(outputs, batch):
    return square(outputs, batch) * BY_NAMESPACE.weight() * BY_ANOTHER_FILE.weight()


def test_what_a_loss_reads_through_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: what methods of a loss that is an object read, functions of other files and functions in
    a cache, and what argparse has made, changed without a word."""
    weighing = Weighing()
    step = piped(built(Net), weighing)
    step()
    weighing.fit()
    step()
    weighing.step = 1
    with pytest.raises(ModelError, match="'Weighing.step' is another value"):
        step()
    cases = (
        (by_both, phases, "BETA"),
        (by_namespace, NAMESPACE, "beta"),
        (by_another_file, phases, "BETA"),
        (by_cache, NAMESPACE, "beta"),
        (by_both, NAMESPACE, "beta"),
    )
    for loss, target, name in sampled(cases, of=3):
        cached.cache_clear()
        with monkeypatch.context() as patched:
            step = piped(built(Net), loss)
            step()
            patched.setattr(target, name, 0.5)
            cached.cache_clear()
            with pytest.raises(ModelError, match="is another value than when"):
                step()
    step = piped(built(Net), by_attributes)
    step()
    monkeypatch.setitem(CONFIGURED, "beta", 0.5)
    with pytest.raises(ModelError, match="is another value than when"):
        step()


def test_steps_that_a_trainer_counts() -> None:
    """What no code of the loss reads is not traced for."""
    weighing = Weighing()
    between = Between(built(Net), weighing)
    weighing.fit()
    assert not between.moved()
    weighing.step = 1
    assert [one.name for one in between.moved()] == ["Weighing.step"]


def test_the_environment_that_the_loss_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(outputs, batch):
        return square(outputs, batch) * float(os.environ.get("AUTOPIPE_TEST_BETA", "1"))

    monkeypatch.setenv("AUTOPIPE_TEST_BETA", "1")
    step = piped(built(Net), loss)
    step()
    monkeypatch.setenv("AUTOPIPE_TEST_OTHER", "2")
    step()
    monkeypatch.setenv("AUTOPIPE_TEST_BETA", "0.5")
    with pytest.raises(ModelError, match=r"'os.environ.AUTOPIPE_TEST_BETA' is another value"):
        step()


def test_an_attribute_of_the_model_that_the_file_keeps() -> None:
    step = piped(kept(Tempered))
    step()
    KEPT[0].tau = 0.5
    with pytest.raises(ModelError, match="'tau' is another value"):
        step()


def test_what_is_not_in_the_graph_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count that forward asks for a log alone, dropout of no share, what nobody reads."""
    model = built(Logs)
    step = piped(model)
    first = step()
    for number in range(3):
        monkeypatch.setitem(globals(), "CALLS", number + 1)
        model.epoch = number
        again = step()
    assert all(torch.equal(again[name], gradient) for name, gradient in first.items())


def test_a_share_of_dropout_is_seen() -> None:
    class Dropped(Net):
        def begin(self):
            self.drop = nn.Dropout(0.0)

        def inside(self, hidden):
            return self.drop(self.middle(hidden))

    model = built(Dropped)
    step = piped(model)
    step()
    model.drop.p = 0.5
    with pytest.raises(ModelError, match="'drop.p' is another value"):
        step()


class Buffered(Net):
    def begin(self):
        self.register_buffer("scale", torch.ones(()))

    def inside(self, hidden):
        return self.middle(hidden) * self.scale


def test_a_buffer_may_be_written_and_not_be_another_tensor() -> None:
    """A run reads the buffers of the module that it was given, those that it had."""
    model = built(Buffered)
    step = piped(model)
    first = step()["up.weight"]
    model.scale.fill_(0.0)
    assert not step()["up.weight"].equal(first)
    model.scale = torch.ones(())
    with pytest.raises(ModelError, match="the buffer 'scale' is another tensor"):
        step()


def test_a_buffer_of_a_model_that_the_file_keeps_is_read_by_no_run() -> None:
    step = piped(kept(Buffered))
    step()
    KEPT[0].scale.fill_(0.0)
    with pytest.raises(ModelError, match="the buffer 'scale' was written in a model that"):
        step()


def test_a_weight_of_which_the_rank_trains_a_copy_may_not_be_written() -> None:
    """Bug: plain PyTorch trains on from what a script has written, and the copy did not change."""
    model = built(Net)
    step = piped(model)
    before = step()["up.weight"]
    model.down.weight.data.zero_()  # fp32 on one CPU: it is what the rank trains
    assert not step()["up.weight"].equal(before)

    model = built(Net)
    step = piped(model, precision="bf16", optimizer_dtype="bf16")
    step()
    model.down.weight.data.zero_()
    with pytest.raises(ModelError, match=r"'down.weight' was written .* trains a copy of it") as e:
        step()
    assert "pipe.named_parameters()" in e.value.hint
