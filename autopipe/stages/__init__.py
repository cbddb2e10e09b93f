"""A `Graph` and cuts  ->  modules that run, and a dry run's shapes and bytes.

In: a graph, its stages (`ir.partition`), what to recompute, and the rows of a micro-batch.
Out: one `torch.fx` module per stage, and the exact bytes that autograd saves of it, from a dry run
on fake tensors. Planning dry-runs the modules that ranks run.
Never found here: processes, searches.

Other rooms use: `lower.lower`, `.Lowered`, `bind.split_as_planned`, `.Split`, `.check_runs`,
`dry_run.rehearse`, `.CrossingTensor`, `.Rehearsal`, `step_programs.step_programs`,
`recompute.blocks_meant`, `.Recomputed`, `precision.arithmetic`, `.computing`, `rng.stream`,
`.draw`, `gathering.with_gathers`, `loss_cut.cut_loss`, `whole_loss.WholeLoss`,
`sent_parts.with_parts`.
"""
