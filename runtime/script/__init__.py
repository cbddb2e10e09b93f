"""What a training script does beside the steps  ->  it is done, let be, or refused with a sentence.

In: the module that was given, this rank's parameters and gradients. A script of one process may
set numbers that forward reads, write weights, clip gradients, update, load or save the module: each
is done or let be where a rank's part does the same, and refused where it would train or show
something else.

Never found here: a step.

Other rooms use: `unmoved.Unmoved`, `clipping.Clipping`, `switched.check_around`,
`stale.check_fresh`, `given_states.GivenStates`.
"""
