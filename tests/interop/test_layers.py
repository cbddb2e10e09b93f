"""Stages in whole layers; for each decision that a runtime cannot express, a sentence says why."""

from dataclasses import replace

import pytest

from autopipe.interop.layers import Layers, layers_of
from autopipe.interop.unsupported import BLOCKS, Vocabulary, unsupported
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import BlockClass, Boundary
from tests.support.plans import chain

LAYERS = ("h.0", "h.1", "h.2", "h.3")


def layered(*stages: tuple[str, ...]) -> Plan:
    """A pipeline whose stages have these parameters; `h.0` to `h.3` are its layers."""
    plan = chain(len(stages), 4)
    own = tuple(
        replace(stage, parameters=names, recompute=())
        for stage, names in zip(plan.stages, stages, strict=True)
    )
    return replace(plan, stages=own, blocks=(BlockClass("h.0", LAYERS),))


WHOLE = layered(("wte.weight", "h.0.w", "h.1.w"), ("h.2.w", "h.3.w", "ln.weight", "head.weight"))
CUT = layered(("wte.weight", "h.0.a", "h.0.b", "h.1.a"), ("h.1.b", "h.1.c", "h.2.a", "h.3.a"))


def test_whole_layers() -> None:
    layers = layers_of(WHOLE)
    assert layers == Layers((LAYERS[:2], LAYERS[2:]), (), (("wte",), ("ln", "head")))
    assert (layers.counts, layers.total, layers.even) == ((2, 2), 4, True)
    assert [layers.modules(stage) for stage in (0, 1)] == [
        ["wte", "h.0", "h.1"], ["h.2", "h.3", "ln", "head"],
    ]  # fmt: skip


def test_a_layer_that_is_cut_is_with_the_larger_part() -> None:
    layers = layers_of(CUT)
    assert (layers.counts, layers.cut) == ((1, 3), ("h.1",))


def test_blocks_within_blocks() -> None:
    """An encoder's layers are not those of its attention's heads."""
    plan = replace(WHOLE, blocks=(*WHOLE.blocks, BlockClass("h.0.x", ("h.0.x", "h.1.x"))))
    assert layers_of(plan).total == 4


def test_a_parameter_of_the_model_itself() -> None:
    """No module to be named: `model.scale = nn.Parameter(...)`."""
    plan = layered(("wte.weight", "h.0.w", "scale", "h.1.w"), ("h.2.w", "h.3.w", "head.weight"))
    assert [layers_of(plan).modules(stage) for stage in (0, 1)] == [
        ["wte", "h.0", "h.1"], ["h.2", "h.3", "head"],
    ]  # fmt: skip
    told = "which stage has scale, of the model itself: it deals out modules"
    assert told in sentences(plan, own_model=False)
    assert told not in sentences(plan, own_model=False, modules=False)


def test_no_blocks() -> None:
    assert layers_of(replace(WHOLE, blocks=())).total == 0


ALL_OF_IT = Vocabulary(
    "X", uneven=True, modules=True, inside=True, tied=True, schedules=None,
    zero=frozenset({0, 1, 3}), recompute=BLOCKS, tensors=True, devices=True, own_model=True,
)  # fmt: skip


def sentences(plan: Plan, **narrower: object) -> tuple[str, ...]:
    return unsupported(plan, replace(ALL_OF_IT, **narrower), layers_of(plan))  # type: ignore[arg-type]


def with_stages(plan: Plan, **changes: object) -> Plan:
    return replace(plan, stages=tuple(replace(s, **changes) for s in plan.stages))  # type: ignore[arg-type]


TIED = layered(("wte.weight", "h.0.w"), ("h.1.w", "wte.weight"))
ZB = replace(WHOLE, schedule="zb-h1")
DEEP = replace(WHOLE, schedule="eager-1f1b", boundaries=(Boundary(2, 3),))


@pytest.mark.parametrize(
    ("plan", "narrower", "sentence"),
    [
        (WHOLE, {"own_model": False}, "the model: this says how it is split; X brings the code of"),
        (WHOLE, {"pipeline": False}, "pipeline parallelism: 2 stages on 2 ranks"),
        (
            CUT,
            {"uneven": False, "modules": False},
            "stages of [1, 3] layers: it gives each as many",
        ),
        (CUT, {"inside": False}, "a cut inside layer h.1, between stages 0 and 1: the whole layer"),
        (TIED, {"tied": False}, "weights that several stages have and that stay equal: wte.weight"),
        (ZB, {"schedules": frozenset({"1f1b"})}, "the schedule zb-h1; it has 1f1b"),
        (DEEP, {"schedules": frozenset({"eager-1f1b"})}, "depths of [3], micro-batches in flight"),
        (
            with_stages(WHOLE, recompute=("h.0",)),
            {"recompute": "all"},
            "recomputation of 1 of 4 lay",
        ),
        (
            with_stages(WHOLE, recompute=LAYERS),
            {"recompute": "none"},
            "recomputation of 4 of 4 laye",
        ),
        (replace(WHOLE, loss_parts=8), {}, "a loss in 8 parts of the vocabulary, whose logits are"),
        (
            replace(WHOLE, loss_over="micro-batch"),
            {},
            "a loss that is a mean over each micro-batch",
        ),
    ],
)
def test_a_sentence_for_each_thing(plan: Plan, narrower: dict[str, object], sentence: str) -> None:
    (found,) = sentences(plan, **narrower)
    assert found.startswith(sentence)
    if narrower:
        assert sentences(plan) == ()


def test_what_is_said_whole_needs_no_sentence() -> None:
    assert sentences(with_stages(WHOLE, recompute=LAYERS), recompute="all") == ()


def test_a_name_of_several_lines_stays_on_one() -> None:
    evil = layered(("x\nrm -rf ~.w",), ("x\nrm -rf ~.w",))
    (found,) = sentences(evil, tied=False)
    assert found.endswith(": x?rm -rf ~.w")
