"""A rank's tensors and its run's state  ->  a folder on disk  ->  the same, under any other plan.

In: a rank's tensors of the model and of the optimizer, and their places in the whole tensors.
Out: `step-00000020/`, with a file of tensors and a manifest from each rank; the tensors read back.

Never found here: gradients, activations, how a step runs; pickle, or anything else that executes.

Other rooms use: `layout.own_tensors`, `checkpoints.Checkpoints`, `content.Content`,
`folder.checkpoints_in`, `stored.Stored`, `convert`, `compare`.
"""
