"""A graph on devices  ->  seconds and bytes: the planner's `Problem`, and a plan's exact bytes.

In: a traced model, the machine, a tensor-parallel degree; later the stages of a plan.
Out: `planners.model.problem.Problem`; for stages that are cut, the bytes that their run will hold.
Tensors here have no memory. Never found here: searches, a user's words.

Other rooms use: `profile.Costing`, `precision_of.need`, `tp_degrees.as_one_rank`,
`plan_memory.dry_run`, `.with_memory`, `.check_fits`.

    tp_degrees     the model as one tensor-parallel rank runs it
    profile        a graph -> the planner's Problem
    by_units       seconds of nodes, summed by unit
    unit_bytes     bytes of units: states, gradients, crossings
    asked_ops      the ops that a word of `--recompute` means
    precision_of   the dtype in which each node computes, and the rates that this needs
    fused_costs    formulas of ops that a compiler fuses
    loss_bytes     bytes that exist only within a loss's backward
    gathered       the most bytes that ZeRO-3 gathers at once
    plan_memory    exact bytes of a Plan
    stage_memory   a rank's part of a stage's states, by the ZeRO stage
    eager_depths   how far eager-1f1b runs ahead, for a plan whose cuts are known
    part_seconds   seconds of the conversions by which stages send tensors in parts
"""
