"""Who a process is under each launcher, and that none of `--local N` outlives its parent."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autopipe.errors import LaunchError
from autopipe.runtime import launch
from autopipe.runtime.launch import World, check_world, interface, spawn, tasks_per_node, world_from

ROOT = Path(__file__).parent.parent

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}

# srun -N3 -n5 in a job of eight tasks: ranks 0 1 | 2 3 | 4, and this is rank 3.
SRUN = {
    "SLURM_JOB_ID": "70",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "node[3-4,9]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def first(nodelist: str) -> str:
    assert nodelist == "node[3-4,9]"
    return "node3"


def never(nodelist: str) -> str:
    raise AssertionError(f"asked for the address of {nodelist}")


# --- who this process is


def test_under_torchrun() -> None:
    assert world_from(TORCHRUN) == World(5, 8, 1, 4, 1, "10.0.0.1", 29500)


def test_under_srun() -> None:
    port = 10000 + 16 * 70 + 2
    assert world_from(SRUN, first) == World(3, 5, 1, 2, 1, "node3", port)


def test_on_the_last_and_smaller_node() -> None:
    last = {**SRUN, "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}
    world = world_from(last, first)
    assert world is not None
    assert (world.rank, world.local_rank, world.local_size, world.node) == (4, 0, 1, 2)


def test_the_port_stays_below_those_that_linux_hands_out() -> None:
    for job in (1, 1249, 1250, 987654321):
        world = world_from({**SRUN, "SLURM_JOB_ID": str(job)}, first)
        assert world is not None and 10000 <= world.master_port < 30000


def test_the_user_may_say_where_rank_0_listens() -> None:
    world = world_from({**SRUN, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4000"}, never)
    assert world is not None
    assert (world.master_addr, world.master_port) == ("10.0.0.9", 4000)


def test_torchrun_started_by_srun() -> None:
    assert world_from({**SRUN, **TORCHRUN}, never) == world_from(TORCHRUN)


def test_alone() -> None:
    assert world_from({}) is None


@pytest.mark.parametrize("step", [None, "batch", "4294967290", "4294967291"])
def test_a_batch_script_is_alone_whatever_the_job_asked_for(step: str | None) -> None:
    """Under sbatch without srun there is SLURM_PROCID=0 and SLURM_NTASKS=8, but one process."""
    environ = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_ID": str(step)}
    if step is None:
        del environ["SLURM_STEP_ID"]
    assert world_from(environ, never) is None


def test_half_of_torchrun() -> None:
    """Some operators set RANK and WORLD_SIZE of a pod, and leave the processes in it to others."""
    with pytest.raises(LaunchError) as error:
        world_from({"RANK": "0", "WORLD_SIZE": "2"})
    assert str(error.value) == (
        "RANK is '0' in the environment, but LOCAL_RANK is not set\n"
        "hint: start the processes with torchrun or srun, which set both, "
        "or unset RANK to run alone"
    )


def test_a_rank_that_is_no_number() -> None:
    with pytest.raises(LaunchError, match="RANK is 'zero' in the environment, expected a number"):
        world_from({**TORCHRUN, "RANK": "zero"})


def test_tasks_per_node() -> None:
    assert tasks_per_node("4") == [4]
    assert tasks_per_node("2(x2),1") == [2, 2, 1]
    assert tasks_per_node("1,3(x3)") == [1, 3, 3, 3]
    with pytest.raises(LaunchError, match=r"expected '2\(x2\),1', found '2x2'"):
        tasks_per_node("2x2")


# --- where rank 0 listens


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
    assert launch.first_address("localhost,other") == "localhost"


def test_the_first_node_by_address(scontrol: Callable[[str, str], None]) -> None:
    scontrol("node3.invalid", "10.0.0.3")
    assert launch.first_address("node[3-4].invalid") == "10.0.0.3"


def test_no_scontrol(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="scontrol show hostnames node3` failed") as error:
        launch.first_address("node3")
    assert error.value.hint is not None and "MASTER_ADDR" in error.value.hint


# --- what is refused before the first step


def test_as_many_processes_as_the_plan_has() -> None:
    check_world(World(0, 4, 0, 4, 0, "", 0), 4)
    with pytest.raises(LaunchError) as error:
        check_world(World(1, 2, 1, 2, 0, "", 0), 4)
    assert str(error.value) == (
        "the plan is for 4 processes, but 2 were started (this is rank 1, on node 0)\n"
        "hint: torchrun --nproc-per-node 4 -m autopipe run plan.json\n"
        "  or: autopipe run plan.json --local 4\n"
        "  or: srun -n 4 autopipe run plan.json"
    )


def test_the_interface_of_gloo() -> None:
    loopback = "lo" if "lo" in [name for _, name in socket.if_nameindex()] else None
    one_host, two_hosts = World(0, 4, 0, 4, 0, "", 0), World(2, 4, 0, 2, 1, "node0", 0)
    names = {socket.gethostname(): "10.0.0.2", "node0": "10.0.0.1"}
    assert interface(one_host, {}) == loopback
    assert interface(one_host, {"GLOO_SOCKET_IFNAME": "eth0"}) is None
    assert interface(two_hosts, {}, names.__getitem__) is None


def test_a_host_that_would_announce_its_loopback() -> None:
    """Debian's /etc/hosts has the host's own name at 127.0.1.1."""
    world = World(2, 4, 0, 2, 1, "node0", 0)
    debian = {socket.gethostname(): "127.0.1.1", "node0": "10.0.0.1"}
    with pytest.raises(LaunchError) as error:
        interface(world, {}, debian.__getitem__)
    assert "resolves to 127.0.1.1, which the other nodes cannot reach" in error.value.message
    assert "(rank 0 is at node0, 10.0.0.1)" in error.value.message
    assert interface(world, {"GLOO_SOCKET_IFNAME": "eth0"}, debian.__getitem__) is None
    simulated = {**debian, "node0": "127.0.0.1"}  # all "nodes" are this host
    assert interface(world, {}, simulated.__getitem__) is None


# --- processes of this machine


def alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# Every process leaves its id in the folder, and waits there until the others have.
MEET = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[1]), int(os.environ["RANK"])
{before}
(folder / f"{{rank}}.part").write_text(str(os.getpid()))
(folder / f"{{rank}}.part").rename(folder / f"{{rank}}.pid")
while len(list(folder.glob("*.pid"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
{after}
time.sleep(60)
"""


