"""A model file: llama-7b by its dimensions, rows of 4096 tokens."""

from functools import partial

from benchmarks.planning import models

model = partial(models.llama, "llama-7b")
inputs = models.tokens(4096)
