"""What a rehearsal on tensors without memory says, beside what real tensors do."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import analyse
from autopipe.ir.graph import Ref
from autopipe.ir.opaque_ops import observing
from autopipe.ir.partition import legal_cuts
from autopipe.ir.tensors import RowMajor, dense_strides, tensors_in
from autopipe.ir.torch_private import fake_mode
from autopipe.stages.dry_run import rehearse
from autopipe.stages.lower import lower
from autopipe.stages.precision import arithmetic, computing
from autopipe.stages.saved_storages import SavedStorages
from tests.support.inprocess import traced
from tests.support.long import chosen, sampled
from tests.support.staged import lowered, micro_batches, one_micro_batch, split, trace_model
from tests.support.zoo import ZOO

ROWS = 3


class Observed:
    """A real micro-batch through real stages: bytes kept by each, and every crossing tensor."""

    def __init__(self, found, model, cuts, batch):
        self.modules = lowered(found, model, cuts, ROWS)
        self.leaves = micro_batches(found, batch, 1)[0]
        self.saved, self.strides, self.gradients = [], {}, {}
        one_micro_batch(self.modules, self.leaves, 1.0, self.watch)

    def watch(self, stage, module, arrived, inputs):
        states = [*module.parameters(), *module.buffers()]
        kept = SavedStorages((*states, *arrived, *inputs))
        with observing(kept.keep):
            results = module(*arrived, *inputs)
        self.saved.append(kept.now)
        for ref, tensor in zip(stage.outgoing, results, strict=False):
            self.strides[ref] = dense_strides(tensor)
        for (ref, _), tensor in zip(stage.receives, arrived, strict=True):
            if tensor.requires_grad:
                tensor.register_hook(  # in its `.grad` it lies as the leaf does
                    lambda gradient, ref=ref: self.gradients.update(
                        {(ref, stage.index): dense_strides(gradient)}
                    )
                )
        return results


def rehearsed(found, cuts):
    return rehearse(found.graph, split(found, cuts), find_blocks(found.graph), ROWS)


def that_matter(strides, shapes):
    """The strides of dims with more than one entry; what the others have is anybody's choice."""
    return {
        key: [stride for stride, size in zip(found, shapes[key], strict=True) if size > 1]
        for key, found in strides.items()
    }


def gradient_strides(rehearsal):
    return {
        (ref, taker): strides
        for ref, boundary in rehearsal.boundaries.items()
        for taker, strides in boundary.gradients.items()
    }


@pytest.mark.parametrize(
    "name",
    chosen(
        ("gpt", "gpt2", "llama", "unet", "dropout", "t5", "lstm", "resnet"),
        now=("unet", "lstm"),
    ),
)
def test_bytes_and_layouts_are_those_of_real_tensors(name):
    case, found = ZOO[name], traced(name)[0]
    legal, chance = legal_cuts(analyse(found.graph)), random.Random(name)
    for stages in (1, 2, 4):
        cuts = sorted(chance.sample(legal, stages - 1))
        rehearsal = rehearsed(found, cuts)
        real = Observed(found, case.model(), cuts, case.inputs(ROWS))
        assert list(rehearsal.saved) == real.saved, cuts
        shapes = {ref: boundary.shape for ref, boundary in rehearsal.boundaries.items()}
        strides = {ref: boundary.strides for ref, boundary in rehearsal.boundaries.items()}
        assert that_matter(strides, shapes) == that_matter(real.strides, shapes), cuts
        backward = {key: shapes[key[0]] for key in real.gradients}
        predicted = gradient_strides(rehearsal)
        assert that_matter(predicted, backward) == that_matter(real.gradients, backward), cuts
    assert sum(rehearsal.saved) > 0


