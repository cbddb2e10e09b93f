"""A part of a model that no trace can look into  ->  one op of the graph, which runs as it is.

In: a model with its weights, and an error for code that could not be captured; or a custom
autograd.Function, a torch.cond, an RNN over a packed sequence, a module compiled by torch.jit.
Out: regions (calls that run as the user wrote them), measured on a few rows and written into the
plan; and the ops that run the user's own code: in a trace, in a dry run, on a rank.
Never found here: how to export a model (`tracing`), where it is cut.

Other rooms use: `search.with_regions`, `measure.measured`, `regions.as_ops`, `.registered`,
`.with_region_names`, `custom_functions.as_ops`, `branches.as_ops`, `packed.as_ops`,
`scripted.plain`. Calls themselves are data of `opaque.calls`.
"""
