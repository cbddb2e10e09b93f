"""A line or a file that describes machines  ->  a `Cluster`, and the seconds of its collectives.

In: `2x8xA100-80GB`, a JSON file, or figures that a probe has measured. Out: devices in rank order
with rates that programs reach, the links between them, and the tensor-parallel groups they form.
Never found here: torch, models, plans, and how to measure (`runtime.probe`).

Other rooms use: `cluster.Cluster`, `.Device`, `.Link`, `spec.parse`, `tp_groups.tp_groups`,
`checks.check`, `collective_time.Topology`, `measured.Found`, `.Need`.
"""
