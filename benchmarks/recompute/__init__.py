"""Predicted seconds and bytes of recomputation by op and by block."""
