"""The zoo's own models: plain PyTorch, small, each with one thing that makes it hard to split.

Shapes are [b, ...] with b rows: `LENGTH` tokens below `VOCABULARY`, `CLASSES` to tell apart. Token
0 is padding where a model knows padding.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 64
LENGTH = 12
WIDTH = 32
CLASSES = 5


class Block(nn.Module):
    """Attention and a two-layer perceptron on x [b, s, WIDTH]; causal where no mask is given."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        drop = self.dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=drop, is_causal=mask is None
        )
        x = x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Counting(nn.Module):
    """Counts its calls in a buffer, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, features: Tensor) -> Tensor:
        self.calls += 1
        return self.second(self.first(features).relu())


class GPT(nn.Module):
    """tokens [b, s] -> logits [b, VOCABULARY, s]; dropout wherever GPT-2 has it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).transpose(1, 2)


class Masked(nn.Module):
    """tokens [b, s] -> logits [b, CLASSES]; whatever comes from the input is used in every block.

    Booleans (which tokens are seen, who attends to whom) cross every cut, and one integer, the
    lengths, crosses all of them to be used at the very end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH + 1, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        seen = tokens != 0
        lengths = seen.sum(1, keepdim=True)
        positions = torch.cumsum(seen, 1) * seen
        itself = torch.eye(tokens.shape[1], device=tokens.device).bool()
        mask = (seen[:, None, :] | itself)[:, None]
        x = self.embedding(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x, mask).masked_fill(~seen[:, :, None], 0.0)
        return self.head(x.sum(1) / lengths)


def convolution(channels: int, features: int, stride: int = 1) -> nn.Sequential:
    """A convolution with batch norm and an activation that is written over its input."""
    return nn.Sequential(
        nn.Conv2d(channels, features, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(features),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """image [b, 3, 16, 16] -> logits [b, CLASSES, 16, 16]; features skip to their mirror image.

    8 ------------------> cat 8
      16 -------> cat 16
         32 -> 32
    """

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([convolution(3, 8), convolution(8, 16), convolution(16, 32)])
        self.bottom = convolution(32, 32)
        self.up = nn.ModuleList([convolution(32 + 16, 16), convolution(16 + 8, 8)])
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, image: Tensor) -> Tensor:
        skips = [self.down[0](image)]
        for down in self.down[1:]:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        x = self.bottom(skips.pop())
        for up in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = up(torch.cat([x, skips.pop()], 1))
        return self.head(x)


class Residual(nn.Module):
    """relu(f(x) + x) without a copy: both are written over f(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            convolution(16, 16), nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x).add_(x))


class ResNet(nn.Module):
    """image [b, 3, 16, 16], label [b] -> the loss itself, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = convolution(3, 16, stride=2)
        self.blocks = nn.Sequential(*(Residual() for _ in range(4)))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.stem(image)).mean((2, 3))), label)


class LSTM(nn.Module):
    """tokens [b, s] -> logits [b, CLASSES]; both layers are one node of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        _, (last, _) = self.lstm(self.embedding(tokens))
        return self.head(torch.tanh(self.hidden(last[-1])))


class Frozen(nn.Module):
    """tokens [b, s] -> logits [b, CLASSES]; what comes first does not learn, nor does one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)
        for part in (self.embedding.weight, *self.layers[0].parameters(), self.layers[2].bias):
            part.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).mean(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def perceptron() -> nn.Sequential:
    """features [b, WIDTH] -> logits [b, CLASSES]: the body of the three below."""
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


class DictOutput(nn.Module):
    """A dict with a tensor that needs a gradient and, nested, two that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron()

    def forward(self, features: Tensor) -> dict[str, Any]:
        logits = self.body(features)
        return {"logits": logits, "extra": (features.mean(1), [logits.argmax(1)])}


class Picked(nn.Module):
    """What each layer passes on is picked by a prediction that is eight times as wide, as a mask of
    attention can be: no gradient comes back through it, and until the mask is made it is held. So
    none of the predictions' own parameters is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.picks = nn.ModuleList(nn.Linear(WIDTH, 8 * WIDTH) for _ in range(4))
        self.picks.requires_grad_(False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        for layer, pick in zip(self.layers, self.picks, strict=True):
            scores = pick(features).tanh().unflatten(1, (WIDTH, 8)).sum(2)
            features = features + layer(features).tanh() * (scores > 0)
        return self.head(features)


class Damped(torch.autograd.Function):
    """x, whose gradient is multiplied by `factor`: a backward that no forward tells."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.factor * gradient / (1 + x.square()), None


class Followed(nn.Module):
    """A layer behind a custom Function, with a running mean that forward assigns anew."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = Damped.apply(self.layer(x).relu(), self.factor)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Odd(nn.Module):
    """Layers that differ in their backward alone, and have a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Followed(factor) for factor in (-1.0, 0.5, -2.0, 3.0))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        for layer in self.layers:
            features = layer(features)
        logits: Tensor = self.head(features)
        return logits


@dataclass
class Answer:
    """An output class that nobody has told PyTorch about."""

    logits: Tensor
    hidden: Tensor
    note: str | None = None


class DataclassOutput(nn.Module):
    """An `Answer`: the loss uses a tensor of the first layer and one of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron()

    def forward(self, features: Tensor) -> Answer:
        hidden = self.body[0](features)
        return Answer(self.body[1:](hidden), hidden, note="kept")


class Keywords(nn.Module):
    """No positional argument, and two that the batch leaves out; the loss itself comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = perceptron()

    def forward(
        self, *, features: Tensor, scale: float = 1.0, weight: Tensor | None = None, labels: Tensor
    ) -> Tensor:
        x = features * scale if weight is None else features * weight
        return F.cross_entropy(self.body(x), labels)
