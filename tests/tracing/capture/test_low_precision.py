"""A model traced in 16 bits: which tensors are cast, and which parameters have a master weight."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe.errors import CaptureError
from autopipe.frontend.construct import fake_copy
from autopipe.tracing.capture.low_precision import SixteenBits, kept, parameters_in
from tests.support.staged import trace_model

BF16 = torch.bfloat16


class Tied(nn.Module):
    """x [b, 4] -> [b, 4]; the first and the last linear have one weight, the norm's is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
        self.norm.weight.requires_grad_(False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def inputs(rows):
    return {"x": torch.randn(rows, 4), "target": torch.randn(rows, 4)}


def loss(outputs, batch):
    assert outputs.dtype == batch["target"].dtype == torch.float32
    return F.mse_loss(outputs, batch["target"])


def test_within_parameters_are_of_16_bits_and_afterwards_as_they_were():
    model = fake_copy(Tied())
    before = dict(model.named_parameters())
    with parameters_in(model, kept("bf16")):
        assert {p.dtype for p in model.parameters()} == {BF16}
        assert model.first.weight is model.last.weight
        assert model.scale.dtype == torch.float32
    assert all(p is before[name] for name, p in model.named_parameters())
    with parameters_in(model, None):
        assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_running_statistics_and_what_goes_with_them_stay_in_fp32():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    with parameters_in(model, kept("bf16")):
        assert [p.dtype for p in model.parameters()] == [BF16, BF16, torch.float32, torch.float32]
        assert model(torch.randn(2, 1, 3, 3, dtype=BF16)).dtype == BF16


def test_the_graph_of_a_model_in_16_bits():
    """Products are of 16 bits; a loss function sees fp32; what trains has a master weight."""
    graph = trace_model(Tied(), inputs, loss, kept=SixteenBits(BF16)).graph
    products = [node for node in graph.nodes if node.short == "linear"]
    assert {spec.dtype for node in products for spec in node.outputs} == {BF16}
    assert graph.spec(graph.outputs[0]).dtype == torch.float32
    assert {n: (s.spec.dtype, s.held.dtype) for n, s in graph.states.items()} == {
        "first.weight": (BF16, torch.float32),
        "first.bias": (BF16, torch.float32),
        "norm.weight": (BF16, BF16),
        "norm.bias": (BF16, torch.float32),
    }
    assert {path: spec.dtype for path, spec in graph.inputs.items()} == {
        "x": torch.float32,
        "target": torch.float32,
    }


def test_a_read_that_depends_on_weights_is_of_those_of_16_bits():
    """1 + 1/512 is 1 in bf16: the branch is the one that a run in bf16 takes."""

    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((4,), 1 + 1 / 512))

        def forward(self, x):
            return (x * self.weight).mean() if self.weight.max() > 1 else (x + self.weight).mean()

    wide = trace_model(Branch(), lambda rows: {"x": torch.randn(rows, 4)})
    low = trace_model(Branch(), lambda rows: {"x": torch.randn(rows, 4)}, kept=SixteenBits(BF16))
    assert [read.value for read in wide.reads] == [True]
    assert [read.value for read in low.reads] == [False]


def test_in_the_models_own_autocast_region_torch_casts():
    class Region(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("cpu", BF16):
                return self.up(x.float()).mean()

    graph = trace_model(
        Region(), lambda rows: {"x": torch.randn(rows, 4)}, kept=SixteenBits(BF16)
    ).graph
    (product,) = (node for node in graph.nodes if node.short == "linear")
    assert graph.spec(product.values()[0]).dtype == torch.float32


def test_a_model_that_mixes_dtypes_by_itself_is_refused_with_its_line():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x):
            return self.up(x.float()).mean()

    with pytest.raises(CaptureError) as error:
        trace_model(Mixed(), lambda rows: {"x": torch.randn(rows, 4)}, kept=SixteenBits(BF16))
    said = str(error.value)
    assert said.startswith(f"{__file__}:") and ": linear gets float32 and bfloat16" in said
    assert "the precision bf16-autocast" in said


def test_a_product_with_what_a_buffer_has_made_wide_is_refused_with_the_buffers_name():
    """Bug: it said that the model casts its input, and nobody does: a mean kept in fp32 is taken
    from a tensor of bf16, and torch computes the difference in fp32."""

    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            return self.down((self.up(x) - 2 * self.mean).relu()).mean()

    with pytest.raises(CaptureError) as error:
        trace_model(Centred(), lambda rows: {"x": torch.randn(rows, 4)}, kept=SixteenBits(BF16))
    said = str(error.value)
    assert "parameters are of bfloat16 here, and the buffer 'mean' stays in float32" in said
    assert "cast to the weight's dtype" in said


