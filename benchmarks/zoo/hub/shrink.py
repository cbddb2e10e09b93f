"""A tiny configuration of any family of transformers, by rules over the names of its fields.

    hidden_size 4096 -> 64      num_hidden_layers 32 -> 2      num_attention_heads 32 -> 4

No rule fits all: `shrunk` gives several configurations, the smallest first. The first whose model
runs forward and backward is taken (`hub.families`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

WORDS = 128
"""Of the vocabulary."""

LAYERS = 2
"""Layers of a model; of one whose layers differ by a pattern, twice as many."""

Rule = tuple[str, Callable[[int], int | None]]


def most(limit: int) -> Callable[[int], int]:
    return lambda value: min(value, limit)


def keep(value: int) -> None:
    return None


def narrow(value: int) -> int | None:
    return 64 if value > 64 else None


RULES: tuple[Rule, ...] = (
    (r"vocab.*size|vocab_size|n_vocab|num_tokens$|codebook_size", most(WORDS)),
    (r"key_value_heads|kv_heads|head_kv|query_group", keep),
    (r"(rope|nope).*head_dim", most(8)),
    (r"head_dim|head_size|d_kv|kv_channels|head_width", most(16)),
    (r"(attention_heads|num_heads|n_heads?|_heads)$", most(4)),
    (r"lora_rank|_rank$", most(16)),
    (r"experts_per_tok|top_?k|num_selected", most(2)),
    (r"n_group$|topk_group|expert_group|num_groups$", most(2)),
    (r"shared_experts", most(1)),
    (r"(moe|shared|expert).*(intermediate|hidden|size|dim|width)", most(32)),
    (r"experts", most(4)),
    (r"first_k_dense|num_dense|moe_layer_start|dense_replace", most(1)),
    (r"intermediate|ffn|d_ff|feed_?forward|inner|mlp_dim|mlp_hidden", most(128)),
    (r"rel.*position|relative", keep),
    (
        r"max_(position|seq|length|source|target|sequence)|n_positions|n_ctx|context_length"
        r"|position_size|max_2d_position",
        most(256),
    ),
    (r"image_size|img_size|input_size|crop_size", most(64)),
    (r"patch_size", lambda value: 8 if value > 8 else None),
    (r"num_queries|num_feature_levels|encoder_n_points|decoder_n_points|num_denoising", most(10)),
    (
        r"hidden|d_model|embed|n_embd|dim|width|channels|latent|projection|conv_kernel|depths",
        narrow,
    ),
    (r"size|units|features|length", lambda value: 64 if value > 1024 else None),
)

DEPTH = re.compile(
    r"(^|_)(n_layers?|num_layers|num_blocks|depth|layers|hidden_layers|blocks|encoder_blocks"
    r"|hidden_groups|num_layers_encoder|perceiver_layers|num_block_layers|conv_blocks)$"
)
PATTERN = re.compile(r"layer_types|period|interval|pattern|every|freq|attn_layer|block_types")
LEFT = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "num_labels", "id2label", "label2id"),
    *("model_type", "num_channels", "in_channels", "dtype", "transformers_version"),
    *("architectures", "problem_type", "return_dict", "use_cache", "layer_types"),
    *("mlp_layer_types", "task_specific_params", "rope_scaling", "rope_parameters"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "image_channels"),
}
DROPPED = re.compile(r"(?<!\w)drop(?!less)|dropout|_pdrop|drop_|layerdrop|jitter|stochastic_depth")


def shrunk(family: str) -> Iterator[PreTrainedConfig]:
    """Tiny configurations of a family, to be tried in turn.

    Raises:
        Exception: what the last configuration's own code raises, if none can be made.
    """
    kind = CONFIG_MAPPING[family]
    whole = kind().to_dict()
    layers = LAYERS * 2 if PATTERN.search(" ".join(map(str, _names(whole)))) else LAYERS
    smaller = _smaller(whole, layers)
    ways = (
        smaller,
        _without(smaller, r"head_dim|head_size|d_kv"),
        _with(smaller, r"heads$", 1, drop=r"head_dim"),
        _only_scalars(smaller),
        _only(smaller, r"vocab|layers|depth|experts|_id$|model_type|blocks"),
        {},
    )
    failed: Exception | None = None
    for way in ways:
        for make in (_by_keywords, _by_fields):
            try:
                config = make(kind, copy.deepcopy(way))
                _settle(config, layers)
            except Exception as error:
                failed = error
                continue
            yield config
    if failed is not None:
        raise failed


def _names(fields: dict[str, Any]) -> Iterator[str]:
    for name, value in fields.items():
        yield name
        if isinstance(value, dict):
            yield from _names(value)


def _smaller(fields: dict[str, Any], layers: int) -> dict[str, Any]:
    """What of a configuration becomes smaller, and to what."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if name in LEFT or not isinstance(name, str) or name.startswith("_"):
            continue
        low = name.lower()
        new: Any = None
        if isinstance(value, dict):
            if "config" in low or low in ("text", "vision", "backbone", "audio"):
                new = _smaller(value, layers)
                if new and "model_type" in value:
                    new["model_type"] = value["model_type"]
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, float):
            new = 0.0 if DROPPED.search(low) or low.startswith("mask_time_prob") else None
        elif isinstance(value, int):
            new = _number(low, value, layers)
        elif isinstance(value, (list, tuple)) and value:
            new = _several(low, value)
        if new is not None and new != value and new != {}:
            found[name] = new
    heads = fields.get("num_attention_heads")
    for name in ("num_key_value_heads", "num_kv_heads"):
        if isinstance(heads, int) and isinstance(own := fields.get(name), int):
            found[name] = 4 if own == heads else 1 if own == 1 else 2
    return found


