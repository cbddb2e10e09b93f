"""When a plan has compiled stages: asked for, refused, or chosen."""

import pytest
import torch
from torch import nn

import autopipe
from autopipe.errors import AutopipeError
from autopipe.frontend import model_file
from autopipe.planners.driver import refine
from tests.support.house import ROOT
from tests.support.pipes import ZOO
from tests.support.pipes import machine as processes

pytestmark = pytest.mark.usefixtures("traces_remembered")

GPUS = "1x2xA100-80GB"


def plan(cluster=GPUS, name="gpt", **asked):
    case = ZOO[name]
    asked = {"cluster": cluster, "batch_size": 8, **asked}
    return autopipe.plan(case.model, case.inputs, loss=case.loss, **asked)


@pytest.mark.long
def test_on_gpus_stages_are_compiled():
    made = plan()
    assert made.compiled and made.zero < 3
    assert not plan(compile=False).compiled


@pytest.mark.long
def test_processes_of_this_machine_compile_where_asked():
    assert not plan(processes(2), pp=2).compiled
    assert plan(processes(2), pp=2, compile=True).compiled


@pytest.mark.long
def test_zero_3_is_compiled_as_others_are():
    made = plan(zero=3, dp=2)
    assert (made.compiled, made.zero) == (True, 3)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 256, bias=False)

    def forward(self, x):
        return x + self.layer(x).relu()


def deep():
    """So many equal blocks that one gathered is little of all."""
    return nn.Sequential(*(Residual() for _ in range(16)))


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("tp", [1, 2])
def test_where_only_zero_3_fits_it_is_taken(tp):
    """Between four replicas it holds no less than ZeRO-1 of what is one bucket; between eight it
    does."""
    dp = 8
    shape = {"cluster": f"1x{tp * dp}xA100-80GB", "pp": 1, "tp": tp, "dp": dp}

    def planned(**asked):
        case = {"loss": lambda made, batch: made.square().mean(), "batch_size": 8}
        return autopipe.plan(deep, lambda rows: torch.ones(rows, 256), **case, **shape, **asked)

    sharded, free = planned(zero=3), planned()
    (stage,) = sharded.stages
    assert free.zero < 3 and free.prediction.step_seconds < sharded.prediction.step_seconds
    made = planned(memory=stage.predicted.memory.peak)
    assert (made.compiled, made.zero) == (True, 3)


class Scaled(nn.Module):
    """A scalar parameter, as the temperature of a contrastive loss."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(512, 512, bias=False), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return (self.layer(x) * self.scale).square().mean()


def test_a_model_with_a_scalar_is_sharded_too():
    mesh = {"cluster": GPUS, "batch_size": 8, "pp": 1, "dp": 2, "tp": 1, "micro_batches": 1}

    def scaled(**asked):
        return autopipe.plan(Scaled, lambda rows: {"x": torch.ones(rows, 512)}, **mesh, **asked)

    (stage,) = scaled(zero=3).stages
    assert stage.predicted.memory.parameters == 512 * 512 * 4 // 2 + 4


def compiled(build):
    """A plan of two compiled stages for a model that takes rows of eight numbers."""
    return autopipe.plan(
        build,
        lambda rows: {"input": torch.randn(rows, 8)},
        loss=lambda outputs, batch: outputs.square().mean(),
        cluster=processes(2),
        batch_size=8,
        pp=2,
        compile=True,
    )


def test_an_activation_in_place_keeps_a_copy_that_no_forward_reads():
    """Bug: a storage that no node saves ended the search with an IndexError."""

    def build():
        layers = (nn.Linear(8, 8), nn.SiLU(inplace=True))
        return nn.Sequential(*layers, *(nn.Linear(8, 8), nn.SiLU(inplace=True)), nn.Linear(8, 8))

    assert compiled(build).compiled


@pytest.mark.long  # asked for, it is refused
def test_an_lstm_is_not_compiled():
    assert not plan(name="lstm", precision="fp32").compiled


def test_asked_for_what_cannot_be():
    with pytest.raises(AutopipeError, match=r"and \S+: no compiler looks into aten.lstm"):
        plan(name="lstm", precision="fp32", compile=True)


class Counting(nn.Module):
    """Its rows are counted in Python: no trace of two rows holds for others."""

    def forward(self, x):
        return torch.stack([row * row for row in x])


def test_asked_for_where_a_part_runs_as_it_is():
    """The sentence has the user's own line, not the name that the part has in a graph."""
    with pytest.raises(AutopipeError) as refusal:
        compiled(lambda: nn.Sequential(nn.Linear(8, 8), Counting(), nn.Linear(8, 8)))
    said = str(refusal.value)
    assert said.startswith(
        "compiled stages were asked for, and 1 is not compiled, since it runs as"
    )
    assert "test_engines.py:" in said


@pytest.mark.long
def test_compiled_stages_keep_less():
    compiled, eager = (plan(pp=2, compile=way) for way in (True, False))
    for mine, its in zip(compiled.stages, eager.stages, strict=True):
        assert mine.predicted.memory.activations < its.predicted.memory.activations


def test_what_a_compiled_backward_makes_is_estimated(monkeypatch):
    """Gradients of the logits and of weights: without them the search would choose what does not
    fit, and search again. Which unit makes what is only guessed."""
    written = []

    def write(candidate, answer):
        written.append((candidate.counted().problem, answer.estimate.stages[0].memory))
        return original(candidate, answer)

    original = refine.write_plan
    monkeypatch.setattr(refine, "write_plan", write)
    (stage,) = plan(pp=1, dp=2, tp=1, micro_batches=2, compile=True).stages
    ((problem, estimated),) = written
    made = max(problem.profile(2).made)
    assert 0 < made < stage.predicted.memory.activations
    assert estimated.activations == pytest.approx(stage.predicted.memory.activations, rel=0.1)


@pytest.mark.long
def test_compiled_bf16_keeps_less_than_two_thirds_of_what_autocast_does():
    """The demo's GPT, a step of 32 rows on one device. Autocast has an fp32 residual stream, and
    keeps each matrix product's operands in 16 bits besides; without compiling, bf16 alone saves
    less: it still keeps what pointwise ops read."""
    demo = model_file.load(str(ROOT / "examples" / "gpt.py"))

    def kept(precision, compile):
        alone = {"pp": 1, "dp": 1, "tp": 1, "micro_batches": 1, "batch_size": 32}
        asked = {"cluster": processes(1), "precision": precision, "compile": compile, **alone}
        (stage,) = autopipe.plan(demo.model, demo.inputs, loss=demo.loss, **asked).stages
        return stage.predicted.memory.activations

    before = kept("bf16-autocast", False)
    assert kept("bf16", True) <= 0.62 * before
    assert kept("bf16", False) <= 0.9 * before
