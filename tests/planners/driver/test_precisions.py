"""The precision of a plan that nobody asked for one."""

import pytest
import torch
from torch import nn

import autopipe
from autopipe import ModelError
from autopipe.cluster.spec import LocalSpec, parse
from autopipe.planners.driver.precisions import in_the_first, usual_precisions

pytestmark = pytest.mark.usefixtures("traces_remembered")

GPUS = parse("1x2xA100-80GB")


def test_on_a_processor_it_is_fp32() -> None:
    said: list[str] = []
    layer = nn.Linear(2, 2)
    assert usual_precisions(LocalSpec(2, cpu=True), layer, said.append) == ("fp32",)
    assert said == []
    assert usual_precisions(GPUS, layer, said.append)[0] == "bf16"
    assert said == ["precision: bf16 with fp32 master weights; --precision asks for another"]
    assert usual_precisions(GPUS, layer.bfloat16(), said.append) == ("fp32",), "as it was built"


def test_of_gpus_without_bf16_fp16_is_named() -> None:
    said: list[str] = []
    volta = parse("1x2xV100-32GB")
    assert usual_precisions(volta, nn.Linear(2, 2), said.append) == ("fp32",)
    assert said == ["precision: fp32, as not all GPUs have bf16; --precision fp16 is quicker there"]


def test_the_first_precision_that_goes_is_taken_and_said_with_the_reason() -> None:
    def planned(precision: str) -> str:
        if precision == "bf16":
            raise ModelError("net.py:7: linear gets float32 and bfloat16", hint="cast it")
        return f"a plan in {precision}"

    said: list[str] = []
    usual = ("bf16", "bf16-autocast", "fp32")
    assert in_the_first(usual, planned, said.append) == "a plan in bf16-autocast"
    assert said == [
        "precision: bf16-autocast; in bf16 the model is refused: net.py:7: linear gets float32 and "
        "bfloat16; --precision bf16 says how to mend it"
    ]


def test_what_is_refused_alike_in_two_precisions_is_not_tried_in_a_third() -> None:
    tried = []

    def planned(precision: str) -> str:
        tried.append(precision)
        raise ModelError("net.py:9: the parameter has a hook")

    with pytest.raises(ModelError, match="has a hook"):
        in_the_first(("bf16", "bf16-autocast", "fp32"), planned, tried.append)
    assert tried == ["bf16", "bf16-autocast"]


class Zeros(nn.Module):
    """Begins with a state of zeros, which are of fp32 whatever its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.Linear(12, 6) for _ in range(3))
        self.out = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(x.shape[0], 6)
        for cell in self.cells:
            state = torch.tanh(cell(torch.cat([x, state], 1)))
        return self.out(state).square().mean()


class Spectrum(nn.Module):
    """Takes a Fourier transform of what a product gives, which no GPU does in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.fft.rfft(self.first(x)).abs()).square().mean()


@pytest.mark.parametrize(
    ("model", "goes"),
    [pytest.param(Zeros, "bf16-autocast", marks=pytest.mark.long), (Spectrum, "fp32")],
)
def test_a_model_that_does_not_go_in_bf16_is_planned_for_gpus(
    model: type[nn.Module], goes: str
) -> None:
    """Bug: the default refused every model in which fp32 meets a parameter of 16 bits."""

    def inputs(rows: int) -> tuple[torch.Tensor]:
        return (torch.ones(rows, 6),)

    said: list[str] = []
    plan = autopipe.plan(model, inputs, cluster=GPUS, batch_size=8, pp=2, say=said.append)
    assert plan.precision == goes
    assert any(line.startswith(f"precision: {goes}; in bf16 the model is ref") for line in said)
    with pytest.raises(ModelError):
        autopipe.plan(model, inputs, cluster=GPUS, batch_size=8, pp=2, precision="bf16")
    with pytest.raises(ModelError):  # which go with bf16 alone
        autopipe.plan(model, inputs, cluster=GPUS, batch_size=8, grad_dtype="bf16")
