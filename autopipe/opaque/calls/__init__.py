"""A call of a model's module, method or lines  ->  what it is given, reads, writes and sets.

In: a model, and the place of a call in it. Out: the call's arguments and results as a tree, the
parameters and buffers that it may read, the attributes that it finds and sets; a method made of
some lines of another, whose calls are then calls like others; and a `with` block in which such
calls are handed to whoever asks.
Never found here: measured figures, ops, traces.

Other rooms use: `sites.Site`, `.SiteCall`, `.standing_in`, `.with_loss`, `trees.parts_of`,
`.whole_of`, `.to_text`, `.distinct_tensors`.

    sites           the call of a module, a method or the loss; standing in for it
    trees           arguments and results as trees with numbered places for tensors
    states          parameters and buffers that it may read and has written
    attributes      attributes that are set before it, and by it
    names_in_code   the names that the code of a method has in it
    sparse          sparse tensors, which only such calls may have
    outlined        lines of a method -> a method (`statements`: which lines can be moved)
"""
