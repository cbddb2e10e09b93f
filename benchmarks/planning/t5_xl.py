"""A model file: t5-xl by its dimensions, rows of 512 tokens."""

from functools import partial

from benchmarks.planning import models

model = partial(models.t5, "t5-xl")
inputs = models.tokens(512)
