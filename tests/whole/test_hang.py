"""What the proof refuses does hang or go wrong, and where its sentence says."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from autopipe.errors import ScheduleError
from autopipe.schedules.deadlock import check
from autopipe.schedules.generators import one_f_one_b
from autopipe.schedules.instructions import format_programs, parse_programs
from autopipe.schedules.registry import make
from autopipe.schedules.transfers import Edge, insert
from tests.support import hang_worker, warm
from tests.support.hang_worker import lanes


@dataclass(frozen=True)
class Case:
    """Programs, what the proof says of them, and what becomes of each rank that runs them.

    `how` their transfers queue is explained in `hang_worker.lanes`.
    """

    programs: str
    says: str | None
    becomes: tuple[str, ...]
    how: str = "apart"


def chain(stages: int) -> list[Edge]:
    return [Edge(stage, stage + 1, gradient=True) for stage in range(stages - 1)]


def without(programs: str, *instructions: str) -> str:
    return " ".join(word for word in programs.split(" ") if word not in instructions)


FINE = """
rank 0: 0POST_B0<1 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0WAIT_B0<1 0POST_B1<1 0FREE_F0>1 0B0 \
        0F2 0SEND_F2>1 0WAIT_B1<1 0POST_B2<1 0FREE_F1>1 0B1 \
        0WAIT_B2<1 0FREE_F2>1 0REDUCE 0B2 0STEP
rank 1: 1POST_F0<0 1WAIT_F0<0 1POST_F1<0 1F0 1B0 1SEND_B0>0 \
        1WAIT_F1<0 1POST_F2<0 1F1 1B1 1SEND_B1>0 \
        1WAIT_F2<0 1F2 1REDUCE 1B2 1FREE_B0>0 1SEND_B2>0 1FREE_B1>0 1FREE_B2>0 1STEP
