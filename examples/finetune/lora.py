"""Fine-tune a causal language model of transformers by LoRA, written by hand, or whole.

    x ---- base (frozen) ------------- + -> y        y = W x + (ALPHA / LORA_RANK) up(down(x))
      \\--- down [r, in] -- up [out, r] --/

Every linear layer but the last one, which gives the logits, gets its own pair `down`, `up` (Hu et
al., LoRA, 2021, section 4.1; on all layers as in Dettmers et al., QLoRA, 2023). What to read comes
from the environment, the same for `plan`, `check` and `run`:

    BASE=FOLDER     of transformers: config.json, weights, and a tokenizer if it has one
    TEXT=FILE       to learn from; without a tokenizer in BASE its bytes are the tokens
    LORA_RANK=8     0: no LoRA, all weights are trained
"""

import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

BASE = Path(os.environ.get("BASE", "base"))
TEXT = Path(os.environ.get("TEXT", "text.txt"))
LORA_RANK = int(os.environ.get("LORA_RANK", 8))
ALPHA = float(os.environ.get("ALPHA", 16))
LENGTH = int(os.environ.get("LENGTH", 512))
LEARNING_RATE = float(os.environ.get("LEARNING_RATE", 2e-4 if LORA_RANK else 2e-5))

batch_size = int(os.environ.get("ROWS", 8))


disable_progress_bar()  # every rank reads BASE, and planning does


class LoRA(nn.Module):
    """A frozen linear layer and what is added to it, zero at first; x is [..., in]."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, LORA_RANK, bias=False)
        self.up = nn.Linear(LORA_RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + ALPHA / LORA_RANK * self.up(self.down(x))

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """One linear layer that computes the same; `base` is changed."""
        self.base.weight += ALPHA / LORA_RANK * self.up.weight @ self.down.weight
        return self.base


def with_lora(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, frozen, with LoRA around its linear layers."""
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    layers = [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and layer is not head
    ]
    if not layers:
        raise ValueError(f"a {type(model).__name__} has no nn.Linear to add LoRA to")
    for name, layer in layers:
        model.set_submodule(name, LoRA(layer))
    return model


def without_lora(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, with what LoRA learned added to its weights."""
    for name, layer in [*model.named_modules()]:
        if isinstance(layer, LoRA):
            model.set_submodule(name, layer.merged())
    return model


@functools.cache
def tokens() -> Tensor:
    """The text, of shape [tokens], int64."""
    if any(BASE.glob("tokenizer*")):
        ids = AutoTokenizer.from_pretrained(BASE)(TEXT.read_text())["input_ids"]
    else:
        ids = list(TEXT.read_bytes())
    if len(ids) <= LENGTH:
        raise ValueError(f"{TEXT} has {len(ids)} tokens, and a row takes LENGTH={LENGTH}")
    return torch.tensor(ids)


# What autopipe reads from here. A batch is {"input_ids": [b, LENGTH], "labels": the same}: the
# model shifts the labels itself, and its output has the loss.


def model() -> nn.Module:
    if not (BASE / "config.json").is_file():  # else transformers asks its hub for the name
        raise FileNotFoundError(f"BASE={BASE} is no folder with a config.json")
    # In fp32 whatever the folder has: --precision bf16 computes in bf16 and keeps fp32 masters.
    read = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    return with_lora(read) if LORA_RANK else read


def inputs(batch_size: int) -> dict[str, Tensor]:
    return next(batches(batch_size))


def batches(batch_size: int, shard: int = 0, num_shards: int = 1) -> Iterator[dict[str, Tensor]]:
    """Random windows of the text without end; each replica keeps its own rows of each batch."""
    text, generator = tokens(), torch.Generator().manual_seed(0)
    rows = batch_size // num_shards
    while True:
        starts = torch.randint(len(text) - LENGTH + 1, (batch_size,), generator=generator)
        own = starts[shard * rows : (shard + 1) * rows]
        window = text[own[:, None] + torch.arange(LENGTH)]
        yield {"input_ids": window, "labels": window}


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
