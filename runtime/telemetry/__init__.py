"""A finished step  ->  its report: on the terminal, in files, to TensorBoard and W&B.

In: a pipe, the results of a step, and the destinations that the user asks for. Out: lines, a bar,
metrics, a trace of the last steps, a snapshot of a GPU's memory.

Never found here: anything that changes a step.

Other rooms use: `progress.figure`, `destinations.Destinations`, `.MemorySnapshot`, `.snapshot_of`,
`.check`, `metrics.Metrics`, `sinks`, `record`, `memory_snapshot`.
"""