class Model(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.run = run

    def forward(self, x):
        return self.run(self, x).mean()


def found_of(run):
    return trace_model(Model(run), lambda b: {"x": torch.ones(b, 4)})


def test_where_a_script_looks_for_anomalies():
    """Bug: `DataDependentOutputException`. A look for nans needs values; a rehearsal has none."""
    found = found_of(lambda m, x: torch.tanh(m.first(x)))
    with torch.autograd.set_detect_anomaly(True):
        assert rehearsed(found, []).saved == (48,)
        assert torch.is_anomaly_enabled(), "a step looks"


def test_the_bytes_of_a_stage_worked_by_hand():
    """tanh keeps its result for backward, the linear keeps it too: one storage, counted once.

    tanh(first(x))    [3, 4] fp32               48
    x                 belongs to the batch       0
    second(..)        nothing: mean of a linear  0
    """
    found = found_of(lambda m, x: m.second(torch.tanh(m.first(x))))
    assert rehearsed(found, []).saved == (3 * 4 * 4,)
    # The same storage, received: stage 1 has not made it and does not count it.
    assert rehearsed(found, ["second/linear/0"]).saved == (48, 0)


def test_a_transposed_tensor_crosses_in_its_own_layout_and_a_gappy_one_dense():
    def transposed(m, x):
        return m.second(m.first(x).t().contiguous().t())

    def gappy(m, x):
        return F.pad(m.first(x)[:, :2].relu()[:, :1], (0, 3)) * x

    found = found_of(transposed)
    cut = rehearsed(found, ["second/linear/0"]).boundaries[Ref("t/1")]
    assert (cut.shape, cut.strides, cut.bytes) == ((3, 4), (1, 3), 48)
    assert cut.gradients == {1: (1, 3)}, "autograd gives a leaf's gradient the leaf's layout"
    found = found_of(gappy)
    cut = rehearsed(found, ["pad/0"]).boundaries[Ref("slice/1")]
    assert (cut.shape, cut.strides) == ((3, 1), (1, 1))


def test_integers_and_what_needs_no_gradient_send_none_back():
    def run(m, x):
        y = m.first(x)
        with torch.no_grad():
            frozen = m.second(x)
        return y.gather(1, y.argsort(1)) + frozen

    boundaries = rehearsed(found_of(run), ["gather/0"]).boundaries
    assert {str(ref): dict(b.gradients) for ref, b in boundaries.items()} == {
        "first/linear/0": {1: (4, 1)},
        "argsort/0": {},
        "second/linear/0": {},
    }


def test_what_crosses_only_to_be_detached_sends_no_gradient_back():
    """Regression: zeros came back, and a parameter had a gradient of zeros instead of none: weight
    decay would have moved it."""

    def run(m, x):
        return m.second(x) * m.first(x).exp().detach()

    found = found_of(run)
    at_detach = rehearsed(found, ["detach/0"])
    assert {str(r): dict(b.gradients) for r, b in at_detach.boundaries.items()} == {
        "second/linear/0": {1: (4, 1)},
        "exp/0": {},
    }


# Recomputation and mixed precision


def observed(found, model, asked, precision):
    """Bytes that real tensors keep in forward, and at the fullest moment of backward besides."""
    blocks, (stage,) = find_blocks(found.graph), split(found, [])
    named = dict(model.named_parameters()) | dict(model.named_buffers()) | found.graph.constants
    states = {name: named[name] for name in stage.states}
    options = {"recompute": asked, "precision": precision}
    made = lower(found.graph, stage, blocks, states, found.reads, ROWS, last=True, **options)
    how = arithmetic(precision, "cpu", [named[name] for name in made.low])
    return made, stage, [*states.values(), *how.copies.values()], how


@pytest.mark.parametrize(
    ("name", "share", "precision"),
    [
        *((name, 0, "bf16-autocast") for name in ("unet", "resnet")),
        ("gpt2", 1, "fp32"),
        ("gpt", 2, "bf16-autocast"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("gpt", 2, "fp16-autocast"),
                *((name, 0, "bf16-autocast") for name in ("gpt", "gpt2", "llama", "t5")),
                *((name, 1, "fp32") for name in ("gpt", "llama", "t5")),
                *((name, 2, "bf16-autocast") for name in ("gpt2", "llama", "t5")),
            )
        ),
    ],
)
def test_bytes_kept_and_made_again_are_those_of_real_tensors(name, share, precision):
    """With all blocks recomputed, every other one, or (share 0) none."""
    case, found = ZOO[name], traced(name)[0]
    blocks = find_blocks(found.graph)
    asked = [block.path for block in blocks][::share] if share else []
    rehearsal = rehearse(
        found.graph, split(found, []), blocks, ROWS, recompute=asked, precision=precision
    )
    made, stage, owned, how = observed(found, case.model(), asked, precision)
    leaves = micro_batches(found, case.inputs(ROWS), 1)[0]
    inputs = [leaves[path] for path in stage.inputs]
    kept = SavedStorages([*owned, *inputs])
    with observing(kept.keep), computing(how):
        (loss, *_) = made.module(*inputs)
    assert rehearsal.saved == (kept.now,)
    before = kept.most = kept.now
    with observing(kept.keep):
        loss.backward()
    assert rehearsal.made == (kept.most - before,)


def test_what_is_made_again_worked_by_hand():
    """Two blocks tanh(linear(x)) on [3, 4]: x is 48 bytes, and so is each tanh.

                        kept                                   made again
    nothing recomputed  tanh 0, tanh 1, exp                     -
    both                tanh 0 (block 1's argument), exp        block 1: its tanh, when exp is gone
                                                                block 0: its tanh, when block 1's
                                                                argument and tanh are gone
    Block 0 is given the batch, which is not counted. So never is more held than was kept.
    """

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return torch.tanh(self.linear(x))

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Layer()])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x.exp().mean()

    found = trace_model(Two(), lambda b: {"x": torch.ones(b, 4)})
    stages, blocks = split(found, []), find_blocks(found.graph)
    paths = [block.path for block in blocks]
    assert paths == ["layers.0", "layers.1"]
    plain = rehearse(found.graph, stages, blocks, ROWS)
    assert (plain.saved, plain.made) == ((3 * 48,), (0,))
    both = rehearse(found.graph, stages, blocks, ROWS, recompute=paths)
    assert (both.saved, both.made) == ((2 * 48,), (0,))
    first = rehearse(found.graph, stages, blocks, ROWS, recompute=paths[:1])
    assert (first.saved, first.made) == ((3 * 48,), (0,)), "block 1 keeps tanh 0 anyway"


