"""The benchmark of any model: a part of it, and that it finds what is right, refused and wrong.

Loss, every gradient and every buffer of each model are those of plain PyTorch, whether it is cut
into four stages or dealt out to two tensor-parallel ranks.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from benchmarks.zoo import catalogue, table, trial
from benchmarks.zoo.compare import compared
from benchmarks.zoo.one_process import Result
from benchmarks.zoo.row import Row
from tests.support.long import chosen
from tests.support.shell import ranks

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

WAYS = ("pp4", "tp2")

PART = (
    "odd/batch-norm-cumulative/layers",  # its momentum is None
    "odd/lazy-buffer/state",  # registered by the first call
    "odd/conjugate/forms",  # complex values
    "odd/custom-two-outputs/autograd",  # a backward of its own
    "odd/shared-weight/forms",  # on two stages
    "odd/nested-batch/forms",  # a tree of tensors
    "odd/branch/control",  # Python reads a tensor
    "odd/autocast/control",
    "odd/cast-under-no-grad/autograd",  # torch returns the value itself
    "odd/experts-dense/control",
    "odd/old-weight-norm/layers",
    "odd/skips-everywhere/shapes",  # tensors that pass by stages
    "odd/unet/shapes",
    "odd/in-place/shapes",
    "odd/writes-through-views/shapes",  # zeros that carry a gradient, once written
    "odd/chunks-by-strides/shapes",  # what lies where in memory
    "odd/einsums/shapes",
    "odd/changes-its-batch/state",
    "odd/running-mean/state",  # a buffer that is assigned
    "odd/hooks-at-first-call/state",
    "odd/listed-twice/forms",  # found elsewhere than where it is registered
    "odd/long-convolutions/shapes",  # a block called before the one around it
    "odd/counts-hits/control",  # lines of a method that is the whole model
    "transformers/llama/causal",
    "transformers/gpt2/causal",  # q, k and v in one weight, tied words
    "transformers/mixtral/causal",  # experts picked word by word
    "transformers/falcon/causal",  # one head of keys and values
    "transformers/bloom/causal",  # a bias by distance, a backward of its own
    "transformers/bert/masked",
    "transformers/t5/sequence-to-sequence",  # a bias by distance, for each head
    "transformers/vit/image",
)
"""Cheap ones, each of which is made of something that the others are not."""


@pytest.fixture(scope="module")
def subjects():
    return {subject.name: subject for subject in catalogue.subjects()}


LATER = (
    "odd/custom-two-outputs/autograd",  # `opaque/test_custom_functions`
    "odd/shared-weight/forms",
    "odd/nested-batch/forms",
    "odd/autocast/control",
    "odd/unet/shapes",
    "odd/experts-dense/control",
    "odd/old-weight-norm/layers",
    "odd/skips-everywhere/shapes",  # ranks that are processes have it
    "odd/chunks-by-strides/shapes",
    "odd/einsums/shapes",
    "odd/long-convolutions/shapes",
    "transformers/llama/causal",
    "transformers/mixtral/causal",
    "transformers/falcon/causal",
    "transformers/bloom/causal",
    "transformers/bert/masked",
    "transformers/t5/sequence-to-sequence",
    "transformers/vit/image",
)
"""In the long run alone: they take longest for what they add to the others."""


@pytest.mark.parametrize("name", chosen(PART, now=[name for name in PART if name not in LATER]))
def test_a_model_is_right_however_it_is_split(name, subjects):
    for row in trial.rows(subjects[name], WAYS):
        assert row["outcome"] == "right", row
        assert row["unexplained"] == "", "a gradient differs in a bit for no reason"
        assert row["counted"] in (None, row["predicted"]), "bytes kept for backward"
        if name.startswith("transformers/") and row["what"] == "tp2":
            assert row["dealt"] > 0.5, "hardly anything of it was dealt out"


def test_ranks_that_are_processes_give_the_same(tmp_path):
    rows, model = tmp_path / "rows.jsonl", "odd/skips-everywhere/shapes"
    what = ("--to", str(rows), "--way", "pp2", "--only", model)
    said = ranks(2, "-m", "benchmarks.zoo.ranks", *what, folder=ROOT)
    assert said.code == 0, said.err
    begun, row = [json.loads(line) for line in rows.read_text().splitlines()]
    assert (begun["outcome"], begun["what"]) == ("crashed", "pp2-processes")
    assert row["outcome"] == "right" and row["bitwise"], row


def test_a_refusal_is_a_row_with_its_cause(subjects):
    (row,) = trial.rows(subjects["odd/parameter-hook/autograd"], ("pp2",))
    assert row["outcome"] == "refused" and "hook on its gradient" in row["cause"]


def test_a_gradient_that_is_off_by_a_thousandth_is_wrong():
    expected = Result([torch.ones(())], {"w": torch.tensor([1.0, 2.0])}, {})
    found = Result([torch.ones(())], {"w": torch.tensor([1.0, 2.002])}, {})
    worst, bitwise, differing = compared(found, expected)
    assert (round(worst, 6), bitwise, differing) == (0.001, False, ["w"])
    assert compared(Result([torch.ones(())], {}, {}), expected)[2] == ["w"]


def test_a_rounding_is_no_more_than_the_last_place_of_each_weight_makes(subjects):
    """A hundredth of a thousandth is more than that in a model this small."""
    tried = trial.Tried(subjects["odd/detached/autograd"], subjects["odd/detached/autograd"].make())
    assert tried.rounds(tried.eager)
    off = {name: gradient * (1 + 1e-5) for name, gradient in tried.eager.gradients.items()}
    assert not tried.rounds(replace(tried.eager, gradients=off))


def test_the_ops_of_a_graph_in_fp64_are_the_model_in_fp64(subjects):
    """What fp32 rounds is gone, so that it tells a rounding from an op that is wrong."""
    tried = trial.Tried(subjects["odd/unet/shapes"], subjects["odd/unet/shapes"].make())
    tried.plan(2, 1)  # those of the doubled model are made of it
    doubled = trial.SameOpsDoubled(tried)
    row, _ = doubled.compared("pp2")
    assert row.outcome == "right" and row.gradient is not None and row.gradient < 1e-12

    graph = doubled.trace.graph
    others = {"aten.relu.default": "aten.silu.default"}
    nodes = tuple(replace(node, op=others.get(node.op, node.op)) for node in graph.nodes)
    assert nodes != graph.nodes
    mistaken = trial.SameOpsDoubled(tried)
    mistaken.trace = replace(doubled.trace, graph=replace(graph, nodes=nodes))
    assert mistaken.compared("pp2")[0].outcome == "wrong"


def test_the_table_counts_models_by_outcome_and_cause():
    row = asdict(Row("odd/a/state", "pp2", "right", bitwise=True, seconds=1.0))
    rows = [row, {**row, "model": "odd/b/state", "outcome": "refused", "cause": "of 3 'x'"}]
    rows = [json.loads(json.dumps(each)) for each in rows]
    assert "| odd | 2 of 2 | 1 of 2, 50.0% | 2 | 0 | 1.0 |" in list(table.outcomes(rows))
    assert "| refused | 1 | odd/b/state pp2 | of 3 'x' |" in list(table.causes(rows))
