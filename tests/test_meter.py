"""The bytes a plan predicts are those that a run counts, stage by stage and kind by kind."""

import pytest
import torch

from autopipe import assemble
from autopipe.footprint import footprint
from autopipe.runtime.meter import Meter
from tests.inprocess import ROWS, cut, run
from tests.zoo import ZOO

FLOAT = 4


def test_the_fullest_moment() -> None:
    """Of all kinds together, not of each kind by itself."""
    meter = Meter()
    meter.hold("activations", 100)
    meter.hold("transfers", 50)  # 150
    meter.hold("activations", -100)
    meter.hold("transfers", 60)  # 110
    assert meter.at_peak == {"activations": 100, "transfers": 50}
    assert meter.now == {"activations": 0, "transfers": 110}


def test_a_storage_is_counted_once_until_backward_lets_go() -> None:
    """sin(x) + cos(x) save x twice; x.exp() saves its result."""
    meter, x = Meter(), torch.ones(10, requires_grad=True)
    y = x * 1.0
    with meter.keeping([x]):
        result = (y.sin() + y.cos() + x.exp()).sum()
    assert meter.now["activations"] == (10 + 10) * FLOAT  # y, and exp(x)
    result.backward()
    del result
    assert meter.now["activations"] == 0
    assert meter.at_peak["activations"] == 20 * FLOAT


def test_owned_storages_are_somebody_elses() -> None:
    """A parameter, a received tensor, a row of the batch: and a view of one is it too."""
    meter, weight, x = Meter(), torch.ones(4, 4, requires_grad=True), torch.ones(8, 4)
    with meter.keeping([weight, x]):
        _ = x[2:4] @ weight.t()
    assert meter.now.total() == 0


def test_a_view_counts_as_its_whole_storage() -> None:
    """As long as any part of it is needed, all of it is held."""
    meter, weight = Meter(), torch.ones(4, requires_grad=True)
    with meter.keeping([weight]):
        whole = torch.ones(100, 4)
        kept = whole[:1] * weight
    assert meter.now["activations"] == 400 * FLOAT
    kept.sum().backward()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("micro_batches", [2, 8])
@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("name", ["gpt", "unet", "lstm", "gpt2", "t5", "llama", "whisper"])
def test_predicted_is_measured(name: str, pp: int, micro_batches: int, schedule: str) -> None:
    """To the byte: the same walk over the same program, once on paper and once in the run."""
    for seed in (None, 1):
        split = cut(name, pp, seed)
        batch = ZOO[name].inputs(ROWS * micro_batches)
        made = run(split, batch, micro_batches=micro_batches, schedule=schedule, metered=True)
        programs = split.programs(schedule, micro_batches)
        for executor, program in zip(made.executors, programs, strict=True):
            stage, meter = executor.stage, executor.meter
            kept = split.rehearsal.saved[stage.index]
            sizes = assemble.sizes(stage, split.rehearsal.boundaries, kept)
            predicted = footprint(program, sizes)
            assert meter is not None
            assert +meter.at_peak == +predicted, f"{split}: stage {stage.index}"
            assert meter.now.total() == 0, f"{split}: stage {stage.index} still holds something"


def test_1f1b_holds_less_than_gpipe() -> None:
    """Stage s of p keeps p - s micro-batches, where GPipe keeps all of them."""
    batch = ZOO["gpt"].inputs(8 * ROWS)

    def kept(schedule: str) -> list[int]:
        made = run(cut("gpt", 2), batch, micro_batches=8, schedule=schedule, metered=True).executors
        return [e.meter.at_peak["activations"] for e in made if e.meter is not None]

    one_each = cut("gpt", 2).rehearsal.saved[0]
    assert kept("1f1b")[0] == 2 * one_each
    assert kept("gpipe")[0] == 8 * one_each
