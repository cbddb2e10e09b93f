"""Names of hosts: what resolves, what is waited for, and what is said of the rest."""

import socket

import pytest
from torch import distributed

from autopipe.errors import LaunchError
from autopipe.runtime.launch import address


def test_an_address_is_its_own() -> None:
    assert address.resolve("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a..b", "x" * 70, "with space"])
def test_a_name_without_an_address(name: str) -> None:
    """At once, and never this host in its stead."""
    with pytest.raises(LaunchError) as error:
        address.resolve(name)
    assert error.value.message.startswith(f"the host name {name!r} has no address: ")
    assert error.value.hint is not None and "every node can resolve" in error.value.hint


def test_a_name_that_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a headless service of Kubernetes do: it waits, and says so once."""
    monkeypatch.setattr(address, "PAUSE", 0.01)
    answers = iter([OSError("not yet"), OSError("not yet"), "10.0.0.1"])

    def look_up(name: str) -> str:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    said: list[str] = []
    assert address.resolve("train-0.train", 60.0, said.append, look_up) == "10.0.0.1"
    assert said == ["waiting up to 60 s for the host name 'train-0.train' to have an address"]


def test_a_name_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "PAUSE", 0.01)
    with pytest.raises(LaunchError, match="has no address after 0.05 s"):
        address.resolve("no-such-host.invalid", 0.05)


def test_the_interface_towards_a_host() -> None:
    if "lo" in [name for _, name in socket.if_nameindex()]:
        assert address.towards("127.0.0.1") == "lo"
    assert address.towards("no address") is None


def test_an_interface_that_is_none() -> None:
    """Bug: an "enforce fail" of gloo's, with --debug for a hint."""
    here = [name for _, name in socket.if_nameindex()]
    address.check_interfaces({})
    address.check_interfaces({"GLOO_SOCKET_IFNAME": ",".join(here)})
    with pytest.raises(LaunchError) as error:
        address.check_interfaces({"GLOO_SOCKET_IFNAME": f"{here[0]},none7"})
    assert error.value.message == (
        f"GLOO_SOCKET_IFNAME is '{here[0]},none7' in the environment, and this host has the "
        f"interfaces {', '.join(here)}"
    )


def test_a_port_where_somebody_listens() -> None:
    """Bug: a DistNetworkError with code 1, which is for what no user can mend."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LaunchError) as error, address.listening(port):
            distributed.TCPStore("127.0.0.1", port, 1, is_master=True)  # type: ignore[attr-defined]
    assert error.value.message.startswith(f"rank 0 cannot listen on port {port} of this host: ")
    with pytest.raises(RuntimeError, match="anything else"), address.listening(port):
        raise RuntimeError("anything else")
