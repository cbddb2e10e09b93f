"""A `Graph` and cuts  ->  modules that run, split backwards, and a dry run's shapes and bytes.

In: a graph, its stages (`ir.partition`), the blocks to recompute, and the rows of a micro-batch.
Out: one `torch.fx` module per stage; its backward in one piece or in two halves; and the exact
bytes that it saves, from a dry run on fake tensors. Planning dry-runs the modules that ranks run.
Never found here: processes, searches.

Other rooms use: `lower.lower`, `.Lowered`, `bind.split_as_planned`, `.Split`, `.check_runs`,
`dry_run.rehearse`, `.Boundary`, `.Rehearsal`, `dry_run_repeats.rehearse_deep`,
`step_programs.step_programs`, `.footprints`, `split_backward_layouts.halves`,
`recompute.blocks_to_recompute`, `.Recomputed`, `precision.arithmetic`, `.computing`, `rng.stream`,
`.draw`, `block_owners.owners`.
"""
