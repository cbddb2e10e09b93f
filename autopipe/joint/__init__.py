"""A lowered stage  ->  its forward and backward as graphs, in one piece or two, and their bytes.

In: a stage's module (`stages.lower`) and the layouts of what it is given.
Out: the joint graph of forward and backward; the graphs that an engine runs without autograd, whose
saved tensors are chosen here; and exact bytes, of deep stages from shallow ones.
Beside it what compiles a graph of ops for the tensors it is called with.
Never found here: processes, searches.

Other rooms use: `split_backward.Joint`, `split_backward_layouts.joint_for`, `levels.levels`,
`dry_run_repeats.rehearse_deep`, `compiled_graph.CompiledGraph`.
"""
