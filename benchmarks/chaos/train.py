"""A user's own script: `torchrun --nproc-per-node 4 train.py plan.json STEPS`."""

import sys

import torch

import autopipe
from benchmarks.chaos import net


def main(path: str, steps: int) -> None:
    plan = autopipe.Plan.load(path)
    pipe = autopipe.parallelize(net.model, plan, loss=net.loss)
    optimizer = torch.optim.AdamW(pipe.parameters())
    for step in range(steps):
        torch.manual_seed(step)  # every rank passes the same batch
        pipe.step(net.inputs(plan.batch.rows))
        optimizer.step()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
