"""A model, a loss and a batch as one `Program`  ->  what torch.export makes of it  ->  a `Graph`.

In: a program, the values that Python has read in a run of it, the modules that are alike. Out: a
graph of the whole model, of which torch.export has seen one of each kind of equal modules; or a
`CaptureError` with the user's line.
Never found here: the choice of what to run or to export (`tracing`), weights.

Other rooms use: `program.Program`, `export.capture`, `from_export.convert`, `value_guards.record`,
`.check`, `low_precision.kept`, `.SixteenBits`, `user_checkpoints.checkpointed_blocks`.

    program            the module that is run and exported; what its runs have found out
    value_guards       values that Python reads: recorded, replayed, checked
    caught_errors      errors of a trace that the user's code catches
    einsum_paths       the order of products in an einsum of three tensors
    low_precision      parameters and buffers that are read in 16 bits
    user_checkpoints   calls of torch.utils.checkpoint, as marks on nodes
    export             the call of torch.export
    stubs              one of several equal modules is exported (`module_makes`: which are equal)
    exported_nodes     the nodes of an exported program, in order and with the user's lines
    same_memory        states of a graph that are one tensor in the model, or views of one
    from_export        an exported program -> a `Graph`
"""
