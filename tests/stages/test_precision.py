"""Mixed precision: what plain torch.autocast computes, with one copy of each weight a step."""

import copy
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe.errors import AutopipeError
from autopipe.ir.blocks import find_blocks
from autopipe.ir.torch_private import fake_mode
from autopipe.runtime.parameters.loss_scale import LossScale
from autopipe.stages.lower import lower
from autopipe.stages.precision import (
    AUTOCAST,
    COMPUTED_LOW,
    FP32,
    WideStatistics,
    arithmetic,
    computing,
    current,
    low,
    saves_wide,
    wide_statistics,
)
from tests.support.long import chosen
from tests.support.odd_models import Net, built, unlike_whole_or_cut
from tests.support.staged import first, micro_batches, split, trace_model, traced
from tests.support.zoo import ZOO

LOW = ["bf16-autocast", "fp16-autocast"]


def whole(found, model, precision):
    """A model as one stage, and the parameters that want copies."""
    (stage,) = split(found, [])
    named = dict(model.named_parameters()) | dict(model.named_buffers()) | found.graph.constants
    states = {name: named[name] for name in stage.states}
    blocks = find_blocks(found.graph)
    made = lower(found.graph, stage, blocks, states, found.reads, 2, last=True, precision=precision)
    return made, [model.get_parameter(name) for name in made.low]


# An op of each kind in the table, called with fp32 operands.

X, W, B = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)
X3, W3 = torch.randn(2, 4, 4), torch.randn(2, 4, 4)
KERNEL1, KERNEL2, KERNEL3 = (torch.randn(4, 4, *[1] * dims) for dims in (1, 2, 3))
IMAGE, VIDEO = torch.randn(1, 4, 3, 3), torch.randn(1, 4, 3, 3, 3)
CALLS = {
    "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(X3, W3, W3),
    "linear": lambda: F.linear(X, W, B),
    "matmul": lambda: torch.matmul(X, W),
    "mm": lambda: torch.mm(X, W),
    "bmm": lambda: torch.bmm(X3, W3),
    "addmm": lambda: torch.addmm(B, X, W),
    "baddbmm": lambda: torch.baddbmm(X3, X3, W3),
    "addbmm": lambda: torch.addbmm(X, X3, W3),
    "conv1d": lambda: F.conv1d(X3, KERNEL1),
    "conv2d": lambda: F.conv2d(IMAGE, KERNEL2),
    "conv3d": lambda: F.conv3d(VIDEO, KERNEL3),
    "conv_transpose1d": lambda: F.conv_transpose1d(X3, KERNEL1),
    "conv_transpose2d": lambda: F.conv_transpose2d(IMAGE, KERNEL2),
    "conv_transpose3d": lambda: F.conv_transpose3d(VIDEO, KERNEL3),
}


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("op", sorted(COMPUTED_LOW & {*CALLS}))  # ours lower by themselves
def test_the_table_has_what_autocast_lowers(op, precision):
    """A copy that goes to an op autocast leaves alone would change what the model computes."""
    with computing(arithmetic(precision, "cpu")):
        assert CALLS[op]().dtype == AUTOCAST[precision]


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("name", chosen(("gpt", "unet", "mask", "frozen"), now=("gpt", "unet")))
def test_losses_and_gradients_are_those_of_torch_autocast(name, precision):
    """Bit for bit, with all micro-batches in flight at once and backward outside."""
    case, found, count = ZOO[name], traced(name), 3
    batches = micro_batches(found, case.inputs(2 * count), count)
    plain, ours = case.model(), case.model()
    expected = []
    for leaves in batches:
        with torch.autocast("cpu", AUTOCAST[precision]):
            expected.append(first(case.eager(plain, leaves)))
        expected[-1].backward()
    lowered, wanted = whole(found, ours, precision)
    how, losses = arithmetic(precision, "cpu", wanted), []
    for leaves in batches:
        with computing(how):
            losses.append(lowered.module(*[leaves[path] for path in lowered.stage.inputs])[0])
    for loss in losses:
        loss.backward()
    assert all(map(torch.equal, losses, expected))
    for (parameter, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), parameter
        if a.grad is not None:
            assert a.grad.dtype == torch.float32
            assert torch.equal(a.grad, b.grad), parameter


