"""Predicted beside measured, on this machine: see README.md."""
