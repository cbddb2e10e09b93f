"""A script that trains two models, each in tensor-parallel parts of its own number.

Started by `warm.spawn`, once per rank:

    python two_pipes_worker.py FOLDER      FOLDER/halves.json and quarters.json, two plans
                                           FOLDER/trained.0: empty, all went well
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import autopipe
from autopipe import Plan
from tests.support.pipes import close

WIDTH = 8

Batch = dict[str, Tensor]


def inputs(rows: int) -> Batch:
    x = torch.arange(float(WIDTH * rows)).reshape(rows, WIDTH)
    return {"input": x.sin(), "target": x.cos()}


def loss(outputs: Tensor, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(outputs, batch["target"])


def model() -> nn.Module:
    torch.manual_seed(0)
    wide = 4 * WIDTH
    return nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH))


def main(folder: Path) -> None:
    batch = inputs(8)
    expected = loss(model()(batch["input"]), batch)
    made = []
    for name in ("halves", "quarters"):
        made.append(autopipe.parallelize(model(), Plan.load(folder / f"{name}.json"), loss=loss))
        for pipe in made:
            close(pipe.step(batch), expected, f"{name}: a step of {pipe!r}")
            close(pipe.evaluate(batch), expected, f"{name}: an evaluation of {pipe!r}")
    for pipe in made:
        for key, tensor in pipe.state_dict().items():
            assert torch.equal(tensor, model().state_dict()[key]), f"{key} of {pipe!r}"
    (folder / f"trained.{made[0].place.rank}").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
