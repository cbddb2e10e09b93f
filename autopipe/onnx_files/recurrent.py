"""Recurrent layers (onnx.ai/onnx/operators: RNN, LSTM, GRU), by torch's own kernels.

of a gate's rows in W, R and B      ONNX has               torch has
LSTM                                input output forget c  input forget c output
GRU                                 update reset hidden    reset update hidden
RNN                                 hidden                 hidden
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopipe.onnx_files.values import Function, NodeOf, Value, as_tensor

ORDERS = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
"""By the op, where each of torch's gates stands among ONNX's."""


def _layer(node: NodeOf, inputs: Sequence[Value]) -> tuple[Any, ...]:
    """One layer, in one direction or both.

    Shapes: X (tokens, rows, width); Y (tokens, directions, rows, hidden), Y_h and Y_c (directions,
    rows, hidden).
    """
    x, w, r = map(as_tensor, inputs[:3])
    more: list[Value] = [*inputs[3:], *[None] * (8 - len(inputs))]
    bias, lengths, states = more[0], more[1], more[2:]
    way, hidden = node.get("direction", "forward"), node.get("hidden_size")
    special = [name for name in ("activations", "clip", "input_forget") if node.get(name)]
    later = node.op == "GRU" and not node.get("linear_before_reset", 0)
    if way == "reverse" or node.get("layout", 0) or special or later:
        raise node.refuse("it is read with torch's own activations and gates, tokens first, only")
    if lengths is not None or (len(states) > 2 and states[2] is not None):
        raise node.refuse("lengths of rows, and peepholes, are not read")
    both, gates = way == "bidirectional", len(ORDERS[node.op])
    biases = None if bias is None else as_tensor(bias)
    flat: list[Tensor] = []
    for direction in range(1 + both):
        flat += [_ordered(node, w[direction]), _ordered(node, r[direction])]
        if biases is not None:
            halves = torch.split(biases[direction], gates * hidden)
            flat += [_ordered(node, half) for half in halves]
    zeros = x.new_zeros((1 + both, x.shape[1], hidden))
    h, c = (zeros if state is None else as_tensor(state) for state in states[:2])
    how = biases is not None, 1, 0.0, False, both, False
    if node.op == "LSTM":
        made, *last = torch.lstm(x, (h, c), flat, *how)
    else:
        kernel = torch.gru if node.op == "GRU" else torch.rnn_tanh
        made, *last = kernel(x, h, flat, *how)
    tokens, rows, _ = made.shape
    return made.reshape(tokens, rows, 1 + both, hidden).transpose(1, 2), *last


def _ordered(node: NodeOf, weight: Tensor) -> Tensor:
    """The rows of a weight by torch's order of gates."""
    gates = weight.chunk(len(ORDERS[node.op]))
    return torch.cat([gates[place] for place in ORDERS[node.op]])


RECURRENT: dict[str, Function] = dict.fromkeys(ORDERS, _layer)
