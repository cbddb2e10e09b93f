"""Layouts that experts chose by hand, and what the tool chooses for the same question."""
