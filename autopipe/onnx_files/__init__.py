"""An ONNX file  ->  a module of torch that computes, and trains, what the file says.

In: a `.onnx` file with its initializers. Out: an `nn.Module` whose parameters are the file's
floating-point initializers under their own names, and what a model file would define beside it.
Never found here: what a plan is; how torch traces the module (`tracing`).

Other rooms use: `source.as_module`. Users: `autopipe.from_onnx`, which is `module.from_onnx`.

    source       a file as a model file: model(), inputs(batch_size), a loss
    module       the nodes of a file, run one after another          start reading here
    read         the file, checked
    entries      its inputs, and names
    trained      which initializers training changes
    ties         weights that it holds more than once
    values       what passes between nodes: tensors, and sizes that are known as numbers
    ops          which function computes which op, and which attributes it reads
    control      If, Loop and Scan
    elementwise  ops on each entry, and reductions
    layers       products, convolutions, norms, attention, losses
    pictures     ops on pixels: resize, grid samples
    recurrent    RNN, LSTM and GRU
    sequences    ops on lists of tensors, as an exporter writes a split
    shapes       ops that compute with sizes, or move entries
"""
