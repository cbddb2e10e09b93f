"""Step 4: 1F1B. As many forwards as reach the last stage, then one backward for each forward.

    rank 0: F0 F1 F2 F3             B0--- F4 B1--- F5 B2---    B3---    B4---    B5---
    rank 1:    F0 F1 F2       B0--- F3 B1--- F4 B2--- F5 B3---    B4---    B5---
    rank 2:       F0 F1 B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4---    B5---
    rank 3:          F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5---

As long as GPipe, but stage i of p holds p - i micro-batches, however many there are. Who does what
when is now a list: the loop below only reads it. That list is what autopipe calls a schedule.

Sends no longer wait for their receiver. Two neighbours that send to each other at the same time
would otherwise both stand still: rank 0 with F4 and rank 1 with the gradient of micro-batch 1.

    torchrun --nproc-per-node 4 examples/learn/step4_1f1b.py

What is left to do is what autopipe is for: finding the stages and cutting a model that nobody
prepared, posting each receive before its data is needed, more micro-batches in flight where the
link is slow, gradients summed while the pipeline drains, and a proof that the list cannot stand
still before any process starts.
"""

import torch
import torch.distributed as dist
from mlp import LAYERS, MICRO_BATCHES, ROWS, STEPS, WIDTH, batch, layers, loss, optimizer, report


def schedule(rank: int, ranks: int) -> list[tuple[str, int]]:
    """One rank's program, as [("F", 0), ("F", 1), ("B", 0), ...]."""
    ahead = min(ranks - 1 - rank, MICRO_BATCHES)
    program = [("F", k) for k in range(ahead)]
    for k in range(MICRO_BATCHES - ahead):
        program += [("F", k + ahead), ("B", k)]
    return program + [("B", k) for k in range(MICRO_BATCHES - ahead, MICRO_BATCHES)]


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
first, last = rank == 0, rank == ranks - 1
stage = layers(LAYERS * rank // ranks, LAYERS * (rank + 1) // ranks)
adam = optimizer(stage)
losses, most = [], 0
for step in range(STEPS):
    adam.zero_grad()
    losses.append(0.0)
    data, held, sending = batch(step), {}, []
    for kind, k in schedule(rank, ranks):
        if kind == "F":
            x, y = data[k]
            if not first:
                x = torch.empty(ROWS // MICRO_BATCHES, WIDTH)
                dist.recv(x, rank - 1)
                x.requires_grad_()
            made = stage(x)
            if last:
                made = loss(made, y)
                losses[-1] += made.item()
            else:
                sent = made.detach()
                sending.append((sent, dist.isend(sent, rank + 1)))
            held[k] = x, made
            most = max(most, len(held))
        else:
            x, made = held.pop(k)
            gradient = torch.ones(()) if last else torch.empty_like(made)
            if not last:
                dist.recv(gradient, rank + 1)
            made.backward(gradient)
            if not first:
                sending.append((x.grad, dist.isend(x.grad, rank - 1)))
    for _, send in sending:
        send.wait()
    adam.step()
report(losses, most)
