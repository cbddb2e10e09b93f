"""The probe: what is asked for again, what is kept, and what is said where nothing can be.

Measuring takes no time here and finds round figures; `test_workers` does it with real processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopipe.cluster.checks import check
from autopipe.cluster.cluster import Cluster, Kernel, Link, Pace
from autopipe.cluster.measured import KERNELS, Found, Need
from autopipe.cluster.spec import LocalSpec
from autopipe.errors import AutopipeError, LaunchError
from autopipe.runtime.probe import probe
from autopipe.util import host_memory
from tests.support.inprocess import measured

SMALL = Need(("fp32",), ("gelu",))
FIVE = ["fp32", "memory", "launch", "messages", "collectives"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The figures of each measurement, which finds all of them."""
    found: list[list[str]] = []

    def measure(
        local: LocalSpec, names: Sequence[str], half: float | None, say: probe.Say
    ) -> dict[str, Found]:
        found.append([*names])
        say("measured")
        return measured(names)

    monkeypatch.setattr(probe, "measure", measure)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return found


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "autopipe"


def losing(monkeypatch: pytest.MonkeyPatch, *lost: str, why: str = "out of time") -> None:
    """Measuring finds everything but these."""

    def measure(
        local: LocalSpec, names: Sequence[str], half: float | None, say: probe.Say
    ) -> dict[str, Found]:
        return measured(names) | {name: Found((), why) for name in lost if name in names}

    monkeypatch.setattr(probe, "measure", measure)


def said(
    processes: int = 2, need: Need = SMALL, again: bool = False, cpu: bool = False
) -> tuple[Cluster, list[str]]:
    lines: list[str] = []
    local = LocalSpec(processes, cpu)
    return probe.local_cluster(local, lines.append, need=need, again=again), lines


def test_figures_become_a_cluster(asked: object, cache: Path) -> None:
    found, _ = said(4)
    check(found)
    assert (found.name, found.num_devices) == ("local:4", 4)
    device = found.row[0]
    assert (device.kind, device.flops, device.half) == ("cpu", {"fp32": 1e10}, 16.0)
    assert (device.bandwidth, device.launch) == (1e10, 1e-6)
    assert device.kernels == {"gelu": Kernel(Pace(1e-5, 1e9), Pace(2e-5, 1e9))}
    assert device.memory == host_memory.total() // 4
    assert device.rough == () and "4 processes, torch" in device.source
    # 3/4 of 16 MiB go twice over the wire in a sum, once in a gathering; 4 and 3 latencies go off.
    assert found.within == found.between
    assert found.within == Link(
        1e-4, 1e9, 2 * 0.75 * 2**24 / (0.05 - 4e-4), 0.75 * 2**24 / (0.04 - 3e-4)
    )


def test_what_is_needed_is_measured_once(asked: list[list[str]], cache: Path) -> None:
    first, talk = said()
    assert (asked, talk) == ([[*FIVE, "gelu"]], ["measured"])
    second, talk = said()
    (record,) = cache.iterdir()
    assert talk == [f"rates of this machine: measured before, read from {record}"]
    assert second == first and len(asked) == 1


def test_a_later_need_measures_what_is_missing(asked: list[list[str]], cache: Path) -> None:
    first, _ = said()
    later, _ = said(need=Need(("bf16",), ("gelu", "tanh")))
    assert asked[1:] == [["tanh", "bf16"]]
    assert later.row[0].flops == {"fp32": 1e10, "bf16": 5e9}
    assert [*later.row[0].kernels] == ["gelu", "tanh"]
    # What others have asked for meanwhile is not in the cluster: equal needs are equal plans.
    assert said()[0] == first
    assert len(asked) == 2 and len([*cache.iterdir()]) == 1


def test_without_a_need_all_is_measured(asked: list[list[str]], cache: Path) -> None:
    probe.local_cluster(LocalSpec(2))
    assert asked == [[*FIVE, *KERNELS, "bf16", "fp16", "fp64"]]


def test_a_process_alone_has_nobody_to_send_to(asked: list[list[str]], cache: Path) -> None:
    found, _ = said(1)
    assert asked == [["fp32", "memory", "launch", "gelu"]]
    assert found.within == Link(0.0, 1e10)


def test_again_measures_what_is_known(asked: list[list[str]], cache: Path) -> None:
    said(need=Need((), ("tanh",)))
    said(again=True)
    assert asked[1] == [*FIVE, "gelu"]
    assert said(need=Need((), ("gelu", "tanh")))[1][0].startswith("rates of this machine: ")


@pytest.mark.parametrize("setting", [None, "ATEN_CPU_CAPABILITY", "NVIDIA_TF32_OVERRIDE"])
def test_other_circumstances_are_another_record(
    setting: str | None, asked: list[list[str]], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said(2)
    if setting is not None:
        monkeypatch.setenv(setting, "1")
    said(3 if setting is None else 2)
    assert len(asked) == len([*cache.iterdir()]) == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (None, ""),
        (None, "{"),
        (None, "[]"),
        (None, '{"key": {}}'),
        ('"processes": "2"', '"processes": "9"'),
        ('"memory": {"values": [10000000000.0]', '"memory": {"values": [-1.0]'),
        ('"memory": {"values": [10000000000.0]', '"memory": {"values": []'),
        ('"memory":', '"hearsay":'),
    ],
)
def test_a_record_that_cannot_be_is_measured_anew(
    old: str | None, new: str, asked: list[list[str]], cache: Path
) -> None:
    cluster, _ = said()
    (file,) = cache.iterdir()
    text = file.read_text()
    assert old is None or old in text
    file.write_text(new if old is None else text.replace(old, new))
    assert said() == (cluster, ["measured"])
    assert said()[1] != ["measured"]


