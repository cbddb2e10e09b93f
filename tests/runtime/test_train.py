"""The loop of `autopipe run`, in one process: how long it goes on, and by which optimizer."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autopipe
from autopipe import ModelError
from autopipe.errors import CheckpointError
from autopipe.runtime.keeping import Keeping
from autopipe.runtime.telemetry.destinations import Destinations
from autopipe.runtime.train import Measured, train
from tests.support.trained import FINITE, Load, run

# --- how long


def test_the_losses_are_those_of_a_plain_loop(load: Load) -> None:
    pipe, file = load("def optimizer(parameters): return torch.optim.SGD(parameters, lr=0.1)\n")
    measured, _ = run(pipe, file, 4)
    torch.manual_seed(0)
    plain = file.model()
    assert file.optimizer is not None and file.loss is not None
    optimizer = file.optimizer(plain.parameters())
    for batch, loss in zip(file.stream(8, 0, 1, 0), measured.losses, strict=False):
        expected = file.loss(plain(batch["input"]), batch)
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    assert len(measured.losses) == 4


def test_gradients_are_clipped_as_the_file_says(load: Load, tmp_path: Path) -> None:
    """By the norm of all of them together, as in a plain loop; the norm is among the metrics."""
    pipe, file = load(
        "max_grad_norm = 0.01\n"
        "def optimizer(parameters): return torch.optim.SGD(parameters, lr=10.0)\n"
    )
    told = tmp_path / "metrics.jsonl"
    measured = train(pipe, file, 3, print, metrics=Destinations(file=told))
    torch.manual_seed(0)
    plain = file.model()
    assert file.optimizer is not None and file.loss is not None
    optimizer = file.optimizer(plain.parameters())
    lines = map(json.loads, told.read_text().splitlines())
    for batch, loss, line in zip(file.stream(8, 0, 1, 0), measured.losses, lines, strict=False):
        expected = file.loss(plain(batch["input"]), batch)
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        optimizer.zero_grad()
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        assert line["grad_norm"] == pytest.approx(float(norm), rel=1e-5) and norm > 0.01
        optimizer.step()


def test_a_norm_that_is_none(load: Load) -> None:
    with pytest.raises(ModelError, match="max_grad_norm is 0, expected a number above 0"):
        load("max_grad_norm = 0\n")


def test_a_plateau_is_one_of_the_losses(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    """The scheduler that asks for a metric gets the loss of the step, the same on every rank."""
    pipe, file = load(
        "class Told(torch.optim.lr_scheduler.ReduceLROnPlateau):\n"
        "    def step(self, metrics): print('seen', metrics); super().step(metrics)\n"
        "def scheduler(optimizer): return Told(optimizer)\n"
    )
    measured, _ = run(pipe, file, 3)
    seen = [line for line in capsys.readouterr().out.splitlines() if line.startswith("seen ")]
    assert seen == [f"seen {loss}" for loss in measured.losses]


def test_a_scheduler_is_stepped_with_the_optimizer(load: Load) -> None:
    """Rates 0.1, 0.05, 0.025, ...: those of a plain loop, and not one of them twice."""
    pipe, file = load(
        "def optimizer(parameters): return torch.optim.SGD(parameters, lr=0.1)\n"
        "def scheduler(optimizer): return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)\n"
    )
    measured, _ = run(pipe, file, 4)
    torch.manual_seed(0)
    plain = file.model()
    assert file.loss is not None
    for number, batch in zip(range(4), file.stream(8, 0, 1, 0), strict=False):
        expected = file.loss(plain(batch["input"]), batch)
        assert measured.losses[number] == pytest.approx(expected.item(), rel=1e-6)
        plain.zero_grad()
        expected.backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= 0.1 * 0.5**number * parameter.grad  # type: ignore[operator]


def test_finite_batches_end_the_run(load: Load) -> None:
    pipe, file = load(FINITE.format(steps=3))
    assert len(run(pipe, file, None)[0].losses) == 3
    assert len(run(pipe, file, 2)[0].losses) == 2
    assert len(run(pipe, file, 9)[0].losses) == 3


def test_batches_that_draw_from_the_global_seed_are_the_same_in_each_run(load: Load) -> None:
    """So are they then on each rank."""
    pipe, file = load(
        "seen = []\n"
        "def batches(batch_size):\n"
        "    for _ in range(2):\n"
        "        seen.append(inputs(batch_size))\n"
        "        yield seen[-1]\n"
    )
    assert file.batches is not None
    seen = file.batches.__globals__["seen"]
    for seed in (5, 5, 6):
        torch.rand(seed)  # whatever was drawn before
        pipe.seed = seed
        run(pipe, file, None)
    one, two, again_one, again_two, other, _ = (batch["input"] for batch in seen)
    assert torch.equal(one, again_one) and torch.equal(two, again_two)
    assert not torch.equal(one, two) and not torch.equal(one, other)


SHUFFLED = """
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, n): return {k: v[0] + n for k, v in inputs(1).items()}


