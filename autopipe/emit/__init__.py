"""A planned model  ->  Python files that a user can read, edit and run.

In: a model, its loss and a plan. Out: a folder with the plan, the ranks' programs as text, one
Python module per stage, and a train.py for torchrun.
Never found here: running those files (`runtime.step.emitted_files`), decisions.

Other rooms use: `emit.emit`, `retrace.graph_of`.
"""
