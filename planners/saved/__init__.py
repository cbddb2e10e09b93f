"""A graph, rows  ->  what its stages keep for backward: storages, their bytes, who reads them.

In: a graph in which equal blocks stand once or a few times (`ir.repeats.Short`), a number of rows,
whether stages run compiled. Out: storages and bytes by units, and the levels of blocks: ways to
keep less and run ops again. Tensors here have no memory. Never found here: seconds of a device,
searches.

Other rooms use: `saved_tensors.Saving`, `observe.observe_saved`, `block_levels.levels_of`.

    watched_run      a run of the graph that notes what is made, and what is saved
    observe          what one number of rows keeps
    other_rows       joint graphs of numbers of rows that were not run
    saved_tensors    what each number of rows keeps                 start reading here
    between_halves   what is kept between the halves of a backward that is split
    block_levels     the levels of all blocks of the whole graph
"""
