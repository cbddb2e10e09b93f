"""A region: a call of the model that runs as the user wrote it, and is one op of the graph.

    encoder.moe             the call of a module, hooks included
    encoder.route()         the call of a method
    encoder.route()#1       the second call of it in a forward
    loss()                  the loss function

No trace sees its inside: the figures in a plan were measured in calls of the model with weights.
"""

from __future__ import annotations

from dataclasses import dataclass

WHOLE = "forward"
"""The method that stands for the whole call of a module."""

LOSS = "loss()"
"""The method, of the model itself, that stands for the loss function: no method is called so."""

COMPILED = "torch.jit has compiled it"
"""Why a scripted or traced module runs as it is. From its second call on torch.jit computes with
derivatives of its own, so two runs of one model agree to rounding alone."""


NOTHING = '{"dict": {}}'
"""No attributes, as `opaque.calls.trees.to_text` writes them."""


@dataclass(frozen=True)
class Result:
    """A tensor that a region returns; `shape` is in `b`, the rows of a micro-batch.

    `order` are its dims from the outermost to the innermost in memory. `gradient`: whether one
    flows back through it.
    """

    shape: tuple[int | str, ...]
    dtype: str
    order: tuple[int, ...]
    gradient: bool


@dataclass(frozen=True)
class Region:
    """One call of a module's method.

    Attributes:
        module: the module's path; "" is the model itself.
        method: the name of the method; `WHOLE`: the module is called; `LOSS`: the loss is.
        call: which call in one forward, from 0 on.
        why: what cannot be captured in there, with the user's line.
        given, gives: its arguments and what it returns, as text (`opaque.calls.trees`).
        states: the parameters, buffers and constants that it reads, by their names in the model.
        written: the buffers that it writes.
        results: the tensors that it returns.
        random: whether it draws random numbers.
        flops: operations of its forward, counted in its matrix products; in `b`.
        saved: bytes that it keeps for backward besides the tensors it is given; in `b`.
        keeps: the positions, among the tensors it is given, of those that it keeps for backward.
        launches: the ops that it runs in forward.
        seen: whether its saved tensors could be observed; else `saved` has all tensors that it
            makes (torch.func refuses to run under the hooks that observe).
        left: the attributes, by their names in the model, in which it leaves tensors that are read
            after it; `gives` and `results` have them too.
        finds: the plain values that forward has put into attributes of its modules before it, by
            their names in the model, as such text: `part.mode = "tanh"`, `part.eval()`.
        carrying: the positions, among the tensors it is given, of those by which a gradient may be
            taken (also tensors of the batch, after `x.requires_grad_()`).
        grad: whether gradients are recorded where it is called; not under `torch.no_grad()`.
        sets: the attributes, by their names in the model, that it was seen to change, for itself.
    """

    module: str
    method: str
    call: int
    why: str
    given: str
    gives: str
    states: tuple[str, ...]
    written: tuple[str, ...]
    results: tuple[Result, ...]
    random: bool
    flops: int | str
    saved: int | str
    keeps: tuple[int, ...]
    launches: int
    seen: bool = True
    left: tuple[str, ...] = ()
    finds: str = NOTHING
    carrying: tuple[int, ...] = ()
    grad: bool = True
    sets: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The call as a plan and the graph show it: `encoder.route()#1`."""
        if self.method == LOSS:
            return LOSS
        method = "" if self.method == WHOLE and self.module else f"{self.method}()"
        place = ".".join(filter(None, (self.module, method)))
        return f"{place}#{self.call}" if self.call else place
