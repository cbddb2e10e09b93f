"""A traced `Graph`  ->  a graph that computes the same by other ops.

In: the model's whole graph, and the rewrites that a plan asks for.
Out: a graph with a loss in parts of its vocabulary, or with attentions as single ops (a plan's
fingerprint is that of the graph before); or a small graph, which counts the labels of a loss, and
batches without some of these labels; or a graph in which checkpoints write as in plain PyTorch.
Also here: the ops that a GPU runs in the place of a CPU's, for dry runs that stand for GPUs, and
those that a trace has in the place of torch's flex_attention.
Never found here: shards, stages, the choice whether to rewrite.

Other rooms use: `loss_in_parts.in_parts`, `.usual_parts`, `logits.heads`, `fused_attention.fused`,
`label_counts.label_counts`, `.LabelCounts`, `.leaving_out`, `for_gpus.for_gpus`,
`gpu_kernels.kernel_of`, `gpu_autocast.autocast`, `.autocast_of_model`, `.autocast_inside`,
`.autocast_as_now`, `.of_absent_gpus`, `projections.sets_norms`, `flex_attention.written_out`,
`checkpoint_calls.CheckpointCall`, `.like`, `.moved`, `second_writes.with_own_results`,
`.with_second_writes`.
"""
