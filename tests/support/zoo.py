"""Models nobody prepared, with their batches and losses: what splitting must leave as it was.

    gpt, dropout                  decoder blocks; with random masks in all the usual places
    unet                          skips across every cut, batch norm
    lstm                          one node that holds two layers
    gpt2, llama, t5, whisper      Hugging Face: tied weights, rotary, encoder and decoder
    resnet                        in-place arithmetic, batch norm; the batch is a tuple
    frozen                        parameters and activations without a gradient
    dict, dataclass               outputs that are no tensor
    odd                           custom autograd Functions, buffers that are assigned
    picked                        a branch that ends in a mask, without a gradient
    mask                          booleans and integers across every cut
    keywords                      a forward without positional arguments
    counted                       a (sum, count) loss over rows of unequal length

A batch is a dict or a tuple. The model's forward takes the entries it names (of a tuple, as many as
it has arguments); the loss sees all of them.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support import models
from tests.support.models import CLASSES, LENGTH, VOCABULARY, WIDTH

Batch = dict[str, Any] | tuple[Any, ...]
Loss = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """A model, its batches and its loss (None: the output itself, or its `.loss`)."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Batch]
    loss: Loss | None = None

    def model(self) -> nn.Module:
        """The same weights at every call, in training mode; the caller's random state stays."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build().train()

    def eager(self, model: nn.Module, batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
        """The loss of one micro-batch as plain PyTorch computes it."""
        names = inspect.signature(model.forward).parameters
        if isinstance(batch, dict):
            outputs = model(**{key: value for key, value in batch.items() if key in names})
        else:
            outputs = model(*batch[: len(names)])
        if self.loss is not None:
            return self.loss(outputs, batch)
        return outputs if isinstance(outputs, Tensor) else outputs.loss


# Batches: the same at every call, and the first rows do not depend on how many follow.


def rows_of(rows: int, draw: Callable[[torch.Generator], Tensor], seed: int = 0) -> Tensor:
    """[rows, ...], row i drawn from its own generator."""
    seeds = range(1000 * seed, 1000 * seed + rows)
    return torch.stack([draw(torch.Generator().manual_seed(number)) for number in seeds])


def noise(rows: int, *shape: int) -> Tensor:
    """Standard normal numbers of shape [rows, *shape]."""
    return rows_of(rows, lambda generator: torch.randn(shape, generator=generator))


def integers(
    rows: int, *shape: int, low: int = 0, below: int = VOCABULARY, seed: int = 1
) -> Tensor:
    """Whole numbers in [low, below) of shape [rows, *shape]."""
    return rows_of(rows, lambda g: torch.randint(low, below, shape, generator=g), seed)


def text(rows: int) -> Batch:
    """tokens [b, s], and as labels [b, s] the next of each."""
    drawn = integers(rows, LENGTH + 1)
    return {"tokens": drawn[:, :-1].clone(), "labels": drawn[:, 1:].clone()}


def padded(rows: int) -> Batch:
    """Row i ends in i % 4 tokens of padding (0), whose labels (-100) no loss counts."""
    padding = torch.arange(LENGTH) >= LENGTH - torch.arange(rows)[:, None] % 4
    return {
        "tokens": integers(rows, LENGTH, low=1).masked_fill(padding, 0),
        "labels": integers(rows, LENGTH, seed=2).masked_fill(padding, -100),
    }


def sentences(rows: int) -> Batch:
    """Padded tokens [b, s] and one label [b] for each row."""
    return {**padded(rows), "labels": integers(rows, below=CLASSES)}


def vectors(rows: int) -> Batch:
    return {"features": noise(rows, WIDTH), "labels": integers(rows, below=CLASSES)}


def pixels(rows: int) -> Batch:
    return {"image": noise(rows, 3, 16, 16), "labels": integers(rows, 16, 16, below=CLASSES)}


# Losses


def entropy(outputs: Tensor, batch: Any) -> Tensor:
    """Mean over the labels; the classes are the second dim of `outputs`: [b, c, ...]."""
    return F.cross_entropy(outputs, batch["labels"])


def gaps(rows: int) -> Batch:
    """Row i has labels for its first 5 * i % 7 tokens alone; of rows 0 and 1 together, 5."""
    batch = text(rows)
    kept = torch.arange(LENGTH) < 5 * torch.arange(rows)[:, None] % 7
    kept[2:4] = False  # two rows are a micro-batch: one without any label
    return {**batch, "labels": batch["labels"].masked_fill(~kept, -100), "kept": kept.float()}


def masked_entropy(outputs: Tensor, batch: Any) -> Tensor:
    """Half of the mean over labels that a mask keeps, as people guard it against no label."""
    each = F.cross_entropy(outputs, batch["labels"].clamp(min=0), reduction="none")
    return 0.5 * (each * batch["kept"]).sum() / (batch["kept"].sum().clamp(min=1) + 1e-3)


def entropy_and_count(outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """The sum over the labels that count, and how many do."""
    labels = batch["labels"]
    return F.cross_entropy(outputs, labels, reduction="sum"), (labels != -100).sum()


def entropy_and_norm(answer: models.Answer, batch: Any) -> Tensor:
    return entropy(answer.logits, batch) + 0.1 * answer.hidden.square().mean()


def gpt(dropout: float) -> Case:
    return Case(lambda: models.GPT(dropout), text, entropy)


# Hugging Face, from tiny random configurations: the labels go in and `.loss` comes out. In eager
# all but one fill caches of keys and values.


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=WIDTH,
            n_layer=4,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=1,
        )
    )


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
    )


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            use_cache=False,  # its products of matrices round otherwise on keys that lie otherwise
        )
    )


def whisper() -> nn.Module:
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            vocab_size=VOCABULARY,
            num_mel_bins=8,
            d_model=WIDTH,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=64,
            max_source_positions=16,
            max_target_positions=LENGTH,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
            decoder_start_token_id=2,
        )
    )


def causal(rows: int) -> Batch:
    tokens = integers(rows, LENGTH)
    return {"input_ids": tokens, "labels": tokens.clone()}


def translation(rows: int) -> Batch:
    return {"input_ids": integers(rows, LENGTH), "labels": integers(rows, 8, seed=2)}


def speech(rows: int) -> Batch:
    return {"input_features": noise(rows, 8, 32), "labels": integers(rows, 8, low=3)}


ZOO: dict[str, Case] = {
    "gpt": gpt(dropout=0.0),
    "dropout": gpt(dropout=0.1),
    "unet": Case(models.UNet, pixels, entropy),
    "lstm": Case(models.LSTM, sentences, entropy),
    "gpt2": Case(gpt2, causal),
    "llama": Case(llama, causal),
    "t5": Case(t5, translation),
    "whisper": Case(whisper, speech),
    "resnet": Case(
        models.ResNet, lambda rows: (noise(rows, 3, 16, 16), integers(rows, below=CLASSES))
    ),
    "frozen": Case(models.Frozen, sentences, entropy),
    "dict": Case(models.DictOutput, vectors, lambda out, batch: entropy(out["logits"], batch)),
    "dataclass": Case(models.DataclassOutput, vectors, entropy_and_norm),
    "picked": Case(models.Picked, vectors, entropy),
    "mask": Case(models.Masked, sentences, entropy),
    "odd": Case(models.Odd, vectors, entropy),
    "keywords": Case(models.Keywords, vectors),
    "counted": Case(lambda: models.GPT(0.0), padded, entropy_and_count),
}
