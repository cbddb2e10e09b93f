"""What a rank holds as sums of sizes: the walk's own bytes at any sizes."""

import random

import pytest

from autopipe.planfile import programs
from autopipe.scaling.moments import OWN, Numbering, moments
from autopipe.schedules.instructions import holders
from autopipe.schedules.peak_memory import fullest_moment
from tests.support.plans import chain


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 1), (3, 5)])
def test_the_largest_moment_is_the_walks_fullest(stages: int, micro_batches: int) -> None:
    plan = chain(stages, micro_batches)
    numbering, step = Numbering.of(plan), programs.step(plan)
    random.seed(0)
    for rank, program in enumerate(step):
        own = [stage for stage, held_by in enumerate(holders(step)) if held_by == rank]
        found = moments(plan, program, own, numbering, set())
        for _ in range(5):
            values = [random.randrange(1, 100) for _ in range(OWN * stages)]
            values += [random.randrange(1, 100) for _ in numbering.tensors]
            sizes = {stage: numbering.sizes(plan, stage, values) for stage in own}
            held = [
                sum(values[number] * times for form in moment.values() for number, times in form)
                for moment in found
            ]
            assert max(held) == fullest_moment(program, sizes).held.total()
