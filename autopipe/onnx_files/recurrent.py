"""Recurrent layers (onnx.ai/onnx/operators: RNN, LSTM, GRU).

By torch's own kernels where they compute the same, token by token otherwise: for rows of unlike
lengths, peepholes, a clip, other activations, and the GRU whose reset comes before its product.

of a gate's rows in W, R and B      ONNX has               torch has
LSTM                                input output forget c  input forget c output
GRU                                 update reset hidden    reset update hidden
RNN                                 hidden                 hidden
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from autopipe.onnx_files.values import Function, NodeOf, Value, as_tensor

ORDERS = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
"""By the op, where each of torch's gates stands among ONNX's."""

OWN = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
"""By the op, its activations in one direction where a file names none."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": F.elu,
    "hardsigmoid": lambda x: torch.clamp(0.2 * x + 0.5, 0.0, 1.0),
    "leakyrelu": F.leaky_relu,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "tanh": torch.tanh,
}
"""By the name in small letters, as ONNX reads it; each with its op's default numbers."""


@dataclass(frozen=True)
class DirectionWeights:
    """One direction's weights, with gates in ONNX's order, and its first states (rows, hidden).

    Attributes:
        biases: of the inputs and of the states; None: there are none.
        peepholes: what gates see of the cell (3 x hidden); None: nothing.
    """

    inputs: Tensor
    states: Tensor
    biases: tuple[Tensor, Tensor] | None
    peepholes: Tensor | None
    hidden: Tensor
    cell: Tensor


def _layer(node: NodeOf, inputs: Sequence[Value]) -> tuple[Any, ...]:
    """One layer, in one direction or both.

    Shapes: X (tokens, rows, width); Y (tokens, directions, rows, hidden), Y_h and Y_c (directions,
    rows, hidden). With layout=1 rows come first in all of them.
    """
    told: list[Tensor | None] = [None if value is None else as_tensor(value) for value in inputs]
    told += [None] * (8 - len(told))
    x, w, r, bias, lengths, h, c, peepholes = told
    assert x is not None and w is not None and r is not None
    if node.get("input_forget", 0):
        raise node.refuse("input_forget=1 is not read")
    rows_first = bool(node.get("layout", 0))
    if rows_first:
        x = x.transpose(0, 1)
        h, c = (None if state is None else state.transpose(0, 1) for state in (h, c))
    way, hidden = node.get("direction", "forward"), r.shape[-1]
    count = 2 if way == "bidirectional" else 1
    zeros = x.new_zeros((count, x.shape[1], hidden))
    h, c = (zeros if state is None else state for state in (h, c))
    parts = [
        DirectionWeights(
            inputs=w[n],
            states=r[n],
            # chunk(2) gives two, which mypy cannot know
            biases=None if bias is None else tuple(bias[n].chunk(2)),  # type: ignore[arg-type]
            peepholes=None if peepholes is None else peepholes[n],
            hidden=h[n],
            cell=c[n],
        )
        for n in range(count)
    ]
    names = [str(name).lower() for name in node.get("activations") or OWN[node.op] * count]
    if unknown := sorted({*names} - {*ACTIVATIONS}):
        raise node.refuse(f"the activation {unknown[0]!r} is not read")
    plain = lengths is None and peepholes is None and not node.get("clip")
    if plain and (kernel := _kernel(node, names, count)):
        made, *last = _by_kernel(node, kernel, x, parts, backwards=way == "reverse")
    else:
        made, *last = _by_tokens(node, x, parts, names, lengths)
    if rows_first:
        return made.permute(2, 0, 1, 3), *(state.transpose(0, 1) for state in last)
    return made, *last


def _kernel(node: NodeOf, names: Sequence[str], count: int) -> Callable[..., Any] | None:
    """Torch's kernel with these activations; None: there is none."""
    if node.op == "GRU" and not node.get("linear_before_reset", 0):
        return None
    if node.op == "RNN" and [*names] == ["relu"] * count:
        return torch.rnn_relu
    if [*names] != [name.lower() for name in OWN[node.op]] * count:
        return None
    kernels: dict[str, Any] = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN": torch.rnn_tanh}
    kernel: Callable[..., Any] = kernels[node.op]
    return kernel


