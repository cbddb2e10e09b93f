"""The probe: measured once with two real processes, then about its cache and its failures."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from autopipe import codec, probe
from autopipe.cluster import Cluster, Device, Kernel, Link, Pace, check
from autopipe.errors import AutopipeError, LaunchError

DEVICE = Device("cpu", 2**30, {"fp32": 1e11}, 1e10, 2e-6, "by hand")
LINK = Link(1e-4, 1e9)


@pytest.fixture(scope="module")
def measured() -> tuple[Device, Link, list[str]]:
    lines: list[str] = []
    return *probe.probe(2, lines.append), lines


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; measuring takes no time and answers `DEVICE` and `LINK`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(probe, "probe", lambda processes, say: say("measured") or (DEVICE, LINK))
    return tmp_path / "autopipe"


def said(processes: int) -> tuple[Cluster, list[str]]:
    lines: list[str] = []
    return probe.local_cluster(processes, lines.append), lines


@pytest.mark.skipif(torch.cuda.is_available(), reason="the bounds below are those of a processor")
def test_the_figures_are_those_of_some_computer(measured: tuple[Device, Link, list[str]]) -> None:
    device, link, _ = measured
    assert device.kind == "cpu"
    assert 1e9 < device.flops["fp32"] < 1e14
    assert 1e6 < device.flops["bf16"] < 1e15
    assert 1e8 < device.bandwidth < 1e13
    assert 1e-7 < device.launch < 1e-3
    assert 1e-6 < link.latency < 0.1
    assert 1e6 < link.bandwidth < 1e12
    assert 1e6 < link.summing < 1e12 and 1e6 < link.gathering < 1e12
    assert device.half >= 0 and "gelu" in device.kernels
    assert "2 processes, torch" in device.source


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has its own memory")
def test_processes_share_the_memory_of_the_machine(
    measured: tuple[Device, Link, list[str]],
) -> None:
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert measured[0].memory == installed // 2


def test_a_line_of_talk_per_measurement(measured: tuple[Device, Link, list[str]]) -> None:
    words = (
        *("measuring", "bf16", "fp32", "memory", "an eighth", "small op", "by themselves"),
        "between processes",
    )
    assert len(measured[2]) == len(words)
    for word, line in zip(words, measured[2], strict=True):
        assert word in line


def test_measured_once_then_read(cache: Path) -> None:
    first, talk = said(4)
    assert talk == ["measured"]
    check(first)
    assert (first.name, first.num_devices, first.row[0]) == ("local:4", 4, DEVICE)
    assert first.within == first.between == LINK
    second, talk = said(4)
    assert second == first
    assert talk == [f"rates of this machine: measured before, read from {next(cache.iterdir())}"]


def test_another_number_of_processes_is_another_measurement(cache: Path) -> None:
    assert said(2)[1] == said(3)[1] == ["measured"]
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": {}}'])
def test_a_damaged_cache_is_measured_anew(cache: Path, damage: str) -> None:
    cluster, _ = said(2)
    (file,) = cache.iterdir()
    file.write_text(damage)
    assert said(2) == (cluster, ["measured"])
    assert said(2)[0] == cluster
    assert said(2)[1] != ["measured"]


def test_a_cache_of_other_circumstances_is_measured_anew(cache: Path) -> None:
    said(2)
    (file,) = cache.iterdir()
    file.write_text(file.read_text().replace('"processes": "2"', '"processes": "9"'))
    assert said(2)[1] == ["measured"]


def test_a_cache_with_impossible_figures_is_measured_anew(cache: Path) -> None:
    said(2)
    (file,) = cache.iterdir()
    file.write_text(file.read_text().replace(f'"memory": {DEVICE.memory}', '"memory": -1'))
    assert said(2)[1] == ["measured"]


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    cluster, talk = said(2)
    assert cluster.num_devices == 2
    assert talk[0] == "measured"
    assert talk[1].startswith("the rates are not kept for next time: ")


def test_without_a_cache_folder_named_it_is_below_home(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    said(2)
    assert list((tmp_path / ".cache" / "autopipe").glob("probe-*.json"))


def test_no_processes() -> None:
    with pytest.raises(AutopipeError, match="asked to measure 0 processes"):
        probe.probe(0)


def test_a_process_that_dies_is_named_and_the_others_are_stopped() -> None:
    """Rank 1 fails at once; rank 0 would sleep for an hour."""
    program = "import sys, time; sys.argv[1] == '1' and sys.exit('no such thing'); time.sleep(3600)"
    with pytest.raises(LaunchError) as caught:
        probe.run_workers(2, [sys.executable, "-c", program])
    assert caught.value.message == (
        "process 1 of 2 that measured this machine ended with code 1: no such thing"
    )


def test_a_process_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PATIENCE", 0.2)
    with pytest.raises(LaunchError, match="did not end within"):
        probe.run_workers(1, [sys.executable, "-c", "import time; time.sleep(3600)"])


def test_samples_come_back_in_the_order_of_ranks() -> None:
    """A stand-in for the worker writes its rank for every rate."""
    program = (
        "import pathlib, sys; rank, _, folder = sys.argv[1:]; "
        "pathlib.Path(folder, rank + '.json').write_text("
        '\'{"flops": {}, "half": 0, "memory_bandwidth": RANK, "launch": [0, 0], "kernels": {}, '
        '"latency": null, "bandwidth": null, "summing": 0, "gathering": 0}\'.replace("RANK", rank))'
    )
    samples = probe.run_workers(3, [sys.executable, "-c", program])
    assert [sample.memory_bandwidth for sample in samples] == [0.0, 1.0, 2.0]


def test_a_sample_is_plain_data() -> None:
    kernels = {"tanh": Kernel(Pace(1.0, 2.0), Pace(3.0))}
    sample = probe.Sample({"fp32": 1.0}, 2.0, 3.0, (4.0, 5.0), kernels, None, None, 6.0, 7.0)
    assert codec.from_json(probe.Sample, codec.to_json(sample), "sample") == sample


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts the GPUs instead")
def test_without_a_gpu_this_machine_is_for_two_processes() -> None:
    assert probe.local_processes() == 2
