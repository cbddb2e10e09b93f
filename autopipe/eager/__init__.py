"""A run of the user's model as it is  ->  what it did that no graph can say.

In: a model, and a function that runs it. Out: refusals with the user's line (a seed, a hook); the
buffers that were assigned; the values that Python has kept for the next call, and whether the next
call of the model makes other calls of torch because of them. The model is as before afterwards.
Never found here: making a graph (`tracing`), comparing one with the model (`planners.driver`).

Other rooms use: `refused_effects.refused`, `.check_model`, `assigned_buffers.written`,
`.as_before`, `second_run.calls_of`, `draws.Generators`, `kept.restoring`, `.caches_put_back`,
`.left_by`, `counts.Counts`, `contents.MOST_ELEMENTS`, `frozen.frozen`, `taint.Taint`.
"""