batches = torch.utils.data.DataLoader(Rows(), batch_size=8, shuffle=True)
"""


def test_a_run_goes_on_with_the_seed_that_it_began_with(load: Load, tmp_path: Path) -> None:
    """Its batches were once those of the command's seed: shuffled anew, some rows came twice."""

    def losses(steps: int, saving: Keeping | None, seed: int = 0) -> tuple[float, ...]:
        pipe, file = load(SHUFFLED)
        pipe.seed = seed
        return train(pipe, file, steps, print, saving=saving).losses

    undisturbed = losses(4, None, seed=5)
    kept = Keeping(tmp_path / "kept")
    assert losses(2, kept, seed=5) == undisturbed[:2]
    with pytest.raises(CheckpointError, match="--seed 6: .* began with --seed 5"):
        losses(4, replace(kept, resume=True, seed=6))
    assert losses(4, replace(kept, resume=True)) == undisturbed[2:]


def test_a_run_goes_on_from_what_a_script_has_saved(load: Load, tmp_path: Path) -> None:
    """Bug: `KeyError: 'position'`. A script's batches are not known; all else goes on."""
    pipe, file = load(SHUFFLED)
    optimizer = file.make_optimizer(pipe.named_parameters(), "adamw")
    pipe.step(file.inputs(8))
    optimizer.step()
    pipe.save(tmp_path / "kept", optimizer)
    said: list[str] = []
    pipe, file = load(SHUFFLED)
    saving = Keeping(tmp_path / "kept", resume=True)
    assert len(train(pipe, file, 3, said.append, saving=saving).losses) == 2
    assert pipe.steps == 3 and not any("ended after" in line for line in said)
    assert "pipe.save, which knows no batches: the run begins with the first" in said[1]


COUNTING = """
class Slower(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.count, self.rates = 0, [None, None]

    def step(self, closure=None):
        self.count += 1
        self.rates[self.count % 2] = 0.1 / self.count
        self.param_groups[0]["lr"] = self.rates[self.count % 2]
        super().step(closure)

def optimizer(parameters): return Slower(parameters)
"""


def test_numbers_in_an_optimizers_attributes_go_on(load: Load, tmp_path: Path) -> None:
    """Bug: a resumed run counted its steps from 0, and trained by other rates without a word."""

    def losses(steps: int, saving: Keeping | None) -> tuple[float, ...]:
        pipe, file = load(SHUFFLED + COUNTING)
        return train(pipe, file, steps, print, saving=saving).losses

    undisturbed = losses(4, None)
    kept = Keeping(tmp_path / "kept")
    assert losses(2, kept) == undisturbed[:2]
    assert losses(4, replace(kept, resume=True)) == undisturbed[2:]


AVERAGING = """
class Lookahead(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p, slow in self.slow.items(): p.copy_(slow.lerp_(p, 0.5))

def optimizer(parameters):
    made = Lookahead(parameters, lr=0.1)
    made.slow = {p: p.detach().clone() for p in made.param_groups[0]["params"]}
    return made
"""


def test_tensors_in_an_optimizers_attributes(load: Load, tmp_path: Path) -> None:
    """Bug: a resumed run went on with the first weights in their place. The first step tells."""
    pipe, file = load(AVERAGING)
    losses = train(pipe, file, 3, print).losses
    assert len(losses) == 3, "without a checkpoint it trains"
    pipe, file = load(AVERAGING)
    with pytest.raises(CheckpointError, match="Lookahead keeps tensors in its attribute 'slow'"):
        train(pipe, file, 3, print, saving=Keeping(tmp_path / "kept"))
    assert pipe.steps == 1


KEPT_ELSEWHERE = """
import collections, random
class Late:
    count = 0
class Slower(torch.optim.SGD):
    def step(self, closure=None):
        {step}
        return super().step(closure)

def optimizer(parameters):
    made = Slower(parameters, lr=0.1)
    made.kept = {kept}
    return made
"""


