"""Training steps in real processes are those of one process.

What happens in processes is told in `pipe_stories`, `memory_stories`, `step_stories`,
`state_dict_stories`, `tp_stories`, `part_stories`, `loss_stories`, `turn_stories`, `zero_stories`,
`script_stories`.
"""

import copy
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopipe
from autopipe import AutopipeError, ModelError, Pipe
from tests.support import pipe_worker, warm
from tests.support.inprocess import machine
from tests.support.pipes import (
    LONG_STORIES,
    STORIES,
    ZOO,
    Story,
    close,
    close_gradients,
    piped,
    planned,
    whole_loss,
)

Told = Callable[[int], Path]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """All stories of one world, told once by so many processes: a file per story and rank."""

    @cache
    def tell(world: int) -> Path:
        folder = tmp_path_factory.mktemp(f"world-{world}")
        code = warm.spawn(world, [pipe_worker.__file__, str(folder)])
        (folder / "code").write_text(str(code))
        return folder

    return tell


@pytest.mark.parametrize(
    ("world", "story"),
    [
        pytest.param(world, story, marks=pytest.mark.long if story in LONG_STORIES else ())
        for world, stories in STORIES.items()
        for story in stories
    ],
    ids=lambda value: value if isinstance(value, int) else value.__name__,
)
def test_story(world: int, story: Story, told: Told) -> None:
    folder = told(world)
    for rank in range(world):
        result = folder / f"{story.__name__}.{rank}"
        assert result.exists(), "an earlier story failed, or another rank of this one"
        assert result.read_text() == ""


@pytest.mark.parametrize(
    "world",
    [
        pytest.param(world, marks=pytest.mark.long if LONG_STORIES >= {*stories} else ())
        for world, stories in STORIES.items()
    ],
)
def test_all_processes_end_well(world: int, told: Told) -> None:
    assert (told(world) / "code").read_text() == "0"


# One process is a pipe too: what it refuses needs no others.


@pytest.fixture(scope="module")
def pipe() -> Pipe:
    return piped("gpt", planned("gpt", 1, 1, 2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": None}, "batch['tokens'] is None, not a tensor int64[b, 12]"),
        (
            {"tokens": torch.zeros(4, 12)},
            "batch['tokens'] is float32[4, 12]; the plan was made for",
        ),
        (
            {"tokens": torch.zeros(4, 9, dtype=torch.int64)},  # shorter rows, but not all of them
            "batch['labels'] is int64[4, 12]; the plan was made for int64[b, 9] with b = 4",
        ),
        ({"labels": torch.zeros(2, 12, dtype=torch.int64)}, "with b = 4 as in the entries before"),
        (
            {"mask": torch.ones(4, 12)},
            "the batch has the entries ['labels', 'mask', 'tokens'], the",
        ),
    ],
)
def test_a_batch_that_does_not_fit(pipe: Pipe, change: dict[str, object], words: str) -> None:
    batch = ZOO["gpt"].inputs(4)
    for run in (pipe.step, pipe.evaluate):
        with pytest.raises(ModelError) as refused:
            run({**batch, **change})  # type: ignore[dict-item]
        assert words in str(refused.value)


def test_a_missing_entry(pipe: Pipe) -> None:
    with pytest.raises(
        ModelError, match=r"entries \['tokens'\], the plan was made for \['labels', "
    ):
        pipe.step({"tokens": torch.zeros(4, 12, dtype=torch.int64)})


def test_rows_that_do_not_divide(pipe: Pipe) -> None:
    with pytest.raises(ModelError) as refused:
        pipe.step(ZOO["gpt"].inputs(5))
    assert str(refused.value) == (
        "the batch has 5 rows, which do not divide into 2 micro-batches\n"
        "hint: give 4 rows, or another multiple of 2"
    )


def test_a_refused_batch_leaves_the_gradients(pipe: Pipe) -> None:
    """Refused at the door: an optimizer step after it would still be the last good one."""
    pipe.step(ZOO["gpt"].inputs(4))
    before = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
    with pytest.raises(ModelError):
        pipe.step(ZOO["gpt"].inputs(5))
    for name, parameter in pipe.named_parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, before[name])


def test_a_step_is_measured_after_it_has_run() -> None:
    with pytest.raises(AutopipeError) as refused:
        piped("gpt", planned("gpt", 1, 1, 2)).measured()
    assert str(refused.value) == (
        "pipe.measured() is of the last step, and none has run yet\n"
        "hint: call pipe.step(batch) first; for bytes too, set pipe.meter = Meter() before"
    )


