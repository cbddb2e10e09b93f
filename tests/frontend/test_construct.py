"""Constructors that read or write weights: they run with as little weight memory as they allow."""

import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopipe.errors import ModelError
from autopipe.frontend.construct import build_fake, fake_copy, on_cpu
from autopipe.ir.torch_private import is_fake
from autopipe.planners.driver import make_plan
from autopipe.tracing import source
from tests.support.inprocess import machine


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.LSTM(16, 4), nn.Conv2d(4, 4, 3))


def drawn() -> nn.Module:
    model = layers()
    nn.init.trunc_normal_(model[0].weight, std=0.02)
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return layers()


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    model[1].weight = model[0].weight
    return model.half()


@pytest.mark.parametrize(
    ("build", "dtype"),
    [
        pytest.param(lambda: layers().to(torch.bfloat16), torch.bfloat16, id="to(bf16)"),
        pytest.param(lambda: layers().half(), torch.float16, id="half"),
        pytest.param(lambda: layers().double(), torch.float64, id="double"),
        pytest.param(lambda: layers().half().float(), torch.float32, id="float"),
        pytest.param(lambda: layers().to("cpu"), torch.float32, id="to(cpu)"),
        pytest.param(lambda: layers().to(torch.device("cpu"), torch.float64), torch.float64),
        pytest.param(lambda: layers().to("meta"), torch.float32, id="to(meta)"),
        pytest.param(lambda: layers().to(memory_format=torch.channels_last), torch.float32),
        pytest.param(lambda: on_meta().to_empty(device="cpu"), torch.float32, id="to_empty"),
        pytest.param(on_meta, torch.float32, id="meta"),
        pytest.param(drawn, torch.float32, id="trunc_normal_"),
        pytest.param(tied, torch.float16, id="tied"),
    ],
)
def test_nothing_is_built_for_real(build: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    said: list[str] = []
    model = build_fake(build, room=lambda: 0, say=said.append)
    real = build()
    assert said == []
    assert all(is_fake(p) and p.dtype == dtype for p in model.parameters())
    assert all(p.device.type == "cpu" for p in model.parameters())
    found = {n: (p.shape, p.stride()) for n, p in model.named_parameters()}
    assert found == {n: (p.shape, p.stride()) for n, p in real.named_parameters()}


class GivenInNumpy(nn.Module):
    """As DLRM initialises its layers: the data of parameters are set, also to other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        drawn = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
        self.body[0].weight.data = torch.tensor(drawn, requires_grad=True)
        self.body[2].bias.data = torch.from_numpy(np.zeros(4))
        self.body[2].weight.data = torch.ones(4, 8).t().half().t()


def test_data_of_parameters_may_be_set_to_real_tensors() -> None:
    model, real = build_fake(GivenInNumpy, room=lambda: 0), GivenInNumpy()
    found, expected = (
        {n: (t.shape, t.stride(), t.dtype, t.device) for n, t in one.state_dict().items()}
        for one in (model, real)
    )
    assert found == expected
    assert all(is_fake(p) and torch.add(p, 1).shape == p.shape for p in model.parameters())


class Anchored(nn.Module):
    """Keeps what its weights were at first; `write(kept, weight)` writes it."""

    scale: float

    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("first", torch.zeros(4, 4))
        self.kept = torch.zeros(4, 4)
        with torch.no_grad():
            write(self.first, self.layer.weight)
            write(self.kept, self.layer.weight)
        self.double = self.kept * 2
        self.mask = torch.ones(4)


WRITES = {
    "copy_": lambda kept, weight: kept.copy_(weight),
    "a row": lambda kept, weight: kept[0].copy_(weight[0]),
    "an item": lambda kept, weight: kept.__setitem__(0, weight[0]),
    "+=": lambda kept, weight: kept.__iadd__(weight),
    ".data": lambda kept, weight: kept.data.add_(weight.data),
    "out": lambda kept, weight: torch.mul(weight, 2, out=kept),
    "a mask": lambda kept, weight: kept.masked_fill_(weight > 0, 1),
}


@pytest.mark.parametrize("way", WRITES)
def test_what_is_written_from_weights_has_no_values_as_they_have_none(way: str) -> None:
    """Bug: it stayed as it was, and a model too large to be run computed with zeros for good."""
    model = build_fake(lambda: Anchored(WRITES[way]), room=lambda: 0)
    assert all(map(is_fake, (model.first, model.kept, model.double)))
    assert not is_fake(model.mask)
    assert dict(model.named_buffers()).keys() == {"first"}


def test_such_values_that_python_reads_need_real_weights() -> None:
    def build() -> nn.Module:
        model = Anchored(WRITES["copy_"])
        model.scale = model.kept.abs().max().item()
        return model

    said: list[str] = []
    model = build_fake(build, say=said.append)
    assert isinstance(model, Anchored) and 0 < model.scale < 1
    assert "it reads values that follow from those of a parameter" in said[0]


def test_a_model_that_computes_with_them_is_refused_by_name() -> None:
    class Model(Anchored):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + (self.layer.weight - self.kept).sum()

    with pytest.raises(
        ModelError, match="keeps kept, which is no buffer and was computed from parameters"
    ):
        make_plan.plan(
            lambda: Model(WRITES["copy_"]),
            lambda rows: {"x": torch.ones(rows, 4)},
            loss=lambda outputs, batch: outputs.mean(),
            cluster=machine(2),
            batch_size=8,
        )


class Experts(nn.Module):
    """All experts of a layer in one parameter, as DeepSeek-V3 has them: here of 4 TiB."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(2**10, 2**15, 2**15))
        nn.init.normal_(self.weights)


def test_a_parameter_may_be_larger_than_memory() -> None:
    said: list[str] = []
    model = build_fake(Experts, room=lambda: 0, say=said.append)
    assert model.weights.shape == (2**10, 2**15, 2**15) and said == []


def resident() -> int:
    """Bytes of memory that this process has by now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class ZeroExperts(nn.Module):
    """Experts that begin as zeros, as Llama 4 has them, 128 MiB each, and a mask of 64 MiB."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        before = resident() if Path("/proc/self/statm").exists() else 0
        self.weights = nn.Parameter(torch.zeros(experts, 2**10, 2**15))
        self.grown = resident() - before if before else 0
        self.mask: torch.Tensor
        self.register_buffer("mask", torch.zeros((2**13, 2**13), dtype=torch.bool))
        self.mask[3, 5] = True


@pytest.mark.parametrize("experts", [8, 2**15], ids=["of 1 GiB", "of 4 TiB"])
def test_zeros_of_a_parameter_are_never_written(experts: int) -> None:
    """Those of Llama 4 took 5 GiB and a second in each layer. A buffer of zeros has its values."""
    model = build_fake(partial(ZeroExperts, experts))
    assert is_fake(model.weights) and model.weights.shape == (experts, 2**10, 2**15)
    assert model.grown < 2**26
    assert not is_fake(model.mask) and model.mask.nonzero().tolist() == [[3, 5]]


class ZerosInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2, 3))
        torch.zeros(2, 3, out=self.get_buffer("table"))


