"""Autocast as a GPU has it, on a CPU: the lists are torch's own, and so are the dtypes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import autopipe
from autopipe.cluster.spec import parse
from autopipe.errors import ModelError
from autopipe.rewriting.for_gpus import for_gpus
from autopipe.rewriting.gpu_autocast import (
    FP32,
    FP32_UNLESS_GIVEN,
    LOWER,
    WIDEST,
    autocast,
    autocast_of_model,
)
from autopipe.stages.dry_run import rehearse
from tests.support.long import chosen
from tests.support.odd_models import inputs, square
from tests.support.staged import split, trace_model

aten = torch.ops.aten
LOW, HIGH = torch.randn(4, 8).bfloat16(), torch.randn(4, 8)
ATTENTION = nn.MultiheadAttention(8, 2)

CASES = {
    "linear": (lambda: F.linear(HIGH, torch.randn(8, 8)), torch.bfloat16),
    "a product of both": (lambda: LOW @ torch.randn(8, 8), torch.bfloat16),
    "softmax": (lambda: LOW.softmax(-1), torch.float32),
    "softmax, told": (lambda: torch.softmax(LOW, -1, dtype=torch.bfloat16), torch.bfloat16),
    "layer norm": (lambda: F.layer_norm(LOW, (8,)), torch.float32),
    "exp": (lambda: LOW.exp(), torch.float32),
    "sum": (lambda: LOW.sum(), torch.float32),
    "norm": (lambda: aten.norm.Scalar(LOW, 2), torch.float32),
    "pow": (lambda: LOW**2, torch.float32),
    "addcmul": (lambda: torch.addcmul(LOW, LOW, HIGH), torch.float32),
    "addcmul of low": (lambda: torch.addcmul(LOW, LOW, LOW), torch.bfloat16),
    "gelu": (lambda: F.gelu(LOW), torch.bfloat16),
    "relu of fp32": (lambda: F.relu(HIGH), torch.float32),
    "a sum of both": (lambda: LOW + HIGH, torch.float32),
    "square": (lambda: aten.square.default(LOW), torch.float32),
    "cross entropy": (lambda: aten.cross_entropy_loss(LOW, torch.zeros(4).long()), torch.float32),
    "interpolated": (
        lambda: aten.upsample_nearest1d.vec(LOW[None], None, [2.0]),
        torch.float32,
    ),
    "cross entropy, by its function": (
        lambda: F.cross_entropy(LOW, torch.zeros(4).long()),
        torch.float32,
    ),
    "interpolated, by its function": (lambda: F.interpolate(LOW[None], 3), torch.float32),
    "normalized": (lambda: F.normalize(LOW), torch.float32),
    "torch.norm": (lambda: torch.norm(LOW, dim=-1), torch.float32),
    "Tensor.norm": (lambda: LOW.norm(dim=-1), torch.float32),
    "a far triplet": (lambda: F.triplet_margin_loss(LOW, LOW + 1, LOW - 1), torch.float32),
    "attention of several heads": (lambda: ATTENTION(HIGH, HIGH, HIGH)[0], torch.bfloat16),
    "its weights": (lambda: ATTENTION(HIGH, HIGH, HIGH)[1], torch.float32),
    "einsum": (lambda: torch.einsum("ij,kj->ik", HIGH, HIGH), torch.bfloat16),
    "cdist": (lambda: torch.cdist(LOW, LOW), torch.float32),
    "a recurrent layer": (lambda: nn.GRU(8, 8)(HIGH)[0], torch.float16),
    "fp64 stays": (lambda: F.linear(HIGH.double(), torch.randn(8, 8).double()), torch.float64),
}
"""As "CUDA Op-Specific Behavior" of torch's documentation says."""


@pytest.mark.parametrize("name", CASES)
def test_an_op_gives_what_it_gives_on_a_gpu(name):
    call, expected = CASES[name]
    with for_gpus(True), autocast("cpu", torch.bfloat16):
        assert call().dtype == expected


def test_the_lists_are_those_of_this_torch():
    """Each op that torch casts on GPUs is in one of them, and no other op."""
    every = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    casts = {
        name.removeprefix("aten::")
        for name in every
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    }
    casts = {name for name in casts if "imname" not in name and ".names_" not in name}
    casts.discard("binary_cross_entropy")  # refused there
    casts.discard("_cudnn_rnn")  # in builds for GPUs; `lstm.input` and the like stand for it
    assert sorted(LOWER | FP32 | FP32_UNLESS_GIVEN | WIDEST) == sorted(casts)


def test_an_inner_autocast_decides():
    with for_gpus(True), autocast("cpu", torch.bfloat16):
        with autocast("cpu", None, enabled=False):
            assert F.linear(HIGH, torch.randn(8, 8)).dtype == torch.float32
        assert F.linear(HIGH, torch.randn(8, 8)).dtype == torch.bfloat16
    assert F.linear(HIGH, torch.randn(8, 8)).dtype == torch.float32


