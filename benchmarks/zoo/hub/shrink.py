"""Tiny configurations of any family of transformers, by `rules` over the names of its fields.

No rule fits all: `shrunk` gives several configurations, the likeliest first. The first whose model
runs forward and backward is taken (`hub.families`).
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from benchmarks.zoo.hub import rules
from benchmarks.zoo.hub.rules import WORDS

LAYERS = 2
"""Layers of a model; of one whose layers differ by a pattern, twice as many."""

Fields = dict[str, Any]


def shrunk(kind: type[PreTrainedConfig], causal: bool = False) -> Iterator[PreTrainedConfig]:
    """Tiny configurations of a kind, to be tried in turn.

    Args:
        causal: whether its model is to predict the next word.

    Raises:
        Exception: what the last configuration's own code raises, if none can be made.
    """
    whole = kind().to_dict()
    layers = LAYERS * 2 if rules.PATTERN.search(" ".join(map(str, _names(whole)))) else LAYERS
    by_hand = rules.BY_HAND.get(kind.model_type, {})
    failed: Exception | None = None
    made = 0
    for way in _ways(whole, layers):
        for make in (_by_keywords, _by_fields):
            try:
                config = make(kind, _merged(way, by_hand))
                _settle(config, causal)
            except Exception as error:
                failed = error
                continue
            made += 1
            yield config
    if failed is not None and not made:
        raise failed


def _ways(whole: Fields, layers: int) -> Iterator[Fields]:
    """What becomes of the fields, from all rules at once to all but one."""
    tiny = _smaller(whole, layers, rules.TINY)
    yield tiny
    given = _given(whole, tiny)
    yield given
    yield _smaller(whole, layers, rules.IN_PROPORTION)
    yield _without(given, r"head_dim|head_size|d_kv")
    for heads in (1, 8):
        yield _edited(_without(given, r"head_dim"), partial(_all_heads, heads))
    yield _edited(given, lambda name, value: None if isinstance(value, list | tuple) else value)
    yield _only(given, r"vocab|layers|depth|experts|_id$|model_type|blocks")
    for name in dict.fromkeys(_names(given)):
        if name != "model_type":
            yield _without(given, f"^{re.escape(name)}$")
    yield {}


STAGES = ("depths", "hidden_sizes")
"""Lists with an entry a stage: a number of layers that is as great counts stages."""


def _all_heads(heads: int, name: str, value: Any) -> Any:
    return heads if name.endswith("heads") else value


def _merged(fields: Fields, more: Fields) -> Fields:
    """A copy of fields, with more of them."""
    found = copy.deepcopy(fields)
    for name, value in more.items():
        own = found.get(name)
        found[name] = _merged(own, value) if isinstance(own, dict) else copy.deepcopy(value)
    return found


def _names(fields: Fields) -> Iterator[str]:
    for name, value in fields.items():
        yield name
        if isinstance(value, dict):
            yield from _names(value)


def _is_config(name: str, value: Any) -> bool:
    """Whether a field is a configuration of its own."""
    return isinstance(value, dict) and (
        "model_type" in value or "config" in name or name in ("text", "vision", "audio")
    )


def _smaller(fields: Fields, layers: int, widths: Sequence[rules.Rule]) -> Fields:
    """What of a configuration becomes smaller, and to what."""
    found: Fields = {}
    stages = {len(value) for name, value in fields.items() if name in STAGES and value}
    layers = max(layers, *(len(value) for name, value in fields.items() if _picks(name, value)), 0)
    depths = {
        value: min(value, layers)
        for name, value in fields.items()
        if type(value) is int and value > 1 and value not in stages
        if rules.DEPTH.search(name) and not rules.NO_DEPTH.search(name)
    }
    for name, value in fields.items():
        if name in rules.LEFT or not isinstance(name, str) or name.startswith("_"):
            continue
        new: Any = None
        if _is_config(name, value):
            new = _smaller(value, layers, widths)
            if new and "model_type" in value:
                new["model_type"] = value["model_type"]
        elif isinstance(value, float):
            off = rules.DROPPED.search(name) or name.startswith("mask_time_prob")
            small = rules.MULTIPLIER.search(name)
            new = 0.0 if off else min(value, 0.25) if small else None
        elif type(value) is int:
            new = rules.number(name.lower(), value, layers, widths)
            new = None if value in stages and rules.DEPTH.search(name) else new
        elif _picks(name, value):
            new = _indices(value, max(depths, default=0))
        elif isinstance(value, list | tuple) and value:
            new = rules.several(name.lower(), value, depths, widths)
        if new is not None and new != value and new != {}:
            found[name] = new
    if widths is rules.TINY:
        found |= _key_value_heads(fields)
    return found


def _picks(name: str, value: Any) -> bool:
    """Whether a field picks layers whose outputs are used."""
    return name.endswith("out_indices") and isinstance(value, list | tuple)


def _indices(values: Sequence[int], layers: int) -> Sequence[int] | None:
    """The first layers in place of some; counted from 1 where the last is the number of layers."""
    first = 1 if values and max(values) == layers else 0
    return type(values)(range(first, first + len(values))) if layers else None


def _key_value_heads(fields: Fields) -> Fields:
    """Heads of keys and values, of four of queries: all of them, one, or two."""
    found = {}
    for name, own in fields.items():
        if re.search(r"kv_heads$|key_value_heads$|kv_attention_heads$", name) and type(own) is int:
            prefix = name.removesuffix("num_key_value_heads").removesuffix("num_kv_heads")
            heads = fields.get(f"{prefix}num_attention_heads", fields.get("num_attention_heads"))
            found[name] = 4 if own == heads else 1 if own == 1 else 2
    return found


def _given(whole: Fields, tiny: Fields) -> Fields:
    """With a number for each field that a family leaves None, and that models need."""
    found = {
        name: _given(value, tiny.get(name, {}))
        for name, value in whole.items()
        if _is_config(name, value) and name in tiny
    }
    missing = {name: new for name, new in rules.GIVEN.items() if whole.get(name, 0) is None}
    return {**tiny, **found, **missing}


def _edited(fields: Fields, edit: Callable[[str, Any], Any]) -> Fields:
    """The tree with `edit(name, value)` for each leaf; None leaves the leaf out."""
    found = {
        name: _edited(value, edit) if isinstance(value, dict) else edit(name, value)
        for name, value in fields.items()
    }
    return {name: value for name, value in found.items() if value is not None and value != {}}


def _without(fields: Fields, pattern: str) -> Fields:
    """Without the fields, and configurations, of such names."""
    left = {name: value for name, value in fields.items() if not re.search(pattern, name)}
    return {
        name: _without(value, pattern) if isinstance(value, dict) else value
        for name, value in left.items()
    }


def _only(fields: Fields, pattern: str) -> Fields:
    return _edited(fields, lambda name, value: value if re.search(pattern, name) else None)


def _by_keywords(kind: Any, fields: Fields) -> PreTrainedConfig:
    return kind(**fields)


def _by_fields(kind: Any, fields: Fields) -> PreTrainedConfig:
    config = kind()

    def assign(config: Any, fields: Fields) -> None:
        for name, value in fields.items():
            inner = vars(config).get(name)
            if isinstance(inner, PreTrainedConfig) and isinstance(value, dict):
                assign(inner, value)
            else:
                setattr(config, name, value)

    assign(config, fields)
    return config


def _settle(config: PreTrainedConfig, causal: bool) -> None:
    """What no rule over numbers says: kinds of layers, masks drawn at random, tokens."""
    own = vars(config)
    layers = own.get("num_hidden_layers") or own.get("num_layers")
    for name, value in list(own.items()):
        if isinstance(value, PreTrainedConfig):
            _settle(value, causal)
        elif name.endswith(("layer_types", "block_types", "layers_block_type")):
            if isinstance(value, list) and type(layers) is int and len(value) > layers:
                setattr(config, name, (list(dict.fromkeys(value)) * layers)[:layers])
        elif isinstance(value, float) and rules.DROPPED.search(name):
            setattr(config, name, 0.0)
    for name in ("rope_parameters", "rope_scaling"):
        _settle_sections(own.get(name), config)
    wanted = {
        "use_cache": False,
        "apply_spec_augment": False,
        "mask_time_prob": 0.0,
        "layerdrop": 0.0,
        **({"is_decoder": True} if causal else {}),
    }
    for name, value in wanted.items():
        if name in own:
            setattr(config, name, value)
    for name, number in (("pad_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)):
        value = own.get(name)
        if isinstance(value, list | tuple) or (isinstance(value, int) and value >= WORDS):
            setattr(config, name, number)
    if own.get("pad_token_id", 0) is None:
        config.pad_token_id = 0
    if own.get("is_encoder_decoder"):
        value = own.get("decoder_start_token_id")
        if value is None or value >= WORDS:
            config.decoder_start_token_id = 1


def _settle_sections(rope: Any, config: PreTrainedConfig) -> None:
    """Let sections of rotary dims for time, height and width add up to half of a head."""
    own = vars(config)
    heads, hidden = own.get("num_attention_heads"), own.get("hidden_size")
    head = own.get("head_dim") or (hidden // heads if heads and hidden else 0)
    if isinstance(rope, dict) and head and ("mrope_section" in rope or _has_sections(config)):
        sections = rope.get("mrope_section") or (2, 1, 1)
        half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
        first, *others = (section * half // sum(sections) for section in sections)
        rope["mrope_section"] = [half - sum(others), *others]


def _has_sections(config: PreTrainedConfig) -> bool:
    """Whether a family's model has sections of its own where its configuration says none."""
    file = Path(inspect.getfile(type(config)))
    model = file.with_name(file.name.replace("configuration_", "modeling_"))
    return model != file and model.exists() and '"mrope_section", [' in model.read_text()
