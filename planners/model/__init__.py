"""Numbers of a model and of devices  ->  a `Problem`, and the `Estimate` of a decision.

In: seconds and bytes by unit of a model, and a cluster's devices in tensor-parallel groups. Out:
seconds of a step and bytes of each stage, for one decision or for all ranges of units at once.
Never found here: torch, graphs, searches.

Other rooms use: `problem.Problem`, `.Config`, `.Decision`, `estimate.estimate`,
`devices.machine_of`, `memory.bound`, `.estimate`, `.excess`, `stage_costs.costs`,
`eager_depths.choose`.

    problem, devices                 what a planner may read                values
    range_tables                     sums over ranges of units
    recompute_sets, level_mixes      what runs again; levels of equal blocks
    places                           what each stage is given
    transfers                        how tensors come to a stage: whole, or in parts
    memory                           bytes of a stage: bound, estimate, does it fit
    stage_costs                      seconds of a stage
    step_formula                     seconds of a step from those of its stages
    estimate                         the score of a decision                start reading here
    eager_period, eager_depths       how far eager-1f1b runs ahead
"""
