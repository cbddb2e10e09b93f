"""The models that are planned, by name; they have no weights, as planning needs none.

`autopipe plan benchmarks.planning.models:MODEL` builds them; the length of a row is in the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

LLAMAS: dict[str, dict[str, int]] = {
    # The Llama 3 Herd of Models (Meta, 2024), table 3.
    "llama-405b": {
        **{"num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248},
        **{"num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256},
        "max_position_embeddings": 131072,
    },
    # The Llama 3 Herd of Models, table 3.
    "llama-70b": {
        **{"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256},
        "max_position_embeddings": 131072,
    },
    # The config.json of meta-llama/Llama-2-7b-hf.
    "llama-7b": {
        **{"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008},
        **{"num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000},
        "max_position_embeddings": 4096,
    },
    # LLaMA 2 (arXiv:2307.09288), table 1 and the config.json of its 13B.
    "llama-13b": {
        **{"num_hidden_layers": 40, "hidden_size": 5120, "intermediate_size": 13824},
        **{"num_attention_heads": 40, "num_key_value_heads": 40, "vocab_size": 32000},
        "max_position_embeddings": 4096,
    },
    # Nobody's: 1.5e9 parameters in LLaMA's layers.
    "decoder-1.5b": {
        **{"num_hidden_layers": 26, "hidden_size": 2048, "intermediate_size": 5504},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50304},
        "max_position_embeddings": 2048,
    },
}


def llama(name: str) -> nn.Module:
    """A Llama of these dimensions."""
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMAS[name], use_cache=False))


T5S: dict[str, dict[str, Any]] = {
    # T5 v1.1: https://huggingface.co/google/t5-v1_1-xl/blob/main/config.json
    "t5-xl": {
        "d_model": 2048,
        "d_kv": 64,
        "d_ff": 5120,
        "num_heads": 32,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
    # https://huggingface.co/google-t5/t5-11b/blob/main/config.json
    "t5-11b": {"d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_heads": 128},
}


def t5(name: str) -> nn.Module:
    """An encoder and a decoder of 24 layers each.

    Every layer of a half adds the biases that the half's first layer has made.
    """
    import transformers

    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            num_layers=24,
            decoder_start_token_id=0,
            pad_token_id=0,
            use_cache=False,
            **T5S[name],
        )
    )


def gemma2() -> nn.Module:
    """The dimensions of Gemma 2 9B (arXiv:2408.00118, table 1): near and far layers take turns.

    The cache of keys and values that its configuration asks for is as it comes.
    """
    import transformers

    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            hidden_size=3584,
            intermediate_size=14336,
            num_hidden_layers=42,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=256,
            vocab_size=256128,
        )
    )


def mixtral_8x22b() -> nn.Module:
    """https://huggingface.co/mistralai/Mixtral-8x22B-v0.1/blob/main/config.json"""
    import transformers

    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            hidden_size=6144,
            num_hidden_layers=56,
            num_attention_heads=48,
            num_key_value_heads=8,
            intermediate_size=16384,
            num_local_experts=8,
            num_experts_per_tok=2,
            vocab_size=32768,
            use_cache=False,
        )
    )


def gpt_oss() -> nn.Module:
    """gpt-oss-120b (OpenAI, 2025): 36 layers of 128 experts each, which transformers' own defaults
    are; near and far layers take turns."""
    import transformers

    return transformers.GptOssForCausalLM(transformers.GptOssConfig(use_cache=False))


def tokens(length: int) -> Callable[[int], dict[str, Tensor]]:
    """Rows of so many tokens, and labels of as many."""

    def inputs(batch_size: int) -> dict[str, Any]:
        row = torch.zeros(batch_size, length, dtype=torch.long)
        return {"input_ids": row, "labels": row.clone()}

    return inputs
