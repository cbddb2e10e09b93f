"""The process beside each rank: watches it from outside, and ends it when the run is over.

    rank 0     rank 1     rank 2     rank 3      train; each writes where it is into shared memory
      |          |          |          |
    guard 0    guard 1    guard 2    guard 3     each in a sidecar process, without torch and GIL
      |__________|___ hub ___|_________|         in rank 0's sidecar (`launch.hub`); over TCP

The hub elects the rank that died first and tells every guard: the verdict. On each node one guard
prints it, unless that rank is on the node and prints its own error. Once that rank has printed it
and ended (at once, if it died), the hub says `end`: each rank may now end by itself, or is ended:

    what the guard hears or sees       what it does
    verdict                            tells its rank, prints
    end                                0.5 s later SIGTERM, 1 s after that SIGKILL
    the hub is gone, silent for 10 s   verdict: rank 0 was lost; end
    goodbye of its rank                passes it on and ends; rank 0's guard ends after the others
    its rank is gone after `end`       ends

A rank in a long C++ call, a compilation or an import counts as alive: ranks owe no signs of life.
Sidecars do, and a rank counts as frozen only if its process is stopped (SIGSTOP).

A sidecar is in its rank's process group, so a launcher that kills the group ends the sidecar too. A
sidecar that gets SIGTERM notes that the launcher has ended the rank. It ignores SIGUSR1 and
SIGUSR2, which are for ranks: Slurm sends them to the whole group (`launch.asked`).

This module imports neither torch nor the rest of autopipe, so a sidecar starts in 30 ms and takes
12 MB.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
from dataclasses import dataclass, field

from autopipe.runtime.launch.hub import (
    BEAT,
    GIVE_UP,
    SILENT,
    SPEAKS,
    Cause,
    Hub,
    Whereabouts,
    unreachable,
)
from autopipe.runtime.launch.messages import Connection, Loop, Message

FROZEN = 5.0
"""Seconds that a process may be stopped before it counts as frozen."""

ASK = 0.5
"""Seconds from the hub's `end` to SIGTERM, for ranks that do not end by themselves."""

KILL = 1.5
"""Seconds from the hub's `end` to SIGKILL."""

_LATE_HINT = (
    "hint: pipe.step, evaluate, save, state_dict ... are calls of all ranks. Does one load its "
    "batch or its model, or do something under `if rank == 0:`? This one waits on"
)

MEMORY = 24
"""Bytes of the three int64 numbers that a rank writes and its sidecar reads."""

OUTSIDE, INSIDE, AFTER = range(3)
"""Where a rank is: in no step, or in one that an exception has ended; in a step; after a step."""


