"""The decoders that recipes train, by the beginning of a recipe's name.

Dimensions are those of the models' own config.json on the Hugging Face hub; the modules are those
of transformers, as they come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Decoder:
    """A decoder of transformers.

    Args:
        family: the beginning of its classes' names, as `Llama`.
        layers, hidden, heads, kv_heads, ffn, vocab: its dimensions.
        seq: tokens of a row where a recipe does not say.
        head_dim: where it is not hidden / heads.
        tied: the head is the embedding.
        experts: fields of its config that a dense decoder has not; empty for a dense one.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    head_dim: int | None = None
    tied: bool = False
    experts: Mapping[str, int] = field(default_factory=dict)

    def build(self, seq: int, rank: int | None = None) -> nn.Module:
        """The model for rows of so many tokens.

        Args:
            rank: train adapters of this rank alone; None: all weights.
        """
        import transformers

        config: Any = getattr(transformers, f"{self.family}Config")(
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim or self.hidden // self.heads,
            intermediate_size=self.ffn,
            vocab_size=self.vocab,
            max_position_embeddings=seq,
            tie_word_embeddings=self.tied,
            use_cache=False,
            **self.experts,
        )
        built: nn.Module = getattr(transformers, f"{self.family}ForCausalLM")(config)
        if rank is not None:
            adapt(built, rank)
        return built


class Adapted(nn.Module):
    """A linear layer that is not trained, and beside it W = B A of a low rank, which is.

    LoRA (Hu et al., ICLR 2022, section 4.1), B being zero at first.

    Args:
        base: the layer; from [..., inputs] to [..., outputs].
    """

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base(x) + self.up(self.down(x))
        return made


def adapt(decoder: nn.Module, rank: int) -> None:
    """Freeze a decoder, and give the queries, keys and values of all layers adapters."""
    decoder.requires_grad_(False)
    for module in list(decoder.modules()):
        for name in ("q_proj", "k_proj", "v_proj"):
            base = getattr(module, name, None)
            if isinstance(base, nn.Linear):
                setattr(module, name, Adapted(base, rank))


_LLAMA3 = 128256
_QWEN3 = 151936


def _chosen(count: int, of: int, width: int) -> dict[str, int]:
    """Fields of a Qwen 3 with experts: so many of all are chosen for a token."""
    return {"num_experts": of, "num_experts_per_tok": count, "moe_intermediate_size": width}


def _local(count: int, of: int) -> dict[str, int]:
    """The same fields of a Mixtral or a gpt-oss."""
    return {"num_local_experts": of, "num_experts_per_tok": count}


_QWEN3_NEXT = {**_chosen(10, 512, 512), "shared_expert_intermediate_size": 512}
_DEEPSEEK = {
    **{"n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1},
    **{"moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128},
    **{"qk_rope_head_dim": 64, "v_head_dim": 128},
}
_KIMI = {
    **_DEEPSEEK,
    **{"n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}

DECODERS = {
    "llama2_7b": Decoder("Llama", 32, 4096, 32, 32, 11008, 32000, 4096),
    "llama2_13b": Decoder("Llama", 40, 5120, 40, 40, 13824, 32000, 4096),
    "llama2_70b": Decoder("Llama", 80, 8192, 64, 8, 28672, 32000, 4096),
    "llama3_8b": Decoder("Llama", 32, 4096, 32, 8, 14336, _LLAMA3, 8192),
    "llama3_70b": Decoder("Llama", 80, 8192, 64, 8, 28672, _LLAMA3, 8192),
    "llama31_8b": Decoder("Llama", 32, 4096, 32, 8, 14336, _LLAMA3, 8192),
    "llama31_70b": Decoder("Llama", 80, 8192, 64, 8, 28672, _LLAMA3, 8192),
    "llama31_405b": Decoder("Llama", 126, 16384, 128, 8, 53248, _LLAMA3, 8192),
    "llama32_1b": Decoder("Llama", 16, 2048, 32, 8, 8192, _LLAMA3, 8192, tied=True),
    "llama32_3b": Decoder("Llama", 28, 3072, 24, 8, 8192, _LLAMA3, 8192, tied=True),
    "mistral_7b": Decoder("Mistral", 32, 4096, 32, 8, 14336, 32768, 4096),
    "qwen3_600m": Decoder("Qwen3", 28, 1024, 16, 8, 3072, _QWEN3, 4096, 128, tied=True),
    "qwen3_1p7b": Decoder("Qwen3", 28, 2048, 16, 8, 6144, _QWEN3, 4096, 128, tied=True),
    "qwen3_4b": Decoder("Qwen3", 36, 2560, 32, 8, 9728, _QWEN3, 4096, 128, tied=True),
    "qwen3_8b": Decoder("Qwen3", 36, 4096, 32, 8, 12288, _QWEN3, 4096, 128),
    "qwen3_14b": Decoder("Qwen3", 40, 5120, 40, 8, 17408, _QWEN3, 4096, 128),
    "qwen3_32b": Decoder("Qwen3", 64, 5120, 64, 8, 25600, _QWEN3, 4096, 128),
    "mixtral_8x7b": Decoder("Mixtral", 32, 4096, 32, 8, 14336, 32000, 4096, experts=_local(2, 8)),
    "mixtral_8x22b": Decoder("Mixtral", 56, 6144, 48, 8, 16384, 32768, 4096, experts=_local(2, 8)),
    "gpt_oss_20b": Decoder(
        "GptOss", 24, 2880, 64, 8, 2880, 201088, 4096, 64, experts=_local(4, 32)
    ),
    "gpt_oss_120b": Decoder(
        "GptOss", 36, 2880, 64, 8, 2880, 201088, 4096, 64, experts=_local(4, 128)
    ),
    "qwen3_30b_a3b": Decoder(
        "Qwen3Moe", 48, 2048, 32, 4, 6144, _QWEN3, 4096, 128, experts=_chosen(8, 128, 768)
    ),
    "qwen3_235b_a22b": Decoder(
        "Qwen3Moe", 94, 4096, 64, 4, 12288, _QWEN3, 4096, 128, experts=_chosen(8, 128, 1536)
    ),
    "qwen3_next_80b_a3b": Decoder(
        "Qwen3Next", 48, 2048, 16, 2, 5120, _QWEN3, 4096, 256, experts=_QWEN3_NEXT
    ),
    "deepseek_v3": Decoder(
        "DeepseekV3", 61, 7168, 128, 128, 18432, 129280, 4096, 64, experts=_DEEPSEEK
    ),
    "kimi_k2": Decoder("DeepseekV3", 61, 7168, 64, 64, 18432, 163840, 4096, 64, experts=_KIMI),
}
"""By the beginning of a recipe's name: a recipe that no name here begins is not built."""
