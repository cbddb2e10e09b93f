"""Each rank gets its own tensors, and only those, from wherever the weights are."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

from autopipe.errors import ModelError
from autopipe.frontend.construct import build_fake
from autopipe.runtime.parameters.materialize import Origin, materialize
from autopipe.util import host_memory, numbers
from tests.support.inprocess import Cut, cut
from tests.support.staged import trace_model
from tests.support.zoo import ZOO


def gpt2() -> Cut:
    """GPT-2 on two stages; the embedding is tied to the head, so both stages have it."""
    return cut("gpt2", 2)


WTE, HEAD = "transformer.wte.weight", "lm_head.weight"


def weights() -> dict[str, Tensor]:
    """The model's weights as one process has them, tied ones under both names."""
    return {name: t.detach().clone() for name, t in ZOO["gpt2"].model().state_dict().items()}


def own(
    stage: int,
    source: nn.Module | Callable[[], nn.Module] | None = None,
    split: Cut | None = None,
    part: Callable[[str, Tensor], Tensor] | None = None,
    optional: Sequence[str] = (),
    **options: Any,
) -> dict[str, Tensor]:
    """What a stage gets, of GPT-2 by default; without a source from a model that has no weights."""
    split = split or gpt2()
    bare = build_fake(ZOO[split.name].model)
    origin = Origin(source or bare, bare, **options)
    names = split.stages[stage].states
    return materialize(split.graph, names, origin, part=part, optional=optional)


