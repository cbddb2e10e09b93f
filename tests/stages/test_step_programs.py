"""From stages and their rehearsal to weights, edges and programs."""

from autopipe.schedules.generators import forward_only
from autopipe.schedules.instructions import Flow, Kind, holders
from autopipe.schedules.peak_memory import fullest_moment
from autopipe.schedules.transfers import Edge
from autopipe.stages import step_programs
from tests.support.inprocess import cut


def test_sizes_of_the_stages_of_a_unet():
    found = cut("unet", 3)
    boundaries = found.rehearsal.boundaries
    weighed = [step_programs.sizes(found.rehearsal, stage) for stage in found.stages]
    for stage, mine in zip(found.stages, weighed, strict=True):
        assert mine.kept == found.rehearsal.saved[stage.index]
        for (flow, peer), tensors in mine.leaving.items():
            assert weighed[peer].arriving[flow, stage.index] == tensors
            assert all(size == boundaries[ref].bytes for ref, size in tensors.items())
    assert (Flow.ACTIVATION, 2) in weighed[0].leaving, "the skip from the first stage to the last"


def test_edges_say_whether_gradients_come_back():
    found = cut("unet", 3)
    assert step_programs.edges(found.stages, found.rehearsal.boundaries) == (
        Edge(0, 1, gradient=True),
        Edge(0, 2, gradient=True),
        Edge(1, 2, gradient=True),
    )
    frozen = cut("frozen", 4)
    found = step_programs.edges(frozen.stages, frozen.rehearsal.boundaries)
    assert [edge.gradient for edge in found] == [False, True, True]


def test_programs_of_a_step_and_of_an_evaluation():
    found = cut("gpt", 2)
    step = found.programs("1f1b", 3)
    assert [sum(i.kind is Kind.BACKWARD for i in program) for program in step] == [3, 3]
    forwards, boundaries = forward_only((0, 1), 3), found.rehearsal.boundaries
    evaluation = step_programs.step_programs(forwards, found.stages, boundaries, [2])
    assert [sum(i.kind is Kind.BACKWARD for i in program) for program in evaluation] == [0, 0]
    assert [sum(i.kind is Kind.FORWARD for i in program) for program in evaluation] == [3, 3]


def test_stages_of_a_rank_are_full_together():
    """zb-v on two ranks: each of four stages has its part of its rank's fullest moment."""
    found = cut("gpt", 4, split=True)
    programs = found.programs("zb-v", 4, chunks=2)
    ranks = holders(programs)
    assert ranks == (0, 1, 1, 0)
    moments = step_programs.fullest_moments(programs, found.stages, found.rehearsal)
    for rank, program in enumerate(programs):
        own = [stage for stage in found.stages if ranks[stage.index] == rank]
        sizes = {stage.index: step_programs.sizes(found.rehearsal, stage) for stage in own}
        together = fullest_moment(program, sizes).held
        assert sum(moments[stage.index][0].total() for stage in own) == together.total()
        alone = [fullest_moment(program, {i: size}).held.total() for i, size in sizes.items()]
        assert max(alone) < together.total() <= sum(alone)


def test_sizes_of_split_backwards_have_what_lies_between_the_halves():
    whole, split = cut("gpt", 2), cut("gpt", 2, split=True)
    for stage in whole.stages:
        before, after = (step_programs.sizes(c.rehearsal, stage) for c in (whole, split))
        assert (before.stash, before.fresh) == (0, 0)
        rehearsed = split.rehearsal.stash[stage.index], split.rehearsal.fresh[stage.index]
        assert (after.stash, after.fresh) == rehearsed != (0, 0)