class Changed(nn.Module):
    """Forward changes a weight: clips it as a Wasserstein GAN's critic does, limits the norms of
    its rows as EEGNet does, or masks it as PixelCNN does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("mask", torch.ones(6, 6).tril())
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight
        if self.how == "clips":
            weight.data.clamp_(-0.1, 0.1)
        elif self.how == "limits":
            weight.data = torch.renorm(weight.data, p=2, dim=0, maxnorm=0.2)
        else:
            weight.data *= self.mask
        out: Tensor = self.layer(x).square().mean()
        return out


@pytest.mark.parametrize("how", ["clips", "limits", "masks"])
def test_a_weight_that_forward_changes_is_changed_before_the_optimizer_changes_it(how: str) -> None:
    """In the first step clipped from up to 0.4 to 0.1; then by as much as an optimizer's step."""
    torch.manual_seed(0)
    model = Changed(how)

    def inputs(rows: int) -> dict[str, Tensor]:
        return {"x": torch.arange(6.0 * rows).reshape(rows, 6).sin()}

    plan = autopipe.plan(model, inputs, cluster=machine(1), batch_size=4, micro_batches=2)
    pipe = autopipe.parallelize(copy.deepcopy(model), plan)
    ours, theirs = (torch.optim.Adam(m.parameters(), lr=0.05) for m in (pipe, model))
    for _ in range(3):
        theirs.zero_grad()
        loss = model(**inputs(4))
        loss.backward()
        close(pipe.step(inputs(4)), loss)
        ours.step()
        theirs.step()
    for name, parameter in pipe.named_parameters():
        close(parameter, model.get_parameter(name), name)


def test_one_process_trains(pipe: Pipe) -> None:
    model = ZOO["gpt"].model()
    batch = ZOO["gpt"].inputs(4)
    expected = whole_loss("gpt", model, batch)
    expected.backward()
    close(pipe.step(batch), expected)
    close_gradients(pipe, model, 5e-5)


def test_a_default_device_of_a_script_is_not_that_of_the_loss(pipe: Pipe) -> None:
    """As `torch.set_default_device("cuda")`; here one from which no number can be read."""
    batch = ZOO["gpt"].inputs(4)
    expected = pipe.step(batch)
    with torch.device("meta"):
        found = pipe.step(batch)
    close(found, expected)
    assert found.device.type == "cpu"


def test_a_default_device_of_a_script_is_that_of_none_of_its_calls(tmp_path: Path) -> None:
    """Bug: `evaluate` traced the tensor that torch makes to ask for it, and ended in a KeyError."""
    batch, lost = ZOO["linear"].inputs(4), list[list[Tensor]]()
    for device in ("cpu", "meta"):
        made: Pipe = piped("linear", planned("linear", 1, 1, 2))  # its forward makes no tensor
        with torch.device(device):
            optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
            losses = [made.step(batch)]
            made.clip_grad_norm_(0.1)
            optimizer.step()
            with torch.no_grad():
                for parameter in made.parameters():
                    parameter.mul_(0.5)
            losses.append(made.step(batch))
            made.save(tmp_path / device, optimizer)
            optimizer.step()
            made.load(tmp_path / device, optimizer)
            made.load_state_dict(made.state_dict())
            lost.append([*losses, made.step(batch), made.evaluate(batch)])
    for found, expected in zip(*lost, strict=True):
        close(found, expected)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, pickle.dumps, torch.optim.swa_utils.AveragedModel]
)
def test_a_pipe_is_not_copied(copied: Callable[[Any], object], pipe: Pipe) -> None:
    """Bug: `cannot pickle 'socket' object`."""
    with pytest.raises(AutopipeError, match=r"cannot be copied .*\nhint: copy its values, \{n: p"):
        copied(pipe)


def test_a_pipe_is_not_called(pipe: Pipe) -> None:
    with pytest.raises(AutopipeError, match=r"is not called .*\nhint: loss = pipe.step\(batch\)"):
        pipe(torch.zeros(2, 4))


def test_the_state_dict_is_the_models() -> None:
    """Parameters and persistent buffers under the model's names; a copy of none."""
    model = ZOO["unet"].model()
    case = ZOO["unet"]
    found = autopipe.parallelize(model, planned("unet", 1, 1, 2), loss=case.loss).state_dict()
    assert found.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert found[name].data_ptr() == tensor.data_ptr()


def test_tied_names_are_one_parameter() -> None:
    """Known by its first name, as `named_parameters` of the model knows it."""
    pipe = piped("gpt2", planned("gpt2", 1, 1, 1))
    expected = [name for name, _ in ZOO["gpt2"].model().named_parameters()]
    assert sorted(name for name, _ in pipe.named_parameters()) == sorted(expected)
