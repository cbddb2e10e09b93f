"""Stories of losses over the whole batch, in two passes, beside one process that has all rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopipe.checking.random_ops import Drawing, RandomNodes
from tests.support import zoo
from tests.support.long import LONG
from tests.support.memory_stories import measured_as_planned
from tests.support.models import WIDTH
from tests.support.pipes import ZOO, close, drawn, piped, planned, rows_of, story, together
from tests.support.zoo import Batch, Case

DEPTH = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def tower() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, WIDTH))


class Clip(nn.Module):
    """Two towers and a temperature, as CLIP returns them (Radford et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = tower(), tower()
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.image(image)), F.normalize(self.text(text)), self.scale.exp()


def both_ways(outputs: tuple[Tensor, Tensor, Tensor], batch: Batch) -> Tensor:
    image, text, scale = outputs
    near = scale * image @ text.T
    truth = torch.arange(near.shape[0])
    return (F.cross_entropy(near, truth) + F.cross_entropy(near.T, truth)) / 2


class Negatives(nn.Module):
    """Queries and documents by one encoder, all in one pass of 2b rows; its output is its loss, in
    which a temperature is a factor of the similarities."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = tower()
        self.temperature = nn.Parameter(torch.tensor(3.0))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        both, rows = self.encoder(torch.cat([image, text])), image.shape[0]
        near = self.temperature * (both[:rows] @ both[rows:].T)
        return F.cross_entropy(near, torch.arange(near.shape[0]))


class Counting(Clip):
    """With a batch norm, whose buffers every micro-batch writes once, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().forward(self.drop(self.norm(image)), text)


def pairs(rows: int) -> Batch:
    return {"image": zoo.noise(rows, WIDTH), "text": zoo.noise(rows, WIDTH).flip(1)}


ZOO["clip"] = Case(Clip, pairs, both_ways)
ZOO["negatives"] = Case(Negatives, pairs)
ZOO["counting"] = Case(Counting, pairs, both_ways)

BATCH = {"loss_over": "batch"}


@story(2)
def a_batch_loss_in_a_pipeline() -> None:
    """Whole backwards and backwards in halves; two stages on each rank; evaluation."""
    for schedule in ("1f1b", "interleaved") if LONG else ("1f1b",):
        pipe = piped("clip", planned("clip", 2, 1, 4, schedule, **BATCH))
        model, batch = ZOO["clip"].model(), pairs(8)
        with torch.no_grad():
            expected = model.eval()(**batch)
        loss, found = pipe.evaluate(batch, outputs=True)
        close(loss, both_ways(expected, batch))
        close(pipe.evaluate(pairs(4)), both_ways(model(**pairs(4)), pairs(4)))
        close(found["0"], expected[0], "embeddings of all rows")
        together("clip", pipe)
    if LONG:
        together("negatives", piped("negatives", planned("negatives", 2, 1, 3, "zb-h1", **BATCH)))


@story(2)
def a_batch_loss_of_one_micro_batch_is_equal_bit_by_bit() -> None:
    """No sum changes its order, so the derivative of sum(e * g) is seen to be g, bit by bit."""
    pipe, model = piped("clip", planned("clip", 2, 1, 1, **BATCH)), ZOO["clip"].model()
    batch = drawn("clip", pipe.plan.batch.rows, 0)
    expected = both_ways(model(**batch), batch)
    expected.backward()
    assert torch.equal(pipe.step(batch), expected.detach())
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter.grad, model.get_parameter(name).grad), name


@story(2, long=True)
def a_batch_loss_over_replicas_and_tensor_parts() -> None:
    """Embeddings are gathered over replicas; a replica may be given its rows alone."""
    plan = planned("negatives", 1, 2, 2, **BATCH)
    together("negatives", piped("negatives", plan))
    pipe, whole = piped("negatives", plan), drawn("negatives", plan.batch.rows, 0)
    own = {name: tensor.chunk(2)[pipe.place.dp] for name, tensor in whole.items()}
    loss = pipe.step(own, sharded=True)
    close(loss, ZOO["negatives"].eager(ZOO["negatives"].model(), whole))
    together("clip", piped("clip", planned("clip", 1, 1, 2, tp=2, **BATCH)))


@story(2)
def both_passes_draw_the_same_and_buffers_are_written_once() -> None:
    """The oracle runs each micro-batch once, by the pipe's random numbers, and keeps everything."""
    pipe, model = piped("counting", planned("counting", 2, 1, 4, **BATCH)), ZOO["counting"].model()
    outputs = []
    for k in range(4):
        own = rows_of(pairs(8), 2 * k, 2 * k + 2)
        nodes = RandomNodes(["drop/dropout/0"])
        with torch.random.fork_rng(), Drawing(nodes, (pipe.seed, 0, k)):
            outputs.append(model(**own))
    image, text, scale = zip(*outputs, strict=True)
    expected = both_ways((torch.cat(image), torch.cat(text), scale[0]), {})
    expected.backward()
    close(pipe.step(pairs(8)), expected)
    for name, parameter in pipe.named_parameters():
        close(parameter.grad, model.get_parameter(name).grad, name)
    for name, buffer in pipe.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name)), name


@story(2)
def memory_of_a_batch_loss() -> None:
    measured_as_planned("clip", 4, "1f1b", "fp32", **BATCH)


@story(4, long=True)
def a_batch_loss_in_two_replicas_of_a_pipeline() -> None:
    """Plain, and under ZeRO-1 and ZeRO-3."""
    for zero, micro_batches in ((0, 2), (1, 2), (3, 2)):
        for name in ("clip", "negatives") if zero == 0 else ("clip",):
            together(name, piped(name, planned(name, 2, 2, micro_batches, zero=zero, **BATCH)))
