"""The edges between stages that tests of schedules take."""

from autopipe.schedules.transfers import Edge


def chain(num_stages):
    return [Edge(stage, stage + 1, gradient=True) for stage in range(num_stages - 1)]
