"""The bytes a plan predicts are those that a run counts, stage by stage and kind by kind."""

import pytest
import torch

from autopipe.errors import ModelError
from autopipe.runtime.step.memory_meter import Meter
from autopipe.stages import step_programs
from tests.support.inprocess import ROWS, Cut, cut, run
from tests.support.long import chosen
from tests.support.zoo import ZOO

FLOAT = 4


def test_the_fullest_moment() -> None:
    """Of all kinds together, not of each kind by itself."""
    meter = Meter()
    meter.hold(0, "activations", 100)
    meter.hold(0, "transfers", 50)  # 150
    meter.hold(0, "activations", -100)
    meter.hold(0, "transfers", 60)  # 110
    assert meter.at_peak == {(0, "activations"): 100, (0, "transfers"): 50}
    assert meter.now == {(0, "activations"): 0, (0, "transfers"): 110}


def test_a_storage_is_counted_once_until_backward_lets_go() -> None:
    """sin(x) + cos(x) save x twice; x.exp() saves its result."""
    meter, x = Meter(), torch.ones(10, requires_grad=True)
    y = x * 1.0
    with meter.keeping(0, [x]):
        result = (y.sin() + y.cos() + x.exp()).sum()
    assert meter.now[0, "activations"] == (10 + 10) * FLOAT  # y, and exp(x)
    result.backward()
    del result
    assert meter.now[0, "activations"] == 0
    assert meter.at_peak[0, "activations"] == 20 * FLOAT


def test_what_is_written_over_is_told_as_without_a_meter() -> None:
    """Torch checks no versions where hooks save: the gradient was one of the new values."""
    meter, x = Meter(), torch.ones(10, requires_grad=True)
    with meter.keeping(0, [x]):
        result = x.sigmoid().add_(1.0).sum()
    with pytest.raises(ModelError, match="at version 1; expected version 0 instead"):
        result.backward()


def test_a_sparse_tensor_that_is_kept_counts_its_parts() -> None:
    """Bug: a rank died in its first step of "Cannot access storage of SparseTensorImpl"."""
    meter, x = Meter(), torch.ones(4, 2, requires_grad=True)
    graph = torch.eye(4).to_sparse()
    with meter.keeping(0, [x]):
        result = torch.sparse.mm(graph, x).sum()
    assert meter.now[0, "activations"] == 4 * FLOAT + 2 * 4 * 8  # values, and two indices each
    result.backward()
    assert torch.equal(x.grad, torch.ones(4, 2))


def test_owned_storages_are_somebody_elses() -> None:
    """A parameter, a received tensor, a row of the batch: and a view of one is it too."""
    meter, weight, x = Meter(), torch.ones(4, 4, requires_grad=True), torch.ones(8, 4)
    with meter.keeping(0, [weight, x]):
        _ = x[2:4] @ weight.t()
    assert meter.now.total() == 0


def test_a_view_counts_as_its_whole_storage() -> None:
    """As long as any part of it is needed, all of it is held."""
    meter, weight = Meter(), torch.ones(4, requires_grad=True)
    with meter.keeping(0, [weight]):
        whole = torch.ones(100, 4)
        kept = whole[:1] * weight
    assert meter.now[0, "activations"] == 400 * FLOAT
    kept.sum().backward()


