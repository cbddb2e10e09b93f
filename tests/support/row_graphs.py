"""Graphs of small models over rows of one tensor."""

import torch

from tests.support.staged import trace_model


def rows(*shape):
    """Batches of one tensor x [b, *shape]."""
    return lambda b: {"x": torch.arange(float(b * torch.Size(shape).numel())).view(b, *shape)}


def mean(outputs, batch):
    return outputs.mean()


def graph_of(model, inputs=None, loss=mean, **options):
    return trace_model(model, inputs or rows(4), loss, **options).graph


def node(graph, name):
    return graph.nodes[graph.index[name]]


def ops(graph):
    return [n.short for n in graph.nodes]


def ones(rows):
    return {"x": torch.ones(rows, 3)}