@pytest.mark.parametrize(
    ("kept", "step", "kind"),
    [
        ("collections.Counter()", "self.kept[p0(self)] += 1", "Counter"),
        ("{}", "self.kept[id(p0(self))] = 1", "dict"),
        ("collections.deque(maxlen=2)", "self.kept.append(0.1)", "deque"),
        ("Late()", "self.kept.count += 1", "Late"),
        ("[Late()]", "self.kept[0].count += 1", "list"),
        ("random.Random(0)", "self.kept.random()", "Random"),
        ("torch.Generator()", "torch.rand(1, generator=self.kept)", "Generator"),
    ],
)
def test_numbers_that_no_checkpoint_of_attributes_holds(
    kept: str, step: str, kind: str, load: Load, tmp_path: Path
) -> None:
    """Bug: a resumed run began anew with each of them without a word."""
    text = KEPT_ELSEWHERE.replace("{kept}", kept).replace("{step}", step)
    text += "\ndef p0(optimizer): return optimizer.param_groups[0]['params'][0]\n"
    pipe, file = load(text)
    with pytest.raises(CheckpointError) as error:
        train(pipe, file, 3, print, saving=Keeping(tmp_path / "kept"))
    assert error.value.message.startswith(
        f"Slower keeps numbers in its attribute 'kept' ({kind}), and its steps change them: "
    )
    assert pipe.steps == 1


def test_what_steps_do_not_change_is_no_matter(load: Load, tmp_path: Path) -> None:
    text = KEPT_ELSEWHERE.replace("{kept}", "[Late(), {Late: 3}, {1, 2}]").replace("{step}", "pass")
    pipe, file = load(text)
    assert len(train(pipe, file, 3, print, saving=Keeping(tmp_path / "kept")).losses) == 3


def test_no_batch_at_all(load: Load) -> None:
    pipe, file = load(FINITE.format(steps=0))
    assert run(pipe, file, None) == (Measured((), 0.0, ()), [])


# --- a loss that is no number


WRONG = """
def optimizer(parameters): return torch.optim.SGD(parameters, lr=1e-3)

def batches(batch_size):
    for step in range(5):
        yield {"input": torch.full((batch_size, 6), float("nan") if step == 2 else 1.0),
               "target": torch.zeros(batch_size, 1)}
"""


def test_a_loss_that_is_no_number_ends_the_run(load: Load) -> None:
    """Before the update: the weights are those of the last good step."""
    pipe, file = load(WRONG)
    with pytest.raises(autopipe.ModelError) as refused:
        run(pipe, file, 5)
    assert re.fullmatch(
        r"step 3: the loss is nan, after \d\.\d{3,} in step 2\n"
        "hint: a lower learning rate, or a look at this step's batch; --keep-going trains on",
        str(refused.value),
    )
    assert all(parameter.isfinite().all() for parameter in pipe.parameters())


def test_a_loss_that_is_no_number_is_said_once(load: Load) -> None:
    pipe, file = load(WRONG)
    said: list[str] = []
    measured = train(pipe, file, 5, said.append, keep_going=True, quiet=True)
    assert len(measured.losses) == 5
    (line,) = said
    assert line.startswith("step 3: the loss is nan, after 0.")


# --- the optimizer


BY_NAME = """
def optimizer(named_parameters):
    named = dict(named_parameters)
    seen.append([*named])
    decay = [p for name, p in named.items() if name.endswith("weight")]
    rest = [p for name, p in named.items() if not name.endswith("weight")]
    groups = [{"params": decay, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=0.1)

seen = []
"""


def test_weight_decay_by_name(load: Load) -> None:
    pipe, file = load(BY_NAME)
    run(pipe, file, 2)
    torch.manual_seed(0)
    plain = file.model()
    assert file.loss is not None and file.by_name is not None
    optimizer = file.by_name(plain.named_parameters())
    for batch in [*zip(range(2), file.stream(8, 0, 1, 0), strict=False)]:
        optimizer.zero_grad()
        file.loss(plain(batch[1]["input"]), batch[1]).backward()
        optimizer.step()
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter, plain.get_parameter(name))


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_an_optimizer_that_the_plan_names(name: str, load: Load) -> None:
    """It once was AdamW, whatever the plan had been made for."""
    pipe, file = load("", optimizer=name)
    made = file.make_optimizer(pipe.named_parameters(), pipe.plan.optimizer)
    assert type(made).__name__.lower() == name


def test_the_default_optimizer_is_adamw(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = torch.optim.AdamW

    def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(len(parameters))
        return original(parameters)

    pipe, file = load("")
    monkeypatch.setattr(torch.optim, "AdamW", adamw)
    run(pipe, file, 1)
    assert made == [4]
