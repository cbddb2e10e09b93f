"""A traced `Graph`  ->  its data flow, blocks, cut points, stages, and the costs of its ops.

In: a `graph.Graph`, plain data that `tracing` makes, and the positions of cuts. Out: what planning
and running need to know of a graph, without any weights: costs in operations and bytes as formulas
in rows and tokens, and seconds on a device.
Never found here: users' models, shards, processes.

Other rooms use: `graph.Graph`, `.Node`, `.Ref`, `.State`, `.shape_at`, `.bytes_at`,
`dataflow.analyse`, `blocks.find_blocks`, `.Block`, `cut_points.find_units`,
`partition.partition`, `.Stage`, `op_costs.costs`, `op_seconds.seconds`, `repeats.shortened`,
`stage_classes.kind_of`, `fingerprint.fingerprint`, `check.after`,
`opaque_ops.observing`, `torch_private.fake_mode`, `.storage_key`.
"""
