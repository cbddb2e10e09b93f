"""A model file: T5 of the XL dimensions, rows of 512 tokens."""

from benchmarks.planning import models

model = models.t5
inputs = models.tokens(512)
