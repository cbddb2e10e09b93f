"""States as JSON data: every schedule and optimizer of torch comes back as it was."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from autopipe import CheckpointError
from autopipe.planfile.placements import OwnRows
from autopipe.runtime.checkpoint import optimizer as states
from autopipe.runtime.checkpoint.layout import rows_of
from autopipe.runtime.checkpoint.plain import like, plain
from autopipe.runtime.checkpoint.stored import Stored
from tests.support.pipes import drawn, piped, planned

MODEL = "linear"


def through_json(present: Any, state: Any) -> Any:
    return like(present, json.loads(json.dumps(plain(state, "state"))))


@pytest.mark.parametrize(
    "value",
    [
        (1, [2.5, (True, None)], "word"),
        {3: 1, "a": {(1, 2): "pair"}},
        {"tensor": 5, "pairs": 6},
        {"lr": float("inf")},
        [],
    ],
    ids=str,
)
def test_a_value_comes_back(value: Any) -> None:
    assert through_json(value, value) == value


def test_a_tensor_comes_back() -> None:
    states = [torch.get_rng_state(), torch.tensor(0.1), torch.arange(6).view(2, 3).bfloat16()]
    for found, expected in zip(through_json(states, states), states, strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_what_has_no_words_is_refused() -> None:
    with pytest.raises(CheckpointError) as refused:
        plain({"a": [1, object()]}, "schedule")
    assert refused.value.message == "schedule.a[1] is a object, which a checkpoint cannot hold"


Make = Callable[[torch.optim.Optimizer], schedules.LRScheduler]
SCHEDULES: dict[str, Make] = {
    "steps": lambda o: schedules.MultiStepLR(o, [2, 3, 5], 0.5),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=9),
    "cosine, restarted": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "warm-up, then cosine": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=3), schedules.CosineAnnealingLR(o, 5)], [3]
    ),
    "a function": lambda o: schedules.LambdaLR(o, lambda step: 0.9**step),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on(name: str) -> None:
    """The rates of four steps, a new schedule from the state after them, and four more."""

    def made() -> tuple[torch.optim.Optimizer, schedules.LRScheduler]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
        return optimizer, SCHEDULES[name](optimizer)

    def rates(optimizer: torch.optim.Optimizer, schedule: schedules.LRScheduler) -> list[float]:
        found = []
        for _ in range(4):
            optimizer.step()
            schedule.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    optimizer, schedule = made()
    rates(optimizer, schedule)
    state, options = schedule.state_dict(), optimizer.param_groups[0].copy()
    again, other = made()
    other.load_state_dict(through_json(other.state_dict(), state))
    group = again.param_groups[0]
    group.update(
        {key: through_json(group[key], options[key]) for key in options if key != "params"}
    )
    assert rates(again, other) == rates(optimizer, schedule)


OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam", "Muon")
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on(name: str, tmp_path: Any) -> None:
    """Two steps, then one with the optimizer itself and one with another that was loaded."""
    pipe = piped(MODEL, planned(MODEL, 1, 1, 2))
    parameters = list(pipe.parameters())
    first, second = (OPTIMIZERS[name](parameters, lr=0.1) for _ in range(2))  # type: ignore[call-arg]
    for number in range(2):
        pipe.step(drawn(MODEL, 4, number))
        first.step()
    pipe.save(tmp_path / "kept", first)

    def third(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        pipe.step(drawn(MODEL, 4, 2))
        optimizer.step()
        return [parameter.detach().clone() for parameter in parameters]

    expected = third(first)
    pipe.load(tmp_path / "kept", second)
    assert all(map(torch.equal, third(second), expected))


def test_a_state_of_another_shape_needs_the_whole_parameter(tmp_path: Path) -> None:
    """Adafactor's means of rows are those of all columns: a rank with some of them has others."""
    pipe = piped(MODEL, planned(MODEL, 1, 1, 2))
    optimizer = torch.optim.Adafactor(pipe.parameters())
    pipe.step(drawn(MODEL, 4, 0))
    optimizer.step()
    pipe.save(tmp_path / "kept", optimizer)
    (folder,) = (tmp_path / "kept").iterdir()

    content = pipe.content(optimizer)
    first = OwnRows(0, 0, 1)
    part = {name: replace(own, pieces=rows_of(own.pieces, first)) for name, own in
            content.own.items()}  # fmt: skip
    with pytest.raises(CheckpointError, match="Adafactor keeps 'row_var' of the shape "):
        states.tensors(optimizer, content.named, part)
    with pytest.raises(CheckpointError, match=r"has 'row_var' of the shape .* it cannot be cut"):
        states.restore(optimizer, content.named, part, Stored.open(folder))