def test_mixed_precision_crosses_cuts_as_it_is():
    """A linear's result is bf16 and so is its gradient; the residual stream stays fp32."""
    found = traced("gpt")[0]
    cuts = ["blocks.1.norm1/layer_norm/0", "blocks.2.up/linear/0", "blocks.2/gelu/0"]
    stages = split(found, cuts)
    rehearsal = rehearse(
        found.graph, stages, find_blocks(found.graph), ROWS, precision="bf16-autocast"
    )
    dtypes = {str(ref): boundary.dtype for ref, boundary in rehearsal.boundaries.items()}
    assert dtypes["blocks.0/add/1"] == torch.float32
    assert dtypes["blocks.2.up/linear/0"] == torch.bfloat16
    up = rehearsal.boundaries[Ref("blocks.2.up/linear/0")]
    assert up.bytes == ROWS * 12 * 128 * 2


def test_evaluation_keeps_nothing_and_returns_nothing():
    model = Model(lambda m, x: m.second(torch.tanh(m.first(x))))
    found = trace_model(model, lambda b: {"x": torch.ones(b, 4)}, training=False)
    stages = split(found, ["second/linear/0"])
    rehearsal = rehearse(found.graph, stages, find_blocks(found.graph), 2, gradients=False)
    assert rehearsal.saved == (0, 0)
    assert [dict(b.gradients) for b in rehearsal.boundaries.values()] == [{}]


def test_a_storage_that_two_nodes_keep_is_kept_once_and_anothers_not_at_all():
    mine, weight = torch.ones(8, requires_grad=True), torch.ones(8, requires_grad=True)
    kept = SavedStorages(elsewhere=[weight])
    with observing(kept.keep):
        x = mine * 2
        y = ((x * weight) + x.view(2, 4).reshape(8) * weight).sum()
    assert kept.now == kept.most == 8 * 4
    y.backward()
    assert (kept.now, kept.most) == (0, 8 * 4)


def turned(*shape):
    """Random numbers that lie in another order than their dims."""
    return torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


def layer_norm(x, gradient):
    _, mean, scale = torch.ops.aten.native_layer_norm(x, [6], None, None, 1e-5)
    given = gradient, x, [6], mean, scale, None, None, [True, False, False]
    return torch.ops.aten.native_layer_norm_backward(*given)[0]


def batch_norm(x, gradient):
    made, mean, scale = torch.ops.aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
    given = gradient, x, None, None, None, mean, scale, True, 1e-5, [True, False, False]
    return made, torch.ops.aten.native_batch_norm_backward(*given)[0]


KERNELS = {
    "layer_norm": layer_norm,
    "batch_norm": batch_norm,
    "log_softmax": lambda x, g: torch.ops.aten._log_softmax_backward_data(g, x, -1, x.dtype),
    "mse": lambda x, g: torch.ops.aten.mse_loss_backward(torch.ones(()), x, g, 1),
    "smooth_l1": lambda x, g: torch.ops.aten.smooth_l1_loss_backward(torch.ones(()), x, g, 1, 1.0),
    "huber": lambda x, g: torch.ops.aten.huber_loss_backward(torch.ones(()), x, g, 1, 1.0),
}


@pytest.mark.parametrize("run", KERNELS.values(), ids=KERNELS)
def test_results_lie_as_those_of_real_kernels(run):
    """Bug: torch's fake kernels keep the layout of an operand, and these lay out anew. A gradient
    that crossed a cut was copied to another layout, in which sums have another last bit."""
    x, gradient = turned(2, 5, 6), turned(2, 5, 6)
    real = run(x, gradient)
    with fake_mode() as mode, RowMajor():
        fake = run(*(mode.from_tensor(tensor) for tensor in (x, gradient)))
    assert [t.stride() for t in tensors_in(real)] == [t.stride() for t in tensors_in(fake)]


class Patches(nn.Module):
    """As DiT has it: what flows between its blocks lies channels first, as its patches do."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, 2)
        self.scales = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, image):
        x = self.patches(image).flatten(2).transpose(1, 2)
        for scale, linear in zip(self.scales, self.linears, strict=True):
            scaled = F.layer_norm(x, (8,)) * scale(x.mean(1)).unsqueeze(1)
            x = x + linear(scaled).tanh() * 3
        return x.square().mean()


def test_gradients_cross_as_they_lie():
    """Bug: a gradient was laid out as what it is the gradient of, as autograd does in a `.grad`."""
    model, batch = Patches(), torch.randn(ROWS, 3, 12, 12)
    found = trace_model(model, lambda rows: {"image": torch.randn(rows, 3, 12, 12)})
    for cut in sampled(legal_cuts(analyse(found.graph)), of=12):
        real = Observed(found, model, [cut], {"image": batch})
        rehearsal = rehearsed(found, [cut])
        shapes = {ref: boundary.shape for ref, boundary in rehearsal.boundaries.items()}
        backward = {key: shapes[key[0]] for key in real.gradients}
        predicted = gradient_strides(rehearsal)
        assert that_matter(predicted, backward) == that_matter(real.gradients, backward), cut
