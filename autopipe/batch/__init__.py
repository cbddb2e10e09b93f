"""A batch  ->  its leaves by path, what they are, and some of its rows.

In: what `inputs(batch_size)` or a training loop gives, and its description in a plan. Out: leaves
by path, a description, a tree of other leaves in the same containers, rows or lengths cut out, the
arguments of a model's forward.
Never found here: models, losses, where batches come from.

Other rooms use: `tree.flatten`, `.rebuild`, `.of_specs`, `.has_own`, `description.describe`,
`.count_rows`, `cut.slice_rows`, `.pick_rows`, `.some_rows`, `.two_rows`, `.example_to_trace`,
`row_length.at_length`, `.length_in`, `.length_of`, `.lengthened`, `arguments.forward_arguments`,
`digest.digest`.
"""
