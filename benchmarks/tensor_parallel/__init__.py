"""Tensor parallelism of models nobody prepared: is it right, and what is divided? See README.md."""
