"""From stages and their rehearsal to weights, edges and programs."""

from autopipe import assemble
from autopipe.schedule import Flow, Kind
from autopipe.transfers import Edge
from tests.inprocess import cut


def test_sizes_of_the_stages_of_a_unet():
    found = cut("unet", 3)
    boundaries = found.rehearsal.boundaries
    weighed = [
        assemble.sizes(stage, boundaries, kept)
        for stage, kept in zip(found.stages, found.rehearsal.saved, strict=True)
    ]
    for stage, mine in zip(found.stages, weighed, strict=True):
        assert mine.kept == found.rehearsal.saved[stage.index]
        for (flow, peer), tensors in mine.leaving.items():
            assert weighed[peer].arriving[flow, stage.index] == tensors
            assert all(size == boundaries[ref].bytes for ref, size in tensors.items())
    assert (Flow.ACTIVATION, 2) in weighed[0].leaving, "the skip from the first stage to the last"


def test_edges_say_whether_gradients_come_back():
    found = cut("unet", 3)
    assert assemble.edges(found.stages, found.rehearsal.boundaries) == (
        Edge(0, 1, gradient=True),
        Edge(0, 2, gradient=True),
        Edge(1, 2, gradient=True),
    )
    frozen = cut("frozen", 4)
    found = assemble.edges(frozen.stages, frozen.rehearsal.boundaries)
    assert [edge.gradient for edge in found] == [False, True, True]


def test_programs_of_a_step_and_of_an_evaluation():
    found = cut("gpt", 2)
    step = found.programs("1f1b", 3)
    assert [sum(i.kind is Kind.BACKWARD for i in program) for program in step] == [3, 3]
    evaluation = assemble.evaluation_programs(found.stages, found.rehearsal.boundaries, 3, [2])
    assert [sum(i.kind is Kind.BACKWARD for i in program) for program in evaluation] == [0, 0]
    assert [sum(i.kind is Kind.FORWARD for i in program) for program in evaluation] == [3, 3]
