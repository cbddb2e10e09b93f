"""Rules that shrink a field of a configuration by its name: numbers, lists, and fields set to None.

hidden_size 4096 -> 64      num_hidden_layers 32 -> 2      layer_types [..32] -> [..2]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

WORDS = 128
"""Of the vocabulary."""

LENGTH = 24
"""Tokens of a row."""

SHARE = 8
"""What `eighth` divides widths by."""

Rule = tuple[str, Callable[[int], int | None]]


def most(limit: int) -> Callable[[int], int]:
    return lambda value: min(value, limit)


def keep(value: int) -> None:
    return None


def narrow(value: int) -> int | None:
    return 64 if value > 64 else None


def eighth(value: int) -> int | None:
    return value // SHARE if value >= 8 * SHARE and value % SHARE == 0 else None


COUNTS: tuple[Rule, ...] = (
    (r"vocab|num_tokens$|codebook_size|num_embeddings$", most(WORDS)),
    (r"rel.*position|relative", keep),
    (r"experts_per_tok|top_?k$|num_selected|moe_k$", most(2)),
    (r"n_groups?$|topk_group|expert_group|num_groups$", most(2)),
    (r"shared_experts", most(1)),
    (r"experts$|num_experts", most(4)),
    (r"first_k_dense|num_dense|moe_layer_start|dense_replace", most(1)),
    (r"kv_shared_layers", most(2)),
    (
        r"max_(seq|length|source|target|sequence)|n_positions|n_ctx|context_length"
        r"|position_size|max_2d_position",
        most(256),
    ),
    (r"max_position|position_embeddings", lambda value: min(max(value, 2 * LENGTH), 256)),
    (r"(sliding|attention|local)_window(_size)?$|attention_chunk_size|local_attention$", most(16)),
    (r"image_size|img_size|input_size|crop_size", most(64)),
    (r"(^|_)n(um)?_filters$", most(8)),
    (r"patch_size", lambda value: 8 if value > 8 else None),
    (r"num_queries|num_feature_levels|encoder_n_points|decoder_n_points|num_denoising", most(10)),
)
"""Of what is no width: as small in every way to shrink."""

TINY: tuple[Rule, ...] = (
    (r"kv_?(attention_)?heads|key_value_heads|head_kv|query_group", keep),
    (r"(rope|nope).*(head_)?dim|rotary_dim", most(8)),
    (r"head_dim|head_size|d_kv|kv_channels|head_width|head_channels", most(16)),
    (r"(attention_heads|num_heads|n_heads?|_heads|head_count)$", most(4)),
    (r"lora_rank|_rank$", most(16)),
    (r"groups$", narrow),
    (r"(moe|shared|expert).*(intermediate|hidden|size|dim|width)", most(32)),
    (r"intermediate|ffn|d_ff|feed_?forward|inner|mlp_dim|mlp_hidden", most(128)),
    (
        r"hidden|d_model|embed|n_embd|dim|width|channels|latent|projection|conv_kernel|depths",
        narrow,
    ),
    (r"size|units|features|length", lambda value: 64 if value > 1024 else None),
)
"""Widths to 64, four heads of 16 or less."""

IN_PROPORTION: tuple[Rule, ...] = (
    (r"heads|kernel|positions$", keep),
    (r"groups$", eighth),
    (
        r"dim|head_size|d_kv|rank$|hidden|d_model|embed|n_embd|width|channels|latent|projection"
        r"|intermediate|ffn|d_ff|feed_?forward|inner|units|features|_size$",
        eighth,
    ),
)
"""Widths to an eighth and heads as they were: whatever is a multiple of another stays one."""

GIVEN = {
    "head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "sliding_window": 16,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "vocab_size": WORDS,
    "max_position_embeddings": 256,
    "image_token_id": WORDS - 3,
    "image_token_index": WORDS - 3,
    "default_language": "en_XX",
}
"""What a field is set to where a family's default is None and its model needs a number."""

FULL = {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}

SAM2 = {
    "prompt_encoder_config": {"patch_size": 16},
    "vision_config": {
        "backbone_channel_list": [64, 32, 16, 8],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        "backbone_config": {
            "image_size": [64, 64],
            "hidden_size": 8,
            "embed_dim_per_stage": [8, 16, 32, 64],
            "blocks_per_stage": [1, 2, 2, 1],
            "global_attention_blocks": [4],
        },
    },
}

