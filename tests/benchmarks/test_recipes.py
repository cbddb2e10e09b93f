"""benchmarks/recipes: how a recipe is read, and the sentence about one that cannot be built."""

import pytest
import torch

from benchmarks.recipes.__main__ import answer, table
from benchmarks.recipes.models import DECODERS, Decoder
from benchmarks.recipes.recipe import Layout, Unbuilt, read


def row(**changes: object) -> dict[str, str]:
    """As NVIDIA's own are written: empty is inherited, None is Python's, texts are quoted."""
    known: dict[str, object] = {
        **{"recipe": "llama3_70b_pretrain_64gpu_h100_bf16_config", "global_batch_size": 128},
        **{"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 4},
        **{"virtual_pipeline_model_parallel_size": 5, "context_parallel_size": 1},
        **{"expert_model_parallel_size": 1, "sequence_parallel": True, "micro_batch_size": 1},
    }
    return {name: str(value) for name, value in {**known, **changes}.items()}


def layout(**changes: object) -> Layout:
    found = read(row(**changes)).layout
    assert isinstance(found, Layout)
    return found


def test_a_recipe_is_a_question_and_an_answer() -> None:
    """64 / (tp 4 * pp 4) = dp 4;  128 rows / (dp 4 * 1) = 32 micro-batches."""
    recipe = read(row())
    assert (recipe.gpu, recipe.gpus, recipe.batch, recipe.seq) == ("h100", 64, 128, 8192)
    assert recipe.model is DECODERS["llama3_70b"]
    found = layout()
    assert (found.dp, found.micro_batches, found.chunks, found.zero) == (4, 32, 5, 1)
    assert found.sequence_parallel


@pytest.mark.parametrize(
    ("task", "rank", "seq"), [("pretrain", None, 8192), ("sft", None, 4096), ("peft", 16, 4096)]
)
def test_a_name_says_what_is_trained(task: str, rank: int | None, seq: int) -> None:
    recipe = read(row(recipe=f"llama3_70b_{task}_64gpu_h100_bf16_config"))
    assert (recipe.rank, recipe.seq) == (rank, seq)


def test_adapters_alone_are_trained_and_change_nothing_at_first() -> None:
    """3 of queries, keys and values in 2 layers, of rank 4: A [4, inputs] and B [outputs, 4]."""
    tiny = Decoder("Llama", 2, 32, 4, 2, 64, 50, 8)
    torch.manual_seed(0)
    whole = tiny.build(8)
    torch.manual_seed(0)
    adapted = tiny.build(8, rank=4)
    trained = {n: tuple(p.shape) for n, p in adapted.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 3 * 2
    assert trained["model.layers.1.self_attn.k_proj.down.weight"] == (4, 32)
    assert trained["model.layers.1.self_attn.k_proj.up.weight"] == (16, 4)
    tokens = torch.arange(8)[None]
    assert torch.equal(adapted(tokens).logits, whole(tokens).logits)


def test_of_a_decoder_with_experts_each_is_built() -> None:
    """Gate and up together are [experts, 2 * width, hidden], down is [experts, hidden, width]."""
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    built = Decoder("Qwen3Moe", 2, 32, 4, 2, 64, 50, 8, experts=experts).build(8)
    shapes = {n: tuple(p.shape) for n, p in built.named_parameters()}
    assert shapes["model.layers.1.mlp.experts.gate_up_proj"] == (6, 2 * 24, 32)
    assert shapes["model.layers.1.mlp.experts.down_proj"] == (6, 32, 24)


def test_what_is_empty_is_inherited() -> None:
    """No field but the name, the batch and nothing else: one rank of each kind, dp over all."""
    found = layout(**dict.fromkeys(list(row())[2:], ""))
    assert (found.tp, found.pp, found.dp, found.chunks, found.recompute) == (1, 1, 64, 1, "none")


@pytest.mark.parametrize(
    ("says", "replaced"),
    [
        ({"recompute_granularity": '"selective"'}, "recompute selective as none"),
        ({"recompute_granularity": '"full"', "recompute_num_layers": 2}, "2 layers as all"),
        ({"layout": "Et|(tt|)*30mL"}, "its own cuts"),
    ],
)
def test_what_the_tool_cannot_be_told_is_said(says: dict[str, object], replaced: str) -> None:
    (found,) = layout(**says).replaced
    assert replaced in found


def test_megatron_fsdp_is_zero_3() -> None:
    assert layout(use_megatron_fsdp=True).zero == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"recipe": "llama3_70b_distil_8gpu_b200_bf16_config"}, "what is trained"),
        ({"recipe": "nobody_1b_pretrain_8gpu_h100_bf16_config"}, "dimensions"),
        ({"recipe": "llama3_70b_pretrain"}, "no devices"),
        ({"global_batch_size": ""}, "no global_batch_size"),
    ],
)
def test_what_cannot_be_built_is_said(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(Unbuilt, match=reason):
        read(row(**changes))
    assert reason in answer(row(**changes))["refused"]


def test_a_layout_that_cannot_be_said_leaves_the_question() -> None:
    assert read(row(expert_model_parallel_size=8)).layout == "expert parallel, ep=8"
    experts = row(recipe="deepseek_v3_sft_64gpu_h100", expert_model_parallel_size="")
    assert read(experts).layout == "expert parallel, ep inherited"
    assert read(row(context_parallel_size=2)).layout == "context parallel, cp=2"
    assert "do not divide 64 GPUs" in str(read(row(tensor_model_parallel_size=3)).layout)


def test_the_table_shows_what_does_not_fit_and_by_how_much() -> None:
    theirs = {"layout": "tp=1", "replaced": [], "seconds": 7.0, "fits": False}
    theirs |= {"needed": 191 * 2**30, "capacity": 152 * 2**30}
    ours = {"layout": "pp=4", "seconds": 7.5}
    line = {"recipe": "x", "gpus": "8 b200", "theirs": theirs, "ours": ours, "planned_in": 9.0}
    assert table([line]).splitlines()[-1] == (
        "| x | 8 b200 | tp=1 | 7 | no, 191 of 152 GiB | pp=4 | 7.5 |  | 9 |"
    )
