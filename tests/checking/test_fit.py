"""How a check shrinks a mesh, a step and a model until they fit this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autopipe import AutopipeError, ModelError
from autopipe.checking.fit import Degrees, fewer_ranks, smaller_models, usual_degrees
from autopipe.checking.subject import Smaller
from autopipe.util import host_memory


def degrees(pp: int, dp: int, tp: int, micro_batches: int = 4, rows: int = 2) -> Degrees:
    return Degrees(pp, dp, tp, 1, micro_batches, rows)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (degrees(2, 1, 1), degrees(2, 1, 1)),
        (degrees(2, 256, 1), degrees(2, 2, 1)),
        (degrees(8, 16, 8), degrees(2, 2, 2)),
        (degrees(16, 1, 1, 64), degrees(8, 1, 1, 16)),
        (degrees(1, 1, 8), degrees(1, 1, 8, 2)),
        (degrees(4, 2, 2), degrees(2, 2, 2)),
    ],
)
def test_a_mesh_keeps_what_it_is(wanted: Degrees, found: Degrees) -> None:
    """At most eight processes; what was more than one is two at least."""
    assert fewer_ranks(wanted) == found


def test_a_written_schedule_stays() -> None:
    assert fewer_ranks(degrees(4, 8, 1, 16), written=True) == degrees(4, 2, 1, 16)
    with pytest.raises(AutopipeError, match="own schedule is for pp=16"):
        fewer_ranks(degrees(16, 1, 1), written=True)


def test_what_is_less_is_told() -> None:
    assert degrees(2, 2, 1).changes_from(degrees(2, 256, 1, 32)) == [
        "dp 256 -> 2",
        "micro-batches 32 -> 4",
    ]


def sized(whole: int) -> list[tuple[Smaller, Degrees]]:
    """The ways for a model of `whole` bytes, whose layers and widths are all there is of it."""

    def model(smaller: Smaller) -> nn.Module:
        entries = whole // 4 // (16 if smaller.layers else 1) // smaller.width**2
        with torch.device("meta"):
            return nn.Linear(entries, 1, bias=False)

    return list(smaller_models(model, degrees(2, 1, 1), tokens=1))


def test_what_fits_is_left_alone() -> None:
    assert sized(2**20)[0] == (Smaller(), degrees(2, 1, 1))


def test_layers_go_first_and_then_width() -> None:
    assert sized(2**31)[0][0] == Smaller(layers=2)
    assert sized(2**34)[0][0] == Smaller(layers=2, width=2)


def without_widths(smaller: Smaller) -> nn.Module:
    """Of 4 GiB, and 512 MiB with as few layers as there can be."""
    if smaller.width > 1:
        raise ModelError("no width")
    with torch.device("meta"):
        return nn.Linear(2**27 if smaller.layers else 2**30, 1)


def test_a_model_without_widths_is_checked_where_the_machine_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bug: 2 layers of `examples/wan` take 396 MiB, and were refused on a machine of 24 GiB."""
    monkeypatch.setattr(host_memory, "available", lambda: 16 * 2**30)
    ways = [*smaller_models(without_widths, degrees(2, 1, 1), tokens=4096)]
    assert ways == [(Smaller(layers=2, length=64), degrees(2, 1, 1))]


def test_what_cannot_be_made_to_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available", lambda: 8 * 2**30)
    with pytest.raises(AutopipeError, match=r"parameters take 512\.0 MiB") as refused:
        list(smaller_models(without_widths, degrees(2, 1, 1), tokens=1))
    assert "that is free is 4.0 GiB" in refused.value.message
    assert "fewer layers" in str(refused.value.hint)


def test_a_schedule_from_a_file_says_its_own_sizes(tmp_path: Path) -> None:
    """Bug: those of a pipeline of two were said to have been asked for."""
    path = tmp_path / "steps.txt"
    path.write_text("rank 0: 0F0 3F0 3B0 0B0\nrank 1: 1F0 1B0 4F0 4B0\nrank 2: 2F0 2B0 5F0 5B0\n")
    words = {"schedule": str(path)}
    found = usual_degrees({}, None, 8, words)
    assert (found.pp, found.chunks, found.micro_batches, found.rows) == (3, 2, 1, 8)
    with pytest.raises(AutopipeError, match="pp=2 was asked for, and the schedule is written for"):
        usual_degrees({"pp": 2}, None, None, words)


def test_without_a_plan_it_is_a_pipeline_of_two() -> None:
    assert usual_degrees({}, None, None, {}) == degrees(2, 1, 1)
    assert usual_degrees({}, None, 32, {}) == degrees(2, 1, 1, 4, 8)
    assert usual_degrees({"dp": 2}, None, None, {}) == degrees(1, 2, 1, 2)
    assert usual_degrees({"tp": 2}, "local:4", None, {}) == degrees(2, 1, 2)
    assert usual_degrees({"tp": 2}, "cpu:4", None, {}) == degrees(2, 1, 2)
    with pytest.raises(AutopipeError, match="are 2 processes, and local:4 has 4"):
        usual_degrees({"pp": 2}, "local:4", None, {})