def _number(name: str, value: int, layers: int) -> int | None:
    if re.search(r"(token|_tok)_?(id|index)$|_index$|_token$", name) or name.endswith("_id"):
        return WORDS - 1 - sum(map(ord, name)) % 20 if value >= WORDS - 20 else None
    if DEPTH.search(name):
        return min(value, layers) if value > 0 else None
    for pattern, rule in RULES:
        if re.search(pattern, name):
            return rule(value)
    return None


def _several(name: str, values: Any) -> Any:
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return None
    if re.search(r"depths?$|layers_per|num_layers|n_layers|num_blocks|layer_depths|blocks$", name):
        return type(values)(min(value, 1) for value in values)
    if re.search(r"hidden_sizes|embed_dims?|neck|widths|channels|dims?$|hidden_size|d_model", name):
        divisor = max(1, min(values) // 16)
        return type(values)(max(8, value // divisor) for value in values)
    if re.search(r"image_size|img_size", name):
        return type(values)(min(value, 64) for value in values)
    return None


def _edited(fields: dict[str, Any], edit: Callable[[str, Any], Any]) -> dict[str, Any]:
    """The tree with `edit(name, value)` for each leaf; None leaves the leaf out."""
    found = {
        name: _edited(value, edit) if isinstance(value, dict) else edit(name, value)
        for name, value in fields.items()
    }
    return {name: value for name, value in found.items() if value is not None and value != {}}


def _without(fields: dict[str, Any], pattern: str) -> dict[str, Any]:
    return _edited(fields, lambda name, value: None if re.search(pattern, name) else value)


def _with(fields: dict[str, Any], pattern: str, number: int, drop: str) -> dict[str, Any]:
    return _edited(
        _without(fields, drop), lambda name, value: number if re.search(pattern, name) else value
    )


def _only_scalars(fields: dict[str, Any]) -> dict[str, Any]:
    return _edited(fields, lambda name, value: None if isinstance(value, list | tuple) else value)


def _only(fields: dict[str, Any], pattern: str) -> dict[str, Any]:
    return _edited(fields, lambda name, value: value if re.search(pattern, name) else None)


def _by_keywords(kind: Any, fields: dict[str, Any]) -> PreTrainedConfig:
    return kind(**fields)


def _by_fields(kind: Any, fields: dict[str, Any]) -> PreTrainedConfig:
    config = kind()

    def assign(config: Any, fields: dict[str, Any]) -> None:
        for name, value in fields.items():
            inner = getattr(config, name, None)
            if isinstance(inner, PreTrainedConfig) and isinstance(value, dict):
                assign(inner, value)
            else:
                setattr(config, name, value)

    assign(config, fields)
    return config


def _settle(config: PreTrainedConfig, layers: int) -> None:
    """What no rule over numbers says: kinds of layers, masks drawn at random, tokens."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _settle(value, layers)
        elif name.endswith(("layer_types", "block_types", "layers_block_type")):
            if isinstance(value, list) and len(value) > layers:
                setattr(config, name, ([*dict.fromkeys(value)] + value)[:layers])
        elif isinstance(value, float) and DROPPED.search(name):
            setattr(config, name, 0.0)
    wanted = {
        "use_cache": False,
        "apply_spec_augment": False,
        "mask_time_prob": 0.0,
        "layerdrop": 0.0,
    }
    for name, value in wanted.items():
        if hasattr(config, name):
            setattr(config, name, value)
    for name, number in (("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)):
        own = getattr(config, name, None)
        if isinstance(own, list | tuple) or (isinstance(own, int) and own >= WORDS):
            setattr(config, name, number)
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    if getattr(config, "is_encoder_decoder", False):
        own = getattr(config, "decoder_start_token_id", None)
        if own is None or own >= WORDS:
            config.decoder_start_token_id = 1
