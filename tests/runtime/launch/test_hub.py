"""The election, case by case, and the hub as its members see it; the clock is set by hand."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from autopipe.runtime.launch import hub
from autopipe.runtime.launch.hub import Cause, Hub, Whereabouts, elect
from autopipe.runtime.launch.messages import Connection, Loop, Message

HERE = Whereabouts("rank 1 (stage 1)", "at step 7, forward of micro-batch 5")


def cause(time: float, kind: str, rank: int, why: str = "") -> Cause:
    return Cause(time, kind, rank, HERE, why)


# --- the election


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("died", "died at step 7, forward of micro-batch 5: so"),
        ("frozen", "froze at step 7, forward of micro-batch 5: so"),
        ("raised", "failed at step 7, forward of micro-batch 5: so"),
        ("echo", "failed at step 7, forward of micro-batch 5: so"),
        ("lost", "was lost, last seen at step 7, forward of micro-batch 5: so"),
        ("left", "left the run at step 7, forward of micro-batch 5: so"),
        ("told", "was ended at step 7, forward of micro-batch 5: so"),
    ],
)
def test_the_sentence(kind: str, sentence: str) -> None:
    assert str(cause(0, kind, 1, "so")) == f"rank 1 (stage 1) {sentence}"


def winner(now: float, *causes: Cause) -> int | None:
    elected = elect(causes, now)
    return None if elected is None else elected.rank


def test_no_cause_no_verdict() -> None:
    assert winner(100) is None


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        *[("died", 0), ("frozen", 0), ("raised", 0.5), ("lost", 0.5), ("left", 0.5)],
        *[("echo", 3), ("told", 3)],
    ],
)
def test_how_long_a_cause_waits_for_a_better_one(kind: str, seconds: float) -> None:
    assert winner(10 + seconds, cause(10, kind, 4)) == 4
    if seconds:
        assert winner(9.9 + seconds, cause(10, kind, 4)) is None


def test_the_first_one_counts() -> None:
    assert winner(10.2, cause(10.1, "died", 0), cause(10, "died", 3)) == 3
    # It said what it raised; what killed it meanwhile is none of the cause.
    assert winner(10.4, cause(10, "raised", 3), cause(10.4, "died", 0)) == 3


def test_a_consequence_gives_way_to_its_cause() -> None:
    assert winner(12, cause(10, "echo", 0), cause(12, "died", 3)) == 3
    assert winner(12, cause(10, "told", 0), cause(11, "lost", 3)) == 3
    assert winner(12, cause(10, "lost", 0), cause(12, "died", 3)) == 3
    assert winner(12, cause(10, "echo", 0), cause(11, "left", 3)) == 3
    assert winner(12, cause(11, "left", 0), cause(12, "raised", 3)) == 3


def test_what_several_raise_alike_the_lowest_says() -> None:
    alike = [cause(10 + rank % 2, "raised", rank, "PlanError") for rank in (3, 2, 5)]
    assert winner(12, *alike) == 2
    assert winner(12, cause(9, "raised", 4, "OSError"), *alike) == 4


# --- the hub


@pytest.fixture(autouse=True)
def closes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test need not close its sockets."""
    real, made = socket.socketpair, contextlib.ExitStack()

    def socketpair() -> tuple[socket.socket, socket.socket]:
        one, two = real()
        return made.enter_context(one), made.enter_context(two)

    monkeypatch.setattr(socket, "socketpair", socketpair)
    with made:
        yield