@dataclass
class Guard:
    """Watches one rank, reports to the hub, and ends the rank when the hub says so.

    Args:
        loop: calls the guard when a connection has something to read.
        rank, node: the rank's number, and that of its node.
        pid: the rank's process id.
        process: the rank's pidfd; unlike a pid it never refers to a later process.
        memory: three numbers that the rank writes: the step plus one; one plus the position of its
            instruction in all programs that it has reported; OUTSIDE, INSIDE or AFTER. 0 as one of
            the first two stands for no step and no instruction.
        control: the connection to the rank.
        hub: the connection to the hub.
        token: the word by which the hub knows the run's guards.
        local_rank: the rank's number on its node; the node's first guard prints the verdict.
        hub_node, hub_local_rank: the number of rank 0's node, and its own on that node.
    """

    loop: Loop
    rank: int
    node: int
    pid: int
    process: int
    memory: memoryview
    control: Connection
    hub: Connection
    token: str
    local_rank: int
    hub_node: int
    hub_local_rank: int
    _program: list[tuple[int, str]] = field(default_factory=list)
    _master: Whereabouts = Whereabouts("rank 0", "before its first step")
    _alive: bool = True
    _signalled: bool = False
    _bye: bool = False
    _acknowledged: bool = False
    _reported: bool = False
    _verdict: Message | None = None
    _ended: float | None = None
    _stopped: float | None = None
    _sent: int = 0
    _gone: float = 0.0
    _heard: float = 0.0
    _beaten: float = 0.0

    def __post_init__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        self.loop.watch(self.process, self._see_the_end)
        self.loop.watch(self.control.socket, self._read_control)
        self.loop.watch(self.hub.socket, self._read_hub)
        self._heard = self.loop.clock
        self.hub.send(hello=self.token, rank=self.rank, node=self.node, place=self.place())

    def place(self) -> Whereabouts:
        """Where the rank is, according to the numbers that it wrote last."""
        step, index, state = self.memory[0] - 1, self.memory[1] - 1, self.memory[2]
        if step >= 0 and 0 <= index < len(self._program):
            stage, words = self._program[index]
            return Whereabouts(f"rank {self.rank} (stage {stage})", f"at step {step}, {words}")
        stages = sorted({stage for stage, _ in self._program})
        which = f" (stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))})"
        where = f"after step {step}" if state == AFTER else f"at step {step}"
        return Whereabouts(
            f"rank {self.rank}{which if stages else ''}",
            where if step >= 0 else "before its first step",
        )

    def turn(self) -> None:
        """Look for a stopped rank, give a sign of life, end the rank: what is due by the clock."""
        now = self.loop.clock
        if self._alive and not self._reported:
            self._look_for_a_stop(now)
        if now - self._beaten >= BEAT:
            self._beaten = now
            self.hub.send(place=self.place(), inside=self.memory[2] == INSIDE)
        if self.hub.open and now - self._heard > SILENT:
            self._conclude(unreachable(0))
        if self._alive and self._ended is not None:
            self._end_the_rank(now - self._ended)
        self.hub.flush()
        self.control.flush()

    def done(self) -> bool:
        """Whether the rank has ended or said goodbye, and the hub knows it or cannot be told."""
        now = self.loop.clock
        if self._ended is not None:
            return not self._alive or now > self._ended + GIVE_UP
        if self._acknowledged or not self.hub.open:
            return self._bye or not self._alive
        return not self._alive and now > self._gone + GIVE_UP

    def _note(self, number: int, _: object) -> None:
        self._signalled = True

    def _look_for_a_stop(self, now: float) -> None:
        if _state(self.pid)[:1] != ["T"]:
            self._stopped = None
        elif self._stopped is None:
            self._stopped = now
        elif now - self._stopped >= FROZEN:
            self._report("frozen", f"stopped for {FROZEN:g} s (SIGSTOP)")

    def _report(self, cause: str, why: str) -> None:
        self._reported = True
        self.hub.send(cause=cause, why=why, place=self.place())

    def _see_the_end(self) -> None:
        self.loop.forget(self.process)
        if self.control.open:
            self._read_control()  # the rank's last messages come before its end
        self._alive, self._gone = False, self.loop.clock
        if not (self._bye or self._reported):
            if self._signalled or self._verdict is not None:
                self._report("told", "by SIGTERM")
            else:
                self._report("died", f"{_manner(self.pid)} (its process is gone)")
        self.hub.send(gone=True)

    def _read_control(self) -> None:
        for message in self.control.receive():
            if "learn" in message:
                self._program += message["learn"]
            if "cause" in message:
                self._report(message["cause"], message["why"])
            if "bye" in message:
                self._bye = True
                self.hub.send(bye=True, place=self.place())
        if not self.control.open:
            self.loop.forget(self.control.socket)

    def _read_hub(self) -> None:
        for message in self.hub.receive():
            self._heard = self.loop.clock
            if "welcome" in message:
                self.control.send(welcome=True)
            if message.get("beat") is not None:
                self._master = Whereabouts(*message["beat"])
            if "late" in message:
                say(f"{message['late']}\n{_LATE_HINT}")
            if "bye" in message:
                self._acknowledged = True
            if "verdict" in message:
                self._learn(message)
            if "end" in message:
                self._end()
        if not self.hub.open:
            self.loop.forget(self.hub.socket)
            self._conclude("its watchdog is gone")

    def _learn(self, verdict: Message) -> None:
        if self._verdict is not None:
            return
        self._verdict = verdict
        self.control.send(verdict=verdict["verdict"], rank=verdict["rank"])
        speaks = verdict["kind"] in SPEAKS and verdict["node"] == self.node
        # If rank 0 is lost, so is its guard: if that is its node's first, the second one prints.
        lost = verdict["kind"] == "lost" and verdict["rank"] == 0
        first = int(lost and self.node == self.hub_node and self.hub_local_rank == 0)
        if self.local_rank == first and not speaks:
            say(f"error: {verdict['verdict']}")

    def _end(self) -> None:
        if self._ended is None:
            self._ended = self.loop.clock
            self.control.send(end=True)

    def _conclude(self, why: str) -> None:
        """Decide without the hub that rank 0 was lost, unless this rank has left the run."""
        if self._acknowledged or not self._alive:
            return
        text = str(Cause(self.loop.clock, "lost", 0, self._master, why))
        self._learn({"verdict": text, "kind": "lost", "rank": 0, "node": self.hub_node})
        self._end()

    def _end_the_rank(self, seconds: float) -> None:
        frozen = self._verdict is not None and self._verdict["kind"] == "frozen"
        if seconds >= KILL or (frozen and _state(self.pid)[:1] == ["T"]):
            number = signal.SIGKILL  # a stopped process acts on other signals only when continued
        elif seconds >= ASK:
            number = signal.SIGTERM
        else:
            return
        if number == self._sent:
            return
        self._sent = number
        try:
            signal.pidfd_send_signal(self.process, number)
        except ProcessLookupError:
            pass  # it has just ended


