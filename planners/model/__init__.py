"""Numbers of a model and of devices  ->  a `Problem`, and the `Estimate` of a decision.

In: seconds and bytes by unit of a model, and a cluster's devices in tensor-parallel groups. Out:
seconds of a step and bytes of each stage, for one decision or for all ranges of units at once.
Never found here: torch, graphs, searches.

Other rooms use: `problem.Problem`, `.Config`, `.Decision`, `estimate.estimate`,
`devices.machine_of`, `memory.bound`, `.estimate`, `.excess`, `keeping_less.costs`.

    problem, devices                 what a planner may read                values
    range_tables                     sums over ranges of units
    block_parts                      the parts of blocks in each range of units
    recompute_sets, level_mixes      what runs again; levels of equal blocks
    offload_ways                     what blocks offload
    places                           a stage's devices, link, memory and micro-batches in flight
    transfers                        how tensors come to a stage: whole, or in parts
    memory                           bytes of a stage: bound, estimate, does it fit
    stage_costs                      seconds of a stage
    keeping_less                     the cheapest of what makes a range fit
    step_formula                     seconds of a step from those of its stages
    estimate                         the score of a decision                start reading here
    eager_period                     the pace of eager-1f1b, by how far it runs ahead
"""
