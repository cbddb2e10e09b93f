"""Every example is a model file that trains by itself, in one process and without autopipe."""

import os
import runpy
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import warm

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def gpt() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "gpt.py"))


def test_gpt_has_about_ten_million_parameters(gpt: dict[str, Any]) -> None:
    # 6 blocks of 12 w^2 + 13 w, embedding and head of 256 w, 128 w positions, the last norm of 2 w.
    w = 384
    expected = 6 * (12 * w * w + 13 * w) + 2 * 256 * w + 128 * w + 2 * w
    assert expected == 10_893_312
    assert sum(p.numel() for p in gpt["model"]().parameters()) == expected


@pytest.mark.long
def test_gpt_learns(gpt: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = gpt["model"]()
    optimizer = gpt["optimizer"](model.parameters())
    losses = []
    for batch in islice(gpt["batches"](4), 6):
        loss = gpt["loss"](model(batch["tokens"]), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > 5.0
    assert losses[-1] < 4.0


def test_gpt_targets_are_the_next_bytes(gpt: dict[str, Any]) -> None:
    batch = gpt["inputs"](3)
    assert batch["tokens"].shape == batch["targets"].shape == (3, 128)
    assert batch["tokens"].dtype == batch["targets"].dtype == torch.int64
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_gpt_sees_the_same_rows_however_many_shards(gpt: dict[str, Any], num_shards: int) -> None:
    shards = [islice(gpt["batches"](8, shard, num_shards), 3) for shard in range(num_shards)]
    for whole, *parts in zip(gpt["batches"](8), *shards, strict=False):
        for key in ("tokens", "targets"):
            assert torch.equal(whole[key], torch.cat([part[key] for part in parts]))


LEARN = EXAMPLES / "learn"


@pytest.mark.long
def test_the_story_of_a_pipeline_ends_with_the_same_loss_each_time(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Four steps, four programs, one loss; only what they hold differs, as README.md says.

    They find the environment that torchrun gives, as it says there.
    """

    def told(step: str, launch: Callable[[list[str]], int]) -> str:
        assert launch([str(LEARN / f"{step}.py")]) == 0
        return capfd.readouterr().out.strip()

    four = partial(warm.spawn, 4)
    loss = told("step1_one_process", lambda argv: warm.start(argv, os.environ).wait(100))
    loss = loss.partition(", ")[0]
    assert loss.removeprefix("loss ") in (LEARN / "README.md").read_text()
    assert told("step2_naive", four) == f"{loss}, micro-batches held: 1 1 1 1"
    assert told("step3_gpipe", four) == f"{loss}, micro-batches held: 8 8 8 8"
    assert told("step4_1f1b", four) == f"{loss}, micro-batches held: 4 3 2 1"
