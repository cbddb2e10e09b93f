"""How much memory a process may have: of the machine, of its container, of its job."""

from pathlib import Path

import pytest

from autopipe.util import host_memory

GIB = 2**30

MEMINFO = {"proc/meminfo": "MemTotal: 16 kB\nMemAvailable: 2097152 kB\n"}  # 2 GiB are free

CONTAINER = {
    "proc/self/cgroup": "0::/docker/1f2e\n",  # as the host has it; nothing of it is seen within
    "sys/fs/cgroup/memory.max": f"{GIB}\n",
    "sys/fs/cgroup/memory.current": f"{GIB // 2}\n",
    "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {GIB // 4}\n",
}
"""A container of 1 GiB that uses a half, a half of which are pages of files it has read."""

JOB = {
    "proc/self/cgroup": "4:memory:/slurm/job_7/step_0\n3:cpuset:/slurm\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{9 * GIB}\n",
    "sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes": f"{GIB}\n",
    "sys/fs/cgroup/memory/slurm/job_7/memory.usage_in_bytes": f"{GIB // 8}\n",
    "sys/fs/cgroup/memory/slurm/job_7/memory.stat": "total_inactive_file 0\n",
}
"""A job of Slurm under version 1, whose step has no limit of its own."""


FREE = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}


def system(folder: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setattr(host_memory, "SYSTEM", folder)


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        (MEMINFO | CONTAINER, GIB, GIB * 3 // 4),
        (MEMINFO | JOB, GIB, GIB * 7 // 8),
        (
            MEMINFO | {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"},
            None,
            2 * GIB,
        ),
    ],
    ids=["container", "job", "no limit"],
)
def test_a_container_or_a_job_may_have_less_than_the_machine(
    files: dict[str, str],
    total: int | None,
    available: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = host_memory.total()
    system(tmp_path, monkeypatch, files)
    assert host_memory.total() == (total or machine)
    assert host_memory.available() == available


def test_a_system_without_proc_has_what_it_has_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: on macOS each rank of `run` and of `check` ended in a FileNotFoundError."""
    system(tmp_path, monkeypatch, {})
    assert host_memory.available() == host_memory.total() > 2**20


def test_this_machine_has_some() -> None:
    assert 2**20 < host_memory.available() <= host_memory.total() < 2**50
