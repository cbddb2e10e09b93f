"""Smaller models: fewer equal layers, narrower configurations, shorter rows, no dropout."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from autopipe import ModelError
from autopipe.checking.shrink import shorter, shrunk, skeleton, surplus
from autopipe.checking.subject import Smaller
from autopipe.frontend.model_file import ModelFile
from autopipe.frontend.transformers_adapter import narrowed

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def file(model: object) -> ModelFile:
    def inputs(rows: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(rows * 32).view(rows, 32) % 64
        return {"input_ids": tokens, "labels": tokens}

    return ModelFile("model.py", model, inputs, None, None, None, None, None)  # type: ignore[arg-type]


def llama() -> nn.Module:
    return LlamaForCausalLM(CONFIG)


@pytest.mark.long
def test_a_model_that_is_the_first_to_import_its_library() -> None:
    """In a rank nobody has built it before. Bug: transformers printed four times that `model` is
    not documented, which it read in the signature of what builds narrowed models."""
    program = """
from autopipe.frontend.transformers_adapter import narrowed

def model():
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **heads, **sizes))

print(narrowed(model, 4).config.hidden_size)
"""
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert made.stdout == "16\n", made.stdout + made.stderr


@pytest.mark.parametrize(
    ("layers", "left_out"),
    [
        ([nn.Linear(4, 4) for _ in range(5)], [2, 3, 4]),
        ([nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 4)], []),
        ([nn.Linear(2, 4), *(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 2)], [3]),
        ([nn.ReLU(), nn.ReLU(), nn.ReLU()], []),
    ],
)
def test_rows_of_equal_layers_are_cut(layers: list[nn.Module], left_out: list[int]) -> None:
    assert surplus(nn.Sequential(*layers), 2) == left_out


def test_a_smaller_model_still_runs() -> None:
    """Two layers of six, a quarter of the width, all heads and words; the own config is whole."""
    smaller = shrunk(file(llama), Smaller(layers=2, width=4, length=8))
    model, batch = smaller.model(), smaller.inputs(3)
    assert len(model.model.layers) == 2
    assert model.model.embed_tokens.weight.shape == (64, 16)
    assert model.model.layers[0].self_attn.k_proj.weight.shape == (8, 16)
    assert batch["input_ids"].shape == (3, 8)
    assert torch.isfinite(model(**batch).loss)
    assert model.config.hidden_size == 16
    assert (CONFIG.hidden_size, CONFIG.num_hidden_layers) == (64, 6)


def test_it_is_the_same_model_each_time() -> None:
    smaller = shrunk(file(llama), Smaller(layers=2))
    one, other = smaller.model().state_dict(), smaller.model().state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_width_that_does_not_divide_is_told() -> None:
    with pytest.raises(ModelError, match="hidden_size is 64, which 3 does not divide"):
        narrowed(llama, 3)
    assert CONFIG.hidden_size == 64


def test_a_skeleton_is_as_large_as_the_model() -> None:
    smaller = Smaller(layers=2, width=2)
    shapes = [p.shape for p in skeleton(file(llama), smaller).parameters()]
    assert shapes == [p.shape for p in shrunk(file(llama), smaller).model().parameters()]


def test_rows_are_cut_where_they_are_as_long() -> None:
    batch = {"tokens": torch.zeros(2, 9, dtype=torch.int64), "mask": torch.zeros(2, 1, 9, 9)}
    found = shorter(batch, 4)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "tokens": (2, 4),
        "mask": (2, 1, 4, 4),
    }
    images = {"image": torch.zeros(2, 3, 9, 9)}
    assert shorter(images, 4) is images


def test_calm_is_without_dropout() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Dropout(0.5), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1))

    calm = shrunk(file(model), Smaller(calm=True)).model()
    x = torch.randn(3, 5, 8)
    assert torch.equal(calm(x), calm(x))
    assert not torch.equal(model()[0](x), x)


class PowerMean(nn.Module):
    """The mean of powers, as GeM pooling has it: its p is no probability."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.triplet = 3.0, nn.TripletMarginLoss(p=1.0)


def test_calm_leaves_powers_and_norms() -> None:
    """Bug: at --tp 2 a model with dropout and such a mean ended in a division by zero."""
    file = ModelFile("net.py", PowerMean, lambda rows: {}, None, None, None, None, None)
    calm = shrunk(file, Smaller(calm=True)).model()
    assert isinstance(calm, PowerMean)
    assert (calm.p, calm.triplet.p) == (3.0, 1.0)


def test_nothing_smaller_is_the_file_itself() -> None:
    own = file(llama)
    assert shrunk(own, Smaller()) is own
