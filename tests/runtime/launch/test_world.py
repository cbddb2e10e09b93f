"""Who a process is under each launcher, and what is refused before the first step."""

import socket
from pathlib import Path

import pytest

from autopipe.errors import LaunchError
from autopipe.runtime.launch.address import own_address
from autopipe.runtime.launch.world import (
    World,
    as_planned,
    check_world,
    interface,
    start,
    world_from,
)
from tests.support import warm

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


def test_a_node_of_which_slurm_says_no_tasks() -> None:
    """Bug: an IndexError."""
    with pytest.raises(LaunchError, match="SLURM_NODEID is 3 .*TASKS_PER_NODE is of 3 nodes"):
        world_from({**SRUN, "SLURM_NODEID": "3"}, first)


def test_the_port_stays_below_those_that_linux_hands_out() -> None:
    for job in (1, 1249, 1250, 987654321):
        world = world_from({**SRUN, "SLURM_JOB_ID": str(job)}, first)
        assert world is not None and 10000 <= world.master_port < 30000


def test_a_job_that_is_requeued_listens_elsewhere() -> None:
    """Its first start may not have let go of the port yet."""
    starts = [world_from({**SRUN, "SLURM_RESTART_COUNT": n}, first) for n in ("0", "1", "2")]
    assert len({world.master_port for world in starts if world is not None}) == 3


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


def test_a_host_without_an_address_also_where_all_ranks_are_on_one_node() -> None:
    """Bug: torch asked for its address again and again, for five minutes."""
    here = World(0, 2, 0, 2, 0, "a..b", 29500)
    with pytest.raises(LaunchError, match=r"the host name 'a\.\.b' has no address"), start(here):
        pass


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


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("MASTER_PORT", "70000", "MASTER_PORT is 70000 in the environment, expected 1 to 65535"),
        ("MASTER_PORT", "0", "MASTER_PORT is 0 in the environment, expected 1 to 65535"),
        ("MASTER_ADDR", "", "MASTER_ADDR is '' in the environment, expected rank 0's host"),
    ],
)
def test_a_place_where_nobody_listens(name: str, value: str, expected: str) -> None:
    """Bug: torch's own TypeError for the first; the last waited five minutes for the name ''."""
    with pytest.raises(LaunchError, match=expected):
        world_from({**TORCHRUN, name: value})


@pytest.mark.parametrize(("name", "value"), [("RANK", "99"), ("LOCAL_WORLD_SIZE", "0")])
def test_a_rank_that_there_is_not(name: str, value: str) -> None:
    """Bug: it ended without a word after half a minute, or in a ZeroDivisionError."""
    with pytest.raises(LaunchError, match="in the environment, and .*: there is no such rank"):
        world_from({**TORCHRUN, name: value})


# --- what is refused before the first step


def test_as_many_processes_as_the_plan_has() -> None:
    check_world(World(0, 4, 0, 4, 0, "", 0), 4)
    with pytest.raises(LaunchError) as error:
        check_world(World(1, 2, 1, 2, 0, "", 0), 4, "plan.json")
    assert str(error.value) == (
        "the plan is for 4 processes, found 2 (this is rank 1, on node 0)\n"
        "hint: torchrun --nproc-per-node 4 -m autopipe run plan.json\n"
        "  or: autopipe run plan.json --local 4\n"
        "  or: srun -n 4 autopipe run plan.json"
    )


def test_a_script_is_told_how_to_start_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`autopipe run plan.json` would train by the model file, not by the script's loop."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/train.py").touch()
    for called, named in (
        (["out/train.py", "--steps", "3"], "out/train.py"),
        (["-c"], "SCRIPT.py"),
    ):
        monkeypatch.setattr("sys.argv", called)
        with pytest.raises(LaunchError) as error:
            check_world(World(0, 2, 0, 2, 0, "", 0), 1)
        assert str(error.value) == (
            "the plan is for 1 process, found 2 (this is rank 0, on node 0)\n"
            f"hint: torchrun --nproc-per-node 1 {named}\n"
            f"  or: srun -n 1 python {named}"
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
    assert interface(world, {}, debian.__getitem__, {"10.0.0.1": "eth1"}.get) == "eth1"
    with pytest.raises(LaunchError) as error:
        interface(world, {}, debian.__getitem__, lambda address: None)
    assert "resolves to 127.0.1.1, which the other nodes cannot reach" in error.value.message
    assert "(rank 0 is at node0, 10.0.0.1)" in error.value.message
    assert interface(world, {"GLOO_SOCKET_IFNAME": "eth0"}, debian.__getitem__) is None
    simulated = {**debian, "node0": "127.0.0.1"}  # all "nodes" are this host
    assert interface(world, {}, simulated.__getitem__) is None


def test_a_plan_that_begins_on_another_node() -> None:
    """Its rank 0 has the hub of the watchdog: the others find it where that node is.

    Bug: they looked for it on the launcher's first node, and all ran without a watchdog.
    """
    ways = {"node0": "10.0.0.2"}.__getitem__  # from each node to node0
    second = World(2, 4, 0, 2, 1, "node0", 29500)
    assert as_planned(second, 0, ways) == World(0, 4, 0, 2, 1, "10.0.0.2", 29500)
    assert as_planned(second, 3, ways) == World(3, 4, 0, 2, 1, "node0", 29500)
    first = World(0, 4, 0, 2, 0, "node0", 29500)
    assert as_planned(first, 0, ways) == first
    # Its own name may be 127.0.1.1 there (Debian): the others would look for it at home.
    assert as_planned(World(1, 4, 1, 2, 0, "node0", 29500), 0, ways).master_addr == "node0"

    def no_way(host: str) -> str:
        raise OSError("Network is unreachable")

    assert as_planned(second, 0, no_way).master_addr == "node0"
    assert own_address("127.0.0.1") == "127.0.0.1"


# --- the process group


REDUCE = """
import os, sys, torch, torch.distributed as dist
from autopipe.runtime.launch.world import start, world_from
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
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # left over from another launcher
    (tmp_path / "reduce.py").write_text(REDUCE)
    assert warm.spawn(2, [str(tmp_path / "reduce.py"), str(tmp_path)]) == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["[1.0, 2.0]"] * 2
    assert capfd.readouterr().err == ""