class Masked(nn.Module):
    """Attention as it is often written: scores are masked with the least number of their dtype."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        scores = self.query(x) @ self.key(x).mT
        later = torch.ones(4, 4, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, torch.finfo(scores.dtype).min)
        return torch.clamp(scores.sum(-1), min=torch.finfo(scores.dtype).min).relu().mean()


class Chosen(Masked):
    """The number is chosen by booleans; the first query sees no key, and weighs all alike."""

    def forward(self, x):
        scores = self.query(x) @ self.key(x).mT
        seen = torch.ones(4, 4, dtype=torch.bool).tril(-1)
        scores = torch.where(seen, scores, torch.finfo(scores.dtype).min)
        return (scores.softmax(-1) @ x).square().mean()


@pytest.mark.parametrize("kind", [Masked, Chosen])
@pytest.mark.parametrize("precision", LOW)
def test_limits_of_fp32_that_the_trace_has_read_are_those_of_16_bits(precision, kind):
    """Bug: "value cannot be converted to type c10::BFloat16 without overflow", in a rank's first
    step: the graph has -3.4e38, and the scores of a product are in 16 bits. Bug: `where` made -inf
    of it, and a query that sees no key had a nan."""
    torch.manual_seed(0)
    plain = kind()
    ours, x = copy.deepcopy(plain), torch.randn(2, 4, 8)
    found = trace_model(copy.deepcopy(plain), lambda rows: {"x": torch.ones(rows, 4, 8)})
    with torch.autocast("cpu", AUTOCAST[precision]):
        expected = plain(x)
    lowered, wanted = whole(found, ours, precision)
    with computing(arithmetic(precision, "cpu", wanted)):
        (loss,) = lowered.module(x)
    assert torch.equal(loss, expected)


def linears():
    """x [b, 8] -> scalar by three linears, of which the second is frozen."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        body = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh()]
        model = nn.Sequential(*body, nn.Linear(8, 1, bias=False))
    model[2].weight.requires_grad_(False)
    return trace_model(Mean(model), lambda b: {"x": torch.ones(b, 8)}), Mean(model)


class Mean(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).float().mean()


def test_all_micro_batches_share_a_copy_of_each_weight():
    """Frozen ones too. torch's own cache is emptied between forwards, so that each micro-batch
    would keep another."""
    found, model = linears()
    lowered, wanted = whole(found, model, "bf16-autocast")
    assert lowered.low == tuple(
        f"inner.{name}" for name in ("0.weight", "0.bias", "2.weight", "4.weight")
    )
    how = arithmetic("bf16-autocast", "cpu", wanted)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        for _ in range(3):
            with computing(how):
                lowered.module(torch.ones(2, 8))
    weights = [t for t in kept if t.shape in ((8, 8), (8, 1))]  # the activations are [2, 8]
    assert len(weights) == 3 * 2
    copies = {name: how.copies[id(p)] for name, p in zip(lowered.low, wanted, strict=True)}
    shared = {copies["inner.2.weight"].data_ptr(), copies["inner.4.weight"].data_ptr()}
    assert {weight.data_ptr() for weight in weights} == shared


def test_each_backward_adds_to_the_gradient_in_fp32_and_calls_its_hooks():
    found, model = linears()
    lowered, wanted = whole(found, model, "bf16-autocast")
    weight, seen = model.inner[4].weight, []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    how, losses = arithmetic("bf16-autocast", "cpu", wanted), []
    for k in range(3):
        with computing(how):
            losses.append(lowered.module(torch.full((2, 8), float(k)))[0])
    for loss in losses:
        loss.backward()
    assert len(seen) == 3
    alone = []
    for k in range(3):
        one = copy.deepcopy(model)
        with torch.autocast("cpu", torch.bfloat16):
            loss = one(torch.full((2, 8), float(k)))
        loss.backward()
        alone.append(one.inner[4].weight.grad)
    assert torch.equal(seen[-1], alone[0] + alone[1] + alone[2])
    assert seen[-1].dtype == torch.float32


def test_the_next_step_computes_with_the_new_weights():
    found, model = linears()
    lowered, wanted = whole(found, model, "bf16-autocast")
    for _ in range(2):
        with computing(arithmetic("bf16-autocast", "cpu", wanted)):
            (loss,) = lowered.module(torch.ones(2, 8))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(loss, model(torch.ones(2, 8)))
        with torch.no_grad():
            model.inner[4].weight.add_(1.0)