BY_HAND: dict[str, dict[str, Any]] = {
    "align": {"projection_dim": 80},
    "beit": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "blip-2": {"qformer_config": {"use_qformer_text_input": True}},
    "cohere_compass": {"text_config": {"rope_parameters": FULL}},
    "cohere_compass_text": {"rope_parameters": FULL},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "depth_pro": {
        "fusion_hidden_size": 16,
        "intermediate_hook_ids": [1, 0],
        "intermediate_feature_dims": [16, 16],
        "scaled_images_feature_dims": [16, 16, 16],
    },
    "efficientnet": {"hidden_dim": 320},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "qwen4_exp_text": INDEXER,
    "sam": {"vision_config": {"num_pos_feats": 32}},
    "sam2": SAM2,
    "sam3_tracker": {"vision_config": {"backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]]}},
    "sam_hq": {"vision_config": {"num_pos_feats": 32}},
    "timm_backbone": {"backbone": "resnet18"},
}
"""What a family needs of its user, for its own defaults do not run."""

DEPTH = re.compile(
    r"(^|_)(n_layers?|num_layers|num_blocks|depth|layers|hidden_layers|blocks|encoder_blocks"
    r"|hidden_groups|num_layers_encoder|perceiver_layers|num_block_layers|conv_blocks)$"
)
NO_DEPTH = re.compile(r"feat_extract|conv_pos|shared_layers|adapter_layers")
PATTERN = re.compile(r"layer_types|period|interval|pattern|every|freq|attn_layer|block_type")
TOKEN = re.compile(r"(token|_tok)_?(id|index)$|_index$|_token$|_id$")
DROPPED = re.compile(r"(?<!\w)drop(?!less)|dropout|_pdrop|drop_|layerdrop|jitter|stochastic_depth")
MULTIPLIER = re.compile(r"(width|depth)_(coefficient|multiplier|mult)|channel_multiplier")

LEFT = {
    *("num_labels", "id2label", "label2id", "model_type", "dtype", "transformers_version"),
    *("num_channels", "in_channels", "image_channels", "architectures", "problem_type"),
    *("return_dict", "use_cache", "task_specific_params", "rope_scaling", "rope_parameters"),
    *("chunk_size_feed_forward", "is_encoder_decoder"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}
"""Fields that no rule over names is for."""


def number(name: str, value: int, layers: int, widths: Sequence[Rule]) -> int | None:
    """What a number becomes; None: what it is."""
    if TOKEN.search(name) and "per_tok" not in name:
        return WORDS - 1 - sum(map(ord, name)) % 20 if value >= WORDS - 20 else None
    if DEPTH.search(name) and not NO_DEPTH.search(name):
        return min(value, layers) if value > 0 else None
    for pattern, rule in (*COUNTS, *widths):
        if re.search(pattern, name):
            return rule(value)
    return None


def several(name: str, values: Any, depths: dict[int, int], widths: Sequence[Rule]) -> Any:
    """What a list becomes; None: what it is.

    Args:
        depths: from lengths of lists that have an entry a layer to how many there will be.
    """
    kind = type(values)
    if name == "axial_pos_shape":
        return kind((4, LENGTH // 4))
    if name == "axial_pos_embds_dim":
        return kind((16, 48))
    if len(values) in depths:
        return kind(_first(values, depths[len(values)], name, widths))
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return None
    if re.search(r"depths?$|layers_per|num_layers|n_layers|num_blocks|layer_depths|blocks$", name):
        return kind(min(value, 1) for value in values)
    if re.search(r"hidden_sizes|embed_dims?|neck|widths|channels|dims?$|hidden_size|d_model", name):
        return kind(max(8, value // SHARE) if value > 8 else value for value in values)
    if re.search(r"image_size|img_size", name):
        return kind(min(value, 64) for value in values)
    return None


def _first(values: Any, count: int, name: str, widths: Sequence[Rule]) -> list[Any]:
    """As many entries, of kinds each in turn: [a, a, a, b, a, a] -> [a, b, a, b]."""
    if all(isinstance(value, str) for value in values):
        kinds = list(dict.fromkeys(values))
        return (kinds * count)[:count]
    return [
        value if new is None else new
        for value in values[:count]
        for new in [number(name, value, 0, widths) if type(value) is int else None]
    ]
