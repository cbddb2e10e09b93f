"""A model, a batch and a loss  ->  a `Graph`, and the values that Python read while tracing.

In: a module (or the function that builds one), an example batch and the user's loss. Out: a
`Trace`, which holds the graph, the description of the batch, and the reads to check in each
micro-batch; or a `CaptureError` with the user's line.
Never found here: costs, cuts, shards.

Other rooms use: `source.trace_source`, `.bare`, `.Source`, `traced.Trace`,
`symbolic_sequence.trace_lengths`, `.with_tokens`. The export itself is in `tracing.capture`.
"""
