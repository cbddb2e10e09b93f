"""A plan and its rivals as sheets, for a page to evaluate at other sizes.

plan, model --traced_again--> TracedAgain --rivals--> Plans --sheet--> one Sheet each, proved
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopipe.errors import AutopipeError
from autopipe.frontend.model_file import ModelFile
from autopipe.planfile.contents import Plan
from autopipe.planners.formulas.lengths import TracedAgain, cut, traced_again
from autopipe.planners.formulas.rivals import rivals
from autopipe.planners.formulas.stage_bytes import NoPolynomial, stage_bytes
from autopipe.planners.formulas.stage_seconds import model_flops, stage_seconds
from autopipe.scaling.make import StageFormulas, sheet_of
from autopipe.scaling.sheet import Sheet
from autopipe.scaling.stops import Stops, stops_of
from autopipe.tracing.source import keeping_default_dtype
from autopipe.util.gc_pause import collector_paused
from autopipe.util.progress import Say, phase

MOST_RIVALS = 4
"""Plans beside a plan, for which a page has room."""


@dataclass(frozen=True)
class Sheets:
    """A plan and its rivals at other sizes.

    Attributes:
        sheets: the sheets; the plan's is the first.
        stops: the sizes at which sliders stop.
        why_no_tokens: why the tokens of a row have no slider; empty if they have one.
    """

    sheets: tuple[Sheet, ...]
    stops: Stops
    why_no_tokens: str


@collector_paused()
@keeping_default_dtype()
def sheets(plan: Plan, file: ModelFile, say: Say, most: int = MOST_RIVALS) -> Sheets:
    """The sheets of a plan and of its rivals.

    Raises:
        ModelError: the model cannot be captured.
        PlanError: it is not the plan's.
        AutopipeError: the plan's sheet does not say what the plan does, or cannot: it offloads, or
            ranks take turns.
    """
    if plan.turns:
        raise AutopipeError(
            "ranks take turns at the plan's stages, and the page's formulas are of one rank each",
            hint="autopipe report --no-sliders; or plan with --turns off",
        )
    if any(stage.offload for stage in plan.stages):
        raise AutopipeError(
            "the plan's blocks offload what they keep, and no formula has yet what of these copies "
            "is left at other sizes",
            hint="autopipe report --no-sliders; or plan with --offload off",
        )
    with phase("tracing"):
        traced = traced_again(plan, file)
    try:
        stops = stops_of(plan, traced.tokens, symbolic=traced.symbolic)
        of_plans = [_sheet(plan, traced, stops)]
    except NoPolynomial as error:
        if not traced.symbolic:
            raise
        traced = replace(traced, trace=traced.fixed(), why=error.message)
        stops = stops_of(plan, traced.tokens, symbolic=False)
        of_plans = [_sheet(plan, traced, stops)]
    for rival in rivals(plan, file, traced, most, say):
        mesh = rival.mesh
        try:
            of_plans.append(_sheet(rival, traced, stops))
        except AutopipeError as error:
            degrees = f"pp={mesh.pp} dp={mesh.dp} tp={mesh.tp}"
            say(f"{degrees} is left out of the comparison: {error.message}")
    return Sheets(tuple(of_plans), stops, traced.why)


def _sheet(plan: Plan, traced: TracedAgain, stops: Stops) -> Sheet:
    planned = cut(plan, traced)
    stages = [
        StageFormulas(*seconds, **vars(sizes))
        for seconds, sizes in zip(stage_seconds(planned), stage_bytes(planned), strict=True)
    ]
    return sheet_of(plan, stages, stops, model_flops(planned))
