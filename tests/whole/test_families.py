"""Families of Hugging Face models, unprepared: split over ranks, each trains as in one process.

They differ in what they are made of, not in name only; `benchmarks/tensor_parallel` has the others.
The ordinary run deals out families in `tests/benchmarks/test_zoo.py`, to two ranks.
"""

import pytest

from benchmarks.tensor_parallel.configs import FAMILIES
from benchmarks.tensor_parallel.families import CLOSE, Subject, row

CASES = {
    # family          attention  tp  sequence
    "llama-kv1": ("sdpa", 4, False),  # one head of keys and values for four ranks
    "gpt2": ("eager", 2, False),  # q, k and v in one weight; tied words, 127 of them
    "bert": ("eager", 4, True),  # padding, labels that do not count
    "t5": ("sdpa", 4, False),  # encoder and decoder; a bias by distance, for each head
    "vit": ("sdpa", 2, True),  # a convolution, a class token put in front
    "mixtral": ("sdpa", 2, False),  # experts picked word by word
    "falcon-alibi": ("sdpa", 2, False),  # q, k, v interleaved by head; a mask in bf16
    "mamba": ("eager", 2, False),  # a recurrence over the words, a convolution for each channel
    "swin": ("eager", 4, False),  # windows that are rolled, heads that double
    "whisper": ("eager", 4, True),  # frozen positions, convolutions over time
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_loss_and_every_gradient_are_those_of_one_process(name: str) -> None:
    attention, ranks, sequence = CASES[name]
    subject = Subject(FAMILIES[name], attention)
    found = row(subject, ranks, sequence)
    assert found["loss"] < CLOSE[subject.loss.dtype]
    assert found["gradient"] < CLOSE[subject.loss.dtype], found["of"]
    assert found["bytes"] > 0.9, "hardly anything of it was dealt out"


@pytest.mark.long
def test_no_other_gradient_would_do() -> None:
    """The comparison can fail: a parameter's gradient off by 1 in 10 000 is seen."""
    subject = Subject(FAMILIES["gpt2"], "sdpa")
    name = "transformer.h.0.attn.c_attn.weight"
    subject.gradients[name] = subject.gradients[name] * 1.0001
    loss, worst, of = subject.differences(subject.plan(2, False))
    assert of == name
    assert worst == pytest.approx(1e-4, rel=0.05)
