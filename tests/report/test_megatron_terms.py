"""Plans in the words of Megatron-LM."""

from dataclasses import replace

import pytest

from autopipe.planfile.parts import WrittenPlacement
from autopipe.report.megatron_terms import describe, word
from tests.support.sharded_plan import PLAN, written


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        (WrittenPlacement("mlp.up/linear/0", "S(2)", ("R", "S(0)")), "column"),
        (WrittenPlacement("c_attn/addmm/0", "S(1, 3)", ("S(0, 3)", "R", "S(1, 3)")),
         "column, in 3 segments"),
        (WrittenPlacement("qkv/linear/0", "S(2, 8+2+2)", ("R", "S(0, 8+2+2)")),
         "column, in segments of 8+2+2"),
        (WrittenPlacement("mlp.down/linear/0", "P", ("S(2)", "S(1)", "P")), "row"),
        (WrittenPlacement("wte/embedding/0", "P", ("S(0)", "I")), "vocabulary"),
        (WrittenPlacement("wte/embedding/0", "S(2)", ("S(1)", "I")), "hidden"),
        (WrittenPlacement("wte/embedding/0", "S(1)", ("R", "S(1)")), "sequence"),
        (WrittenPlacement("ln/layer_norm/0", "S(1)", ("S(1)", "R", "R")), "sequence"),
        (WrittenPlacement("loss()/cross_entropy_loss/0", "I", ("S(1)", "I")), "vocabulary"),
        (WrittenPlacement("attn/softmax/0", "S(1)", ("S(1)",)), None),
        (WrittenPlacement("mlp.up.weight", "S(0)"), None),
    ],
)  # fmt: skip
def test_words(sharding: WrittenPlacement, expected: str | None) -> None:
    assert word(sharding) == expected


def test_a_model_in_two_parts() -> None:
    plan, _ = written("gpt2")
    lines = list(describe(plan))
    assert lines[0] == "tensor parallel over 2 ranks; what is not named is replicated"
    begin = lines.index("4 blocks, each as transformer.h.0:")
    assert [" ".join(line.partition(" (")[0].split()) for line in lines[begin + 1 : begin + 7]] == [
        "attn.c_attn column, in 3 segments",
        "attn.c_proj row",
        "mlp.c_fc column",
        "mlp.c_proj row",
        "forward: 2 all-reduce",
        "backward: 2 all-reduce",
    ]


def test_a_plan_without() -> None:
    plan = replace(PLAN, mesh=replace(PLAN.mesh, tp=1))
    assert list(describe(plan)) == []
