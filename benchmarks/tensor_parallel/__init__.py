"""Tensor parallelism of models nobody prepared: is it right, how much is shared?"""
