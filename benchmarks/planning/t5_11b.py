"""A model file: t5-11b by its dimensions, rows of 512 tokens."""

from functools import partial

from benchmarks.planning import models

model = partial(models.t5, "t5-11b")
inputs = models.tokens(512)
