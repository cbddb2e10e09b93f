"""Slurm's short forms of nodes and their tasks."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from autopipe.errors import LaunchError
from autopipe.runtime.launch.slurm import first_address, tasks_per_node


def test_tasks_per_node() -> None:
    assert tasks_per_node("4") == [4]
    assert tasks_per_node("2(x2),1") == [2, 2, 1]
    assert tasks_per_node("1,3(x3)") == [1, 3, 3, 3]
    with pytest.raises(LaunchError, match=r"expected '2\(x2\),1', found '2x2'"):
        tasks_per_node("2x2")


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Install a `scontrol` that knows one node, by a name and an address."""

    def install(name: str, address: str) -> None:
        script = tmp_path / "scontrol"
        script.write_text(
            "#!/bin/sh\n"
            f'test "$2" = hostnames && echo {name} && echo other && exit\n'
            f'test "$2 $3" = "node {name}" && echo "   NodeAddr={address} NodeHostName=x"\n'
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return install


def test_the_first_node_by_name(scontrol: Callable[[str, str], None]) -> None:
    scontrol("localhost", "10.0.0.1")
    assert first_address("localhost,other") == "localhost"


def test_the_first_node_by_address(scontrol: Callable[[str, str], None]) -> None:
    scontrol("node3.invalid", "10.0.0.3")
    assert first_address("node[3-4].invalid") == "10.0.0.3"


def test_no_scontrol(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="scontrol show hostnames node3` failed") as error:
        first_address("node3")
    assert error.value.hint is not None and "MASTER_ADDR" in error.value.hint
