"""A frozen parameter that somebody moves between two steps, or trains, is noticed."""

import pytest
import torch
from torch import nn

from autopipe.errors import ModelError
from autopipe.runtime.script.moved_frozen import MovedFrozen


class Taught(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(4, 4)
        self.teacher = nn.Linear(4, 4).requires_grad_(False)

    @torch.no_grad()
    def move(self) -> None:
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            old.lerp_(new, 0.5)


def test_a_teacher_that_is_moved_where_ranks_have_parts() -> None:
    """Bug: it was moved to the student's first weights, where another rank trains these."""
    model = Taught()
    watch = MovedFrozen([model], parts=True)
    model.move()
    watch.check()  # before the first step values are loaded
    watch.note()
    watch.check()
    model.move()
    with pytest.raises(ModelError, match=r"'teacher.weight' was written between two steps") as told:
        watch.check()
    assert "move it in forward" in str(told.value.hint)


def test_a_write_that_changes_nothing_yet() -> None:
    """Under ZeRO-3 the module's student stays what it was, and the teacher with it."""
    model = Taught()
    model.teacher.load_state_dict(model.student.state_dict())
    watch = MovedFrozen([model], parts=True)
    watch.note()
    model.move()
    with pytest.raises(ModelError, match="'teacher.weight' was written"):
        watch.check()


def test_whole_replicas_may_move_it_and_all_may_write_what_is_trained() -> None:
    model = Taught()
    whole, part = (MovedFrozen([model], parts=parts) for parts in (False, True))
    whole.note()
    model.move()
    whole.check()
    part.note()
    with torch.no_grad():
        model.student.weight.clamp_(-0.01, 0.01)
    part.check()


@pytest.mark.parametrize("parts", [False, True])
def test_what_is_trained_stays_so(parts: bool) -> None:
    """Bug: a backbone that a scheduler unfroze was trained by each replica for itself."""
    model = Taught()
    watch = MovedFrozen([model], parts=parts)
    model.teacher.requires_grad_(True)
    with pytest.raises(ModelError) as refused:
        watch.check()
    assert refused.value.message == (
        "the parameter 'teacher.weight' was frozen when the model was planned and is trained now: "
        "its requires_grad was set between two steps"
    )
    model.teacher.requires_grad_(False)
    watch.check()
    model.student.bias.requires_grad_(False)
    with pytest.raises(ModelError, match=r"'student.bias' was trained .* and is frozen now"):
        watch.check()


def test_a_ranks_own_parameter_that_is_frozen() -> None:
    """Bug: rows of it, as ZeRO has them, were trained on: the module's own was as it had been."""
    rows = nn.Parameter(torch.ones(2, 4))
    watch = MovedFrozen([Taught()], parts=True, trained={"student.weight": rows})
    watch.note()
    watch.check()
    rows.requires_grad_(False)
    with pytest.raises(ModelError, match="'student.weight' was trained when .* is frozen now"):
        watch.check()
