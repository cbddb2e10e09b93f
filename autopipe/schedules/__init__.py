"""Ranks, micro-batches and a schedule's name  ->  proved programs, a timed timeline, peak bytes.

In: the name of a schedule or the text of one, and the edges between stages. Out: a program of
instructions for each rank, with its transfers; the proof that they run to their end; when each
instruction starts and ends. Never found here: torch, tensors, processes, and what a stage computes.

Other rooms use: `registry.make`, `.SCHEDULES`, `generators.held_before`, `instructions.Program`,
`.COMPUTE`, `.holders`, `transfers.insert`, `.edges_of`, `deadlock.check`, `simulate.simulate`,
`peak_memory.fullest_moment`, `.walk`, `user_schedule`, `phrases.describe`.
"""
