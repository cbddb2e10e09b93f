"""A user's model file  ->  a model, batches, a loss and an optimizer, checked.

In: the path of a model file, or the objects that a user passes to `autopipe.plan`. Out: a module
with fake parameters (shapes without memory), its batches, the loss and the optimizer as checked
functions, and the user's line for every error.
Never found here: making a graph (`tracing`), plans, processes.

Other rooms use: `model_file.load`, `loss.Loss`, `.outputs_to_loss`, `.check_trained`,
`measured_optimizer.stepped_apart`, `.named_apart`, `.optimizer_factor`, `construct.build_fake`,
`user_lines.here`, `.of_error`, `quiet.libraries_hushed`, `transformers_adapter.initialiser`,
`.narrowed`, `training_mode.put_into`.
"""
