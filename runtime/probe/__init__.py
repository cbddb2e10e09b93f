"""This machine  ->  measured rates of its processors and links, as a `Cluster`.

In: how many processes, on GPUs or the processor, and which ops a cost model needs. Out: seconds,
bytes a second and operations a second, also kept in a record on disk for the next run.

Never found here: a user's model, plans.

Other rooms use: `probe.local_cluster`, `probe.this_machine`.
"""
