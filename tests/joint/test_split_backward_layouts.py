"""Backwards in two halves, laid out as the rehearsal found what crosses, and what they hold."""

from __future__ import annotations

import pytest
import torch

from autopipe.ir.torch_private import fake_mode
from autopipe.joint.joint_graph import Layout
from autopipe.joint.split_backward import Joint
from autopipe.joint.split_backward_layouts import JointDryRun, joint_for
from autopipe.stages.dry_run import Rehearsal, fake_state, rehearse
from autopipe.stages.lower import lower
from tests.support.inprocess import Cut, cut


def joint_of(found: Cut, index: int) -> Joint | None:
    """The halves of a stage."""
    stage, last = found.stages[index], index == len(found.stages) - 1
    with fake_mode():
        states = {name: fake_state(found.graph, name) for name in stage.states}
        lowered = lower(found.graph, stage, found.blocks, states, None, found.rows, last=last)
    return joint_for(found.graph, lowered, found.rehearsal, last=last)


def in_halves(found: Cut, whole: Rehearsal, precision: str = "fp32") -> Rehearsal:
    joint = JointDryRun(found.graph, found.blocks, found.rows, precision=precision)
    return joint.instead(found.stages, whole)


@pytest.mark.parametrize("name", ["gpt", "unet", "resnet", "frozen", "counted"])
def test_a_rehearsal_counts_what_the_halves_count(name: str) -> None:
    """What F saves, what I leaves for W, and what of that it has made: to the byte."""
    found = cut(name, 3)
    rehearsal = in_halves(found, found.rehearsal)
    for stage in found.stages:
        joint = joint_of(found, stage.index)
        assert joint is not None
        i = stage.index
        counted = rehearsal.saved[i], rehearsal.stash[i], rehearsal.fresh[i]
        assert counted == (joint.kept, joint.stash, joint.fresh)
        assert 0 <= joint.fresh <= joint.stash <= joint.kept + joint.fresh
    assert rehearsal.boundaries == found.rehearsal.boundaries


def test_zero_bubbles_cost_memory() -> None:
    """W needs the inputs of matrix products, most of what F saved, and gradients that I has made.

    The first stage receives nothing that a gradient goes back for: its I does nothing at all.
    """
    found = cut("gpt", 2)
    first, last = in_halves(found, found.rehearsal), joint_of(found, 1)
    assert (first.stash[0], first.fresh[0]) == (first.saved[0], 0)
    assert last is not None
    assert last.stash - last.fresh > last.kept / 3
    assert last.fresh > 0


def test_arguments_are_laid_out_as_what_is_received() -> None:
    """Of frozen's stages the first receives nothing with a gradient, the second does."""
    found = cut("frozen", 4)
    boundaries = found.rehearsal.boundaries
    for stage in found.stages:
        joint = joint_of(found, stage.index)
        assert joint is not None
        received = joint.arguments[: len(stage.receives)]
        for (ref, _), layout in zip(stage.receives, received, strict=True):
            boundary = boundaries[ref]
            assert (layout.shape, layout.strides, layout.dtype) == (
                boundary.shape, boundary.strides, boundary.dtype,
            )  # fmt: skip
            assert layout.gradient == (stage.index in boundary.gradients)
        assert not any(layout.gradient for layout in joint.arguments[len(stage.receives) :])


def test_seeds_are_gradients_as_the_latest_stage_sends_them() -> None:
    """Stage 0 of a U-Net sends its skip to stages 1 and 2: stage 2's gradient comes first."""
    found = cut("unet", 3)
    first = found.stages[0]
    joint = joint_of(found, 0)
    assert joint is not None
    for number, ref in enumerate(first.outgoing):
        boundary = found.rehearsal.boundaries[ref]
        strides = boundary.gradients[max(boundary.gradients)]
        assert joint.seeds[number] == Layout(
            boundary.shape, strides, boundary.dtype, torch.device("cpu")
        )


def test_of_the_results_of_the_last_stage_the_loss_has_a_seed() -> None:
    """A loss that is (sum, count) is seeded for the sum."""
    joint = joint_of(cut("counted", 2), 1)
    assert joint is not None
    assert joint.results == 2
    assert {number: seed.shape for number, seed in joint.seeds.items()} == {0: ()}


def test_a_stage_that_cannot_be_split_keeps_its_whole_backward() -> None:
    """An LSTM keeps for backward what only its kernel knows: I does all of it, and W nothing."""
    found = cut("lstm", 2)
    whole = [joint_of(found, stage.index) is None for stage in found.stages]
    assert any(whole)
    rehearsal = in_halves(found, found.rehearsal)
    for index in (number for number, stays in enumerate(whole) if stays):
        assert rehearsal.saved[index] == found.rehearsal.saved[index]
        assert (rehearsal.stash[index], rehearsal.fresh[index]) == (0, 0)


def test_in_low_precision_the_halves_keep_less() -> None:
    found = cut("gpt", 2)
    low = rehearse(found.graph, found.stages, found.blocks, found.rows, precision="bf16-autocast")
    wide, mixed = (
        in_halves(found, found.rehearsal),
        in_halves(found, low, precision="bf16-autocast"),
    )
    for before, after in zip(wide.saved, mixed.saved, strict=True):
        assert after < before


def test_what_runs_again_runs_in_the_first_half_and_stays_for_the_second() -> None:
    """F keeps the arguments of blocks; I makes the rest again, and what W needs of it is there."""
    found = cut("gpt", 2)
    again = [block.path for block in found.blocks]
    whole = rehearse(found.graph, found.stages, found.blocks, found.rows, recompute=again)
    usual = in_halves(found, found.rehearsal)
    joint = JointDryRun(found.graph, found.blocks, found.rows, again)
    recomputed = joint.instead(found.stages, whole)
    assert recomputed.saved[1] < usual.saved[1]
    assert recomputed.fresh[1] > usual.fresh[1]
    made = recomputed.fresh[1] - usual.fresh[1] + recomputed.made[1]
    assert made >= whole.made[1] > 0 < recomputed.made[1]
