"""`precision="bf16"`: plain PyTorch in bf16 with fp32 master weights, and close to fp32."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopipe
from autopipe import Pipe, Plan
from tests.support import masters, pipes
from tests.support.inprocess import machine
from tests.support.long import LONG
from tests.support.models import WIDTH
from tests.support.pipes import planned, rows_of
from tests.support.remembered import traces_remembered
from tests.support.zoo import ZOO, Case, noise

MICRO_BATCHES = 2


def piped(name: str, precision: str, **words: str) -> Pipe:
    """A model of the zoo in one process, in micro-batches of two rows."""
    return pipes.piped(name, planned(name, 1, 1, MICRO_BATCHES, precision=precision, **words))


def parts(batch: Any) -> list[Any]:
    return [rows_of(batch, 2 * k, 2 * k + 2) for k in range(MICRO_BATCHES)]


MODELS = ("gpt", "unet", "llama", "mask", "frozen", "keywords")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NOW = (("gpt", "bf16"), ("frozen", "fp16"))
"""The others in the long run."""


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(*case, marks=() if case in NOW else pytest.mark.long)
        for case in product(MODELS, DTYPES)
    ],
)
def test_gradients_are_those_of_plain_torch(name: str, precision: str) -> None:
    """Bit by bit, added in fp32; parameters that are frozen are held in 16 bits alone."""
    case, dtype = ZOO[name], DTYPES[precision]
    pipe, batch = piped(name, precision), case.inputs(2 * MICRO_BATCHES)
    scale = pipe.loss_scale.scale if pipe.loss_scale is not None else 1.0
    expected = masters.step(case, case.model(), dtype, parts(batch), scale)
    mean = sum(expected.losses, torch.zeros(())) / MICRO_BATCHES
    assert torch.equal(pipe.step(batch), mean.to(expected.losses[0].dtype))
    for key, parameter in pipe.named_parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else dtype), key
        assert (parameter.grad is None) == (key not in expected.gradients), key
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, expected.gradients[key]), key


def test_gradients_summed_in_16_bits_are_those_of_plain_torch() -> None:
    """In each of two steps; what the optimizer gets is in fp32 again, as the masters are."""
    case, dtype = ZOO["gpt"], torch.bfloat16
    pipe, batch = piped("gpt", "bf16", grad_dtype="bf16"), case.inputs(4)
    expected = masters.step(case, case.model(), dtype, parts(batch), summed=dtype)
    for _ in range(2):
        pipe.step(batch)
        for key, parameter in pipe.named_parameters():
            assert parameter.grad is not None and parameter.grad.dtype == torch.float32, key
            assert torch.equal(parameter.grad, expected.gradients[key]), key


def test_an_optimizer_of_16_bits_changes_parameters_of_16_bits() -> None:
    """No master weights: parameters, gradients and moments are those of `model.bfloat16()`."""
    case, dtype = ZOO["gpt"], torch.bfloat16
    pipe, batch = piped("gpt", "bf16", optimizer_dtype="bf16"), case.inputs(4)
    plain = case.model().to(dtype)
    optimizers = [torch.optim.AdamW(of.parameters()) for of in (pipe, plain)]
    for _ in range(2):
        pipe.step(batch)
        expected = masters.step(case, plain, dtype, parts(batch), summed=dtype)
        for name, parameter in plain.named_parameters():
            parameter.grad = expected.gradients[name].to(dtype)
        for optimizer in optimizers:
            optimizer.step()
    own = dict(plain.named_parameters())
    for name, parameter in pipe.named_parameters():
        assert parameter.dtype == dtype and torch.equal(parameter, own[name]), name
        assert optimizers[0].state[parameter]["exp_avg"].dtype == dtype


@pytest.mark.long
def test_training_follows_fp32() -> None:
    """The losses of 200 steps, by default 25, each within two percent."""
    case, found = ZOO["gpt"], dict[str, list[float]]()
    batch = case.inputs(2 * MICRO_BATCHES)
    for precision in ("fp32", "bf16"):
        pipe = piped("gpt", precision)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
        found[precision] = []
        for _ in range(200 if LONG else 25):
            found[precision].append(float(pipe.step(batch)))
            optimizer.step()
    wide, low = (torch.tensor(losses) for losses in found.values())
    assert low[-1] < (0.1 if LONG else 0.5) * low[0]
    # Near zero two percent of the loss are nothing: of what has been learnt, then.
    assert ((low - wide).abs() <= 0.02 * wide.clamp_min(0.02 * wide[0])).all()


class Slope(nn.Module):
    """x [b, WIDTH] -> the mean of x weighted; each step moves each weight by as much."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x.abs() * self.weight).sum(1).mean()


def test_a_step_that_bf16_does_not_resolve_is_made() -> None:
    """1 - 2**-12 is 1 in bf16; 64 such steps are 1 - 2**-6, which is not."""
    case = Case(Slope, lambda rows: {"x": torch.ones_like(noise(rows, WIDTH))})
    options: Any = {"cluster": machine(1), "batch_size": 2 * MICRO_BATCHES, "precision": "bf16"}
    plan = autopipe.plan(Slope, case.inputs, micro_batches=MICRO_BATCHES, **options)
    pipe = autopipe.parallelize(Slope(), plan)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=2**-12)
    losses = []
    for _ in range(65):
        losses.append(float(pipe.step(case.inputs(2 * MICRO_BATCHES))))
        optimizer.step()
    (weight,) = pipe.parameters()
    assert torch.equal(weight, torch.full((WIDTH,), 1 - 65 * 2**-12))
    assert losses[1] == losses[0] and losses[-1] == WIDTH * (1 - 2**-6)


def test_a_plan_says_what_it_is_in() -> None:
    """bf16 on GPUs that have it; a model of 16 bits, other GPUs and CPUs are left as they are."""
    case = ZOO["frozen"]

    def precision(cluster: object, model: Any = case.model) -> str:
        mesh: Any = {"pp": 2, "dp": 1, "tp": 1, "micro_batches": 4, "compile": False}
        options: Any = {"cluster": cluster, "loss": case.loss, "batch_size": 8, **mesh}
        plan: Plan = autopipe.plan(model, case.inputs, **options)
        return plan.precision

    with traces_remembered():
        assert precision("1x2xA100-80GB") == "bf16"
        assert precision("1x2xV100-32GB") == precision(machine(2)) == "fp32"
    assert precision("1x2xA100-80GB", case.model().to(torch.bfloat16)) == "fp32"
