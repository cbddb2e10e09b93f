"""A model file: llama-405b by its dimensions, rows of 8192 tokens."""

from functools import partial

from benchmarks.planning import models

model = partial(models.llama, "llama-405b")
inputs = models.tokens(8192)
