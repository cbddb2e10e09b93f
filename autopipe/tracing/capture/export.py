"""Export a `Program` with torch.export, taking the branches that eager execution takes.

Non-strict export in training IR: ops stay as the user's code calls them (`linear`, not `addmm` and
`t`), batch norm stays in training, in-place ops stay in place. The number of rows is a symbol. The
values that Python reads are recorded in a first run and replayed (`tracing.capture.value_guards`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

from autopipe.eager.kept import restoring
from autopipe.errors import ModelError
from autopipe.frontend import refusals
from autopipe.frontend.loss import note_lines
from autopipe.frontend.quiet import libraries_hushed
from autopipe.frontend.transformers_adapter import eager_branches
from autopipe.ir.graph import SEQUENCE
from autopipe.ir.torch_private import quiet
from autopipe.planfile.parts import InputSpec, Read
from autopipe.tracing.capture.caught_errors import ended_calls_forgotten
from autopipe.tracing.capture.exported_nodes import keep_memory_order
from autopipe.tracing.capture.program import Program
from autopipe.tracing.capture.same_memory import detached_of_now
from autopipe.tracing.capture.stubs import standing_in
from autopipe.tracing.capture.user_checkpoints import marking
from autopipe.tracing.capture.value_guards import replay
from autopipe.util import dims


def capture(
    program: Program,
    leaves: Mapping[str, Any],
    specs: Sequence[InputSpec],
    *,
    reads: Sequence[Read],
    alike: Mapping[str, str],
    symbolic: bool = True,
) -> torch.export.ExportedProgram:
    """Export `program`, whose parameters are fake, on the example batch `leaves`.

    Args:
        reads: the recorded reads of a run (`looks.look`).
        alike: path of each module replaced by a stub -> path of its equal (`stubs`).
        symbolic: whether dims given as text in the specs become symbols, or the example's sizes.

    Raises:
        CaptureError: torch.export cannot capture the model; the message names the user's line.
    """
    tensors = tensors_of(leaves, specs)
    described = [spec for spec in specs if spec.dtype != "python"]
    dims = tuple(_dynamic(*pair) for pair in zip(described, tensors, strict=True))
    # Export warns of what autopipe handles: attributes set in forward, LSTM's flat weights.
    with eager_branches(), libraries_hushed(heard=False), quiet():

        def export() -> torch.export.ExportedProgram:
            standing, first = standing_in(program.model, alike), restoring(*program.parts)
            asked = program.found.asks_for_others
            drawn, ended = torch.random.fork_rng(devices=[]), ended_calls_forgotten()
            aliases = detached_of_now(program.twins)
            with first, drawn, replay(reads), marking(), standing, ended, aliases:
                try:
                    return torch.export.export(
                        program,
                        tuple(tensors),
                        strict=False,
                        dynamic_shapes=(dims,) if symbolic else None,
                    )
                finally:
                    program.found.asks_for_others = asked  # what an export asks is not the model's

        note_lines(program.loss)
        known = program.found.counts
        try:
            found = export()
            found = found if program.found.counts == known else export()
            keep_memory_order(found.graph_module)
            return found
        except ModelError:
            raise
        except Exception as error:  # export raises whatever the model's own code raises
            if refusals.fixes_rows(error):
                raise refusals.fixed_rows(
                    export, program.model, lines=program.lines_may_fix_rows
                ) from error
            raise refusals.in_a_trace(error, program.loss) from error


def tensors_of(leaves: Mapping[str, Any], specs: Sequence[InputSpec]) -> list[Tensor]:
    """The batch's tensors; a tensor that occurs twice is copied. Export would merge the two into
    one input of the graph: labels would become tokens."""
    return [leaves[spec.path].detach().clone() for spec in specs if spec.dtype != "python"]


def _dynamic(spec: InputSpec, tensor: Tensor) -> dict[int, Any]:
    """The dynamic shapes of a tensor for export: each dim is a symbol, a multiple of one, or fixed.

    A sequence is at most as long as the example's: many models hold a table of that many positions.
    """
    found = {}
    for number, entry in enumerate(spec.shape):
        if isinstance(entry, str):
            factor, symbol = sympy.sympify(dims.parse(entry)).as_coeff_Mul()
            if symbol == SEQUENCE:
                known = torch.export.Dim("sequence", max=tensor.shape[number])
            else:
                known = torch.export.Dim("rows")
            found[number] = known if factor == 1 else int(factor) * known
    return found