def test_a_users_own_region_stays_as_it_is():
    """Its ops keep their dtype, lower or not, and their parameters do not come as copies."""

    class Regions(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            x = self.a(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.b(x.float())
            with torch.autocast("cpu", enabled=False):
                x = self.c(x.float())
            return x.mean()

    model = Regions()
    found = trace_model(model, lambda b: {"x": torch.ones(b, 8)})
    lowered, wanted = whole(found, model, "fp16-autocast")
    assert lowered.low == ("a.weight", "a.bias")
    products = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if "linear" in str(func):
                products.append(made.dtype)
            return made

    with computing(arithmetic("fp16-autocast", "cpu", wanted)), Watch():
        (loss,) = lowered.module(torch.ones(2, 8))
    loss.backward()
    assert products == [torch.float16, torch.bfloat16, torch.float32]
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(loss, model(torch.ones(2, 8)))


def test_no_gradient_flows_through_no_grad():
    """The copy leads back to its parameter; a node of torch.no_grad() must not take that way."""

    class Peeking(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8, bias=False)

        def forward(self, x):
            with torch.no_grad():
                peek = self.a(x)
            return (self.a(x) * peek).float().mean()

    model = Peeking()
    found = trace_model(model, lambda b: {"x": torch.ones(b, 8)})
    lowered, wanted = whole(found, model, "bf16-autocast")
    with computing(arithmetic("bf16-autocast", "cpu", wanted)):
        (loss,) = lowered.module(torch.ones(2, 8))
    loss.backward()
    gradient, model.a.weight.grad = model.a.weight.grad, None
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = model(torch.ones(2, 8))
    loss.backward()
    assert torch.equal(gradient, model.a.weight.grad)


def test_fp32_is_nothing_at_all():
    found, model = linears()
    lowered, wanted = whole(found, model, "fp32")
    assert (lowered.low, wanted) == ((), [])
    assert "low(" not in lowered.module.code
    with computing(arithmetic("fp32", "cpu", wanted)):
        assert not torch.is_autocast_enabled("cpu")


def test_what_is_computed_in_belongs_to_a_thread_and_ends():
    weight = nn.Parameter(torch.ones(2))
    how, elsewhere = arithmetic("bf16-autocast", "cpu", [weight]), []
    with computing(how):
        assert low(weight).dtype == torch.bfloat16
        assert low(other := nn.Parameter(torch.ones(2))) is other
        thread = threading.Thread(target=lambda: elsewhere.append((current(), low(weight))))
        thread.start()
        thread.join()
        with computing(FP32):
            assert low(weight) is weight
        assert current() is how
    assert low(weight) is weight
    assert elsewhere == [(FP32, weight)]


def test_an_unknown_precision():
    with pytest.raises(AutopipeError) as caught:
        arithmetic("fp8", "cpu")
    assert (
        str(caught.value) == "there is no precision 'fp8'\n"
        "hint: one of fp32, bf16, fp16, bf16-autocast, fp16-autocast"
    )


NORMS = {
    "layer": lambda affine: nn.LayerNorm(4, elementwise_affine=affine),
    "group": lambda affine: nn.GroupNorm(2, 4, affine=affine),
    "batch": lambda affine: nn.BatchNorm2d(4, affine=affine),
}


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_on_fake_tensors_keep_as_much_as_on_real_ones(norm, affine):
    """The statistics are fp32 where the norm has states in fp32, and only there."""

    def kept():
        found = []
        x = torch.zeros(2, 4, 3, 4, dtype=torch.bfloat16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
            NORMS[norm](affine)(x)
        return [(tuple(t.shape), t.dtype) for t in found]

    real = kept()
    with fake_mode(), WideStatistics():
        assert kept() == real


def test_small_gradients_survive_fp16_with_a_loss_scale():
    """d loss / d product = 1e-8 is nothing in fp16; times 2 ** 16 it is 6.6e-4."""
    found, model = linears()
    lowered, wanted = whole(found, model, "fp16-autocast")
    weight = model.inner[4].weight

    def gradient(loss_scale):
        with computing(arithmetic("fp16-autocast", "cpu", wanted)):
            (loss,) = lowered.module(torch.ones(2, 8))
        weight.grad = None
        loss.backward(torch.full_like(loss, 1e-8 * loss_scale.scale))
        assert loss_scale.unscale([weight])
        return weight.grad

    lost, kept = gradient(LossScale(scale=1.0)), gradient(LossScale())
    assert not lost.any()
    exact = model.inner[:4](torch.ones(1, 8)) * 1e-8
    torch.testing.assert_close(kept, exact, rtol=1e-2, atol=0)


def test_statistics_are_looked_after_only_where_a_norm_may_be_in_16_bits():
    """The mode stands in the way of every op: a model without such norms goes without."""

    def modes(model, precision):
        nodes = trace_model(Mean(model), lambda b: {"x": torch.ones(b, 8)}).graph.nodes
        return type(wide_statistics(saves_wide(nodes, precision)))

    norm = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    assert modes(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), "bf16-autocast") is nullcontext
    assert modes(norm, "fp32") is nullcontext
    assert modes(norm, "bf16-autocast") is WideStatistics
    assert modes(Lowest(norm), "fp32") is WideStatistics


class Lowest(nn.Module):
    """A model that casts to bf16 itself."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner.bfloat16()

    def forward(self, x):
        return self.inner(x.bfloat16())


class Places(Net):
    """Rotary positions, in fp32 whatever is around them; `arange` and `softmax` have a dtype."""

    def inside(self, hidden):
        with torch.autocast("cpu", enabled=False):
            place = torch.arange(hidden.shape[1], dtype=torch.float32)
            share = torch.softmax(hidden, 1, dtype=torch.float32)
        return self.middle(hidden) * place.cos() + share


def test_an_op_with_a_dtype_of_its_own_under_an_autocast_of_the_model():
    """Bug: TypeError: under_autocast() got multiple values for argument 'dtype'."""
    assert unlike_whole_or_cut(built(Places), cuts=["relu/1"]) == []
