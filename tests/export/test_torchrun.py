"""The script for torchrun: read by bash and shellcheck, its refusals, and two nodes that train."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopipe.errors import AutopipeError
from autopipe.export.targets import export
from autopipe.export.words import Words
from tests.support.long import LONG
from tests.support.scripts import check_script, words_of
from tests.support.shell import Said, end, free_port, save_nodes, start
from tests.support.spread import on_cpus, spread

FULL = Words(
    checkpoints="it's $HOME",
    save_every=10,
    hosts=("node0", "node1"),
    interface="eth0",
    venv="/opt/my env",
    run=("--steps", "5", "--save", "a b.safetensors"),
)


@pytest.mark.parametrize("words", [Words(), FULL])
@pytest.mark.parametrize("cluster", ["2x2xA100-80GB", "2x1x2xA100-80GB@5ms,1Gbit/s"])
def test_it_is_a_script(words: Words, cluster: str) -> None:
    check_script(export(spread(cluster, [2, 2]), "torchrun", "my plan's.json", words))


def test_one_node() -> None:
    text = export(on_cpus(1, 4), "torchrun", "plan.json", Words())
    check_script(text)
    command = text[text.index("exec torchrun") :]
    assert words_of(command)[1:] == [
        "torchrun", "--standalone", "--nproc-per-node", "4", "--max-restarts", "3",
        "--log-dir", "logs/autopipe", "--tee", "3", "-m", "autopipe", "run", "plan.json",
    ]  # fmt: skip


def test_nodes_of_unlike_sizes_each_know_theirs() -> None:
    text = export(spread("2xA100-80GB+4xA100-40GB", [2, 4]), "torchrun", "p", Words())
    assert "    0) processes=2 ;;\n    1) processes=4 ;;\n" in text


def test_as_many_hosts_as_nodes() -> None:
    with pytest.raises(AutopipeError, match="the plan has 2 nodes, found 3 hosts"):
        export(on_cpus(2, 1), "torchrun", "p", Words(hosts=("a", "b", "c")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`net.py`, a plan for two nodes of one process, and its script."""
    found = save_nodes(tmp_path_factory.mktemp("torchrun"), nodes=2, processes=1, pp=2)
    run = Words(run=("--steps", "3"))
    (found / "train.sh").write_text(export(on_cpus(2, 1), "torchrun", "plan.json", run))
    return found


def node(folder: Path, *argv: str, **environ: str) -> subprocess.Popen[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return start("bash", "train.sh", *argv, folder=folder, environ={"PATH": path, **environ})


@pytest.mark.parametrize(
    ("argv", "environ", "sentence"),
    [
        ([], {}, "expected the number of this node, 0 to 1"),
        (["2"], {}, "expected the number of this node, 0 to 1, found 2"),
        (["0; id"], {}, "expected the number of this node, 0 to 1, found 0; id"),
        (["0"], {}, "MASTER_ADDR is not set: the name or address of node 0"),
        (["1"], {"MASTER_ADDR": "gone.invalid"}, "node 0 is gone.invalid, a name that has no "),
    ],
)
def test_what_a_node_refuses(
    folder: Path, argv: list[str], environ: dict[str, str], sentence: str
) -> None:
    said = end(node(folder, *argv, **environ))
    assert said.error.startswith(sentence)


def test_a_folder_without_the_plan(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text((folder / "train.sh").read_text())
    assert end(node(tmp_path, "0")).error == "there is no plan plan.json in this folder"


@pytest.mark.long
def test_two_nodes_train(folder: Path) -> None:
    """Each says which it is; rank 0 is on node 0, and each rank has a log."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    begun = [node(folder, str(number), **where) for number in (1, 0)]
    second, first = map(end, begun)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "loss " in first.out and "loss " not in second.out
    assert len([*folder.glob("logs/autopipe/*/attempt_0/0/stdout.log")]) == 2


@pytest.mark.skipif(not LONG, reason="AUTOPIPE_LONG=1")
def test_a_killed_worker_starts_again(folder: Path) -> None:
    """Both nodes' workers are started again, find each other anew, and train to the end."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    text = (folder / "net.py").read_text()
    (folder / "net.py").write_text(text + KILLED)
    begun = [node(folder, str(number), **where) for number in (0, 1)]
    said: list[Said] = [end(process) for process in begun]
    (folder / "net.py").write_text(text)
    assert [each.code for each in said] == [0, 0], said[0].err + said[1].err
    assert (folder / "killed").exists()
    assert [*folder.glob("logs/autopipe/*/attempt_1")]


KILLED = """

def batches(batch_size):
    import os, pathlib, signal
    for step in range(3):
        mark = pathlib.Path("killed")
        if step == 1 and os.environ["RANK"] == "1" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield inputs(batch_size)
"""
