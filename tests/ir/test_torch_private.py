"""Models of any size without their memory."""

import resource

import pytest
import torch
from torch import nn

from autopipe.frontend.construct import build_fake, fake_copy
from autopipe.ir import torch_private
from tests.support.zoo import ZOO


def peak():
    """The most bytes this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Large(nn.Module):
    """20 GB of weights; uninitialised, as every constructor's are for a moment."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(5):
            layer = nn.Module()
            layer.weight = nn.Parameter(torch.empty(10**6, 1000))
            self.layers.append(layer)


def test_a_model_of_20_gb_is_built_without_its_memory():
    before = peak()
    model = build_fake(Large)
    assert sum(p.numel() * p.itemsize for p in model.parameters()) == 20 * 10**9
    assert peak() - before < 100 * 2**20


@pytest.mark.parametrize("name", list(ZOO))
def test_every_model_of_the_zoo_looks_the_same_built_fake(name):
    with torch.random.fork_rng(devices=[]):
        model, real = build_fake(ZOO[name].build), ZOO[name].build()
    assert all(torch_private.is_fake(p) for p in model.parameters())
    assert not any(torch_private.is_fake(b) for b in model.buffers())
    described = [
        {n: (p.shape, p.dtype, p.requires_grad) for n, p in m.named_parameters()}
        for m in (model, real)
    ]
    assert described[0] == described[1]


def test_the_class_is_left_as_it_was():
    before = nn.Module.register_parameter
    with pytest.raises(ZeroDivisionError):
        build_fake(lambda: 1 / 0)
    assert nn.Module.register_parameter is before


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)
        self.embedding.weight.is_mine = True
        self.norm.weight.requires_grad_(False)


@pytest.mark.parametrize("make", [lambda: build_fake(Tied), lambda: fake_copy(Tied())])
def test_ties_flags_and_marks_on_parameters_are_kept(make):
    model = make()
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.is_mine
    assert not model.norm.weight.requires_grad
    assert isinstance(model.head.weight, nn.Parameter)
    assert model.norm.running_var.tolist() == [1, 1, 1, 1], "buffers are real"


def test_a_skeleton_is_another_model():
    model = Tied()
    skeleton = fake_copy(model)
    skeleton.norm.running_mean.fill_(7)
    skeleton.eval()
    assert model.norm.running_mean.sum() == 0
    assert model.training
    assert not torch_private.is_fake(model.head.weight)
    assert torch_private.is_fake(fake_copy(skeleton).head.weight), "a skeleton has a skeleton"


def test_what_ops_write_and_what_they_view():
    aten = torch.ops.aten
    assert torch_private.writes(aten.add_.Tensor) == (0,)
    assert torch_private.writes(aten.add.Tensor) == ()
    assert torch_private.writes(aten.add.out) == (3,)
    assert torch_private.writes(len) == ()
    assert torch_private.views(aten.view.default) and torch_private.views(aten.relu_.default)
    assert torch_private.views(aten.chunk.default) and not torch_private.views(aten.relu.default)
    assert torch_private.written_arguments(aten.add.out, [1, 2], {"out": 3}) == [3]


def test_views_share_a_storage_real_or_fake():
    for x in (torch.zeros(4), torch_private.fake_like(torch_private.fake_mode(), torch.zeros(4))):
        assert (
            torch_private.storage_key(x)
            == torch_private.storage_key(x[1:])
            != torch_private.storage_key(x.clone())
        )
