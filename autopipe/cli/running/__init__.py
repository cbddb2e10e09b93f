"""`autopipe run`: a plan and options  ->  a trained model, and what the run measured.

In: a plan file, the command line, what a launcher's environment says of this process. Out: ranks
started on this machine, or the training of one rank; checkpoints, metrics, a trace, a record and
the saved model as files; planned beside measured on stdout.
Never found here: the training itself (`runtime`), the planning of another plan (`planners.driver`).

Only `cli` uses it.

    options    the command's options in four groups, each with its checks
    run        where this process is, what it is to do, in order
    ranks      starts ranks on this machine, which run the same command
    replanned  another plan, where other devices are there than the plan is for
    training   one rank: builds the model, trains, saves
    summary    what was measured, written or lost, for the user
"""
