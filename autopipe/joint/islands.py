"""Find the islands of a graph: the calls that a compiler makes one function of.

Some calls have to run as Python: random ones, which seed their generator first; read checks; calls
that gather parameters or move tensors to the host and back; ops that no compiler looks into. The
calls of one block between two such calls are an island:

    h.0 [norm, linear, attention]  draw(dropout)  h.0 [add, norm, linear, gelu, linear]  draw ...

Within an island, calls that only move memory are fused into loops, with no tensors between them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from torch import fx

from autopipe.ir.opaque_ops import OPAQUE
from autopipe.joint import offload
from autopipe.joint.joint_graph import storages
from autopipe.joint.least_cut import maker
from autopipe.joint.run_again import is_cheap
from autopipe.stages.node_calls import python_only, take
from autopipe.stages.op_tape import SEGMENT

_PYTHON_ONLY = frozenset({*python_only, *offload.CALLS})

_FUSED = frozenset(
    "native_layer_norm_backward native_group_norm_backward native_batch_norm_backward "
    "native_batch_norm cudnn_batch_norm cudnn_batch_norm_backward _fused_rms_norm_backward "
    "_softmax_backward_data _log_softmax_backward_data nll_loss_forward nll_loss_backward "
    "nll_loss2d_forward nll_loss2d_backward mse_loss mse_loss_backward smooth_l1_loss "
    "smooth_l1_loss_backward huber_loss huber_loss_backward binary_cross_entropy "
    "binary_cross_entropy_backward elu_backward leaky_relu_backward hardtanh_backward "
    "hardswish_backward hardsigmoid_backward softplus_backward glu glu_backward slice_backward "
    "select_backward logsumexp linalg_vector_norm new_zeros new_empty new_full empty_like copy "
    "repeat rsub fill masked_fill where flip".split()
)
"""Ops of aten, beside cheap ones, that torch.compile writes loops for. What else there is calls a
kernel of a library: products, attention, convolutions, sorting."""


def islands(calls: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """The calls in order, grouped: those of an island together, any other call alone."""

    def place(call: fx.Node) -> object:
        return (call.meta.get(SEGMENT),) if is_compiled(call) else call

    return [[*together] for _, together in groupby(calls, place)]


def is_compiled(call: fx.Node) -> bool:
    """Whether a call may be in an island."""
    if call.op != "call_function":
        return False
    if takes(call):  # it goes with what it takes from
        source = call.args[0]
        assert isinstance(source, fx.Node)
        return is_compiled(source)
    return call.target not in _PYTHON_ONLY and not any(str(op) in OPAQUE for op in ops_of(call))


def takes(call: fx.Node) -> bool:
    """Whether a call reads a result of another one."""
    return call.target in (take, operator.getitem)


def ops_of(call: fx.Node) -> list[Any]:
    """The op that a call runs, itself or through a function of ours."""
    return [a for a in (call.target, *call.args) if hasattr(a, "overloadpacket")]


def is_loop(call: fx.Node) -> bool:
    """Whether a compiler fuses a call into an island's loops, without a kernel of its own."""
    call = maker(call)
    op: Any = call.target
    if getattr(op, "namespace", None) != "aten":
        return False
    view = storages([call]) <= storages(call.all_input_nodes)
    return view or is_cheap(call) or op.overloadpacket.__name__ in _FUSED
