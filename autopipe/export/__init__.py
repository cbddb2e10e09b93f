"""A `Plan` and a user's words  ->  the script or manifest that starts it elsewhere.

In: a plan, `Words` (a job's name, its time limit, its image, ...). Out: text: a shell script for
torchrun or Slurm, a manifest for Kubeflow or JobSet. What the target cannot start is refused.

Never found here: torch, processes, files; `autopipe export` writes what is made here.

Other rooms use: `targets.export`, `targets.LAUNCHERS`, `words.Words`.
"""
