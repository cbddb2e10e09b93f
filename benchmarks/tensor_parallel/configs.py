"""Tiny Hugging Face models of many families, as data: a class, its settings, and a batch.

Two layers, random weights, no dropout, nothing downloaded. The vocabulary is 127, which no number
of ranks divides; heads of keys and values are sometimes fewer than the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 127
LENGTH = 12
CLASSES = 5

Batch = dict[str, Tensor]
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Family:
    """How to build a model of a family.

    Attributes:
        model: a class of `transformers`.
        settings: of its configuration.
        inputs: a batch of so many rows.
        loss: of outputs and batch; None takes `.loss` of the outputs.
        attention: the implementations of attention that there are to choose from.
        wide: compute in fp64: there are gradients that nearly cancel.
        training: False takes the model in evaluation, whose backward is the same.
    """

    model: str
    settings: Mapping[str, Any]
    inputs: Callable[[int], Batch]
    loss: Loss | None = None
    attention: tuple[str, ...] = ("sdpa", "eager")
    wide: bool = False
    training: bool = True

    def build(self, attention: str) -> nn.Module:
        """The same weights at every call, without dropout."""
        kind = getattr(transformers, self.model)
        config = kind.config_class(**self.settings)
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: nn.Module = kind._from_config(config, attn_implementation=attention)
        return (model.double() if self.wide else model).train(self.training)

    def batch(self, rows: int) -> Batch:
        """The batch in the model's precision."""
        made = self.inputs(rows)
        wide = {name: x.double() for name, x in made.items() if self.wide and x.is_floating_point()}
        return {**made, **wide}


# Batches: the first rows do not depend on how many follow.


def _rows(rows: int, seed: int, draw: Callable[[torch.Generator], Tensor]) -> Tensor:
    return torch.stack([draw(torch.Generator().manual_seed(100 * seed + n)) for n in range(rows)])


def tokens(rows: int, length: int = LENGTH, seed: int = 1) -> Tensor:
    """Words in [3, VOCABULARY), clear of the special ones."""
    return _rows(rows, seed, lambda g: torch.randint(3, VOCABULARY, (length,), generator=g))


def labels(rows: int) -> Tensor:
    """A class for each row."""
    return _rows(rows, 2, lambda g: torch.randint(0, CLASSES, (), generator=g))


def noise(rows: int, *shape: int) -> Tensor:
    """Standard normal numbers."""
    return _rows(rows, 3, lambda g: torch.randn(shape, generator=g))


def causal(rows: int) -> Batch:
    """The labels are the words."""
    return {"input_ids": tokens(rows), "labels": tokens(rows)}


def masked(rows: int) -> Batch:
    """Row i ends in i + 1 words of padding, whose labels do not count."""
    padding = torch.arange(LENGTH) >= LENGTH - 1 - torch.arange(rows)[:, None]
    return {
        "input_ids": tokens(rows).masked_fill(padding, 0),
        "attention_mask": (~padding).long(),
        "labels": tokens(rows, seed=4).masked_fill(padding, -100),
    }


def translation(rows: int) -> Batch:
    """Two texts of different lengths."""
    return {"input_ids": tokens(rows), "labels": tokens(rows, 8, seed=4)}


def speech(rows: int) -> Batch:
    """A spectrogram and its text."""
    return {"input_features": noise(rows, 8, 32), "labels": tokens(rows, 8)}


def images(rows: int) -> Batch:
    """Pictures and their classes."""
    return {"pixel_values": noise(rows, 3, 32, 32), "labels": labels(rows)}


def pairs(rows: int) -> Batch:
    """Pictures and texts that belong together."""
    return {"input_ids": tokens(rows), "pixel_values": noise(rows, 3, 32, 32)}


def square(outputs: Any, batch: Any) -> Tensor:
    """For a model without a loss: the mean square of its last hidden state."""
    mean: Tensor = outputs.last_hidden_state.square().mean()
    return mean


def contrast(outputs: Any, batch: Any) -> Tensor:
    """For a model of two towers: the mean square of how alike texts and pictures are."""
    mean: Tensor = outputs.logits_per_text.square().mean()
    return mean


