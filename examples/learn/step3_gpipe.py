"""Step 3: GPipe. All forwards go first, one behind the other, then all backwards.

    rank 0: F0 F1 F2 F3                            B0--- B1--- B2--- B3---
    rank 1:    F0 F1 F2 F3                   B0--- B1--- B2--- B3---
    rank 2:       F0 F1 F2 F3          B0--- B1--- B2--- B3---
    rank 3:          F0 F1 F2 F3 B0--- B1--- B2--- B3---

Now the stages work at the same time. With p stages and m micro-batches a stage idles for p - 1 of
m + p - 1 turns: more micro-batches, less waiting. The price is in the last column of the report: a
stage keeps the activations of every micro-batch until its backward.

    torchrun --nproc-per-node 4 examples/learn/step3_gpipe.py
"""

import torch
import torch.distributed as dist
from mlp import LAYERS, MICRO_BATCHES, ROWS, STEPS, WIDTH, batch, layers, loss, optimizer, report

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
first, last = rank == 0, rank == ranks - 1
stage = layers(LAYERS * rank // ranks, LAYERS * (rank + 1) // ranks)
adam = optimizer(stage)
losses = []
for step in range(STEPS):
    adam.zero_grad()
    losses.append(0.0)
    held = []  # (x, what the stage made of it) of each micro-batch between its F and its B
    for x, y in batch(step):
        if not first:
            x = torch.empty(ROWS // MICRO_BATCHES, WIDTH)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        made = stage(x)  # F
        if last:
            made = loss(made, y)
            losses[-1] += made.item()
        else:
            dist.send(made.detach(), rank + 1)
        held.append((x, made))
    most = len(held)
    while held:
        x, made = held.pop(0)
        gradient = torch.ones(()) if last else torch.empty_like(made)
        if not last:
            dist.recv(gradient, rank + 1)
        made.backward(gradient)  # B
        if not first:
            dist.send(x.grad, rank - 1)
    adam.step()
report(losses, most)