@pytest.mark.parametrize("schedule", chosen(("1f1b", "gpipe"), now=("1f1b",)))
@pytest.mark.parametrize("micro_batches", [2, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("pp", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(
    "name",
    chosen(
        ("gpt", "unet", "lstm", "gpt2", "t5", "llama", "whisper", "picked"),
        now=("lstm", "gpt2", "picked"),
    ),
)
def test_predicted_is_measured(name: str, pp: int, micro_batches: int, schedule: str) -> None:
    """To the byte: the same walk over the same program, once on paper and once in the run."""
    for seed in (None, 1):
        held_as_predicted(cut(name, pp, seed), schedule, micro_batches)


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zb-v", "eager-1f1b"])
@pytest.mark.parametrize("name", chosen(("gpt", "unet", "gpt2"), now=("unet",)))
def test_predicted_is_measured_whatever_the_schedule(name: str, schedule: str) -> None:
    """With two stages on a rank, and with what W holds besides."""
    chunks = 2 if schedule in ("interleaved", "zb-v") else 1
    split = schedule.startswith("zb")
    held_as_predicted(cut(name, 4, split=split), schedule, 5, chunks=chunks)


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast"])
@pytest.mark.parametrize("recompute", [(), ("all",)])
@pytest.mark.parametrize("name", chosen(("gpt", "gpt2", "llama", "dropout"), now=("gpt2",)))
def test_predicted_is_measured_in_low_precision_and_with_blocks_that_run_again(
    name: str, recompute: tuple[str, ...], precision: str
) -> None:
    found = cut(name, 2, recompute=recompute, precision=precision)
    held_as_predicted(found, "1f1b", 4)


OPS = "layer_norm", "gelu", "scaled_dot_product_attention", "dropout", "mul", "silu"


@pytest.mark.parametrize(
    ("name", "more", "precision"),
    [
        ("dropout", (), "bf16-autocast"),
        *(
            pytest.param(name, more, precision, marks=pytest.mark.long)
            for name in ("gpt", "dropout", "llama")
            for more in ((), ("linear",))
            for precision in ("fp32", "bf16-autocast")
        ),
    ],
)
def test_predicted_is_measured_with_ops_that_run_again(
    name: str, more: tuple[str, ...], precision: str
) -> None:
    """And gradients are the same, bit by bit, dropout that is drawn a second time included."""
    usual = cut(name, 2, precision=precision)
    found = cut(name, 2, ops=(*OPS, *more), precision=precision)
    assert sum(found.rehearsal.saved) < sum(usual.rehearsal.saved)
    assert max(found.rehearsal.made) > 0
    held_as_predicted(found, "1f1b", 4)
    batch = ZOO[name].inputs(ROWS * 4)
    expected = run(usual, batch, micro_batches=4).gradients
    made = run(found, batch, micro_batches=4).gradients
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[parameter], expected[parameter]) for parameter in expected)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", ["dropout", "t5"])
def test_predicted_is_measured_with_attention_that_runs_again(name: str, schedule: str) -> None:
    """In one op, whose dropout is drawn a second time; and of ops one by one, noise in place."""
    split = schedule != "1f1b"
    usual = cut(name, 2, split=split)
    found = cut(name, 2, words=("attention",), split=split)
    assert sum(found.rehearsal.saved) < sum(cut(name, 2).rehearsal.saved)
    held_as_predicted(found, schedule, 4)
    batch = ZOO[name].inputs(ROWS * 4)
    expected = run(usual, batch, micro_batches=4, schedule=schedule).gradients
    made = run(found, batch, micro_batches=4, schedule=schedule).gradients
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[parameter], expected[parameter]) for parameter in expected)


def held_as_predicted(found: Cut, schedule: str, micro_batches: int, **shape: int) -> None:
    batch = ZOO[found.name].inputs(ROWS * micro_batches)
    made = run(found, batch, micro_batches=micro_batches, schedule=schedule, metered=True, **shape)
    programs = found.programs(schedule, micro_batches, **shape)
    predicted = step_programs.fullest_moments(programs, found.stages, found.rehearsal)
    for executor in made.executors:
        meter = executor.meter
        assert meter is not None
        for stage in executor.stages:
            for kind in ("activations", "transfers"):
                held = meter.at_peak[stage, kind]
                assert held == predicted[stage][0][kind], f"{found}: stage {stage}, {kind}"
        assert meter.now.total() == 0, f"{found}: something is still held"


def test_1f1b_holds_less_than_gpipe() -> None:
    """Stage s of p keeps p - s micro-batches, where GPipe keeps all of them."""
    batch = ZOO["gpt"].inputs(8 * ROWS)

    def kept(schedule: str) -> list[int]:
        made = run(cut("gpt", 2), batch, micro_batches=8, schedule=schedule, metered=True).executors
        meters = [executor.meter for executor in made]
        return [m.at_peak[stage, "activations"] for stage, m in enumerate(meters) if m is not None]

    one_each = cut("gpt", 2).rehearsal.saved[0]
    assert kept("1f1b")[0] == 2 * one_each
    assert kept("gpipe")[0] == 8 * one_each
