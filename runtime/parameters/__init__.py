"""A model, a seed or a checkpoint  ->  a rank's own parameters, and the sums of their gradients.

In: the rank's part of a planned model, and where values come from. Out: parameters whole or in
shards, by the plan's ZeRO stage; gradients summed over ranks; a state dict or a file.

Never found here: activations, transfers between stages, the order of a step.

Other rooms use: `part.RankPart`, `materialize.materialize`, `hold.hold`, `gradient_sum.total_norm`,
`model_states.ModelStates`, `loss_scale.LossScale`.
"""
