"""A plan's formulas at other sizes: what planning anew for those sizes gives, to the byte."""

from typing import Any

import pytest
from torch import Tensor

from autopipe.cluster.cluster import Cluster
from autopipe.cluster.spec import parse
from autopipe.errors import PlanError
from autopipe.frontend.model_file import ModelFile
from autopipe.planfile.contents import Plan
from autopipe.planners.formulas.lengths import traced_again
from autopipe.planners.formulas.sheets import sheets
from autopipe.scaling import links
from autopipe.scaling.evaluate import at
from autopipe.scaling.sheet import PlanAt, Point
from tests.support.part_stories import in_parts
from tests.support.sheeted import CLUSTER, TOKENS, Language, Text, entropy, planned, sheeted
from tests.support.zoo import ZOO


def of_plan(found: Plan) -> PlanAt:
    peaks = tuple(stage.predicted.memory.peak for stage in found.stages)
    return PlanAt(found.prediction.step_seconds, found.prediction.bubble, peaks)


def same(one: PlanAt | None, other: PlanAt) -> None:
    assert one is not None and one.peaks == other.peaks
    assert one.step_seconds == pytest.approx(other.step_seconds, rel=1e-9)
    assert one.bubble == pytest.approx(other.bubble, abs=1e-9)


NODES = parse(CLUSTER)
assert isinstance(NODES, Cluster)
BANDWIDTH = links.farthest(NODES).link.bandwidth


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize(
    "point",
    [
        Point(batch=16, rows=4, tokens=TOKENS, bandwidth=BANDWIDTH),
        Point(batch=64, rows=2, tokens=TOKENS, bandwidth=BANDWIDTH / 16),
        Point(batch=8, rows=4, tokens=TOKENS // 2, bandwidth=BANDWIDTH),
    ],
)
def test_a_sheet_says_what_a_plan_for_those_sizes_says(point: Point) -> None:
    own = sheeted()
    cluster = links.with_bandwidth(own.plan.cluster, point.bandwidth)
    anew = planned(
        point.tokens,
        cluster=cluster,
        batch_size=point.batch,
        micro_batches=point.batch // point.rows,
        recompute="none",
    )
    assert [s.first for s in anew.stages] == [s.first for s in own.plan.stages]
    same(at(own.sheets.sheets[0], point), of_plan(anew))


def test_a_batch_that_does_not_divide_has_no_outcome() -> None:
    sheet = sheeted().sheets.sheets[0]
    assert at(sheet, Point(batch=18, rows=4, tokens=TOKENS, bandwidth=BANDWIDTH)) is None


def test_a_rival_is_another_plan_and_its_sheet_is_proved() -> None:
    _, rival = sheeted().sheets.sheets
    assert (rival.pp, rival.schedule) != (2, "1f1b")
    own = rival.rows * rival.dp * rival.micro_batches
    assert at(rival, Point(own, rival.rows, rival.tokens, BANDWIDTH)) is not None


@pytest.mark.long
def test_a_sheet_knows_of_tensors_that_go_in_parts() -> None:
    """It is proved: at the plan's own sizes its seconds and bytes are the plan's."""
    own, case = in_parts("gpt", 2, "1f1b"), ZOO["gpt"]
    file = ModelFile("m.py", case.model, case.inputs, case.loss, None, None, None, None)
    sheet = sheets(own, file, lambda line: None, most=0).sheets[0]
    bandwidth = links.farthest(own.cluster).link.bandwidth
    same(at(sheet, Point(own.batch.rows, sheet.rows, sheet.tokens, bandwidth)), of_plan(own))


@pytest.mark.long
def test_a_sheet_knows_that_groups_of_one_kind_of_device_have_other_links() -> None:
    """Bug: of four tensor-parallel groups one is of two nodes, and the link of one group was taken
    for that of all: the page was refused, as its formulas gave another step than the plan."""
    from autopipe.planners.driver.make_plan import plan

    case, asked = ZOO["gpt"], {"pp": 4, "tp": 2, "micro_batches": 4, "compile": False}
    own = plan(case.model, case.inputs, loss=case.loss, cluster="3x3xA100-80GB", **asked)
    file = ModelFile("m.py", case.model, case.inputs, case.loss, None, None, None, None)
    sheet = sheets(own, file, lambda line: None, most=0).sheets[0]
    bandwidth = links.farthest(own.cluster).link.bandwidth
    same(at(sheet, Point(own.batch.rows, sheet.rows, sheet.tokens, bandwidth)), of_plan(own))


def twice(outputs: Tensor, batch: Any) -> Tensor:
    return 2 * entropy(outputs, batch)


def test_another_model_is_refused() -> None:
    other = ModelFile("m.py", Language, Text(TOKENS), twice, None, None, None, None)
    with pytest.raises(PlanError, match="another model or another loss"):
        traced_again(sheeted().plan, other)


EAGER = {"compile": False}  # a compiler's choice of what to keep jumps in so small a model

LONG: list[tuple[str, dict[str, Any]]] = [
    ("gpt", {"tp": 2, "pp": 2, "micro_batches": 4, **EAGER}),
    ("gpt", {"tp": 2, "pp": 2, "micro_batches": 4, "transfers": "parts", **EAGER}),
    ("gpt", {"pp": 4, "schedule": "zb-v", "micro_batches": 8}),
    ("gpt", {"pp": 1, "dp": 4, "zero": 3, "micro_batches": 2}),
    ("gpt", {"pp": 2, "dp": 2, "zero": 3, "micro_batches": 4}),
    ("gpt", {"pp": 1, "dp": 2, "tp": 2, "zero": 2, "micro_batches": 2, **EAGER}),
    ("gpt", {"pp": 2, "dp": 2, "zero": 1, "micro_batches": 4, "recompute": "all", **EAGER}),
    ("unet", {"pp": 2, "micro_batches": 4}),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "options"), LONG)
def test_of_any_kind_of_plan(name: str, options: dict[str, Any]) -> None:
    from autopipe.planners.driver.make_plan import plan

    case = ZOO[name]
    asked = {"loss": case.loss, "cluster": "2x2xA100-80GB", **options}
    own = plan(case.model, case.inputs, batch_size=32, **asked)
    file = ModelFile("m.py", case.model, case.inputs, case.loss, None, None, None, None)
    sheet = sheets(own, file, lambda line: None, most=0).sheets[0]
    fixed = {
        "pp": own.mesh.pp,
        "dp": own.mesh.dp,
        "tp": own.mesh.tp,
        "schedule": own.schedule,
        "zero": own.zero,
        "compile": own.compiled,
        "recompute": [block for stage in own.stages for block in stage.recompute] or "none",
    }
    for times, faster in ((2, 1.0), (1, 0.25)):
        cluster = links.with_bandwidth(own.cluster, BANDWIDTH * faster)
        count = own.batch.micro_batches * times
        anew = plan(
            case.model,
            case.inputs,
            batch_size=32 * times,
            **{**asked, **fixed, "cluster": cluster, "micro_batches": count},
        )
        found = at(sheet, Point(32 * times, sheet.rows, sheet.tokens, BANDWIDTH * faster))
        assert found is not None
        assert found.step_seconds == pytest.approx(anew.prediction.step_seconds, rel=1e-9)
        assert sum(found.peaks) == sum(stage.predicted.memory.peak for stage in anew.stages)