def test_zeros_may_go_to_a_tensor_that_is_there() -> None:
    model = build_fake(ZerosInPlace)
    assert model.get_buffer("table").tolist() == [[0.0] * 3] * 2


class Reading(nn.Module):
    """Reads its weight in its own constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(100, 10))
        assert torch.isfinite(self.weight).all()


def test_where_a_part_reads_its_weights_one_part_is_real_at_a_time() -> None:
    """4,000 bytes each, and there is room for one."""
    said: list[str] = []

    def build() -> nn.Module:
        whole = nn.Module()
        for number in range(5):
            whole.add_module(f"part{number}", Reading())
        return whole

    before = torch.get_rng_state()
    model = build_fake(build, room=lambda: 4000, say=said.append)
    assert len([*model.parameters()]) == 5 and all(map(is_fake, model.parameters()))
    assert torch.equal(torch.get_rng_state(), before)
    (line,) = said
    assert line.startswith("model() was built with real weights, for it needs their values (")
    assert "test_construct.py" in line and "`assert torch.isfinite(self.weight).all()`" in line


@pytest.mark.parametrize(
    "place",
    [Tensor.data_ptr, lambda w: w.untyped_storage().data_ptr(), lambda w: w.storage().data_ptr()],
)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_where_a_weight_is_in_memory_needs_real_weights(place: Callable[[Tensor], int]) -> None:
    """Bug: fake ones are at 0, all of them, and a model took its matrices for tied."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model.tied = place(model[0].weight) == place(model[1].weight)  # type: ignore[assignment]  # no module
        return model

    assert build_fake(build).tied is False


def test_where_they_are_read_at_the_end_the_whole_model_is_real() -> None:
    real: list[float] = []

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(10, 100), nn.Linear(100, 10))
        model[0].weight.data /= (size := model[0].weight.abs().max().item())
        real.append(size)
        return model

    model = build_fake(build)
    assert len(real) == 1 and 0 < real[0] <= 10**-0.5
    assert all(map(is_fake, model.parameters()))
    with pytest.raises(ModelError) as refused:
        build_fake(build, room=lambda: 5000)
    found = str(refused.value)
    assert found.startswith("the model cannot be built without memory, for ")
    assert "`model[0].weight.data /= (size := model[0].weight.abs().max().item())`" in found
    assert found.endswith(
        "up to 'weight' of a Linear its weights take 8.2 KiB, and 4.9 KiB are free\n"
        "hint: build it without reading its weights, or where there is more memory"
    )


def test_an_error_of_the_users_own_is_raised() -> None:
    def build() -> nn.Module:
        layers()
        raise OSError("no weights")

    with pytest.raises(OSError, match="no weights"):
        build_fake(build)