def _by_kernel(
    node: NodeOf,
    kernel: Callable[..., Any],
    x: Tensor,
    parts: Sequence[DirectionWeights],
    *,
    backwards: bool,
) -> tuple[Tensor, ...]:
    flat: list[Tensor] = []
    for part in parts:
        flat += [_ordered(node, part.inputs), _ordered(node, part.states)]
        flat += [_ordered(node, half) for half in part.biases or ()]
    h = torch.stack([part.hidden for part in parts])
    state: Any = (h, torch.stack([part.cell for part in parts])) if node.op == "LSTM" else h
    how = parts[0].biases is not None, 1, 0.0, False, len(parts) == 2, False
    made, *last = kernel(x.flip(0) if backwards else x, state, flat, *how)
    made = made.flip(0) if backwards else made
    tokens, rows, _ = made.shape
    return made.reshape(tokens, rows, len(parts), -1).transpose(1, 2), *last


def _ordered(node: NodeOf, weight: Tensor) -> Tensor:
    """The rows of a weight by torch's order of gates."""
    gates = weight.chunk(len(ORDERS[node.op]))
    return torch.cat([gates[place] for place in ORDERS[node.op]])


def _by_tokens(
    node: NodeOf,
    x: Tensor,
    parts: Sequence[DirectionWeights],
    names: Sequence[str],
    lengths: Tensor | None,
) -> tuple[Tensor, ...]:
    """Token after token, as the definition has it. Beyond a row's length its states stay."""
    each, way = len(names) // len(parts), node.get("direction", "forward")
    all_made, all_h, all_c = [], [], []
    for n, part in enumerate(parts):
        acts = [ACTIVATIONS[name] for name in names[n * each : (n + 1) * each]]
        h, c, made = part.hidden, part.cell, []
        backwards = way == "reverse" or n == 1
        tokens = range(x.shape[0])
        for token in reversed(tokens) if backwards else tokens:
            new_h, new_c = _cell(node, x[token], h, c, part, acts)
            if lengths is not None:
                within = (token < lengths)[:, None]
                h, c = torch.where(within, new_h, h), torch.where(within, new_c, c)
                made.append(torch.where(within, new_h, torch.zeros_like(new_h)))
            else:
                h, c = new_h, new_c
                made.append(h)
        all_made.append(torch.stack(made[::-1] if backwards else made))
        all_h.append(h)
        all_c.append(c)
    last = [all_h, all_c] if node.op == "LSTM" else [all_h]
    return torch.stack(all_made, 1), *(torch.stack(states) for states in last)


def _cell(
    node: NodeOf,
    x: Tensor,
    h: Tensor,
    c: Tensor,
    part: DirectionWeights,
    acts: Sequence[Callable[[Tensor], Tensor]],
) -> tuple[Tensor, Tensor]:
    """One token: the next hidden state and, of an LSTM, the next cell; else `c` as it was."""
    clip = node.get("clip")

    def act(place: int, value: Tensor) -> Tensor:
        return acts[place](value if not clip else torch.clamp(value, -clip, clip))

    own_b, state_b = part.biases or (None, None)
    own = F.linear(x, part.inputs, own_b)
    if node.op == "RNN":
        return act(0, own + F.linear(h, part.states, state_b)), c
    if node.op == "LSTM":
        i, o, f, new = (own + F.linear(h, part.states, state_b)).chunk(4, -1)
        p_i, p_o, p_f = (0.0, 0.0, 0.0) if part.peepholes is None else part.peepholes.chunk(3)
        seen_i, seen_f = act(0, i + p_i * c), act(0, f + p_f * c)
        made = seen_f * c + seen_i * act(1, new)
        return act(0, o + p_o * made) * acts[2](made), made
    xz, xr, xh = own.chunk(3, -1)
    if node.get("linear_before_reset", 0):
        hz, hr, hh = F.linear(h, part.states, state_b).chunk(3, -1)
        update, reset = act(0, xz + hz), act(0, xr + hr)
        new = act(1, xh + reset * hh)
    else:
        width = h.shape[-1]
        gates, last = part.states[: 2 * width], part.states[2 * width :]
        gates_b, last_b = (
            (None, None) if state_b is None else (state_b[: 2 * width], state_b[2 * width :])
        )
        hz, hr = F.linear(h, gates, gates_b).chunk(2, -1)
        update, reset = act(0, xz + hz), act(0, xr + hr)
        new = act(1, xh + F.linear(reset * h, last, last_b))
    return (1 - update) * new + update * h, c


RECURRENT: dict[str, Function] = dict.fromkeys(ORDERS, _layer)