# Settings: what most configurations call the same

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHORT = {  # GPT-2's names
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BOTH = {  # BART's names
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
SIGHT = {
    **{name: BASE[name] for name in ("hidden_size", "intermediate_size")},
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": CLASSES,
}
EXPERTS = {
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "experts_implementation": "grouped_mm",
}
GQA = {"num_key_value_heads": 2}
HEAD = {"head_dim": 8}

NONE = ("eager",)
"""There is nothing to choose: no attention, or one implementation."""


def decoder(name: str, *changes: Mapping[str, Any], **known: Any) -> Family:
    """A causal language model with settings like most."""
    settings = functools.reduce(lambda a, b: {**a, **b}, changes, BASE)
    return Family(f"{name}ForCausalLM", settings, causal, **known)


def encoder(name: str, *changes: Mapping[str, Any], **known: Any) -> Family:
    """A masked language model with settings like most."""
    settings = functools.reduce(lambda a, b: {**a, **b}, changes, BASE)
    return Family(f"{name}ForMaskedLM", settings, masked, **known)


def classifier(name: str, settings: Mapping[str, Any], **known: Any) -> Family:
    """A model that says what a picture shows."""
    known_settings = {"num_labels": CLASSES, **settings}
    return Family(f"{name}ForImageClassification", known_settings, images, **known)


FAMILIES: dict[str, Family] = {
    # Decoders
    "llama": decoder("Llama"),
    "llama-kv2": decoder("Llama", GQA),
    "llama-kv1": decoder("Llama", {"num_key_value_heads": 1}),
    "qwen2": decoder("Qwen2", GQA),
    "qwen3": decoder("Qwen3", GQA, HEAD),
    "mistral": decoder("Mistral", GQA),
    "mistral-window": decoder("Mistral", GQA, {"sliding_window": 4}),
    "gemma": decoder("Gemma", GQA, HEAD),
    "gemma2": decoder("Gemma2", GQA, HEAD, attention=NONE),
    "gemma3": decoder("Gemma3", GQA, HEAD),
    "phi": decoder("Phi"),
    "phi3": decoder("Phi3", GQA),
    "olmo": decoder("Olmo"),
    "olmo2": decoder("Olmo2"),
    "stablelm": decoder("StableLm", GQA),
    "starcoder2": decoder("Starcoder2", GQA),
    "cohere": decoder("Cohere", GQA),
    "granite": decoder("Granite", GQA),
    "nemotron": decoder("Nemotron", GQA),
    "persimmon": decoder("Persimmon"),
    "glm": decoder("Glm", GQA, HEAD),
    "smollm3": decoder("SmolLM3", GQA),
    "gpt_neox": decoder("GPTNeoX"),
    "gpt2": Family("GPT2LMHeadModel", SHORT, causal),
    "gptj": Family("GPTJForCausalLM", {**SHORT, "rotary_dim": 8}, causal, attention=NONE),
    "codegen": Family("CodeGenForCausalLM", {**SHORT, "rotary_dim": 8}, causal, attention=NONE),
    "gpt_bigcode": Family("GPTBigCodeForCausalLM", SHORT, causal),
    "gpt_neo": decoder(
        "GPTNeo",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        attention=NONE,
    ),
    "opt": decoder("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "bloom": Family(
        "BloomForCausalLM", {**BASE, "n_layer": 2, "n_head": 4}, causal, attention=NONE
    ),
    "falcon": decoder("Falcon"),
    "falcon-alibi": decoder(
        "Falcon", {"new_decoder_architecture": False, "multi_query": False, "alibi": True}
    ),
    "mpt": Family(
        "MptForCausalLM",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 40},
        causal,
        attention=NONE,
    ),
    "xglm": decoder(
        "XGLM",
        {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64},
        attention=NONE,
    ),
    "biogpt": decoder("BioGpt"),
    # Mixtures of experts
    "mixtral": decoder("Mixtral", EXPERTS, {"num_local_experts": 4}),
    "qwen3_moe": decoder("Qwen3Moe", EXPERTS, HEAD, {"num_experts": 4}),
    "olmoe": decoder("Olmoe", EXPERTS, {"num_experts": 4}),
    # Without attention
    "mamba": decoder("Mamba", {"state_size": 4}, attention=NONE),
    # Encoders
    "bert": encoder("Bert"),
    "roberta": encoder("Roberta"),
    "distilbert": encoder("DistilBert", {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}),
    "albert": encoder("Albert", {"embedding_size": 16}),
    "electra": encoder("Electra", {"embedding_size": 16}),
    "deberta": encoder("Deberta", attention=NONE),
    "deberta_v2": encoder("DebertaV2", attention=NONE),
    "mobilebert": encoder(
        "MobileBert",
        {"embedding_size": 16, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    ),
    "mpnet": encoder("MPNet", attention=NONE),
    "modernbert": encoder("ModernBert", {"cls_token_id": 1, "sep_token_id": 2}),
    # Encoders and decoders
    "t5": Family("T5ForConditionalGeneration", T5, translation),
    "t5-gated": Family(
        "T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}, translation
    ),
    "bart": Family("BartForConditionalGeneration", BOTH, translation),
    "marian": Family("MarianMTModel", BOTH, translation),
    "pegasus": Family("PegasusForConditionalGeneration", BOTH, translation),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        {**BOTH, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 40}
        | {"begin_suppress_tokens": None, "suppress_tokens": None},
        speech,
    ),
    # Pictures
    "vit": classifier("ViT", SIGHT),
    "deit": classifier("DeiT", SIGHT),
    "beit": classifier("Beit", SIGHT),
    "dinov2": classifier("Dinov2", {**SIGHT, "mlp_ratio": 2}),
    "siglip": classifier("Siglip", {"vision_config": SIGHT, "text_config": BASE}, wide=True),
    "swin": classifier(
        "Swin",
        {"image_size": 32, "patch_size": 4, "embed_dim": 32, "depths": [2, 2]}
        | {"num_heads": [2, 4], "window_size": 4},
        attention=NONE,
    ),
    "convnext": classifier(
        "ConvNext", {"hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]}, attention=NONE
    ),
    "resnet": classifier(
        "ResNet",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"},
        attention=NONE,
    ),
    # Pictures and texts
    "clip-text": Family(
        "CLIPTextModel", BASE, lambda rows: {"input_ids": tokens(rows)}, square, wide=True
    ),
    "clip": Family(
        "CLIPModel",
        {"vision_config": SIGHT, "text_config": BASE, "projection_dim": 16},
        pairs,
        contrast,
        wide=True,
    ),
}
"""All families, by name."""
