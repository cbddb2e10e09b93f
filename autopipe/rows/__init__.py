"""A trace, an example batch  ->  whether micro-batches compute what the whole batch does.

In: a graph that ends with a loss, batches of a few rows. Out: a refusal of a loss whose value
depends on the cut; lines about a model whose gradients or states do; the nodes of a loss that
compare rows. Graphs run here on made-up weights alone.
Never found here: the model's weights, stages, plans.

Other rooms use: `loss_grouping.check`, `row_mixing.remark`, `moved_states.check`,
`.remark`, `own_backwards.remark`, `one_row.same_with_one_row`, `loss_tail.tail`,
`row_dims.rows_lie`, `.outputs_lie`, `.joined`, `.parted`, `least_rows.least_rows`, `.or_two`,
`.check_rows`.

    row_dims       in which dim of a value rows lie, and in which order
    row_runs       a part of a graph run on 4 rows, and on 2 and 2
    loss_tail      where a loss begins to compare rows
    loss_grouping  the loss is the same however its rows are grouped    start reading here
    row_mixing     what makes a row depend on others before the loss
    moved_states   what each micro-batch moves, and the next one reads
    own_backwards  gradients that are no shares of the whole batch's
    least_rows     the fewest rows for which a graph is right
    one_row        a model that asks for a single row computes the same of one
"""
