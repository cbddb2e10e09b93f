"""A plan and a model  ->  ranks that train it, one process each.

In: the plan, the model's code and weights, the batches. Out: losses, parameters, what a step took.
The rooms below are the processes (`launch`), what passes between them (`comm`), what each one owns
(`parameters`), what a training script does to that (`script`), one step (`step`), what is told of
it (`telemetry`) and how fast a machine is (`probe`); here are the start of a rank and the loop over
steps.

Never found here: search, or a decision that the plan does not contain.

Other rooms use: `parallelize.parallelize`, `train.train`, `onnx_stages.write_stages`; written files
use `emitted`.
"""