def program(after: str = "", before: str = "") -> tuple[str, ...]:
    return (sys.executable, "-c", MEET.format(before=before, after=after))


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob("*.pid"))]


REDUCE = """
import os, sys, torch, torch.distributed as dist
from autopipe.runtime.launch import start, world_from
world = world_from(os.environ)
with start(world, timeout=30):
    mine = torch.zeros(world.size)
    mine[world.rank] = world.rank + 1
    dist.all_reduce(mine)
    open(f"{sys.argv[1]}/{dist.get_rank()}", "w").write(str(mine.tolist()))
assert not dist.is_initialized() and "GLOO_SOCKET_IFNAME" not in os.environ
"""


def test_processes_that_find_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # left over from another launcher
    assert spawn(2, [str(tmp_path)], command=(sys.executable, "-c", REDUCE)) == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["[1.0, 2.0]"] * 2
    assert capfd.readouterr().err == ""


def test_what_each_process_finds_in_its_environment(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    script = (
        "import os; from autopipe.runtime.launch import world_from;"
        "world = world_from(os.environ);"
        "print(world.rank, world.size, world.local_rank, world.local_size, world.node,"
        " world.master_addr, os.environ['OMP_NUM_THREADS'])"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert spawn(2, [], command=(sys.executable, "-c", script)) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "0 2 0 2 0 127.0.0.1 3",
        "1 2 1 2 0 127.0.0.1 3",
    ]


@linux
def test_the_code_of_the_one_that_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert spawn(3, [str(tmp_path)], command=program("if rank == 1: sys.exit(7)")) == 7
    assert capfd.readouterr().err == "rank 1 of 3 exited with code 7; ending the others\n"
    assert [alive(pid) for pid in pids(tmp_path)] == [False] * 3


@linux
def test_the_signal_that_killed_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    killed = program("if rank == 2: os.kill(os.getpid(), signal.SIGKILL)")
    assert spawn(3, [str(tmp_path)], command=killed) == 128 + 9
    assert capfd.readouterr().err == (
        "rank 2 of 3 was killed by signal 9 (Killed); ending the others\n"
    )
    assert [alive(pid) for pid in pids(tmp_path)] == [False] * 3


@linux
def test_one_that_does_not_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE", 0.2)
    deaf = program("if rank == 0: sys.exit(1)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    assert spawn(2, [str(tmp_path)], command=deaf) == 1
    assert [alive(pid) for pid in pids(tmp_path)] == [False] * 2


@linux
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_nobody_outlives_the_parent(tmp_path: Path, number: int, code: int) -> None:
    """Asked to end, or killed on the spot: then the kernel ends the children in its stead."""
    script = (
        "import sys; from autopipe.runtime.launch import spawn;"
        "sys.exit(spawn(2, sys.argv[1:2], command=sys.argv[2:]))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), *program()],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        wait_until(lambda: len(pids(tmp_path)) == 2)
        assert all(alive(pid) for pid in pids(tmp_path))
        parent.send_signal(number)
        assert parent.wait(timeout=20) == code
        wait_until(lambda: not any(alive(pid) for pid in pids(tmp_path)))
    finally:
        parent.kill()


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert spawn(1, [], command=(sys.executable, "-c", "")) == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_no_processes() -> None:
    with pytest.raises(LaunchError, match="at least 1 local process, found 0"):
        spawn(0, [])
