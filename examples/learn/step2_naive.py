"""Step 2: each process holds a quarter of the layers, and all but one of them wait.

    rank 0: F0                            B0--- F1
    rank 1:    F0                   B0---          F1
    rank 2:       F0          B0---                   F1
    rank 3:          F0 B0---                            F1 B1---

A stage receives what the one before has computed, and sends back the gradient of that. Nothing else
crosses: no stage knows the others' weights. The memory of the model is divided by four; the time is
not.

    torchrun --nproc-per-node 4 examples/learn/step2_naive.py
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
    for x, y in batch(step):
        if not first:
            x = torch.empty(ROWS // MICRO_BATCHES, WIDTH)
            dist.recv(x, rank - 1)
            x.requires_grad_()
        made = stage(x)  # F
        if last:
            share = loss(made, y)
            share.backward()  # B
            losses[-1] += share.item()
        else:
            dist.send(made.detach(), rank + 1)
            gradient = torch.empty_like(made)
            dist.recv(gradient, rank + 1)
            made.backward(gradient)  # B
        if not first:
            dist.send(x.grad, rank - 1)
    adam.step()
report(losses, held=1)