def hold(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Every parameter found is the expected one, bit by bit, and trains."""
    parameters = {name: t for name, t in found.items() if isinstance(t, nn.Parameter)}
    assert parameters
    for name, tensor in parameters.items():
        assert tensor.requires_grad and torch.equal(tensor, expected[name]), name


def save_distributed(tensors: dict[str, Tensor], folder: Path) -> None:
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(tensors, checkpoint_id=str(folder), no_dist=True)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_model_is_taken_as_it_is(stage: int) -> None:
    """Not copied: an optimizer that has the model's parameters has the pipe's."""
    model = ZOO["gpt2"].model()
    found = own(stage, model)
    assert found.keys() == set(gpt2().stages[stage].states)
    for name, tensor in found.items():
        if name not in gpt2().graph.constants:
            state = gpt2().graph.states[name]
            whose = model.get_parameter if state.kind == "parameter" else model.get_buffer
            assert tensor is whose(name)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_file(stage: int, tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    hold(own(stage, weights=tmp_path / "model.safetensors"), weights())


@pytest.mark.parametrize("stage", [0, 1])
def test_a_folder_of_files(stage: int, tmp_path: Path) -> None:
    named = list(weights().items())
    for number in range(3):
        save_file(dict(named[number::3]), tmp_path / f"model-{number}-of-3.safetensors")
    hold(own(stage, weights=tmp_path), weights())


@pytest.mark.parametrize("stored", [WTE, HEAD])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_tied_parameter_under_either_name(stage: int, stored: str, tmp_path: Path) -> None:
    other = {WTE: HEAD, HEAD: WTE}[stored]
    file = tmp_path / "model.safetensors"
    save_file({name: t for name, t in weights().items() if name != other}, file)
    hold(own(stage, weights=file), weights())


@pytest.mark.parametrize("stage", [0, 1])
def test_a_distributed_checkpoint(stage: int, tmp_path: Path) -> None:
    save_distributed(weights(), tmp_path)
    hold(own(stage, weights=tmp_path), weights())


def test_buffers_come_from_the_checkpoint(tmp_path: Path) -> None:
    split = cut("unet", 2)
    stored = ZOO["unet"].model().state_dict()
    for name, tensor in stored.items():
        if "running" in name:
            tensor.fill_(0.25)
    save_file(stored, tmp_path / "model.safetensors")
    found = own(0, split=split, weights=tmp_path / "model.safetensors")
    means = [tensor for name, tensor in found.items() if "running" in name]
    assert means and all((mean == 0.25).all() for mean in means)


def test_a_missing_tensor(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({n: t for n, t in weights().items() if not n.endswith("h.0.ln_1.weight")}, file)
    with pytest.raises(ModelError) as refused:
        own(0, weights=file)
    assert str(refused.value) == (
        f"{file}: holds no 'transformer.h.0.ln_1.weight', which the model has as [32]\n"
        "hint: of its 52 names the nearest is 'transformer.h.3.ln_1.weight'"
    )
    own(1, weights=file)  # the other stage does not need it


def test_a_tensor_of_another_shape(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({**weights(), "transformer.h.0.ln_1.weight": torch.zeros(2, 16)}, file)
    with pytest.raises(ModelError) as refused:
        own(0, weights=file)
    assert str(refused.value) == (
        f"{file}: 'transformer.h.0.ln_1.weight' has the shape [2, 16], in the model [32]"
    )


def test_a_distributed_checkpoint_that_misses_a_tensor(tmp_path: Path) -> None:
    kept = {n: t for n, t in weights().items() if not n.endswith("h.0.ln_1.weight")}
    save_distributed(kept, tmp_path)
    with pytest.raises(ModelError, match=r"holds no 'transformer\.h\.0\.ln_1\.weight', which"):
        own(0, weights=tmp_path)


def test_a_distributed_checkpoint_of_a_tied_parameter(tmp_path: Path) -> None:
    """It has the head, the model's graph calls it by the embedding's name."""
    kept = {name: t for name, t in weights().items() if name != WTE}
    save_distributed(kept, tmp_path)
    hold(own(1, weights=tmp_path), weights())


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refused:
        own(0, weights=tmp_path)
    assert refused.value.message == f"weights {str(tmp_path)!r}: the folder has none"


def test_a_constructor_builds_what_one_process_builds() -> None:
    """Seeded: both stages' parts are those of one model, and the caller's random state stays."""
    build = ZOO["gpt2"].build
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        expected = build().state_dict()
    before = torch.get_rng_state()
    for stage in (0, 1):
        hold(own(stage, build, seed=5), expected)
    assert torch.equal(torch.get_rng_state(), before)
    other = own(0, build, seed=6)
    assert not torch.equal(other[WTE], expected[WTE])


def test_a_rank_holds_its_own_bytes_only() -> None:
    """Both stages' parameters are the model's, the tied one twice."""
    sizes = {name: t.numel() for name, t in ZOO["gpt2"].model().named_parameters()}
    held = [own(stage, ZOO["gpt2"].build) for stage in (0, 1)]
    counts = [sum(t.numel() for t in h.values() if isinstance(t, nn.Parameter)) for h in held]
    assert sum(counts) == sum(sizes.values()) + sizes[WTE]
    assert max(counts) < 0.75 * sum(sizes.values())


def test_where_the_whole_model_does_not_fit() -> None:
    """Own modules initialise themselves: the same values in whichever stage they stand."""
    split = cut("gpt", 2)
    found = [own(stage, ZOO["gpt"].model, split, memory=1000, seed=3) for stage in (0, 1)]
    whole = own(0, ZOO["gpt"].model, cut("gpt", 1), memory=1000, seed=3)
    other = own(0, ZOO["gpt"].model, cut("gpt", 1), memory=1000, seed=4)
    for part in found:
        hold(part, whole)
    norm = [t for name, t in whole.items() if name.endswith("norm.weight")]
    assert all((t == 1).all() for t in norm)
    drawn = [name for name, t in whole.items() if isinstance(t, nn.Parameter) and t.std() > 0]
    assert drawn and not any(torch.equal(whole[name], other[name]) for name in drawn)


def test_hugging_face_initialises_by_its_own_hook() -> None:
    """Reset by itself, an embedding has a deviation of 1; GPT-2 says 0.02 for all weights, and
    0.02 / sqrt(2 * layers) for the projections into the residual stream, which a parent scales."""
    found = own(0, ZOO["gpt2"].model, memory=1000)
    assert found[WTE].std().item() == pytest.approx(0.02, rel=0.2)
    projection = found["transformer.h.0.mlp.c_proj.weight"]
    assert projection.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.2)
    assert (found["transformer.h.0.ln_1.weight"] == 1).all()
    assert torch.equal(own(1, ZOO["gpt2"].model, memory=1000)[WTE], found[WTE])


def test_refused_with_the_bytes() -> None:
    split = cut("unet", 2)
    bare = build_fake(ZOO["unet"].model)
    for part in bare.modules():
        if isinstance(part, nn.Conv2d):
            part.reset_parameters = None  # type: ignore[assignment]
    size = sum(p.numel() * 4 for p in bare.parameters())
    with pytest.raises(ModelError) as refused:
        origin = Origin(ZOO["unet"].model, bare, memory=1000)
        materialize(split.graph, split.stages[0].states, origin)
    assert str(refused.value).startswith(
        f"the model's parameters, {numbers.memory(size)}, do not fit in this machine's memory, "
        "1000 bytes, and "
    )
    assert "(Conv2d) has no reset_parameters" in str(refused.value)


def test_a_model_without_values() -> None:
    with pytest.raises(ModelError, match=r"'transformer\.wte\.weight' has no values"):
        own(0)
    with torch.device("meta"):
        meta = ZOO["gpt2"].build()
    with pytest.raises(ModelError, match="built without memory"):
        own(0, meta)


def test_a_stage_can_be_built_only_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """While one process of a machine holds the whole model, the next one waits."""
    monkeypatch.setattr(host_memory.tempfile, "gettempdir", lambda: str(tmp_path))
    lock = tmp_path / f"autopipe-{host_memory.os.getuid()}.lock"
    with host_memory.in_turn(), lock.open("w") as other:
        with pytest.raises(BlockingIOError):
            host_memory.fcntl.flock(other, host_memory.fcntl.LOCK_EX | host_memory.fcntl.LOCK_NB)


class HalfMade(nn.Module):
    """Its projection is what memory held: a bug of the model, of which one process says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Parameter(torch.empty(4, 4))
        self.unread = nn.Parameter(torch.empty(4))
        self.cache = torch.empty(3)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.projection).sum()


