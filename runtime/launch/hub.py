"""Elects the rank that died first, from what the guards of all ranks report.

A report on a rank is a cause, and one cause becomes the verdict. A cause that often follows from
another rank's death waits for reports of that death, which outrank it:

    what is seen of a rank                                   cause    outranked by  waits, seconds
    its process is gone, and has said no goodbye             died     -             0
    its process has been stopped (state T) for 5 s           frozen   -             0
    it reports the error that it has raised                  raised   -             0.5
    its guard's connection is closed, or silent for 10 s     lost     those above   0.5
    it has said goodbye, and another rank needs it           left     those above   0.5
    it reports a lost connection or a wait that was too long echo     those above   3
    its process is gone, after its launcher's SIGTERM        told     those above   3

A rank that waits long in a call of all ranks, while another one has not come, is no cause: rank 0's
guard says so.

The hub runs in rank 0's sidecar and imports neither torch nor the rest of autopipe.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from autopipe.runtime.launch.messages import Connection, Loop, Message

RANKS = {"died": 0, "frozen": 0, "raised": 0, "lost": 1, "left": 2, "echo": 3, "told": 4}
SETTLE = {"raised": 0.5, "lost": 0.5, "left": 0.5, "echo": 3.0, "told": 3.0}
VERBS = {
    "died": "died",
    "frozen": "froze",
    "lost": "was lost, last seen",
    "left": "left the run",
    "told": "was ended",
}

SPEAKS = ("raised", "echo")
"""Causes that leave their rank alive: it prints its own error and ends."""

BEAT = 0.5
"""Seconds between two signs of life of a sidecar."""

SILENT = 10.0
"""Seconds without a sign of life after which a connection counts as cut."""

LEAVE = 5.0
"""Seconds that a rank gets to print its error and end, before the others are ended."""

STRAY = 10.0
"""Seconds after one rank's goodbye in which another rank may still report that it is in a step: its
message may be late, or its machine may be busy with other processes."""

LATE = 10.0
"""Seconds that a rank waits for one which is elsewhere before that is said."""

GIVE_UP = 8.0
"""Seconds after which a sidecar ends although what it waits for has not happened."""


class Whereabouts(NamedTuple):
    """Where a rank is: `rank 2 (stage 1)`, `at step 7, forward of micro-batch 5`."""

    who: str
    where: str


class Cause(NamedTuple):
    """Why the run may have to end, seen at `time` by the hub's clock."""

    time: float
    kind: str
    rank: int
    place: Whereabouts
    why: str

    def __str__(self) -> str:
        """`rank 2 (stage 1) died at step 7, forward of micro-batch 5: killed (...)`."""
        return f"{self.place.who} {VERBS.get(self.kind, 'failed')} {self.place.where}: {self.why}"


def elect(causes: Sequence[Cause], now: float) -> Cause | None:
    """The cause of the run's end, or None as long as a cause that outranks it may come in.

    If several ranks raise the same error (no rank can read the plan), the lowest rank's cause wins.
    """
    if not any(now - cause.time >= SETTLE.get(cause.kind, 0.0) for cause in causes):
        return None
    first = min(causes, key=lambda cause: (RANKS[cause.kind], cause.time))
    alike = [c for c in causes if c.kind == first.kind == "raised" and c.why == first.why]
    return min(alike, key=lambda cause: cause.rank, default=first)


def unreachable(rank: int) -> str:
    """The reason for a lost rank whose guard was silent for `SILENT` seconds, in words."""
    return f"rank {rank}'s node cannot be reached (nothing heard for {SILENT:g} s)"


@dataclass
class Member:
    """What the hub knows of one rank; `rank` and `node` are -1 until its guard has said hello.

    Attributes:
        heard: when its guard has last sent something, by the hub's clock.
        bye: when the rank has said goodbye; None: it has not.
        signalled: whether its launcher has ended it.
        gone: whether its process is gone.
        lost: whether its guard is silent or gone.
        inside: whether it is in a call of all ranks.
        since: the loop's clock when that or its place last changed; 0: neither has.
    """

    connection: Connection
    heard: float
    rank: int = -1
    node: int = -1
    place: Whereabouts = Whereabouts("", "")
    bye: float | None = None
    signalled: bool = False
    gone: bool = False
    lost: bool = False
    inside: bool = False
    since: float = 0.0

    @property
    def here(self) -> bool:
        """Whether the rank is still part of the run, as far as the hub knows."""
        return self.rank >= 0 and self.bye is None and not (self.gone or self.lost)


