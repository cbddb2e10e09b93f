"""A tensor on one rank  ->  the same tensor on another rank, or its sum over an axis of ranks.

In: which ranks there are and which stages exchange tensors. Out: a `Transport` between stages, and
the axis that tensor-parallel collectives go over.

Never found here: what a tensor means, parameters, the choice of a schedule.

Other rooms use: `choose.transport_for`, `choose.backend_for`, `transport.Transport`,
`shared_memory_axis.tensor_parallel_axis`.
"""
