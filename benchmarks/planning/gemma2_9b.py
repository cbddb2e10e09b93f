"""A model file: Gemma 2 of 9 B parameters, rows of 4096 tokens."""

from benchmarks.planning import models

model = models.gemma2
inputs = models.tokens(4096)