def _state(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third, the state, on; none if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _manner(pid: int) -> str:
    """How a process has ended: `exited with code 1`, `killed by SIGSEGV`.

    "killed" stands for SIGKILL, and for an end that cannot be seen as the parent has reaped it.
    """
    state = _state(pid)
    status = int(state[-1]) if state[:1] == ["Z"] else int(signal.SIGKILL)
    if os.WIFEXITED(status):
        return f"exited with code {os.WEXITSTATUS(status)}"
    number = os.WTERMSIG(status)
    return "killed" if number == signal.SIGKILL else f"killed by {signal.Signals(number).name}"


def say(line: str) -> None:
    """Print a line on stderr, in one write."""
    try:
        os.write(2, f"{line}\n".encode())
    except OSError:
        pass  # stderr is closed


def main(config: Message) -> None:
    """Run a sidecar until its guard and, in rank 0's sidecar, the hub are done.

    Args:
        config: as `runtime.launch.watchdog.watch` writes it; files stand as their descriptors.
    """
    loop, hub = Loop(), None
    if "listener" in config:
        hub = Hub(loop, config["size"], config["token"])
        hub.listen(socket.socket(fileno=config["listener"]))
        hub_end, to_hub = socket.socketpair()
        hub.join(hub_end)
    else:
        host, port = config["host"], config["port"]
        try:
            to_hub = socket.create_connection((host, port), timeout=SILENT)
        except OSError as error:
            say(
                f"warning: rank {config['rank']} runs without a watchdog: "
                f"rank 0's does not answer at {host} port {port}: {error}"
            )
            return
    guard = Guard(
        loop=loop,
        rank=config["rank"],
        node=config["node"],
        pid=config["pid"],
        process=config["process"],
        memory=memoryview(mmap.mmap(config["memory"], MEMORY)).cast("q"),
        control=Connection(socket.socket(fileno=config["control"])),
        hub=Connection(to_hub),
        token=config["token"],
        local_rank=config["local_rank"],
        hub_node=config["hub_node"],
        hub_local_rank=config["hub_local_rank"],
    )
    while not (guard.done() and (hub is None or hub.done())):
        loop.turn()
        guard.turn()
        if hub is not None:
            hub.turn()