"""
"""1F1B, a window of 1."""

V = format_programs(insert(make("zb-v", 2, 3, chunks=2), chain(4), [2] * 3))
SKIP = [*chain(3), Edge(0, 2, gradient=True)]

CASES = {
    # What the proof lets pass ends.
    "fine": Case(FINE, None, ("ended", "ended")),
    "fine_in_line": Case(FINE, None, ("ended", "ended"), "channel"),
    "fine_on_three": Case(
        format_programs(insert(one_f_one_b(3, 4), SKIP, [1, 2])), None, ("ended",) * 3
    ),
    "fine_in_a_v": Case(V, None, ("ended", "ended")),
    # Stage 1 waits for activation 1 before it sends the gradient that stage 0 wants before that.
    "waits_that_cross": Case(
        """
        rank 0: 0POST_B0<1 0POST_B1<1 0F0 0SEND_F0>1 0WAIT_B0<1 0FREE_F0>1 0B0 \
                0F1 0SEND_F1>1 0WAIT_B1<1 0FREE_F1>1 0B1
        rank 1: 1POST_F0<0 1POST_F1<0 1WAIT_F0<0 1F0 1WAIT_F1<0 1F1 \
                1B0 1SEND_B0>0 1B1 1SEND_B1>0 1FREE_B0>0 1FREE_B1>0
        """,
        "deadlock: "
        "rank 0 waits at 0WAIT_B0<1 for 1SEND_B0>0, which comes after 1WAIT_F1<0 of rank 1; "
        "rank 1 waits at 1WAIT_F1<0 for 0SEND_F1>1, which comes after 0WAIT_B0<1 of rank 0",
        ("0WAIT_B0<1", "1WAIT_F1<0"),
    ),
    # Window 0: receives are posted when they are needed, too late for sources that wait.
    "window_0": Case(
        """
        rank 0: 0F0 0SEND_F0>1 0FREE_F0>1 0F1 0SEND_F1>1 0FREE_F1>1 \
                0POST_B0<1 0WAIT_B0<1 0B0 0POST_B1<1 0WAIT_B1<1 0B1
        rank 1: 1POST_F0<0 1WAIT_F0<0 1F0 1B0 1SEND_B0>0 1FREE_B0>0 \
                1POST_F1<0 1WAIT_F1<0 1F1 1B1 1SEND_B1>0 1FREE_B1>0
        """,
        "deadlock: "
        "rank 0 waits at 0FREE_F1>1 for 1POST_F1<0, which comes after 1FREE_B0>0 of rank 1; "
        "rank 1 waits at 1FREE_B0>0 for 0POST_B0<1, which comes after 0FREE_F1>1 of rank 0",
        ("0FREE_F1>1", "1FREE_B0>0"),
    ),
    # The same program as `fine`, with one communicator for both directions.
    "one_lane": Case(
        FINE,
        "deadlock: "
        "rank 1 waits at 1WAIT_F0<0 for 0POST_B0<1, which is before 0SEND_F0>1 in a lane of rank 0"
        "; 0POST_B0<1 waits for 1SEND_B0>0, which comes after 1WAIT_F0<0 of rank 1",
        ("0WAIT_B0<1", "1WAIT_F0<0"),
        "pair",
    ),
    # A V has activations in both directions; a lane for each flow is not enough.
    "a_lane_for_each_flow": Case(
        """
        rank 0: 0F0 0F1 0SEND_F0>1 2F0 2SEND_F0>3 0FREE_F0>1 2FREE_F0>3
        rank 1: 3POST_F0<2 1POST_F0<0 1WAIT_F0<0 1F0 3WAIT_F0<2 3F0
        """,
        "deadlock: "
        "3POST_F0<2 waits for 0SEND_F0>1, which is before 2SEND_F0>3 in a lane of rank 0; "
        "0SEND_F0>1 waits for 3POST_F0<2, which is before 1POST_F0<0 in a lane of rank 1",
        ("0FREE_F0>1", "1WAIT_F0<0"),
        "flow",
    ),
    # 0 waits for 1, 1 for 2, and 2, through a skip connection, for 0.
    "around_three": Case(
        format_programs(
            insert(
                parse_programs("""
                    rank 0: 0F0 0B0 0F1 0B1
                    rank 1: 1F0 1B0 1F1 1B1
                    rank 2: 2F0 2F1 2B0 2B1
                """),
                [*chain(3), Edge(0, 2, gradient=False)],
                [2, 2],
            )
        ),
        "deadlock: "
        "rank 0 waits at 0WAIT_B0<1 for 1SEND_B0>0, which comes after 1WAIT_B0<2 of rank 1; "
        "rank 1 waits at 1WAIT_B0<2 for 2SEND_B0>1, which comes after 2WAIT_F1<0 of rank 2; "
        "rank 2 waits at 2WAIT_F1<0 for 0SEND_F1>2, which comes after 0WAIT_B0<1 of rank 0",
        ("0WAIT_B0<1", "1WAIT_B0<2", "2WAIT_F1<0"),
    ),
    "one_end": Case(
        without(FINE, "0SEND_F2>1", "0FREE_F2>1"),
        "1POST_F2<0 has no 0SEND_F2>1: a transfer needs both ends",
        ("0WAIT_B2<1", "1WAIT_F2<0"),
    ),
    # What is no deadlock and goes wrong. Stages 0 and 1 on one rank: the mailbox knows better than
    # to wait.
    "a_rank_that_waits_for_itself": Case(
        "rank 0: 1POST_F0<0 0F0 1WAIT_F0<0 0SEND_F0>1 0FREE_F0>1 1F0",
        "deadlock: rank 0 waits at 1WAIT_F0<0 for 0SEND_F0>1, which comes later on that rank",
        (
            "ScheduleError: receive of stage 0 -> stage 1, flow F, slot 0: waited for before its "
            "send was issued, which the same rank would have to do: it would wait for ever",
        ),
    ),
    "receives_swapped": Case(
        """
        rank 0: 0POST_B0<1 0POST_B1<1 0F0 0SEND_F0>1 0F1 0SEND_F1>1 \
                0WAIT_B0<1 0FREE_F0>1 0B0 0WAIT_B1<1 0FREE_F1>1 0B1
        rank 1: 1POST_F1<0 1POST_F0<0 1WAIT_F0<0 1F0 1B0 1SEND_B0>0 \
                1WAIT_F1<0 1F1 1B1 1SEND_B1>0 1FREE_B0>0 1FREE_B1>0
        """,
        "transfer 0 from stage 0 to stage 1 is 0SEND_F0>1 at the source and 1POST_F1<0 at the "
        "target: tensors would be swapped",
        ("0WAIT_B0<1", "ValueError: expected 0, found 1"),
    ),
    "a_send_that_is_never_over": Case(
        without(FINE, "1FREE_B2>0"),
        "rank 1: 1SEND_B2>0 needs 1FREE_B2>0 after it, which is missing",
        ("ended", "ended, and holds 1SEND_B2>0"),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases at once, forced to run: each waits in vain at the same time as the others."""
    made = tmp_path_factory.mktemp("hang")
    for name, case in CASES.items():
        (made / f"{name}.{case.how}").write_text(case.programs)
    assert warm.spawn(1, [hang_worker.__file__, str(made)]) == 0
    return made


@pytest.mark.parametrize("name", CASES)
def test_the_proof_says(name: str) -> None:
    case = CASES[name]
    programs = parse_programs(case.programs)
    if case.says is None:
        check(programs, lanes(case.how, programs))
        return
    with pytest.raises(ScheduleError) as error:
        check(programs, lanes(case.how, programs))
    assert error.value.message == case.says


@pytest.mark.parametrize("name", CASES)
def test_and_so_it_is(name: str, folder: Path) -> None:
    """Each rank is where the sentence has it, and stays there."""
    becomes = CASES[name].becomes
    found = tuple((folder / f"{name}.{rank}").read_text() for rank in range(len(becomes)))
    assert found == becomes


def test_the_sentence_names_where_each_rank_waits() -> None:
    """A cycle of ranks: of these the sentence has all. One through lanes has transfers as well."""
    for name in ("waits_that_cross", "window_0", "around_three"):
        case = CASES[name]
        for rank, instruction in enumerate(case.becomes):
            assert f"rank {rank} waits at {instruction} for " in str(case.says)