def test_one_number_may_have_a_dim(tmp_path: Path) -> None:
    """A count of steps that is `torch.zeros(1)` has the shape of no matrix."""
    pipe = piped(MODEL, planned(MODEL, 1, 1, 2))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for parameter in pipe.parameters():
        optimizer.state[parameter]["step"] = torch.full((1,), 3.0)
    pipe.step(drawn(MODEL, 4, 0))
    pipe.save(tmp_path / "kept", optimizer)
    again = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe.load(tmp_path / "kept", again)
    assert [state["step"].tolist() for state in again.state.values()] == [[3.0], [3.0]]


class Clocked(torch.optim.Optimizer):
    """It counts its steps beside all parameters, and keeps what `kept` makes of each."""

    def __init__(self, parameters: Any, kept: Any = lambda parameter: None) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.kept = kept

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it has overloads
        states: Any = self.state
        states.setdefault("clock", {"steps": 0})["steps"] += 1
        for parameter in self.param_groups[0]["params"]:
            state = states[parameter]
            state.setdefault("kept", self.kept(parameter))
            if isinstance(state["kept"], list):
                state["kept"][0].add_(1)
            parameter -= 0.1 * parameter.grad / states["clock"]["steps"]


def test_a_state_of_no_parameter_goes_on(tmp_path: Any) -> None:
    """Bug: it was lost without a word, and the run went on as another one."""
    pipe = piped(MODEL, planned(MODEL, 1, 1, 2))
    first, second = (
        Clocked(pipe.parameters(), lambda parameter: [torch.tensor(0.0), (1,)]) for _ in range(2)
    )
    for number in range(2):
        pipe.step(drawn(MODEL, 4, number))
        first.step()
    pipe.save(tmp_path / "kept", first)
    pipe.load(tmp_path / "kept", second)
    states: Any = second.state
    assert states["clock"] == {"steps": 2}
    pipe.step(drawn(MODEL, 4, 2))
    second.step()
    assert {s["kept"][0].item() for key, s in states.items() if key != "clock"} == {3.0}


def test_a_state_under_no_name_is_refused(tmp_path: Any) -> None:
    """Bug: `AttributeError: 'Tensor' object has no attribute 'items'`. torch's own state_dict has
    such a state."""
    pipe = piped(MODEL, planned(MODEL, 1, 1, 2))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    states: Any = optimizer.state
    name, parameter = next(iter(pipe.named_parameters()))
    states[parameter] = torch.zeros_like(parameter)
    pipe.step(drawn(MODEL, 4, 0))
    with pytest.raises(CheckpointError, match=rf"SGD.state\['{name}'\] is a Tensor, and a check"):
        pipe.save(tmp_path / "kept", optimizer)


class Wrapping(torch.optim.Optimizer):
    """It has another one make its steps, whose state it shares or not."""

    def __init__(self, parameters: Any, shares: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.Adam(self.param_groups)
        if shares:
            self.state = self.base.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it has overloads
        self.base.step()


class Telling(Wrapping):
    def state_dict(self) -> dict[str, Any]:
        return {"of the base": self.base.state_dict(), **super().state_dict()}


@pytest.mark.parametrize(
    ("kind", "shares", "found"),
    [
        (Wrapping, False, "holds another optimizer, Adam, in 'base', which has a state of its own"),
        (Telling, True, r"Telling.state_dict\(\) has 'of the base', and a checkpoint has what is"),
    ],
)
def test_an_optimizer_in_another_one(
    kind: type[Wrapping], shares: bool, found: str, tmp_path: Any
) -> None:
    """Bug: its moments were in no checkpoint, and a resumed run began with none."""
    pipe = piped(MODEL, planned(MODEL, 1, 1, 2))
    optimizer = kind(pipe.parameters(), shares)
    pipe.step(drawn(MODEL, 4, 0))
    optimizer.step()
    with pytest.raises(CheckpointError, match=found):
        pipe.save(tmp_path / "kept", optimizer)
    pipe.save(tmp_path / "kept", Wrapping(pipe.parameters(), shares=True))


def test_tensors_in_a_list_of_a_parameters_state(tmp_path: Any) -> None:
    """Bug: they were kept as one rank's bytes, and `load` made dicts of them."""
    pipe = piped(MODEL, planned(MODEL, 1, 1, 2))
    optimizer = Clocked(pipe.parameters(), lambda parameter: [torch.zeros_like(parameter)])
    pipe.step(drawn(MODEL, 4, 0))
    optimizer.step()
    with pytest.raises(CheckpointError, match="'kept'] is a list of tensors: no other plan could"):
        pipe.save(tmp_path / "kept", optimizer)
