"""A `Plan`  <->  plan.json; and what follows from it alone: programs, seconds, traffic, what
runs again.

Never found here: torch, and the search for a plan.
"""
