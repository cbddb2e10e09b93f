"""The benchmark of any model: it finds what is right, what is refused, and what is wrong."""

import json

import pytest
import torch

from benchmarks.zoo import table, trial
from benchmarks.zoo.odd import common
from benchmarks.zoo.one_process import Result

RIGHT = ("odd/batch-norm-cumulative/layers", "odd/lazy-buffer/state", "odd/conjugate/forms")


@pytest.fixture(scope="module")
def subjects():
    return {subject.name: subject for subject in common.subjects()}


@pytest.mark.parametrize("name", RIGHT)
def test_odd_models_are_right_however_they_are_split(name, subjects):
    for row in trial.rows(subjects[name], ("pp2", "pp4", "tp2")):
        assert row["outcome"] == "right", row
        assert row["counted"] in (None, row["predicted"])


def test_a_refusal_is_a_row_with_its_cause(subjects):
    (row,) = trial.rows(subjects["odd/parameter-hook/autograd"], ("pp2",))
    assert row["outcome"] == "refused" and "hook on its gradient" in row["cause"]


def test_a_gradient_that_is_off_by_a_thousandth_is_wrong():
    expected = Result([torch.ones(())], {"w": torch.tensor([1.0, 2.0])}, {})
    found = Result([torch.ones(())], {"w": torch.tensor([1.0, 2.002])}, {})
    worst, bitwise, differing = trial.compared(found, expected)
    assert (round(worst, 6), bitwise, differing) == (0.001, False, ["w"])
    assert trial.compared(Result([torch.ones(())], {}, {}), expected)[2] == ["w"]


def test_the_table_counts_models_by_outcome_and_cause():
    row = trial.asdict(trial.Row("odd/a/state", "pp2", "right", bitwise=True, seconds=1.0))
    rows = [row, {**row, "model": "odd/b/state", "outcome": "refused", "cause": "of 3 'x'"}]
    rows = [json.loads(json.dumps(each)) for each in rows]
    assert "| odd | 2 of 2 | 1 of 2, 50.0% | 2 | 0 | 1.0 |" in list(table.outcomes(rows))
    assert "| refused | 1 | odd/b/state pp2 | of 3 'x' |" in list(table.causes(rows))
