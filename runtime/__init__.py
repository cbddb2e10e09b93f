"""Processes: how they come to life, what passes between them, and what each one does in a step."""
