"""The models that are predicted and measured, each as the functions of a model file.

gpt, gpt-narrow, gpt-wide    examples/gpt.py at 384, 128 and 768 wide
mini-gpt                     examples/mini_gpt with two layers: a vocabulary of 50257, tied
conv                         residual convolutions with batch norm over images of 32 x 32
mlp                          six layers of 1024
lstm                         two layers of 256 over 64 tokens
llama, gpt2                  Hugging Face, 256 wide, four layers
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from autopipe.frontend.model_file import ModelFile

EXAMPLES = Path(__file__).parents[2] / "examples"
VOCABULARY = 1000
LENGTH = 64
CLASSES = 10


def file(
    name: str,
    model: Callable[[], nn.Module],
    inputs: Callable[[int], Any],
    loss: Callable[[Any, Any], Any] | None = None,
) -> ModelFile:
    """A model file of these functions; it trains with AdamW on the same batch again and again."""

    def batches(rows: int) -> Any:
        batch = inputs(rows)
        while True:
            yield batch

    return ModelFile(name, model, inputs, loss, batches, None, None, None)


def example(path: str, **sizes: int) -> ModelFile:
    """One of the examples with other sizes: its constants are looked up when it is built."""
    spec = importlib.util.spec_from_file_location(f"honest_{Path(path).stem}", EXAMPLES / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, size in sizes.items():
        assert hasattr(module, name), f"{path} has no {name}"
        setattr(module, name, size)
    return file(path, module.model, module.inputs, module.loss)


class Residual(nn.Module):
    """relu(norm(conv(relu(norm(conv(x))))) + x) of `features` channels."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(features, features, 3, padding=1, bias=False),
            nn.BatchNorm2d(features),
            nn.ReLU(),
            nn.Conv2d(features, features, 3, padding=1, bias=False),
            nn.BatchNorm2d(features),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + x)


def conv() -> nn.Module:
    """image [b, 3, 32, 32] -> logits [b, CLASSES]."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        *(Residual(64) for _ in range(2)),
        nn.Conv2d(64, 128, 3, 2, padding=1),
        *(Residual(128) for _ in range(3)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )


def mlp() -> nn.Module:
    """features [b, 1024] -> logits [b, CLASSES]."""
    layers = (nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(6))
    return nn.Sequential(*layers, nn.Linear(1024, CLASSES))


class Recurrent(nn.Module):
    """tokens [b, LENGTH] -> logits [b, CLASSES]; each layer is one node of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 256)
        self.first = nn.LSTM(256, 256, batch_first=True)
        self.second = nn.LSTM(256, 256, batch_first=True)
        self.head = nn.Linear(256, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.first(self.embedding(tokens))
        x, _ = self.second(x)
        return self.head(x[:, -1])


def llama() -> nn.Module:
    """Rotary positions, grouped queries, gated MLPs."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
    )


def gpt2() -> nn.Module:
    """Dropout where GPT-2 has it, fused queries, keys and values, tied."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=256,
            n_layer=4,
            n_head=4,
            use_cache=False,
        )
    )


def entropy(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Of logits [b, CLASSES]."""
    return F.cross_entropy(outputs, batch["labels"])


def causal(rows: int) -> dict[str, Tensor]:
    """Tokens, which are the labels too."""
    tokens = torch.randint(VOCABULARY, (rows, LENGTH))
    return {"input_ids": tokens, "labels": tokens}


def labelled(name: str, draw: Callable[[int], Tensor]) -> Callable[[int], dict[str, Tensor]]:
    """Rows under the name of forward's argument, and a class for each."""

    def inputs(rows: int) -> dict[str, Tensor]:
        return {name: draw(rows), "labels": torch.randint(CLASSES, (rows,))}

    return inputs


MODELS: dict[str, Callable[[], ModelFile]] = {
    "gpt": lambda: example("gpt.py"),
    "gpt-narrow": lambda: example("gpt.py", WIDTH=128, HEADS=4, LAYERS=4),
    "gpt-wide": lambda: example("gpt.py", WIDTH=768, HEADS=12, LAYERS=4),
    "mini-gpt": lambda: example("mini_gpt/model.py", LAYERS=2),
    "conv": lambda: file(
        "conv", conv, labelled("input", lambda rows: torch.randn(rows, 3, 32, 32)), entropy
    ),
    "mlp": lambda: file(
        "mlp", mlp, labelled("input", lambda rows: torch.randn(rows, 1024)), entropy
    ),
    "lstm": lambda: file(
        "lstm",
        Recurrent,
        labelled("tokens", lambda rows: torch.randint(VOCABULARY, (rows, LENGTH))),
        entropy,
    ),
    "llama": lambda: file("llama", llama, causal),
    "gpt2": lambda: file("gpt2", gpt2, causal),
}