def test_what_is_made_on_the_meta_device_has_its_values() -> None:
    with on_cpu():
        torch.manual_seed(3)
        model = on_meta()
    torch.manual_seed(3)
    for found, expected in zip(model.parameters(), layers().parameters(), strict=True):
        assert torch.equal(found, expected)
    assert torch.empty(1, device="meta").is_meta


def lazy(*, called: bool) -> nn.Module:
    net = nn.Sequential(nn.LazyConv2d(8, 3), nn.Flatten(), nn.LazyLinear(5))
    if called:
        with torch.no_grad():
            net(torch.zeros(1, 3, 6, 6))
    return net


def test_lazy_layers_have_their_shapes_once_they_were_called() -> None:
    found = source.bare(lambda: lazy(called=True))
    assert [tuple(p.shape) for p in found.parameters()] == [(8, 3, 3, 3), (8,), (5, 128), (5,)]
    assert all(map(is_fake, found.parameters()))


@pytest.mark.parametrize("model", [lambda: lazy(called=False), lazy(called=False)])
def test_lazy_layers_that_nobody_has_called_are_refused(model: source.Source) -> None:
    """Bug: torch's own error of an uninitialized parameter, with a traceback."""
    with pytest.raises(ModelError, match="'0.weight' has no shape yet: its layer is a lazy one"):
        source.bare(model)


def test_the_skeleton_of_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    found = fake_copy(model)
    for tensor in (*found.parameters(), *found.buffers()):
        assert is_fake(tensor) and tensor.device.type == "cpu"


def test_a_default_dtype_holds_for_the_model_and_ends_with_the_plan() -> None:
    """It holds for the inputs as well, which one process makes after the model."""

    def build() -> nn.Module:
        torch.set_default_dtype(torch.float64)
        return nn.Linear(8, 4)

    with source.keeping_default_dtype():
        plan = make_plan.plan(
            build, lambda rows: (torch.randn(rows, 8),), loss=lambda out, batch: out.mean(),
            cluster=machine(1), batch_size=4,
        )  # fmt: skip
        assert torch.get_default_dtype() == torch.float32
    assert plan.inputs[0].dtype == "float64" and plan.products == ("fp64",)


class DrawnAfter(nn.Module):
    """What it draws beside its weights follows on the numbers that these have taken."""

    def __init__(self, keep: Callable[[nn.Module, torch.Tensor], None]) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)
        self.kept: object = None
        keep(self, torch.randperm(64) + 1)


def in_an_attribute(model: nn.Module, order: torch.Tensor) -> None:
    model.kept = order.flip(0)  # type: ignore[assignment]


def as_numbers(model: nn.Module, order: torch.Tensor) -> None:
    model.kept = order.tolist()


def in_a_list(model: nn.Module, order: torch.Tensor) -> None:
    model.kept = [{"order": order}]  # type: ignore[assignment]


def numbers(kept: object) -> list[int]:
    kept = kept[0]["order"] if isinstance(kept, list) and isinstance(kept[0], dict) else kept
    return kept.tolist() if isinstance(kept, torch.Tensor) else [*kept]  # type: ignore[misc]


@pytest.mark.parametrize("kind", ["meta", "cuda"])
def test_the_default_device_of_a_script_is_not_left_behind(kind: str) -> None:
    """Bug: `Tensor.item() cannot be called on meta tensors`, of planning's own tensors."""

    def build() -> nn.Module:
        torch.set_default_device(kind)
        return nn.Linear(4, 4)

    model = build_fake(build)
    assert torch.get_default_device() == torch.zeros(1).device == torch.device("cpu")
    assert model.weight.device == torch.device("cpu")
    assert not torch.overrides.has_torch_function((torch.zeros(1),)), "a mode of torch is left"


@pytest.mark.parametrize("keep", [in_an_attribute, as_numbers, in_a_list])
def test_what_is_drawn_after_weights_is_what_the_model_itself_draws(
    keep: Callable[[nn.Module, torch.Tensor], None],
) -> None:
    """Bug: no numbers were drawn for weights, and those after them were others."""
    said: list[str] = []
    model = build_fake(lambda: DrawnAfter(keep), say=said.append)
    torch.manual_seed(0)
    assert numbers(model.kept) == numbers(DrawnAfter(keep).kept)
    assert "drawn after weights" in said[0]
    assert all(map(is_fake, model.parameters()))


def test_what_is_drawn_after_weights_may_be_a_buffer_or_a_parameter() -> None:
    """Ranks have the values of these from the model itself."""

    def keep(model: nn.Module, order: torch.Tensor) -> None:
        model.register_buffer("order", order)
        model.scale = nn.Parameter(torch.randn(8) * 0.1)
        model.noise = torch.randn(3, generator=torch.Generator().manual_seed(0))

    model = build_fake(lambda: DrawnAfter(keep), room=lambda: 0)
    assert not is_fake(model.get_buffer("order"))