def test_a_teacher_in_16_bits_is_refused():
    """Bug: 0.99 * old + 0.01 * new was rounded to bf16, in which most steps are nothing."""

    class Followed(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                self.teacher.weight.lerp_(self.up.weight, 0.01)
            return (self.up(x) - self.teacher(x)).square().mean()

    with pytest.raises(CaptureError) as error:
        trace_model(Followed(), lambda rows: {"x": torch.randn(rows, 4)}, kept=SixteenBits(BF16))
    said = str(error.value)
    assert said.startswith(f"{__file__}:") and "'teacher.weight', which is of bfloat16" in said
    assert "the precision bf16-autocast" in said


def test_a_model_with_autocast_regions_of_its_own_is_told_the_precision_that_keeps_them():
    """Outside of them it casts back to fp32, where its parameters are of 16 bits."""

    class Regions(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("cpu", BF16):
                hidden = self.up(x)
            return self.down(hidden.float()).mean()

    with pytest.raises(CaptureError) as error:
        trace_model(Regions(), lambda rows: {"x": torch.randn(rows, 4)}, kept=SixteenBits(BF16))
    assert "plan it with precision fp32" in str(error.value.hint)
    graph = trace_model(Regions(), lambda rows: {"x": torch.randn(rows, 4)}).graph
    up, down = (node for node in graph.nodes if node.short == "linear")
    assert (up.autocast.dtype, down.autocast) == (BF16, None)


class Tables(nn.Module):
    """Adds a table of positions, and in each layer a mask; turns by frequencies."""

    def __init__(self, *, turns: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Masked() for _ in range(2))
        self.turns = turns
        self.register_buffer("positions", torch.randn(8, 4))
        self.register_buffer("frequencies", torch.rand(4))

    def forward(self, x):
        x = x + self.positions[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        if self.turns:
            x = x * (torch.arange(x.shape[1])[:, None] * self.frequencies).cos()
        return self.layers[0].first(x)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("mask", torch.zeros(8, 8).fill_(-torch.inf).triu(1))

    def forward(self, x):
        scores = x @ x.transpose(1, 2) + self.mask[: x.shape[1], : x.shape[1]]
        return self.first(scores.softmax(-1) @ x)


def rows_of_tables(rows):
    return {"x": torch.randn(rows, 3, 4), "target": torch.randn(rows, 3, 4)}


def test_buffers_that_meet_activations_are_read_in_16_bits():
    """Bug: x + self.positions is of fp32, and the linear layer behind it refused that."""
    said, model = [], Tables()
    found = trace_model(model, rows_of_tables, loss, kept=kept("bf16"), say=said.append)
    assert found.kept.buffers == ("positions", "layers.0.mask", "layers.1.mask")
    assert {found.graph.states[name].spec.dtype for name in found.kept.buffers} == {torch.float32}
    linear = [node for node in found.graph.nodes if node.short == "linear"]
    assert {node.outputs[0].dtype for node in linear} == {BF16}
    assert any("buffer positions: read in bfloat16" in line for line in said)
    assert model.positions.dtype == torch.float32, "as it was"
    again = trace_model(model, rows_of_tables, loss, kept=found.kept, reads=found.reads)
    assert again.graph.nodes == found.graph.nodes, "a rank has the names from its plan"


class MixesInAProduct(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        return torch.bmm(self.first(x).float(), x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("kind", [Tables, MixesInAProduct])
def test_no_weights_are_made_to_see_that_buffers_meet_activations(kind):
    """A run without weights tells; they were made for each buffer, 15 s each time in MaxViT. Where
    no buffer is the reason, a run with weights tells what is wrong."""
    made, model = [], kind()

    def weights():
        made.append(copy.deepcopy(model))
        return made[-1]

    if kind is Tables:
        trace_model(model, rows_of_tables, loss, kept=kept("bf16"), real=weights)
    else:
        with pytest.raises(CaptureError, match="expected scalar type Float"):
            trace_model(model, rows_of_tables, loss, kept=kept("bf16"), real=weights)
    assert len(made) == (kind is MixesInAProduct)


def test_what_is_computed_from_a_buffer_stays_in_fp32():
    with pytest.raises(CaptureError, match="the buffer 'frequencies' stays in float32"):
        trace_model(Tables(turns=True), rows_of_tables, loss, kept=kept("bf16"))


def test_a_buffer_that_forward_writes_is_not_read_in_16_bits():
    class Counts(Tables):
        def forward(self, x):
            made = super().forward(x)
            self.positions.add_(1)
            return made

    with pytest.raises(CaptureError, match="forward writes the buffer 'positions'"):
        trace_model(Counts(), rows_of_tables, loss, kept=kept("bf16"))
