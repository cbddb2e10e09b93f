"""A model file, or a plan and its model file  ->  a `Comparison`: does the split train alike?

In: the arguments of `autopipe check`. Out: a comparison, tensor by tensor, of two optimizer steps
of the split model in real processes on this machine's CPU with those of the user's own module in
one; the first node that differs. Never found here: a way of its own to plan or to run a model
(`planners.driver` and `runtime` are what is checked); how a comparison is printed (`cli`).

Other rooms use: `check.check_model`, `check.check_plan`, `comparison`,
`fit.usual_degrees`, `split.run_rank`.

    subject      what is checked, as a folder that all processes read
    fit          how much smaller a model and a mesh have to be for this machine
    shrink       a model file whose model is smaller: fewer layers, narrower, shorter rows
    sized        the model file and its plan, as small as they have to be
    small_plan   a plan for few processes of this machine: the same cuts, or the same constraints
    split        one rank's two steps, written down
    layout       the part of a whole tensor that a rank holds, and back
    random_ops   plain PyTorch draws the random numbers that the plan's nodes draw
    unsplit      the user's module, loss and optimizer in one process: the same two steps
    compare      both, tensor by tensor                                      -> rows
    two_sides    ranks and the unsplit model run; rows of both
    first_node   rows -> the node of the graph where the difference begins
    comparison   rows, reductions, the first node: as a value, and as data
    second_look  another comparison in a wider dtype, if rounding may decide, or hide, something
    check        all of them in order                                        start reading here
"""
