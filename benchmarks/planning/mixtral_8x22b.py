"""A model file: Mixtral of 8 times 22 B, rows of 4096 tokens."""

from benchmarks.planning import models

model = models.mixtral_8x22b
inputs = models.tokens(4096)
