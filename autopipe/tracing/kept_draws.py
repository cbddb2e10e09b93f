"""Random numbers that only a first call draws: are they kept for later ones, or thrown away?

if self.noise is None:                     kept: the graph would draw them in each call
    self.noise = torch.rand(8)
layer = nn.Linear(8, 8)                    thrown away, as where BigBird makes a layer for short
layer.weight = self.weight                 rows in its first call: no result comes of them
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.eager.second_run import RANDOM
from autopipe.errors import CaptureError
from autopipe.ir.dataflow import analyse, is_random
from autopipe.ir.graph import REGION_OP, Graph, Ref, values_in
from autopipe.ir.opaque_ops import FUNCTION_OP

_USERS = REGION_OP, FUNCTION_OP
"""Code of the user's own, which is not looked into."""


def check(graph: Graph, drawn_once: Sequence[str]) -> None:
    """Refuse a graph that computes with what only the first call of its model draws.

    Args:
        drawn_once: the functions by which only the first call draws.

    Raises:
        CaptureError: names one of them.
    """
    if not drawn_once:
        return
    flow = analyse(graph)
    results = {flow.position(value) for value in values_in(graph.outputs)}
    written = (at for root, at in flow.writers.items() if not isinstance(root, Ref))
    called = {position for position, node in enumerate(graph.nodes) if node.op in _USERS}
    used = flow.with_all_before(results.union(called, *written) - {-1})
    for position in used:
        node = graph.nodes[position]
        if is_random(node) and (node.op in _USERS or _may_draw(node.op, drawn_once)):
            raise CaptureError(
                f"the model draws random numbers in a first call ({drawn_once[0]}) and keeps them; "
                "in a graph each call draws its own",
                hint="draw them in __init__, and keep them with register_buffer",
            )


def _may_draw(op: str, functions: Sequence[str]) -> bool:
    """Whether an op may be what one of the functions draws by (`kaiming_uniform_`: a uniform)."""
    return any(word in op and word in function for word in RANDOM for function in functions)
