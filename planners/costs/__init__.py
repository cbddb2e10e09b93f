"""A graph on devices  ->  seconds and bytes: the planner's `Problem`, and a plan's exact bytes.

In: a traced model, the machine, a tensor-parallel degree; later the stages of a plan.
Out: `planners.model.problem.Problem`; for stages that are cut, the bytes that their run will hold.
Tensors here have no memory. Never found here: searches, a user's words.

Other rooms use: `profile.Costing`, `precision_of.need`, `tp_degrees.as_one_rank`,
`plan_memory.dry_run`, `.with_memory`, `.check_fits`.

    tp_degrees     the model as one tensor-parallel rank runs it
    profile        a graph -> the planner's Problem
    precision_of   what nodes compute in, and the rates that this asks for
    fused_costs    formulas of ops that a compiler fuses
    loss_bytes     what a loss has for a moment
    gathered       what ZeRO-3 gathers in one go
    plan_memory    exact bytes of a Plan
    eager_depths   how far eager-1f1b runs ahead, of a plan that is cut
    part_seconds   seconds of the conversions by which stages send tensors in parts
"""
