"""Decoders by their dimensions: LLaMA's layers in Hugging Face's writing, without weights.

        width   MLP     layers   heads   vocabulary   parameters
1.5b    2048    5504    26       16      50304        1.5e9
7b      4096    11008   32       32      32000        6.7e9    LLaMA 2, arXiv:2307.09288
13b     5120    13824   40       40      32000        13.0e9   LLaMA 2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import transformers
from torch import Tensor, nn

TOKENS = 2048


class Sizes(NamedTuple):
    width: int
    mlp: int
    layers: int
    heads: int
    vocabulary: int


SIZES = {
    "1.5b": Sizes(2048, 5504, 26, 16, 50304),
    "7b": Sizes(4096, 11008, 32, 32, 32000),
    "13b": Sizes(5120, 13824, 40, 40, 32000),
}


def decoder(name: str) -> Callable[[], nn.Module]:
    """A function that builds it."""
    sizes = SIZES[name]

    def model() -> nn.Module:
        config = transformers.LlamaConfig(
            hidden_size=sizes.width,
            intermediate_size=sizes.mlp,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.heads,
            vocab_size=sizes.vocabulary,
            max_position_embeddings=TOKENS,
            use_cache=False,
        )
        return transformers.LlamaForCausalLM(config)

    return model


def tokens(rows: int) -> dict[str, Tensor]:
    """Token ids of shape [rows, TOKENS], which are their own labels."""
    ids = torch.zeros(rows, TOKENS, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}
