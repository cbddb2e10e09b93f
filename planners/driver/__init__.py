"""A model, a batch, a cluster and constraints  ->  a `Plan`.

In: what a user passes to `autopipe.plan`. Out: a checked `planfile.contents.Plan`, or an error that
says what would fit. The only room of `planners/` that knows torch; tensors here have no memory.
Never found here: how a planner searches (`planners.search`), what a stage costs by the estimate
(`planners.model`), processes that train (`runtime`).

Other rooms use: `make_plan.plan`, `formulas.cost_formulas`, `formula_sheet.sheet`, `.as_data`.

    request        what was asked, what was traced, both on devices       values
    make_plan      `plan`: its phases in order                            start reading here
    arguments      each argument checked and completed
    tp_degrees     the model as one tensor-parallel rank runs it
    profile        a graph -> the planner's Problem
    saved_tensors  bytes saved for backward, observed
    candidate      one tensor-parallel degree: its Problem, its search
    loss_parts     the loss whole, or from parts of its vocabulary
    choose         the best plan over all degrees
    refine         exact bytes and longest paths correct the estimate
    write_plan     an Answer -> a Plan
    plan_memory    exact bytes of a Plan
    formulas, formula_sheet   a model's costs as formulas, for people
"""
