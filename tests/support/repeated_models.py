"""Models of repeated layers, each with one thing that makes a layer unlike the others."""

import torch
from torch import nn

DEPTH = 7


class Layer(nn.Module):
    """Residual, with a mask that all layers read; written in place if asked to."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.in_place = in_place

    def forward(self, x: torch.Tensor, mask: torch.Tensor, far: bool = False) -> torch.Tensor:
        bend = torch.relu if far else torch.tanh
        read = x * 1 if self.in_place else x  # a norm keeps what it reads, which must stay as it is
        made = self.down(bend(self.up(self.norm(read)) * mask))
        return x.add_(made) if self.in_place else x + made


class Deep(nn.Module):
    def __init__(self, depth: int = DEPTH, in_place: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.scale = nn.Linear(4, 16)
        self.layers = nn.ModuleList(Layer(in_place) for _ in range(depth))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, y = torch.sigmoid(self.scale(x)), self.embed(x) * 2
        for layer in self.layers:
            y = layer(y, mask)
        return self.head(y).mean()


class Collecting(Deep):
    """The result is made of what all layers give: none of them can be left out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, y = torch.sigmoid(self.scale(x)), self.embed(x) * 2
        found = []
        for layer in self.layers:
            y = layer(y, mask)
            found.append(y)
        return self.head(torch.stack(found).sum(0)).mean()


class Growing(Deep):
    """Layers alike, of which the fifth has a wider relative."""

    def __init__(self) -> None:
        super().__init__(9)
        self.layers[4].up, self.layers[4].down = nn.Linear(8, 24), nn.Linear(24, 8)
        self.wider = nn.Linear(4, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, y = torch.sigmoid(self.scale(x)), self.embed(x) * 2
        for number, layer in enumerate(self.layers):
            y = layer(y, torch.sigmoid(self.wider(x)) if number == 4 else mask)
        return self.head(y).mean()


class Turning(Deep):
    """Of so many layers the last looks far, the others near: each kind has its own mask.

    Looking far is another function too, unless `masks` alone make the difference.
    """

    def __init__(self, depth: int, period: int = 2, masks: bool = False) -> None:
        super().__init__(depth)
        self.further = nn.Linear(4, 16)
        self.period, self.masks = period, masks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near, far = torch.sigmoid(self.scale(x)), torch.sigmoid(self.further(x))
        y = self.embed(x) * 2
        for number, layer in enumerate(self.layers):
            looks_far = number % self.period == self.period - 1
            y = layer(y, far if looks_far else near, looks_far and not self.masks)
        return self.head(y).mean()


class Recalling(Deep):
    """Layers with an even number read what the first layer has made, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, y = torch.sigmoid(self.scale(x)), self.embed(x) * 2
        first = y
        for number, layer in enumerate(self.layers):
            y = layer(y * first if number % 2 == 0 else y, mask)
            first = y if number == 0 else first
        return self.head(y).mean()


class Tied(Deep):
    """One layer's weight is also the head's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, y = torch.sigmoid(self.scale(x)), self.embed(x) * 2
        for layer in self.layers:
            y = layer(y, mask)
        return nn.functional.linear(y, self.layers[3].up.weight).mean()