def test_a_record_that_cannot_be_written_is_no_error(asked: object, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    cluster, talk = said()
    assert cluster.num_devices == 2
    assert talk[0] == "measured"
    assert talk[1].startswith("the rates are not kept for next time: ")


def test_a_read_only_home_is_no_error(
    asked: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc/1")  # where not even root may write
    assert said()[1][1].startswith("the rates are not kept for next time: ")


def test_no_home_is_no_error(asked: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(probe.Path, "home", nowhere)
    assert said()[1] == [
        "measured",
        "the rates are not kept for next time: there is no home folder",
    ]


def test_without_a_cache_folder_named_it_is_below_home(
    asked: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    said()
    assert list((tmp_path / ".cache" / "autopipe").glob("probe-*.json"))


def test_a_processor_that_says_nothing_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(self: Path, *args: object) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", unreadable)
    monkeypatch.setattr(probe.platform, "processor", lambda: "z80")
    assert probe._processor() == "z80"


# --- Where something could not be measured


def test_what_was_lost_is_left_out_and_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losing(monkeypatch, "gelu", "tanh")
    cluster, talk = said(need=Need((), ("gelu", "tanh", "exp")))
    rough = "gelu, tanh: out of time"
    assert [*cluster.row[0].kernels] == ["exp"]
    assert cluster.row[0].rough == (rough,)
    assert talk == [f"rough, and so are predictions: {rough}"]
    losing(monkeypatch)
    cluster, talk = said(need=Need((), ("gelu", "tanh", "exp")))  # only the two were not kept
    assert cluster.row[0].rough == () and talk == []


def test_a_dtype_or_a_link_that_was_lost_is_estimated(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losing(monkeypatch, "bf16", "messages", "collectives")
    cluster, _ = said(need=Need(("bf16",), ()))
    assert cluster.row[0].flops == {"fp32": 1e10, "bf16": 1e10}
    assert cluster.within == Link(1e-4, 2.5e9)
    assert cluster.row[0].rough == (
        "messages: out of time; taken as 100 us and a quarter of memory's bytes a second",
        "collectives: out of time",
        "bf16: out of time; taken to be as fast as fp32",
    )


def test_this_process_looks_itself_where_no_other_could(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losing(monkeypatch, *FIVE, "gelu", why="no memory")
    monkeypatch.setattr(probe, "QUICK", 0.05)
    cluster, _ = said()
    check(cluster)
    assert 1e7 < cluster.row[0].flops["fp32"] < 1e14
    assert cluster.row[0].rough[0] == (
        "fp32, memory, launch: no memory; this process alone took a quick look"
    )
    assert not cache.exists()  # nothing has been measured as it should


def test_where_nothing_could_be_measured_a_probe_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losing(monkeypatch, *FIVE, "gelu", why="no memory")
    with pytest.raises(LaunchError) as refused:
        probe.local_cluster(LocalSpec(2), need=SMALL, estimate=False)
    assert str(refused.value) == (
        "nothing of this machine could be measured: no memory\n"
        "hint: describe the machine in a cluster file instead, or try fewer processes"
    )


# --- The processor of a machine with a GPU


@pytest.fixture
def gpu(asked: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has one, which nobody asks for anything."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")


def test_a_processor_beside_a_gpu_is_a_processor(
    asked: list[list[str]], cache: Path, gpu: None
) -> None:
    found, _ = said(cpu=True)
    check(found)
    assert asked == [[*FIVE, "gelu"]]
    assert (found.name, found.num_devices, found.row[0].kind) == ("cpu:2", 2, "cpu")
    assert found.row[0].memory == host_memory.total() // 2


def test_a_processor_is_measured_once_with_and_without_gpus(
    asked: list[list[str]], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_any_name, _ = said()
    assert said(cpu=True)[0] == replace(by_any_name, name="cpu:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    said(cpu=True)
    assert len(asked) == 1


def test_what_was_lost_of_a_processor_is_looked_at_there(
    cache: Path, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    losing(monkeypatch, *FIVE, "gelu", why="no memory")
    monkeypatch.setattr(probe, "QUICK", 0.05)
    check(said(cpu=True)[0])  # on a GPU that is not there it would fail


def test_more_processes_than_gpus_may_be_meant_for_the_processor(cache: Path, gpu: None) -> None:
    with pytest.raises(AutopipeError) as refused:
        said(4)
    assert str(refused.value) == (
        "asked for 4 processes, found 1 GPU\n"
        "hint: use local:1, or cpu:4 for processes on its processor"
    )


def test_how_many_processes_this_machine_is_for(gpu: None) -> None:
    assert probe.this_machine() == LocalSpec(1)
    assert probe.this_machine(cpu=True) == LocalSpec(2, cpu=True)
    assert probe.this_machine(3) == LocalSpec(3)


def test_no_processes() -> None:
    with pytest.raises(AutopipeError, match="asked to measure 0 processes"):
        probe.probe(0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts the GPUs instead")
def test_without_a_gpu_this_machine_is_for_two_processes() -> None:
    assert probe.this_machine() == LocalSpec(2)