def test_what_a_model_asks_for_a_gpu_is_done_on_a_gpu_alone():
    """Traced on a CPU, "cpu" is what `x.device.type` has been read as."""
    layer = nn.Linear(8, 8)

    def made(asked, gpus):
        with for_gpus(gpus), autocast_of_model(asked, torch.bfloat16, True, [HIGH]):
            return layer(HIGH).dtype

    assert made("cpu", False) == made("cpu", True) == made("cuda", True) == torch.bfloat16
    assert made("cuda", False) == torch.float32


class Mixed(nn.Module):
    """Asks for autocast around its first layer, by a name of a device."""

    def __init__(self, device):
        super().__init__()
        self.device = device
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast(self.device, torch.bfloat16):
            hidden = self.first(x)
        return self.second(hidden.float()).square().mean()


class Softmax(nn.Module):
    """Sends a softmax to its second stage."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.first(x).softmax(-1)).square().mean()


def crossing(model, after, precision="fp32", *, gpus):
    """The dtype of what crosses a cut behind a node, as a rehearsal has it."""
    trace = trace_model(model, lambda rows: {"x": torch.randn(rows, 8)})
    names = [node.name for node in trace.graph.nodes]
    cut = next(i for i, name in enumerate(names) if name.startswith(after)) + 1
    with for_gpus(gpus):
        found = rehearse(trace.graph, split(trace, [cut]), (), 2, precision=precision)
    (tensor,) = found.boundaries.values()
    return tensor.dtype


@pytest.mark.parametrize("asked", chosen(("cpu", "cuda"), now=("cuda",)))
def test_an_autocast_of_the_model_is_one_of_the_gpus_that_it_is_planned_for(asked):
    """Bug: on GPUs a model that asks for its tensors' device got none, traced on a CPU as it was;
    what it sent was twice as large as its receiver had room for, and the ranks died."""
    assert crossing(Mixed(asked), "first", gpus=True) == torch.bfloat16
    on_cpu = torch.bfloat16 if asked == "cpu" else torch.float32
    assert crossing(Mixed(asked), "first", gpus=False) == on_cpu


def test_a_softmax_is_sent_as_a_gpu_gives_it():
    """Bug: under bf16-autocast its receiver expected what a CPU gives."""
    model = Softmax()
    assert crossing(model, "softmax", "bf16-autocast", gpus=True) == torch.float32
    assert crossing(model, "softmax", "bf16-autocast", gpus=False) == torch.bfloat16


class Exp(torch.autograd.Function):
    """Multiplies and raises, as autocast has it."""

    @staticmethod
    def forward(ctx, x, weight):
        made = (x @ weight).exp()
        ctx.save_for_backward(x, weight, made)
        return made

    @staticmethod
    def backward(ctx, gradient):
        x, weight, made = ctx.saved_tensors
        inner = (gradient * made).float()
        return inner @ weight.float().t(), x.float().t() @ inner


class Function(nn.Module):
    """Sends what a custom Function gives."""

    def __init__(self):
        super().__init__()
        self.weight, self.second = nn.Parameter(torch.eye(8)), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(Exp.apply(x, self.weight)).square().mean()


class Either(Softmax):
    """Sends what one side of a cond gives."""

    def forward(self, x):
        made = torch.cond(x.sum() > 0, lambda h: self.first(h), lambda h: self.first(-h), (x,))
        return self.second(made).square().mean()


def test_the_models_own_functions_and_branches_compute_as_on_a_gpu():
    """Their ops are called from within an op, where the emulation has to begin again."""
    assert crossing(Function(), "function", "bf16-autocast", gpus=True) == torch.float32
    assert crossing(Function(), "function", "bf16-autocast", gpus=False) == torch.bfloat16
    assert crossing(Either(), "cond", "bf16-autocast", gpus=True) == torch.bfloat16


class Packs(nn.Module):
    """Sends what a recurrent layer makes of packed sequences."""

    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4), nn.GRU(4, 4, batch_first=True)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x.unflatten(1, (2, 4)))
        lengths = torch.full((x.shape[0],), 2)
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        made, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=2)
        return self.second(made).square().mean()


def test_packed_sequences_come_as_cudnn_gives_them():
    """Bug: planned for GPUs they were refused, as a product of bf16 with fp32."""
    assert crossing(Packs(), "layer/packed_rnn", "bf16-autocast", gpus=True) == torch.float16
    assert crossing(Packs(), "layer/packed_rnn", gpus=True) == torch.float32


class Spectrum(nn.Module):
    """Takes a Fourier transform of what autocast has made bf16, which no GPU does."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(5, 4)

    def forward(self, x):
        found = torch.fft.rfft(self.first(x))
        return self.second(found.abs())


def test_an_op_that_does_not_compute_in_16_bits_is_refused_with_its_line():
    """Bug: planning ended in a traceback; plain PyTorch on a GPU raises too."""
    with pytest.raises(ModelError) as error:
        autopipe.plan(
            Spectrum(),
            inputs,
            loss=square,
            cluster=parse("2xH100-80GB"),
            batch_size=8,
            precision="bf16-autocast",
        )
    assert "test_gpu_autocast.py" in str(error.value)
    error.match(r"under autocast fft_rfft raises \w+Error: Unsupported dtype BFloat16")
