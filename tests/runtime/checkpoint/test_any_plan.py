"""A checkpoint of any plan, loaded under any other one, is the same to the bit.

`checkpoint_worker` saves and loads in real processes; the long run takes all 81 pairs, and 16 bits,
other runs 9 of them.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from autopipe.errors import DamagedError
from autopipe.ir.graph import Graph
from autopipe.runtime.checkpoint import trained
from tests.support import checkpoint_worker as worker
from tests.support import warm
from tests.support.checkpoint_worker import PLANS

Told = dict[str, float]


@pytest.fixture(scope="module", params=["fp32", pytest.param("bf16", marks=pytest.mark.long)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All checkpoints; `losses.json` has the loss of the step after each."""
    made = tmp_path_factory.mktemp(request.param)
    one = worker.made("one", request.param)
    losses = {"one": worker.saved(one, made / "one")}
    assert warm.spawn(4, [worker.__file__, str(made), request.param]) == 0
    losses |= json.loads((made / "losses.json").read_text())
    losses |= worker.reloaded(made, {"one": one})
    (made / "losses.json").write_text(json.dumps(losses))
    return made


PAIRS = [(source, target) for target in PLANS for source in PLANS]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda name: name)
def test_parameters_masters_and_moments(source: str, target: str, folder: Path) -> None:
    saved, again = worker.whole(folder / source), worker.whole(folder / f"{source} under {target}")
    assert saved.keys() == again.keys()
    assert [key for key in saved if not same(saved[key], again[key])] == []


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda name: name)
def test_the_loss_of_the_next_step(source: str, target: str, folder: Path) -> None:
    """Bitwise under the plan that saved; another one sums in another order."""
    losses: Told = json.loads((folder / "losses.json").read_text())
    found, expected = losses[f"{source} under {target}"], losses[source]
    near = 1e-6 if folder.name.startswith("fp32") else 2e-3
    assert found == (expected if source == target else pytest.approx(expected, rel=near))


@pytest.mark.parametrize("source", PLANS)
def test_weights_to_start_from(source: str, folder: Path) -> None:
    """Those of the model alone, whatever plan has saved them, of the newest or of one by name."""
    saved = worker.whole(folder / source)
    (checkpoint,) = (folder / source).iterdir()
    for weights in (folder / source, checkpoint):
        with worker.once():
            found = worker.made("one", "fp32", weights=weights).state_dict()
        assert found and all(same(tensor, saved[f"{name}/"]) for name, tensor in found.items())


def test_weights_of_a_larger_model(folder: Path) -> None:
    """Bug: a checkpoint's tensors that the model has not were passed over without a word."""
    said: list[str] = []
    stored = trained.read(folder / "one", Graph({}, {}, (), (), {}), [], (), said.append)
    (line,) = said
    assert not stored and "the model has no " in line and line.endswith(" more: not read")


def test_damaged_weights(folder: Path, tmp_path: Path) -> None:
    """No earlier one is taken in its stead: nobody has asked for that."""
    shutil.copytree(folder / "one", tmp_path / "kept")
    (file,) = tmp_path.glob("kept/*/rank-0.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedError, match="rank-0.safetensors has "):
        worker.made("one", "fp32", weights=tmp_path / "kept")


def test_every_parameter_has_its_moments(folder: Path) -> None:
    keys = worker.whole(folder / "one").keys()
    names = {key.removesuffix("/") for key in keys if key.endswith("/")}
    moments = {f"{name}/{state}" for name in names for state in ("exp_avg", "exp_avg_sq", "step")}
    assert moments <= keys


def same(one: Tensor, other: Tensor) -> bool:
    """Equal bits: not a number equals itself, and -0 is not 0."""
    bits = [t.reshape(-1).view(torch.uint8) for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
