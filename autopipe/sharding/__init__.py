"""A `Graph` and an axis size  ->  placements of every tensor, and the graph of one rank.

In: a traced graph, its blocks, and the number of tensor-parallel ranks with their link. Out: a
`Sharding`, its form in the plan, and the graph that one rank runs, with collectives as nodes.
Never found here: stages, processes, the choice of the axis size.

Other rooms use: `local_graph.shardable`, `.shard_graph`, `.blocks_of`, `.sent_by`, `.held_whole`,
`ilp.shard`, `.AxisCosts`, `plan_io.write_down`, `.read_back`, `collectives.bind`, `.attach`,
`.whole`, `.own_part`, `column_linear.COLUMNS`, `vocabulary_loss.BACKWARD`,
`torch_names.all_gather_single`, `.group_of`.
"""
