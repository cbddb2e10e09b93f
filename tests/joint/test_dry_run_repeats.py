"""Bytes of deep stages, derived from shallow ones, equal those of a dry run of the deep stages."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
import transformers
from torch import nn

from autopipe.ir.blocks import Block, find_blocks
from autopipe.ir.dataflow import Dataflow, analyse, obstacle
from autopipe.ir.partition import Stage, legal_cuts, partition
from autopipe.ir.repeats import Run, Uneven
from autopipe.joint import dry_run_repeats
from autopipe.joint.dry_run_repeats import rehearse_deep
from autopipe.joint.split_backward_layouts import JointDryRun
from autopipe.joint.wanted import HALVES, Wanted
from autopipe.stages.dry_run import Rehearsal, rehearse
from tests.support.repeated_models import Collecting, Deep, Growing, Recalling, Tied, Turning
from tests.support.staged import trace_model
from tests.support.zoo import VOCABULARY, causal, translation

SMALL = {"vocab_size": VOCABULARY, "use_cache": False}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=9, num_attention_heads=2, **SMALL
    )
    return transformers.LlamaForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=5,
        num_decoder_layers=5,
        num_heads=2,
        decoder_start_token_id=0,
        **SMALL,
    )
    return transformers.T5ForConditionalGeneration(config)


def vectors(rows: int) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(rows, 4)}


MODELS = {
    "deep": (lambda: Deep(9), vectors),
    "in place": (lambda: Deep(9, in_place=True), vectors),
    "one is wider": (Growing, vectors),
    "one is tied": (lambda: Tied(12), vectors),
    "all are collected": (lambda: Collecting(9), vectors),
    "in turns": (lambda: Turning(14), vectors),
    "by their masks": (lambda: Turning(14, 3, masks=True), vectors),
    "the first is recalled": (lambda: Recalling(14), vectors),
    "llama": (llama, causal),
    "t5": (t5, translation),
}


@cache
def flow_of(name: str) -> tuple[Dataflow, tuple[Block, ...]]:
    make, inputs = MODELS[name]
    graph = trace_model(make(), inputs).graph
    return analyse(graph), find_blocks(graph)


def whole(
    flow: Dataflow,
    stages: tuple[Stage, ...],
    blocks: tuple[Block, ...],
    rows: int,
    *,
    recompute: list[str],
    precision: str,
    wanted: Wanted | None,
) -> Rehearsal:
    """The rehearsal of all there is."""
    graph = flow.graph
    found = rehearse(graph, stages, blocks, rows, recompute=recompute, precision=precision)
    if wanted is None:
        return found
    joint = JointDryRun(graph, blocks, rows, recompute, precision, wanted)
    return joint.instead(stages, found)


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("one is tied", 1),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                *((n, 1) for n in MODELS if n != "one is tied"),
                *((n, 0) for n in MODELS if n != "t5"),
            )
        ),
        ("deep", 2),
    ],
)
def test_bytes_and_crossings_are_those_of_the_whole_stages(name: str, seed: int) -> None:
    """Cut anywhere, with any blocks running again, in either precision, run in any way."""
    flow, blocks = flow_of(name)
    chance = random.Random(f"{name} {seed}")
    cuts = sorted(chance.sample(legal_cuts(flow), seed))
    stages = partition(flow, cuts)
    may = [b.path for b in blocks if obstacle(flow, range(b.first, b.stop)) is None]
    again = chance.choice([[], may, may[: len(may) // 2]])
    how = {
        "recompute": again,
        "precision": chance.choice(["fp32", "bf16-autocast"]),
        "wanted": chance.choice([None, HALVES, Wanted(True, True), Wanted(False, True)]),
    }
    assert rehearse_deep(flow, stages, blocks, 2, **how) == whole(flow, stages, blocks, 2, **how)


def test_of_stages_with_the_same_layers_one_is_made_a_layer_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twelve layers in four stages, the first of which has the embeddings, the last the head."""
    graph = trace_model(Deep(16), vectors).graph
    flow, blocks = analyse(graph), find_blocks(graph)
    stages = partition(flow, [blocks[number].first for number in (4, 8, 12)])
    told: list[list[int]] = []
    shorter = dry_run_repeats._DeepRehearsing.shallow

    def noting(self: dry_run_repeats._DeepRehearsing, runs: list[Run]) -> Rehearsal:
        told.append([run.kept for run in runs])
        return shorter(self, runs)

    monkeypatch.setattr(dry_run_repeats._DeepRehearsing, "shallow", noting)
    rehearse_deep(flow, stages, blocks, 2)
    assert told == [[2, 2, 2, 2], [3, 2, 2, 2], [2, 3, 2, 2]]  # mask is made, then received


def test_who_is_uneven_is_run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    flow, blocks = flow_of("deep")
    stages = partition(flow, ())

    def uneven(*_: object) -> dict[str, int]:
        raise Uneven

    whole = rehearse(flow.graph, stages, blocks, 2)
    monkeypatch.setattr(dry_run_repeats, "_difference", uneven)
    assert rehearse_deep(flow, stages, blocks, 2) == whole
    monkeypatch.setattr(
        dry_run_repeats._DeepRehearsing, "deep", lambda _: pytest.fail("some are left out")
    )
    assert rehearse_deep(flow, stages, blocks, 2, even=False) == whole
