"""A traced `Graph`  ->  a graph that computes the same by other ops.

In: the model's graph, whole, and what a plan says is to be done otherwise.
Out: a graph with a loss in parts of its vocabulary, or with attentions as single ops; what a run
knows the model by is the graph before. Or a small graph, which counts the labels of a loss.
Beside it what single ops are elsewhere: on GPUs, of which a rehearsal on a CPU is to tell.
Never found here: shards, stages, the choice whether to rewrite.

Other rooms use: `loss_in_parts.in_parts`, `.usual_parts`, `logits.heads`, `fused_attention.fused`,
`label_counts.label_counts`, `.LabelCounts`, `for_gpus.for_gpus`, `gpu_kernels.kernel_of`,
`gpu_autocast.autocast`, `.autocast_of_model`, `.autocast_inside`, `.autocast_as_now`,
`.of_absent_gpus`, `projections.sets_norms`.
"""
