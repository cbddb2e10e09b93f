"""Which losses are of a product whose logits nothing else reads: a model for each rule."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopipe.ir.graph import Graph, State, shape_at
from autopipe.rewriting.logits import heads
from autopipe.rewriting.loss_in_parts import in_parts, usual_parts
from autopipe.sharding.vocabulary_loss import LOSS
from tests.support.staged import trace_model

WORDS, WIDTH, LENGTH = 20, 8, 6

Run = Callable[["Model", Tensor, Tensor], Any]


class Model(nn.Module):
    """Hidden states [b, s, h] of tokens [b, s], and what `run` makes of them."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.run = run

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        return self.run(self, torch.tanh(self.embedding(tokens)), labels)


def inputs(rows: int) -> dict[str, Tensor]:
    words = torch.arange(rows * LENGTH).reshape(rows, LENGTH) % WORDS
    return {"tokens": words, "labels": words.flip(1)}


def graph_of(run: Run) -> Graph:
    return trace_model(Model(run), inputs).graph


def flat(m: Model, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x).view(-1, WORDS), y.view(-1))


def shifted(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """Each word is to tell the next one, as in nanoGPT and transformers before 4.46."""
    logits = m.head(x).float()[:, :-1].contiguous()
    return F.cross_entropy(logits.view(-1, WORDS), y[:, 1:].reshape(-1), ignore_index=3)


def turned(m: Model, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x).transpose(1, 2), y)


def permuted(m: Model, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x).permute(0, 2, 1), y)


def tied(m: Model, x: Tensor, y: Tensor) -> Tensor:
    logits = x.flatten(0, 1) @ m.embedding.weight.T
    return F.cross_entropy(logits, y.flatten(), reduction="sum") / y.numel()


def logarithms(m: Model, x: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(m.head(x), -1).flatten(0, 1), y.flatten())


@pytest.mark.parametrize("run", [flat, shifted, turned, permuted, tied, logarithms])
def test_a_loss_of_a_product(run: Run) -> None:
    """Its product and casts go, rows move with the hidden states, and the loss keeps its name."""
    graph = graph_of(run)
    (head,) = heads(graph)
    assert head.weight == State("embedding.weight" if run is tied else "head.weight")
    assert head.bias == (None if run is tied else State("head.bias"))
    positions = LENGTH - 1 if run is shifted else LENGTH
    assert head.logits_bytes(2) == 2 * LENGTH * WORDS * 4
    made = in_parts(graph, 3)
    (loss,) = (node for node in made.nodes if node.op == LOSS)
    assert loss.name == head.loss.name and made.outputs == graph.outputs
    sizes = [spec.shape[-1] for node in made.nodes for spec in node.outputs if spec and spec.shape]
    assert WORDS not in sizes
    each = loss.outputs[1]
    assert each is not None and shape_at(each, 2) == (2 * positions,)


def test_the_graph_that_is_left() -> None:
    made = in_parts(graph_of(shifted), 3)
    assert [str(node) for node in made.nodes[2:]] == [
        "slice/0 = aten.slice.Tensor(tanh/0, 1, 0, -1) -> float32[b, 5, 8]",
        "contiguous/0 = aten.contiguous.default(slice/0) -> float32[b, 5, 8]",
        "view/0 = aten.reshape.default(contiguous/0, (5*b, 8)) -> float32[5*b, 8]",
        "slice/1 = aten.slice.Tensor(<labels>, 1, 1, 9223372036854775807) -> int64[b, 5]",
        "reshape/0 = aten.reshape.default(slice/1, (-1)) -> int64[5*b]",
        "cross_entropy_loss/0 = autopipe.vocabulary_loss.default(view/0, [head.weight], "
        "[head.bias], reshape/0, 3, 1, float32, 7, 0, ) -> float32[], float32[5*b]",
    ]


def test_parts_of_no_more_than_8192_columns() -> None:
    assert usual_parts(graph_of(flat)) == 1
    graph = graph_of(smoothed)
    assert usual_parts(graph) == 0 and in_parts(graph, 3) is graph
    assert in_parts(graph_of(flat), 0) == graph_of(flat)


def smoothed(m: Model, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x).flatten(0, 1), y.flatten(), label_smoothing=0.1)


def weighed(m: Model, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x).flatten(0, 1), y.flatten(), weight=torch.ones(WORDS))


def each_row(m: Model, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x).flatten(0, 1), y.flatten(), reduction="none").square().mean()


def read_again(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """A penalty of large logits, as PaLM's z-loss."""
    logits = m.head(x).flatten(0, 1)
    return F.cross_entropy(logits, y.flatten()) + 1e-4 * logits.logsumexp(-1).square().mean()


def probable(m: Model, x: Tensor, y: Tensor) -> Tensor:
    likely = F.one_hot(y.flatten(), WORDS).to(x.dtype)
    return F.cross_entropy(m.head(x).flatten(0, 1), likely)


def capped(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """Gemma 2's soft cap."""
    return F.cross_entropy(torch.tanh(m.head(x)).flatten(0, 1), y.flatten())


def written(m: Model, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x)
    logits[..., 0] = -10.0
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def some_words(m: Model, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x)[..., :-1].flatten(0, 1), y.flatten().clamp(max=WORDS - 2))


def of_positions(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """Logits [b, s, v] unturned: the classes are the positions, whatever that may mean."""
    return F.cross_entropy(m.head(x), torch.zeros_like(y[:, :1]).expand(-1, WORDS))


def by_a_vector(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """A product of [b, s, h] and [h]: the classes are the positions."""
    return F.cross_entropy(F.linear(x, m.head.weight[0]), y[:, 0] % LENGTH)


def without_gradient(m: Model, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        logits = m.head(x).flatten(0, 1)
    return F.cross_entropy(logits, y.flatten()) + x.mean()


def written_behind(m: Model, x: Tensor, y: Tensor) -> Tensor:
    """A frozen head keeps no hidden states, so that they may be written once it has read them."""
    logits = F.linear(x, m.head.weight.detach())
    x = x.mul_(2)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()) + x.mean()


def rows_without_gradient(m: Model, x: Tensor, y: Tensor) -> Tensor:
    logits = m.head(x)
    with torch.no_grad():
        rows = logits.flatten(0, 1)
    return F.cross_entropy(rows, y.flatten()) + x.mean()


def words_without_gradient(m: Model, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        turned = m.head.weight.T
    return F.cross_entropy((x @ turned).flatten(0, 1), y.flatten())


def one_bias_of_all(m: Model, x: Tensor, y: Tensor) -> Tensor:
    logits = F.linear(x, m.head.weight, m.head.bias[:1])
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize(
    "run",
    [
        *(smoothed, weighed, each_row, read_again, probable, capped, written, some_words),
        *(of_positions, by_a_vector, without_gradient, written_behind, rows_without_gradient),
        *(words_without_gradient, one_bias_of_all),
    ],
)
def test_a_loss_that_is_left_alone(run: Run) -> None:
    assert heads(graph_of(run)) == ()


def test_logits_that_the_model_returns_are_kept() -> None:
    """As in evaluation with the model's own outputs."""
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS))

    def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())

    def named(rows: int) -> dict[str, Tensor]:
        batch = inputs(rows)
        return {"input": batch["tokens"], "labels": batch["labels"]}

    assert heads(trace_model(model, named, loss, outputs=False).graph)
    assert not heads(trace_model(model, named, loss, outputs=True).graph)