@dataclass
class Hub:
    """Receives the guards' reports, elects the verdict and sends it to all guards.

    Args:
        size: the number of ranks.
        token: the word that a guard has to send first.
    """

    loop: Loop
    size: int
    token: str
    verdict: Cause | None = None
    _members: list[Member] = field(default_factory=list)
    _causes: list[Cause] = field(default_factory=list)
    _decided: float = 0.0
    _ended: float | None = None
    _beaten: float = 0.0
    _told_of: list[int] = field(default_factory=list)

    def listen(self, server: socket.socket) -> None:
        """Accept guards that connect to `server`; `join` explains how they say who they are."""
        server.setblocking(False)

        def accept() -> None:
            try:
                self.join(server.accept()[0])
            except OSError:
                pass  # the other end has closed already

        self.loop.watch(server, accept)

    def join(self, sock: socket.socket) -> None:
        """Listen to a connected guard; its first message has the token and the rank's number."""
        member = Member(Connection(sock, limit=1 << 16), self.loop.clock)
        self._members.append(member)
        self.loop.watch(sock, lambda: self._read(member))

    def turn(self) -> None:
        """Notice silent guards, give a sign of life, elect, end the run: what is due by now."""
        now = self.loop.clock
        for member in self._members:
            if member.here and now - member.heard > SILENT:
                self._lose(member, unreachable(member.rank))
        if now - self._beaten >= BEAT:
            self._beaten = now
            self._tell(beat=next((m.place for m in self._members if m.rank == 0), None))
        if self.verdict is None and self._peaceful():
            if self._complete():
                self._tell(bye=True)
        elif self.verdict is None:
            self.verdict, self._decided = elect(self._causes, now), now
            if self.verdict is not None:
                self._tell(**self._verdict_message(self.verdict))
            else:
                self._look_for_waiting(now)
        if self.verdict is not None and self._ended is None and self._may_end(self.verdict):
            self._ended = now
            self._tell(end=True)
        for member in self._members:
            member.connection.flush()

    def done(self) -> bool:
        """Whether no guard needs the hub any longer."""
        if self._ended is None:
            return self._complete() and self._peaceful()
        # Rank 0's guard runs in this process and closes nothing.
        alone = not any(m.connection.open for m in self._members if m.rank != 0 and not m.lost)
        return (self._complete() and alone) or self.loop.clock > self._ended + GIVE_UP

    def _complete(self) -> bool:
        """Whether every guard has connected; after `SILENT` s the missing ones never will."""
        return len(self._members) >= self.size or self.loop.clock > SILENT

    def _peaceful(self) -> bool:
        """Whether every rank has said goodbye, or was ended by its launcher."""
        return all(member.bye is not None or member.signalled for member in self._members)

    def _may_end(self, verdict: Cause) -> bool:
        """Whether the others may end: the verdict's rank has printed its error, or never will."""
        late = self.loop.clock - self._decided > LEAVE
        alive = any(m.here for m in self._members if m.rank == verdict.rank)
        return late or not alive or verdict.kind not in SPEAKS

    def _tell(self, **message: object) -> None:
        for member in self._members:
            if member.rank >= 0:
                member.connection.send(**message)

    def _verdict_message(self, verdict: Cause) -> Message:
        node = next(member.node for member in self._members if member.rank == verdict.rank)
        text, kind, rank = str(verdict), verdict.kind, verdict.rank
        return {"verdict": text, "kind": kind, "rank": rank, "node": node}

    def _read(self, member: Member) -> None:
        for message in member.connection.receive():
            member.heard = self.loop.clock
            self._hear(member, message)
        if member.connection.open:
            return
        self.loop.forget(member.connection.socket)
        member.connection.socket.close()
        if member.rank < 0:
            self._members.remove(member)
        elif member.here:
            self._lose(member, "it is gone, and its watchdog with it")

    def _hear(self, member: Member, message: Message) -> None:
        if member.rank < 0:
            if message.get("hello") != self.token:
                member.connection.open = False
                return
            member.rank, member.node = message["rank"], message["node"]
            member.connection.send(welcome=True)
            if self.verdict is not None:
                member.connection.send(**self._verdict_message(self.verdict))
            if self._ended is not None:
                member.connection.send(end=True)
        if "place" in message:
            place, inside = Whereabouts(*message["place"]), bool(message.get("inside"))
            if (place, inside) != (member.place, member.inside):
                member.since = self.loop.clock
            member.place, member.inside = place, inside
        if message.get("inside"):
            self._look_for_a_leaver(member, STRAY)
        if "cause" in message:
            member.signalled |= message["cause"] == "told"
            self._add(member, message["cause"], message["why"])
            if message["cause"] == "echo":
                self._look_for_a_leaver(member, 0.0)
        if "gone" in message:
            member.gone = True
        if "bye" in message:
            member.bye = self.loop.clock
            member.connection.send(bye=True)

    def _lose(self, member: Member, why: str) -> None:
        member.lost = True
        self._add(member, "lost", why)

    def _look_for_a_leaver(self, waiting: Member, seconds: float) -> None:
        """Report a rank that said goodbye at least so many seconds before `waiting` needed it."""
        for member in self._members:
            if member.bye is not None and self.loop.clock - member.bye >= seconds:
                place = waiting.place
                self._add(member, "left", f"it has ended, but {place.who} is {place.where}")
                return

    def _look_for_waiting(self, now: float) -> None:
        """Have rank 0's guard say, once, which rank waits in a call of all ranks, and for which."""
        long = [m for m in self._members if m.here and now - m.since >= LATE]
        waiting = [m for m in long if m.inside]
        late = sorted((m for m in long if not m.inside), key=lambda member: member.rank)
        if not waiting or not late:
            self._told_of = []
            return
        if self._told_of == [member.rank for member in late]:
            return
        self._told_of = [member.rank for member in late]
        first, whom = min(waiting, key=lambda member: member.rank).place, late[0].place
        others = f" and {len(late) - 1} more" if len(late) > 1 else ""
        text = f"{first.who} is {first.where} and has waited {LATE:g} s for {whom.who}{others}"
        for member in self._members:
            if member.rank == 0:
                member.connection.send(late=f"{text}, which is {whom.where}")

    def _add(self, member: Member, kind: str, why: str) -> None:
        self._causes.append(Cause(self.loop.clock, kind, member.rank, member.place, why))
