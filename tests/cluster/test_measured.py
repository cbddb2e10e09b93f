"""Which figures a model's need asks for, and which figures a record may hold."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopipe.cluster.measured import EVERYTHING, KERNELS, Found, Need, Record, checked, figures
from autopipe.errors import AutopipeError
from autopipe.ir import op_costs
from autopipe.planners.costs.precision_of import need
from tests.support.inprocess import measured, traced
from tests.support.odd_models import Net, built, inputs, square
from tests.support.staged import trace_model


def test_figures_of_a_need() -> None:
    """Kernels of unknown names are those of no figure; fp32 is what kernels are compared with."""
    two = Need(("bf16",), ("tanh", "gelu", "conjuring"))
    own = ("fp32", "memory", "launch")
    assert figures(two, 1, gpus=False) == (*own, "gelu", "tanh", "bf16")
    assert figures(two, 2, gpus=False) == (*own, "messages", "collectives", "gelu", "tanh", "bf16")
    assert figures(two, 2, gpus=True) == (*own, "messages", "collectives", "bf16")
    assert {*figures(EVERYTHING, 2, gpus=False)} > {*KERNELS}


def test_the_need_of_a_model() -> None:
    graph = traced("gpt")[0].graph
    kernels = ("causal attention", "cross_entropy_loss", "dropout", "gelu", "layer_norm", "linear")
    assert need(graph, "fp32") == Need(("fp32",), kernels)
    low = ("causal attention in bf16", *kernels[1:])
    assert need(graph, "bf16-autocast") == Need(("bf16",), low)
    assert need(graph, "fp16-autocast").dtypes == ("fp16",)


class Force(Net):
    """A gradient that is taken within forward: of all its products one op is made."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            (force,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
        return force[:, :4]


def test_the_need_of_products_within_an_op() -> None:
    """MFU counts them by the rate of their dtype. Bug story: the MFU of a gradient penalty in bf16
    fell over a rate that nobody had measured."""
    graph = trace_model(built(Force), inputs, square).graph
    assert not any(cost.dims for cost in op_costs.costs(graph))
    assert need(graph, "fp32").dtypes == ("fp32",)


def test_what_a_machine_can_have() -> None:
    assert checked(Record({}, measured(["fp32", "gelu", "collectives"])))
    for name, values in (("fp32", (1e9,)), ("gelu", ()), ("hearsay", (1.0,)), ("bf16", (-1.0,))):
        with pytest.raises(AutopipeError):
            checked(Record({}, {name: Found(values)}))
