"""A plan's job for a launcher: ranks, settings by kind of link, words that a target refuses."""

from dataclasses import replace

import pytest

from autopipe.errors import AutopipeError
from autopipe.export.job import job_of
from autopipe.export.links import advice, settings
from autopipe.export.targets import LAUNCHERS, export
from autopipe.export.words import Words
from tests.support.spread import on_cpus, spread


def test_what_a_rank_runs() -> None:
    words = Words(checkpoints="kept", save_every=100, keep=3, run=("--steps", "9", "--offload"))
    job = job_of(on_cpus(2, 2), "plans/a b.json", words)
    assert (job.processes, job.devices, job.gpu) == ((2, 2), (2, 2), False)
    assert " ".join(job.command) == (
        "autopipe run plans/a b.json --checkpoints kept --resume --save-every 100 --keep 3 "
        "--steps 9 --offload"
    )


def test_a_plan_whose_name_looks_like_an_option() -> None:
    assert job_of(on_cpus(1, 2), "-rf", Words()).command == ("autopipe", "run", "./-rf")


def test_nodes_without_a_rank_are_not_started() -> None:
    plan = spread("3x2xA100-80GB", [2, 0, 1])
    assert job_of(plan, "p", Words()).processes == (2, 1)


ALONE, NEAR = spread("2xA100-80GB", [2]), spread("2x1xA100-80GB", [1, 1])
FAR = spread("2x1x1xA100-80GB@30ms,1Gbit/s", [1, 1])
CUDA = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_DEBUG": "WARN"}
NAMED = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}
WAN = {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}


@pytest.mark.parametrize(
    ("plan", "interface", "expected"),
    [
        (on_cpus(1, 2), "eth0", {}),
        (on_cpus(2, 1), None, {}),
        (on_cpus(2, 1), "eth0", {"GLOO_SOCKET_IFNAME": "eth0"}),
        (ALONE, "eth0", CUDA),
        (NEAR, None, CUDA),
        (NEAR, "eth0", CUDA | NAMED),
        (FAR, None, CUDA | WAN),
        (FAR, "eth0", CUDA | NAMED | WAN),
    ],
)
def test_settings_by_kind_of_link(plan, interface, expected) -> None:  # type: ignore[no-untyped-def]
    assert settings(job_of(plan, "p", Words(interface=interface))) == expected


def test_buffers_for_a_line_between_sites() -> None:
    """30 ms each way at 125 MB/s have 7.5 MB under way; buffers hold twice that."""
    text = "\n".join(advice(job_of(FAR, "p", Words())))
    assert "with 7,500,000 bytes under way" in text and "rmem_max=15000000" in text
    assert advice(job_of(NEAR, "p", Words())) == []


@pytest.mark.parametrize("target", [name for name in LAUNCHERS if name != "torchrun"])
@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (spread("2x2xA100-80GB", [2, 1]), r"equal nodes, and this plan has \[2, 1\] processes"),
        (FAR, "assigns nodes of one site, and this plan's nodes are at 2 sites"),
        (spread("1xA100-80GB+1xA100-40GB", [1, 1]), "nodes of A100-80GB and of A100-40GB"),
    ],
)
def test_nodes_that_a_pool_cannot_hand_out(target, plan, sentence) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(AutopipeError, match=sentence) as error:
        export(plan, target, "p", Words(image="i"))
    assert error.value.hint is not None and error.value.hint.startswith("--to torchrun")


@pytest.mark.parametrize("target", LAUNCHERS)
def test_a_word_of_another_target(target: str) -> None:
    """Nothing that a user asks for is passed over."""
    asked = {
        "hosts": ("a", "b"), "port": 1, "restarts": 1, "style": "srun", "venv": "v", "array": "0-1",
        "partition": "p", "namespace": "n", "claim": "c", "folder": "f", "time_limit": 9,
    }  # fmt: skip
    for name, value in asked.items():
        if name in LAUNCHERS[target].takes:
            continue
        with pytest.raises(
            AutopipeError, match=f"has no meaning for {target}; it is an option of "
        ):
            export(on_cpus(2, 1), target, "p", replace(Words(), **{name: value}))
