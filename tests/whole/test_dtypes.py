"""A model of 16 or 64 bits is taken at its word: counted so, and split without changing a bit."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autopipe.stages import step_programs
from tests.support.inprocess import ROWS, cut, micro_batch, run
from tests.support.zoo import ZOO, Batch, Case

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def case(name: str, dtype: torch.dtype) -> Case:
    """A model of the zoo that ends in `.to(dtype)`, its loss in whatever it likes."""
    given = ZOO[name]

    def inputs(rows: int) -> Batch:
        batch = given.inputs(rows)
        assert isinstance(batch, dict)
        return {k: t.to(dtype) if t.is_floating_point() else t for k, t in batch.items()}

    return replace(given, build=lambda: given.build().to(dtype), inputs=inputs)


@pytest.fixture(autouse=True)
def in_the_zoo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in ("gpt", "unet", "llama"):
        for word, dtype in DTYPES.items():
            monkeypatch.setitem(ZOO, f"{name} in {word}", case(name, dtype))
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("gpt in bf16", "1f1b"),
        ("gpt in fp64", "zb-h1"),
        *(
            pytest.param(name, schedule, marks=pytest.mark.long)
            for name, schedule in (
                ("unet in fp16", "1f1b"),
                ("gpt in fp16", "1f1b"),
                ("gpt in fp64", "1f1b"),
                ("unet in bf16", "1f1b"),
                ("unet in fp64", "1f1b"),
                ("llama in bf16", "1f1b"),
                ("gpt in bf16", "zb-h1"),
            )
        ),
    ],
)
def test_it_computes_what_one_process_does_and_holds_what_was_counted(
    name: str, schedule: str
) -> None:
    """Losses and gradients bit by bit, activations and transfers byte by byte."""
    found, given, count = cut(name, 2, split=schedule == "zb-h1"), ZOO[name], 3
    batch = given.inputs(ROWS * count)
    made = run(found, batch, micro_batches=count, schedule=schedule, metered=True)

    model = given.model()
    for k in range(count):
        loss = given.eager(model, micro_batch(found, batch, k))
        assert isinstance(loss, Tensor)
        loss.backward(torch.full_like(loss, 1 / count))
        assert torch.equal(made.losses[k][0], loss)
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert made.gradients.keys() == expected.keys()
    for parameter, gradient in expected.items():
        assert made.gradients[parameter].dtype == gradient.dtype
        assert torch.equal(made.gradients[parameter], gradient), parameter

    if name == "gpt in fp64" and torch.__version__ < "2.13":
        return  # fake tensors keep the sums of attention in fp32 there, at any precision
    programs = found.programs(schedule, count)
    predicted = step_programs.fullest_moments(programs, found.stages, found.rehearsal)
    for executor in made.executors:
        assert executor.meter is not None
        for stage in executor.stages:
            for kind in ("activations", "transfers"):
                assert executor.meter.at_peak[stage, kind] == predicted[stage][0][kind]
