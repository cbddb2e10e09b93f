"""A run of one process in this one: a checkpoint after each step, and a copy of its state."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from autopipe.runtime.checkpoint.checkpoints import Checkpoints, Loaded
from tests.support.pipes import drawn, piped, planned

MODEL = "linear"


class Run:
    """The run; `said` is what it has said, `states` a copy of its state after each step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.pipe = piped(MODEL, planned(MODEL, 1, 1, 2))
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=0.1)
        self.states: dict[int, list[Tensor]] = {}

    def checkpoints(self, keep: int = 3) -> Checkpoints:
        return self.pipe.checkpoints(self.folder, keep, self.said.append)

    def save(self, saving: Checkpoints) -> None:
        saving.begin(self.pipe.content(self.optimizer), self.pipe.steps, self.pipe.values())
        saving.settle()
        saving.agree()

    def train(self, steps: int = 3) -> None:
        saving = self.checkpoints()
        for number in range(steps):
            self.pipe.step(drawn(MODEL, 4, number))
            self.optimizer.step()
            self.states[self.pipe.steps] = self.state()
            self.save(saving)

    def state(self) -> list[Tensor]:
        """Copies of the parameters and of the optimizer's state."""
        tensors: list[Tensor] = []
        for parameter in self.pipe.parameters():
            tensors += [parameter.detach().clone()]
            tensors += [value.clone() for value in self.optimizer.state[parameter].values()]
        return tensors

    def load(self) -> Loaded | None:
        """Into parameters that are zeros, and an optimizer without state."""
        self.said.clear()
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=0.1)
        with torch.no_grad():
            for parameter in self.pipe.parameters():
                parameter.zero_()
        return self.checkpoints().load(self.pipe.content(self.optimizer))

    def is_at(self, step: int) -> bool:
        """Whether parameters and optimizer are what they were after `step`, bit by bit."""
        return all(map(torch.equal, self.state(), self.states[step]))
