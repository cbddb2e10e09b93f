"""An environment  ->  ranks that are alive and connected, and a verdict on the first that dies.

In: the environment variables of torchrun, of Slurm or of a Kubeflow pod, or `--local N`. Out: a
`World`, a process group, a `Watchdog`.

Never found here: models, plans, tensors.

Other rooms use: `world.start`, `world.world_from`, `world.check_world`, `world.TIMEOUT`,
`spawn.spawn`, `pods.pod_from`, `pods.environments`, `address.resolve`, `watchdog.Watchdog`,
`watchdog.verdict`, `voice.one_voice`, `words.sentence`.
"""