class Member:
    """One end of a connection to a hub."""

    def __init__(self, of: Hub, token: str = "token", rank: int | None = None) -> None:
        own, others = socket.socketpair()
        self.connection = Connection(own)
        of.join(others)
        if rank is not None:
            place = Whereabouts(f"rank {rank}", "at step 7")
            self.connection.send(hello=token, rank=rank, node=rank // 2, place=place)

    def heard(self) -> list[Message]:
        """All that the hub has said since, its signs of life left out."""
        return [message for message in self.connection.receive() if "beat" not in message]


@pytest.fixture
def run() -> tuple[Hub, list[Member]]:
    """A hub, and three ranks that have come in."""
    made = Hub(Loop(), 3, "token")
    members = [Member(made, rank=rank) for rank in range(3)]
    turn(made, 0)
    assert [member.heard() for member in members] == [[{"welcome": True}]] * 3
    return made, members


def turn(of: Hub, seconds: float) -> None:
    """What there is to read is read, and so many seconds later it is the hub's turn."""
    before = of.loop.clock
    of.loop.turn()
    of.loop.clock = before + seconds
    of.turn()


def verdict(rank: int, kind: str, text: str) -> Message:
    return {"verdict": text, "kind": kind, "rank": rank, "node": rank // 2}


def test_a_death_is_told_to_all(run: tuple[Hub, list[Member]]) -> None:
    made, members = run
    members[2].connection.send(cause="died", why="killed", place=HERE)
    turn(made, 0)
    text = "rank 1 (stage 1) died at step 7, forward of micro-batch 5: killed"
    assert [m.heard() for m in members] == [[verdict(2, "died", text), {"end": True}]] * 3
    assert not made.done()
    for member in members[1:]:  # rank 0's own guard is part of the hub's process
        member.connection.socket.close()
    turn(made, 0)
    turn(made, 0)
    assert made.done()


@pytest.mark.parametrize("leaves", [True, False])
def test_who_has_raised_is_given_time_to_say_so(
    leaves: bool, run: tuple[Hub, list[Member]]
) -> None:
    made, members = run
    members[2].connection.send(cause="raised", why="OSError")
    turn(made, 0.4)
    assert members[0].heard() == []
    turn(made, 0.2)
    assert members[0].heard() == [verdict(2, "raised", "rank 2 failed at step 7: OSError")]
    if leaves:
        members[2].connection.send(gone=True)
        turn(made, 0.1)
    else:
        turn(made, hub.LEAVE)
        assert members[0].heard() == []
        members[0].connection.send(place=HERE)
        turn(made, 0.1)
    assert members[0].heard() == [{"end": True}]


def test_who_comes_late_is_told(run: tuple[Hub, list[Member]]) -> None:
    made, members = run
    members[1].connection.send(cause="died", why="killed")
    turn(made, 0)
    late = Member(made, rank=3)
    turn(made, 0)
    expected = verdict(1, "died", "rank 1 died at step 7: killed")
    assert late.heard() == [{"welcome": True}, expected, {"end": True}]


def test_silence(run: tuple[Hub, list[Member]]) -> None:
    made, members = run
    turn(made, hub.SILENT - 1)
    for member in members[:2]:
        member.connection.send(place=HERE)
    turn(made, 0)
    turn(made, 1.5)
    turn(made, 0.5)
    why = "rank 2's node cannot be reached (nothing heard for 10 s)"
    text = f"rank 2 was lost, last seen at step 7: {why}"
    assert members[0].heard() == [verdict(2, "lost", text), {"end": True}]


def test_a_connection_that_closes_without_a_goodbye(run: tuple[Hub, list[Member]]) -> None:
    made, members = run
    members[1].connection.socket.close()
    turn(made, 0)
    turn(made, 0.5)
    text = "rank 1 was lost, last seen at step 7: it is gone, and its watchdog with it"
    assert members[0].heard() == [verdict(1, "lost", text), {"end": True}]


def test_goodbyes(run: tuple[Hub, list[Member]]) -> None:
    """Each is answered, and the last one ends the hub."""
    made, members = run
    for member in members:
        assert not made.done()
        member.connection.send(bye=True)
        turn(made, 0)
        assert {"bye": True} in member.heard()
        member.connection.socket.close()
    turn(made, 0)
    assert made.done() and made.verdict is None


def test_who_has_left_is_missed_in_the_next_step(run: tuple[Hub, list[Member]]) -> None:
    """A step needs every rank; what is heard of one right after a goodbye may be old, however."""
    made, members = run
    members[2].connection.send(bye=True)
    turn(made, 0)
    for seconds in (hub.STRAY / 2, hub.STRAY / 2):
        for member in members[:2]:
            member.connection.send(place=HERE, inside=True)
        turn(made, seconds)
    assert made.verdict is None
    members[0].connection.send(place=HERE, inside=False)  # it saves what it has learnt
    turn(made, 1)
    assert made.verdict is None
    members[1].connection.send(place=HERE, inside=True)
    turn(made, 0.5)
    where = "at step 7, forward of micro-batch 5"
    text = f"rank 2 left the run at step 7: it has ended, but rank 1 (stage 1) is {where}"
    assert members[0].heard() == [verdict(2, "left", text), {"end": True}]


def test_who_waits_for_another_is_told(run: tuple[Hub, list[Member]]) -> None:
    """By rank 0's guard, once, also where it waits itself; ranks that compute wait for nobody."""
    made, members = run
    door, after = Whereabouts("rank 0", "at step 8"), Whereabouts("rank 2", "after step 7")
    told = []
    for number in range(12):
        for member in members[:2]:
            member.connection.send(place=door, inside=True)
        members[2].connection.send(place=after, inside=False)
        turn(made, hub.LATE / 8)
        told += [number for one in members[0].heard() if "late" in one]
    assert told == [7] and not members[1].heard() + members[2].heard()
    for _ in range(9):  # it has come
        for member in members:
            member.connection.send(place=door, inside=True)
        turn(made, hub.LATE / 8)
    assert not members[0].heard() and made.verdict is None
    for _ in range(9):
        members[0].connection.send(place=Whereabouts("rank 0", "after step 8"), inside=False)
        for member in members[1:]:
            member.connection.send(place=Whereabouts("rank 1", "at step 9"), inside=True)
        turn(made, hub.LATE / 8)
    text = "rank 1 is at step 9 and has waited 10 s for rank 0, which is after step 8"
    assert members[0].heard() == [{"late": text}]


def test_who_has_left_is_why_a_connection_is_closed(run: tuple[Hub, list[Member]]) -> None:
    made, members = run
    members[2].connection.send(bye=True)
    turn(made, 0)
    members[1].connection.send(cause="echo", why="Connection closed by peer")
    turn(made, 0.5)
    text = "rank 2 left the run at step 7: it has ended, but rank 1 is at step 7"
    assert members[0].heard() == [verdict(2, "left", text), {"end": True}]


def test_all_are_told_to_end(run: tuple[Hub, list[Member]]) -> None:
    made, members = run
    for member in members:
        member.connection.send(cause="told", why="by SIGTERM")
    turn(made, 0)
    assert [member.heard() for member in members] == [[{"bye": True}]] * 3
    assert made.done() and made.verdict is None


def test_one_is_told_to_end_and_the_others_are_not(run: tuple[Hub, list[Member]]) -> None:
    made, members = run
    members[1].connection.send(cause="told", why="by SIGTERM")
    turn(made, 0)
    turn(made, 3)
    text = "rank 1 was ended at step 7: by SIGTERM"
    assert members[0].heard() == [verdict(1, "told", text), {"end": True}]


@pytest.mark.parametrize("hello", [{"hello": "guess", "rank": 1, "node": 0}, {"bye": True}])
def test_strangers_are_shown_out(hello: Message, run: tuple[Hub, list[Member]]) -> None:
    made, members = run
    stranger = Member(made)
    stranger.connection.send(**hello)
    turn(made, 0)
    assert stranger.heard() == [] and not stranger.connection.open
    turn(made, 1)
    assert made.verdict is None and members[0].heard() == []
