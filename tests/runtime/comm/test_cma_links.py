"""Who gets wires: between real processes, with hosts that are made up and rights that are given up.

A rank says into files of its own what it got (see `main`); `what_came` starts three and reads.
"""

import ctypes
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from autopipe.errors import LaunchError
from autopipe.runtime.comm import cma_links
from autopipe.runtime.comm.choose import VARIABLE, transport_for
from autopipe.runtime.comm.cma import CALLS
from autopipe.runtime.comm.cma_links import Card, Host
from autopipe.runtime.comm.cma_transport import DirectTransport
from autopipe.runtime.comm.transport import Transport
from autopipe.runtime.launch.world import start, world_from
from tests.support import warm
from tests.support.transport_stories import EDGES, RANKS, STAGES, STORIES

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


class Scene(NamedTuple):
    """A letter for the host of each rank ("x": host a, without rights), and what is asked for."""

    hosts: str
    asked: str


def what_came(folder: Path, *scenes: Scene) -> dict[Scene, list[str]]:
    """What each rank says in each scene; the same three processes play all of them."""
    argv = [__file__, str(folder), *(word for scene in scenes for word in scene)]
    assert warm.spawn(RANKS, argv) == 0
    return {
        scene: [(folder / f"{number}.{rank}").read_text() for rank in range(RANKS)]
        for number, scene in enumerate(scenes)
    }


ONE = Scene("aaa", "")
TWO = Scene("aab", "direct")
EACH = Scene("abc", "")
EACH_DIRECT = Scene("abc", "direct")


@pytest.fixture(scope="module")
def came(tmp_path_factory: pytest.TempPathFactory) -> dict[Scene, list[str]]:
    return what_came(tmp_path_factory.mktemp("links"), ONE, TWO, EACH, EACH_DIRECT)


def test_one_host_for_all(came: dict[Scene, list[str]]) -> None:
    assert came[ONE] == ["direct to 1, 2", "direct to 0, 2", "direct to 0, 1"]


def test_two_hosts(came: dict[Scene, list[str]]) -> None:
    """All stories go well over wires and gloo together."""
    assert came[TWO] == ["direct to 1, gloo", "direct to 0, gloo", "direct to nobody, gloo"]


def test_a_host_each(came: dict[Scene, list[str]]) -> None:
    assert came[EACH] == ["gloo"] * 3


def test_a_host_each_though_direct_is_asked_for(came: dict[Scene, list[str]]) -> None:
    error = (
        "AUTOPIPE_TRANSPORT is 'direct', but no two ranks that exchange tensors share a host\n"
        "hint: unset AUTOPIPE_TRANSPORT: gloo does without"
    )
    assert came[EACH_DIRECT] == [error] * 3


def test_ranks_that_may_not_copy(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 1 is another user's: all go over gloo in silence, unless direct is asked for."""
    silent, direct = Scene("axa", ""), Scene("axa", "direct")
    found = what_came(tmp_path, silent, direct)
    assert capfd.readouterr() == ("", "")
    assert found[silent] == ["gloo"] * 3
    refused, *others = found[direct]
    assert others == [refused] * 2
    assert "'direct', but rank" in refused
    assert "Operation not permitted, between its memory and that of rank" in refused


def test_a_stranger_who_calls() -> None:
    """The kernel says that the caller is none of the ranks; nobody else calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cma_links, "PATIENCE", 0.05)
        card, listener = cma_links.listen()
        assert listener is not None
        with cma_links.socket.socket(cma_links.socket.AF_UNIX) as stranger:
            stranger.connect(card.address)
            with pytest.raises(TimeoutError):
                cma_links.make_wires(0, [card, card._replace(pid=1)], [1], listener)
            assert stranger.recv(1) == b""
        assert listener.fileno() == -1


def test_a_rank_that_may_open_no_socket_has_a_card_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It raised, and the others waited for its card."""

    def refused(*_: object) -> None:
        raise PermissionError("a sandbox")

    monkeypatch.setattr(cma_links.socket.socket, "bind", refused)
    assert cma_links.listen() == (Card(None, 0, b""), None)


def main(folder: Path, scenes: list[Scene]) -> None:
    """Say what transport this rank has in each scene, after all stories were told over it.

    Rights that are given up do not come back: scenes with an "x" have to be the last.
    """
    world = world_from(os.environ)
    assert world is not None
    found = cma_links.host()
    assert found is not None
    with ExitStack() as open_until_end, start(world, timeout=60):
        names = [folder / f"{number}.{world.rank}" for number in range(len(scenes))]
        files = [open_until_end.enter_context(name.open("w")) for name in names]
        for scene, file in zip(scenes, files, strict=True):
            own = scene.hosts[world.rank]
            pretended = found._replace(boot="a" if own == "x" else own)
            cma_links.host = lambda pretended=pretended: pretended
            os.environ[VARIABLE] = scene.asked
            if own == "x":
                give_up_rights()
            file.write(what_is_made(world.rank))


def give_up_rights() -> None:
    """No longer root, and not to be traced."""
    if os.getuid() == 0:
        os.setresuid(65534, 65534, 65534)
    ctypes.CDLL(None).prctl(4, 0)  # PR_SET_DUMPABLE


def what_is_made(rank: int) -> str:
    """The transport in words, or why there is none."""
    try:
        made = transport_for(torch.device("cpu"), [STAGES], EDGES, timeout=60)
    except LaunchError as error:
        return str(error)
    for story in STORIES:
        story(made, rank)
    said = words(made)
    made.close()
    return said


def words(transport: Transport) -> str:
    """What it consists of."""
    if not isinstance(transport, DirectTransport):
        return "gloo"
    lines = ", ".join(str(rank) for rank in sorted(transport._exchange.lines))
    return f"direct to {lines or 'nobody'}" + ", gloo" * (transport._far is not None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [*map(Scene, sys.argv[2::2], sys.argv[3::2])])
