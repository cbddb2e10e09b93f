"""A model, a batch, a cluster and constraints  ->  a `Plan`.

In: what a user passes to `autopipe.plan`. Out: a checked `planfile.contents.Plan`, or an error that
says what would fit. With `planners.costs` the rooms of `planners/` that know torch.
Never found here: how a planner searches (`planners.search`), what a stage costs by the estimate
(`planners.model`), processes that train (`runtime`).

Other rooms use: `make_plan.plan`, `replan.replan`, `arguments`, `outcomes`,
`against_eager.one_thread`, `request.Job`, `candidate.Candidate`, `refine.plan_that_fits`.

    request        what was asked, what was traced, both on devices       values
    make_plan      `plan`: its phases in order                            start reading here
    checked_trace  the model as a graph, with all checks of it
    arguments      each argument checked and completed
    precisions     the precision asked for, or the first usual one in which the model runs
    against_eager  the graph computes what the model does (`outcomes`: both, compared)
    against_whole  a loss over the batch is the same in two passes
    candidate      one tensor-parallel degree: its Problem, its search
    loss_parts     the loss whole, or from parts of its vocabulary
    choose         the best plan over all degrees
    refine         exact bytes and longest paths correct the estimate
    write_plan     an Answer -> a Plan (`work`: what its step computes)
    replan         a plan again, for the devices that are left
"""
