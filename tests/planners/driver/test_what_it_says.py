"""What `plan` says of a model, and what it refuses before anything is measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopipe
from autopipe.errors import InfeasibleError, ModelError
from autopipe.planners.driver import arguments
from tests.support.pipes import machine as processes

GPUS = "1x2xA100-80GB"


def inputs(rows: int) -> dict[str, Tensor]:
    return {"x": torch.linspace(0, 1, rows * 8).view(rows, 8)}


def mean(made: Tensor, batch: Any) -> Tensor:
    return made.square().mean()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu())


class OnGPUs(Layers):
    """Has another branch for GPUs, which it asks for in two ways; the third asks for nothing."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        if x.is_cuda:
            x = x * 2
        if x.device.type == "cuda":
            x = x * 3
        return self.two(x + torch.ones(8, device=x.device, dtype=x.dtype))


def test_a_branch_for_gpus_is_told_where_ranks_are_gpus() -> None:
    """Bug: nobody said that ranks on GPUs compute what the model computes on a CPU."""
    first = OnGPUs.forward.__code__.co_firstlineno
    expected = [
        f"{__file__}:{first + after}: asks whether a tensor is on a GPU; the graph is traced on a "
        "CPU, and its ranks do there what the model does on a CPU"
        for after in (2, 4)
    ]
    for cluster, lines in ((GPUS, expected), (processes(2), [])):
        said: list[str] = []
        autopipe.plan(OnGPUs, inputs, loss=mean, cluster=cluster, batch_size=4, say=said.append)
        assert [line for line in said if "on a GPU;" in line] == lines


class Chooses(nn.Module):
    """All of its layers around a line that no graph has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Layers()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        high = x.sum(1) > 0
        made = torch.zeros_like(x)
        made[high] = x[high] * 2
        return self.layers(made)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Chooses()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_what_takes_all_that_could_be_cut_is_named() -> None:
    """Bug: `needs a model of at least 3 units` of a model of many layers, and no word of why."""
    cluster = processes(6)
    with pytest.raises(InfeasibleError) as refused:
        autopipe.plan(Whole, inputs, loss=mean, cluster=cluster, batch_size=4, pp=6)
    line = Chooses.forward.__code__.co_firstlineno + 4
    assert refused.value.message == (
        "pp=6 dp=1 needs a model of at least 6 units, one a stage; this one has 3 to cut between, "
        "and none of them cuts body, which runs as it is with 4 of the 4 parameters "
        f"({__file__}:{line} `made[high] = x[high] * 2`: a size here depends on the values of a "
        "tensor, so the stages cannot know what they will receive)"
    )
    assert refused.value.hint is not None
    assert refused.value.hint.endswith(
        "into a smaller method or module of its own: it alone runs as it is then"
    )


def test_a_degree_that_divides_nothing_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bug: `plan --tp 3 --cluster cpu:3` measured this machine for half a minute first."""

    def measured(*_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(arguments, "measured", measured)
    with pytest.raises(InfeasibleError, match="^tp=3 was asked for, and no parameter divides"):
        autopipe.plan(Layers, inputs, loss=mean, cluster=processes(3), batch_size=4, tp=3)


def test_a_loss_beside_a_figure_is_no_sum_and_count_in_a_single_micro_batch_either() -> None:
    """Bug: cut into several it was refused, and whole it was divided by the number of rows that
    were right, without a word."""

    def with_right_ones(made: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        labels = torch.zeros(len(made), dtype=torch.int64)
        return nn.functional.cross_entropy(made, labels), (made.argmax(1) == labels).sum()

    with pytest.raises(ModelError, match="sum and count of the whole are not those of the halves"):
        autopipe.plan(
            Layers, inputs, loss=with_right_ones, cluster=processes(1), batch_size=8,
            pp=1, dp=1, micro_batches=1,
        )  # fmt: skip
