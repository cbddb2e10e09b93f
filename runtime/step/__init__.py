"""A rank's part of a model and a batch  ->  loss, gradients, and what the step took.

In: a `prepare.Rank`, with its parameters, its transport and the plan's programs. Out: a `Pipe`,
whose `step` runs the rank's program over its lowered stages.

Never found here: how ranks come to life, where parameters come from, the optimizer.

Other rooms use: `pipe.Pipe`, `prepare.Rank`, `memory_meter.Meter`, `emitted_files.Emitted`,
`whole_loss.replicas_of_last_stage`.
"""
