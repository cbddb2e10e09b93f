"""Step 1: one process. The batch goes through in micro-batches, whose gradients add up.

F0 B0 F1 B1 F2 B2 F3 B3 ...

python examples/learn/step1_one_process.py
"""

from mlp import LAYERS, STEPS, batch, layers, loss, optimizer, report

model = layers(0, LAYERS)
adam = optimizer(model)
losses = []
for step in range(STEPS):
    adam.zero_grad()
    losses.append(0.0)
    for x, y in batch(step):
        share = loss(model(x), y)  # F
        share.backward()  # B
        losses[-1] += share.item()
    adam.step()
report(losses, held=1)