def test_a_parameter_that_nobody_initialises_would_be_another_on_each_rank() -> None:
    graph = trace_model(HalfMade(), lambda rows: {"x": torch.ones(rows, 4)}).graph
    with pytest.raises(ModelError) as refused:
        materialize(graph, ["projection"], Origin(HalfMade, build_fake(HalfMade)))
    assert str(refused.value) == (
        "model() makes the parameter 'projection' and writes no values into all of it, as by "
        "torch.empty alone: what its memory held would be its values, others on each rank\n"
        "hint: initialise it in model(), with nn.init for example, or start from weights that "
        "have it (--weights)"
    )
    assert not torch.are_deterministic_algorithms_enabled()


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.tensor([1 + 2j, 3 - 4j]).conj())

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.turn).abs().sum()


def test_a_buffer_that_is_a_view_of_its_conjugate_has_bytes_of_its_own() -> None:
    """Bug: of such a view no file can be written, and a trained model was lost."""
    model = Turned()
    graph = trace_model(model, lambda rows: {"x": torch.ones(rows, 2)}).graph
    (turn,) = materialize(graph, ["turn"], Origin(model, model)).values()
    assert not turn.is_conj() and torch.equal(turn, model.turn)


class Scaled(nn.Module):
    """Computes with a number that it has taken of its weights, as data-dependent scales do."""

    def __init__(self, *, buffer: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        norm = self.layer.weight.detach().norm()
        if buffer:
            self.register_buffer("scale", norm.clone())
        self.scale_of = float(norm) if not buffer else self.layer.weight.sum().item() > 1e9

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale if hasattr(self, "scale") else self.scale_of
        made: Tensor = self.layer(x).square().mean() * scale
        return made


def test_a_number_that_a_constructor_computes_from_weights_is_that_of_the_plan() -> None:
    """Bug: a plan has the number of the weights of seed 0, and `run --seed 7` trained with it."""

    def kept(seed: int, *, buffer: bool) -> dict[str, Tensor]:
        build = partial(Scaled, buffer=buffer)
        graph = trace_model(build(), lambda rows: {"x": torch.randn(rows, 4)}).graph
        names = [name for name in graph.states if name in ("layer.weight", "scale")]
        return materialize(graph, names, Origin(build, build_fake(build), seed=seed))

    assert kept(0, buffer=False)["layer.weight"].shape == (2, 4)
    with pytest.raises(
        ModelError, match=r"'scale_of' from its weights, or draws it after them; with seed 7"
    ):
        kept(7, buffer=False)
    found = kept(7, buffer=True)
    assert torch.equal(found["scale"], found["layer.weight"].detach().norm())


class Listed(Scaled):
    """Keeps such numbers in a list, and others that no weight decides."""

    def __init__(self, *, listed: bool) -> None:
        super().__init__(buffer=True)
        self.best, self.sizes = float("nan"), {"width": 4, "even": True}
        self.order, self.wave = torch.arange(4), torch.ones(2, dtype=torch.complex64)
        self.sums = [float(row.sum()) for row in self.layer.weight.detach()] if listed else []
        self.eval()


def test_a_list_of_them_is_too_and_what_no_weight_decides_is_not() -> None:
    for listed in (False, True):
        build = partial(Listed, listed=listed)
        graph = trace_model(build(), lambda rows: {"x": torch.randn(rows, 4)}).graph
        origin = Origin(build, build_fake(build).train(), seed=7)
        if not listed:
            assert materialize(graph, ["layer.weight"], origin)
            continue
        with pytest.raises(ModelError, match=r"'sums' from its weights"):
            materialize(graph, ["layer.weight"], origin)
