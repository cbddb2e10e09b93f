"""A model file: Llama 3 of 70 B parameters, rows of 8192 tokens."""

from functools import partial

from benchmarks.planning import models

model = partial(models.llama, "llama-70b")
inputs = models.tokens(8192)
