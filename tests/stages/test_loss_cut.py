"""A loss that compares rows is cut off its graph, or refused with the line that forbids it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe.errors import ModelError
from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import analyse
from autopipe.ir.graph import Input
from autopipe.ir.partition import partition
from autopipe.stages.loss_cut import cut_loss
from autopipe.stages.lower import lower
from tests.support.staged import trace_model

WIDTH = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.ones(()))
        self.register_buffer("queue", torch.zeros(8, WIDTH))

    def forward(self, x):
        return self.layer(x)


def inputs(rows):
    return {"x": torch.randn(rows, WIDTH), "label": torch.arange(rows) % 3}


def near(e, batch):
    return F.cross_entropy(e @ e.T, torch.arange(e.shape[0]))


def cut(forward=None, loss=near):
    model = Net()
    if forward is not None:
        model = type("Own", (Net,), {"forward": forward})()
    return cut_loss(trace_model(model, inputs, loss).graph)


def lies(whole):
    """Of each embedding its shape, the dim of its rows, and how often all rows come in it."""
    return [(str(e.spec).removeprefix("float32"), e.dim, e.groups) for e in whole.embeddings]


LYING = {
    "rows by themselves stay with the model": (
        lambda self, x: F.normalize(self.layer(x) + x).exp(), "[b, 4]", 0, 1,
    ),
    "two batches, one after the other": (
        lambda self, x: self.layer(torch.cat([x, x.flip(1)])), "[2*b, 4]", 0, 2,
    ),
    "two entries of each row": (
        lambda self, x: self.layer(torch.stack([x, x.flip(1)], 1).flatten(0, 1)), "[2*b, 4]", 0, 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("forward", "shape", "dim", "groups"), LYING.values(), ids=LYING)
def test_what_the_loss_reads_is_told_by_how_rows_lie(forward, shape, dim, groups):
    whole = cut(forward)
    assert lies(whole) == [(shape, dim, groups)]
    (embedding,) = whole.embeddings
    batch = torch.arange(4 * groups)  # of 4 rows, in 2 micro-batches
    parts = embedding.parted(batch, 2)
    assert [part.tolist() for part in parts] == (
        [[0, 1, 4, 5], [2, 3, 6, 7]] if groups == 2 else [[0, 1], [2, 3]]
    )
    assert torch.equal(embedding.joined(parts), batch)


def test_a_parameter_that_the_loss_reads_is_an_embedding_without_rows():
    whole = cut(
        lambda self, x: self.temperature * (self.layer(x) @ x.T), lambda o, b: o.logsumexp(1).mean()
    )
    assert ("[]", None, 1) in lies(whole)
    assert whole.loss.states == {}
    assert "temperature" in whole.rows.states


def test_labels_and_masks_are_the_loss_s_own():
    def alike(e, batch):  # of one label
        same = batch["label"][:, None] == batch["label"][None]
        return (e @ e.T * same).mean()

    whole = cut(loss=alike)
    assert {"label", "embedding.0"} == {*whole.loss.inputs}
    read = {v.path for node in whole.rows.nodes for v in node.values() if isinstance(v, Input)}
    assert read == {"x", "gradient.0"}


def rows_mixed(self, x):
    return self.layer(torch.cat([x, x]).flip(0))


def drawn_into_a_part(self, x):
    half = torch.zeros(2)
    half[0] = torch.rand(())
    return self.layer(x) @ x.T * (half * self.temperature).sum()


def written_once_it_is_read(self, x):
    e = self.layer(x)
    total = e.sum(0)
    e.add_(1)
    return self.layer(e) * total


REFUSED = {
    "rows that cannot be told apart": (
        rows_mixed, near, "what linear makes, which the loss reads, is float32[2*b, 4], in which "
        "its rows (b) cannot be told apart",
    ),
    "a number of each micro-batch": (
        lambda self, x: self.layer(x) @ x.T + x.mean() * self.temperature, lambda o, b: o.mean(),
        "which the loss reads, has no rows, and is another number in each micro-batch",
    ),
    "a buffer that is written": (
        lambda self, x: (self.queue.add_(1), self.layer(x) @ self.queue.T)[1],
        lambda o, b: (o @ o.T).mean(), "[queue], which the loss reads, is written in place at",
    ),
    "numbers drawn into a part of a tensor": (
        drawn_into_a_part, lambda o, b: o.mean(),
        "which the loss reads, has no rows, and is drawn in each micro-batch",
    ),
    "rows that are written once they are read": (
        written_once_it_is_read, lambda o, b: o.square().mean(),
        "what linear makes, which the loss reads, is written in place at",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("forward", "loss", "what"), REFUSED.values(), ids=REFUSED)
def test_what_micro_batches_cannot_give_is_refused(forward, loss, what):
    with pytest.raises(ModelError) as error:
        cut(forward, loss)
    assert what in str(error.value)
    assert 'loss_over="batch" was asked for' in str(error.value)


class Spectral(Net):
    """Its rows are complex, and so is a scale of them."""

    def __init__(self):
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x):
        return torch.fft.fft(self.layer(x)) @ self.mixing, self.phase


def in_spectra(outputs, batch):
    rows, phase = outputs
    return ((rows * phase) @ rows.conj().T).abs().logsumexp(1).mean()


def test_complex_embeddings_have_gradients():
    """Bug: they had none, and what the model computes them with was planned, and never trained."""
    torch.manual_seed(0)
    model, batch = Spectral(), inputs(4)
    expected = gradients(in_spectra(model(batch["x"]), batch), model)
    whole = cut_loss(trace_model(model, inputs, in_spectra).graph)
    assert lies(whole) == [("complex64[b, 4]", 0, 1)] * 2
    rows, loss = on_rows(whole.rows, model), on_rows(whole.loss, model)
    paths, seeds = [e.path for e in whole.embeddings], [e.gradient for e in whole.embeddings]
    zeros = {seed: torch.zeros(4, WIDTH, dtype=torch.complex64) for seed in seeds}
    _, *embeddings = rows(batch | zeros)
    leaves = [e.detach().requires_grad_() for e in embeddings]
    of_batch = torch.autograd.grad(loss(batch | dict(zip(paths, leaves, strict=True)))[0], leaves)
    surrogate, *_ = rows(batch | dict(zip(seeds, of_batch, strict=True)))
    found = gradients(surrogate, model)
    assert found.keys() == expected.keys() == {"layer.weight", "layer.bias", "mixing", "phase"}
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def gradients(loss, model):
    """By name, of the parameters that have one."""
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, [*named.values()], allow_unused=True)
    return {name: g for name, g in zip(named, found, strict=True) if g is not None}


def on_rows(graph, model):
    """The graph as one stage of the model on four rows, which takes its inputs by name."""
    (stage,) = partition(analyse(graph), [])
    states = {name: model.get_parameter(name) for name in stage.states}
    module = lower(graph, stage, find_blocks(graph), states, (), 4, last=True).module
    return lambda leaves: module(*(leaves[path].clone() for path in stage.inputs))
