"""Who gets wires: between real processes, with hosts that are made up and rights that are given up.

A rank says into a file of its own what it got (see `main`); `what_came` starts three and reads.
"""

import ctypes
import os
import sys
from pathlib import Path

import pytest
import torch

from autopipe.errors import LaunchError
from autopipe.runtime import links
from autopipe.runtime.connect import VARIABLE, transport_for
from autopipe.runtime.direct import DirectTransport
from autopipe.runtime.launch import spawn, start, world_from
from autopipe.runtime.links import Card, Host
from autopipe.runtime.transport import Transport
from autopipe.runtime.wires import CALLS
from tests.transport_stories import EDGES, RANKS, STAGES, STORIES

pytestmark = pytest.mark.skipif(CALLS is None, reason="takes Linux")

HERE = Host("a boot", 1, 2)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (HERE, HERE, True),
        (HERE, HERE._replace(boot="another"), False),
        (HERE, HERE._replace(pids=7), False),  # its processes have other numbers there
        (HERE, HERE._replace(network=7), False),  # what is between them is to be used
        (None, None, False),  # no such system calls
    ],
)
def test_one_host(one: Host | None, other: Host | None, expected: bool) -> None:
    assert Card(one, 1, b"").shares_host(Card(other, 2, b"")) is expected


def what_came(folder: Path, hosts: str, asked: str) -> list[str]:
    """What each rank says."""
    root = Path(__file__).parent.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(root))
        patch.setenv(VARIABLE, asked)
        assert spawn(RANKS, [hosts, str(folder)], command=(sys.executable, __file__)) == 0
    return [(folder / str(rank)).read_text() for rank in range(RANKS)]


def test_one_host_for_all(tmp_path: Path) -> None:
    assert what_came(tmp_path, "aaa", "") == [
        "direct to 1, 2",
        "direct to 0, 2",
        "direct to 0, 1",
    ]


def test_two_hosts(tmp_path: Path) -> None:
    """All stories go well over wires and gloo together."""
    assert what_came(tmp_path, "aab", "direct") == [
        "direct to 1, gloo",
        "direct to 0, gloo",
        "direct to nobody, gloo",
    ]


def test_a_host_each(tmp_path: Path) -> None:
    assert what_came(tmp_path, "abc", "") == ["gloo"] * 3


def test_a_host_each_though_direct_is_asked_for(tmp_path: Path) -> None:
    error = (
        "AUTOPIPE_TRANSPORT is 'direct', but no two ranks that exchange tensors share a host\n"
        "hint: unset AUTOPIPE_TRANSPORT: gloo does without"
    )
    assert what_came(tmp_path, "abc", "direct") == [error] * 3


def test_ranks_that_may_not_copy(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 1 is another user's: all go over gloo, and nothing is said."""
    assert what_came(tmp_path, "axa", "") == ["gloo"] * 3
    assert capfd.readouterr() == ("", "")


def test_ranks_that_may_not_copy_though_direct_is_asked_for(tmp_path: Path) -> None:
    found = what_came(tmp_path, "axa", "direct")
    assert found[0] == found[1] == found[2]
    assert "'direct', but rank" in found[0]
    assert "Operation not permitted, between its memory and that of rank" in found[0]


def test_a_stranger_who_calls() -> None:
    """The kernel says that the caller is none of the ranks; nobody else calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "PATIENCE", 0.05)
        card, listener = links.listen()
        assert listener is not None
        with links.socket.socket(links.socket.AF_UNIX) as stranger:
            stranger.connect(card.address)
            with pytest.raises(TimeoutError):
                links.make_wires(0, [card, card._replace(pid=1)], [1], listener)
            assert stranger.recv(1) == b""
        assert listener.fileno() == -1


def main(hosts: str, folder: Path) -> None:
    """Say what transport this rank has, after all stories have been told over it.

    Args:
        hosts: a letter for each rank; "x" is "a", for a rank that gives up its rights.
    """
    world = world_from(os.environ)
    assert world is not None
    own = hosts[world.rank]
    found = links.host()
    assert found is not None
    pretended = found._replace(boot="a" if own == "x" else own)
    links.host = lambda: pretended
    with (folder / str(world.rank)).open("w") as file, start(world, timeout=60):
        if own == "x":
            if os.getuid() == 0:
                os.setresuid(65534, 65534, 65534)
            ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE: not to be traced
        try:
            made = transport_for(torch.device("cpu"), [STAGES], EDGES, timeout=60)
        except LaunchError as error:
            file.write(str(error))
            return
        for story in STORIES:
            story(made, world.rank)
        file.write(words(made))
        made.close()


def words(transport: Transport) -> str:
    """What it consists of."""
    if not isinstance(transport, DirectTransport):
        return "gloo"
    lines = ", ".join(str(rank) for rank in sorted(transport._exchange.lines))
    return f"direct to {lines or 'nobody'}" + ", gloo" * (transport._far is not None)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
