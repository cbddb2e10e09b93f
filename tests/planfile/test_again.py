"""The blocks and ops that run again, in words."""

from dataclasses import replace

import pytest

from autopipe.planfile.again import Repeated, folded, named, repeated, within, words
from autopipe.planfile.parts import BlockClass
from tests.support.plans import example_plan

PATHS = tuple(f"h.{number}" for number in range(12))


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        (("attn/scaled_dot_product_attention/0",), "attention"),
        (("attn/matmul/0", "attn/softmax/0"), "attention"),
        (("attn/matmul/0", "attn/dropout/0", "attn.out/linear/0"), "attention and out"),
        (("/matmul/0", "/softmax/0", "/gelu/0"), "attention and activations"),
        (("norm1/layer_norm/0", "norm2/pow/0"), "norms"),
        (("mlp/silu/0", "mlp/mul/0"), "activations and gated products"),
        (("q/linear/0", "mlp.0/linear/0"), "q and mlp.0"),
        (("0/linear/0", "1/gelu/0"), "activations and 0's linear"),
        (("/add/0", "up/linear/0", "mlp/gelu/0"), "add, activations and up"),
        (("norm1/layer_norm/0>R", "out/linear/0/[out.weight]>R"), "what is exchanged"),
    ],
)
def test_words(ops: tuple[str, ...], expected: str) -> None:
    assert words(ops) == expected


@pytest.mark.parametrize(
    ("path", "name", "op"),
    [
        ("h.3", "h.3.up/linear/0", "up/linear/0"),
        ("h.3", "h.3/add/0", "/add/0"),
        ("0", "0.0/linear/0", "0/linear/0"),  # blocks of nn.Sequential, in nn.Sequential
        ("0", "0.10.up/linear/0", "10.up/linear/0"),
        ("h.0", "h.0.h.0.up/linear/0", "h.0.up/linear/0"),
    ],
)
def test_a_node_within_its_block(path: str, name: str, op: str) -> None:
    """Bug: the block's path was cut out wherever it stood: `0.10.up` within `0` became `1up`."""
    assert within(path, name) == op
    assert named(path, op) == name


def test_blocks_are_told_together_by_what_runs_again_of_them() -> None:
    """h.1 is not h.11; a collective has the block's path in it a second time."""
    again = ("h.0", *(f"h.{n}.out/linear/0/[h.{n}.out.weight]>R" for n in (1, 11)), "h.2/add/0")
    plan = example_plan()
    stages = (replace(plan.stages[0], recompute=again), plan.stages[1])
    plan = replace(plan, stages=stages, blocks=(BlockClass("h.0", PATHS),))
    assert repeated(plan, stages[:1]) == [
        Repeated(("h.0",), ()),
        Repeated(("h.1", "h.11"), ("out/linear/0/[out.weight]>R",)),
        Repeated(("h.2",), ("/add/0",)),
    ]
    assert [str(own) for own in repeated(plan, stages[:1])] == [
        "1 block",
        "what is exchanged of 2 blocks",
        "add of 1 block",
    ]


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (PATHS, "h.0-11"),
        (("h.9", "h.10", "h.0", "h.2"), "h.0, h.2, h.9-10"),
        (("encoder.0", "decoder.0", "decoder.1"), "encoder.0, decoder.0-1"),
        (("a.0.b.1", "a.0.b.2", "a.1.b.0"), "a.0.b.1-2, a.1.b.0"),
        (("layers.0.mlp", "layers.1.mlp", "layers.1.attn"), "layers.0-1.mlp, layers.1.attn"),
        (("0", "1", "head", "head2"), "0-1, head, head2"),
        ((), ""),
    ],
)
def test_paths_with_consecutive_numbers_are_one(paths: tuple[str, ...], expected: str) -> None:
    assert folded(paths) == expected
