"""Loss scaling, with torch's own GradScaler as the oracle."""

import pytest
import torch
from torch import nn

from autopipe.errors import ModelError
from autopipe.runtime.parameters.loss_scale import BACKOFF, GROWTH, INITIAL, INTERVAL, LossScale


def parameter(gradient: list[float]) -> nn.Parameter:
    made = nn.Parameter(torch.ones(len(gradient)))
    made.grad = torch.tensor(gradient)
    return made


def test_a_good_step_divides_by_the_scale() -> None:
    """A power of two: the gradient that comes back is the one that went in, bit for bit."""
    plain, loss_scale = torch.randn(100), LossScale()
    weight = nn.Parameter(torch.ones(100))
    weight.grad = plain * loss_scale.scale
    assert loss_scale.unscale([weight])
    assert torch.equal(weight.grad, plain)
    assert loss_scale == LossScale(INITIAL, good_steps=1)


@pytest.mark.parametrize("broken", [torch.inf, -torch.inf, torch.nan])
def test_an_overflow_drops_every_gradient_and_halves_the_scale(broken: float) -> None:
    weights = [parameter([1.0, 2.0]), parameter([0.0, broken]), parameter([3.0])]
    loss_scale = LossScale(good_steps=7)
    assert not loss_scale.unscale(weights)
    assert [weight.grad for weight in weights] == [None, None, None]
    assert loss_scale == LossScale(INITIAL / 2, good_steps=0)


def test_gradients_that_are_finite_at_no_scale() -> None:
    """Bug: a nan in backward was an overflow in each step, and a run ended as it had begun."""
    loss_scale = LossScale()
    with pytest.raises(ModelError, match="not finite in fp16 at a loss scale of 6e-08 either"):
        for halved in range(1, 42):  # from 2^16 to 2^-25
            loss_scale.unscale([parameter([torch.nan])])
            assert loss_scale.scale == 2.0 ** (16 - halved)


def test_large_entries_are_no_overflow() -> None:
    """Their sum would be infinite in fp32; none of them is."""
    assert LossScale().unscale([parameter([3e38, 3e38])])


def test_a_shard_may_have_no_rows() -> None:
    """Of a parameter of one row, one of two replicas holds none."""
    weights = [parameter([]), parameter([2.0])]
    assert LossScale(scale=2.0).unscale(weights)
    assert weights[1].grad == torch.tensor([1.0])
    assert not LossScale().unscale([parameter([]), parameter([torch.inf])])


def test_the_scale_grows_after_enough_good_steps_in_a_row() -> None:
    loss_scale = LossScale(scale=4.0)
    for _ in range(INTERVAL):
        assert loss_scale.scale == 4.0
        loss_scale.unscale([parameter([1.0])])
    assert loss_scale == LossScale(8.0, good_steps=0)


def test_the_numbers_are_those_of_torchs_scaler() -> None:
    """The same good steps and overflows, one after another, with growth every third good step."""
    torchs = torch.amp.GradScaler(
        "cpu",
        init_scale=INITIAL,
        growth_factor=GROWTH,
        backoff_factor=BACKOFF,
        growth_interval=INTERVAL,
    )
    assert torchs.get_growth_interval() == torch.amp.GradScaler("cpu").get_growth_interval()
    ours = LossScale(good_steps=INTERVAL - 3)
    torchs.scale(torch.ones(()))  # makes the scale, which is made late
    torchs._growth_tracker.fill_(INTERVAL - 3)  # type: ignore[union-attr]
    for broken in (False, False, False, True, True, False):
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        torchs.scale(weight.sum() * (torch.inf if broken else 1.0)).backward()
        torchs.step(optimizer)
        torchs.update()
        ours.unscale([parameter([torch.inf if broken else 1.0])])
        assert ours.scale == torchs.get_scale(), f"after {broken=}"


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("foreach", [True, False])
def test_optimizers_pass_over_an_overflow(make: type[torch.optim.Optimizer], foreach: bool) -> None:
    """Weights, momenta and step counters are as if the step had not been: nothing decays."""
    options = {"lr": 0.1, "weight_decay": 0.1, "foreach": foreach}
    options |= {"momentum": 0.9} if make is torch.optim.SGD else {}
    weights = {word: parameter([1.0, 2.0]) for word in ("with", "without")}
    optimizers = {word: make([weight], **options) for word, weight in weights.items()}
    loss_scale = LossScale(scale=1.0)
    for gradients in ([1.0, 2.0], [torch.inf, 0.0], [0.5, 0.25]):
        for word, weight in weights.items():
            if word == "without" and torch.inf in gradients:
                continue
            weight.grad = torch.tensor(gradients)
            loss_scale.scale = 1.0
            loss_scale.unscale([weight])
            optimizers[word].step()
    assert torch.equal(weights["with"], weights["without"])
    states = [optimizers[word].state[weights[word]] for word in ("with", "without")]
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key


def test_a_checkpoint_brings_it_back() -> None:
    kept = LossScale(2.0, 5).state_dict()
    restored = LossScale()
    restored.load_state_dict(kept)
    assert restored == LossScale(2.0, 5)


def test_a_rank_without_gradients_takes_part() -> None:
    """It has nothing to look at, and must not keep the others waiting."""
    assert LossScale().unscale([nn.Parameter(torch.ones(2), requires_grad=False)])


def _rank(rank: int, store: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    world = torch.distributed.group.WORLD
    weight = parameter([torch.inf if rank == 1 else 1.0])
    loss_scale = LossScale(scale=2.0)
    assert not loss_scale.unscale([weight], world)
    assert (weight.grad, loss_scale.scale) == (None, 1.0)
    good = parameter([float(rank)])
    assert loss_scale.unscale([good] if rank else [], world)
    torch.distributed.destroy_process_group()


@pytest.mark.long  # `step_stories` have an overflow on one rank, of a whole step
def test_what_one_rank_finds_all_ranks_know(tmp_path) -> None:  # type: ignore[no-untyped-def]
    torch.multiprocessing.spawn(_rank, (str(tmp_path / "store"),), nprocs=2)
