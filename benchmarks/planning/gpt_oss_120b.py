"""A model file: gpt-oss of 117 B parameters, rows of 2048 tokens."""

from benchmarks.planning import models

model = models.gpt_oss
inputs = models.tokens(2048)
