"""What each runtime computes and sums in: where a plan's dtypes are lost, a sentence says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from autopipe.interop.precisions import EVERY, KEPT, nearest
from autopipe.interop.targets import RUNTIMES
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Mesh, Place
from tests.support.plans import chain


def of(precision: str, pp: int = 1, dp: int = 1, zero: int = 0, **more: str) -> Plan:
    """A chain of `pp` stages on `dp` replicas each."""
    plan = chain(pp, 4)
    (group,) = plan.cluster.nodes[0].groups
    node = replace(plan.cluster.nodes[0], groups=(replace(group, count=pp * dp),))
    places = tuple(
        Place(rank, rank // dp, rank % dp, 0, 0, rank, "cuda:0") for rank in range(pp * dp)
    )
    return replace(
        plan,
        cluster=replace(plan.cluster, nodes=(node,)),
        mesh=Mesh(pp, dp, 1, places),
        batch=replace(plan.batch, rows=8 * dp),
        stages=tuple(replace(stage, zero=zero, recompute=()) for stage in plan.stages),
        precision=precision,
        **more,  # type: ignore[arg-type]
    )


def told(plan: Plan, target: str) -> list[str]:
    """What it says of dtypes."""
    words = "the precision", "sums of gradients", "an optimizer", "bf16 beside"
    return [line for line in RUNTIMES[target](plan).unsupported if line.startswith(words)]


def lines(plan: Plan, target: str) -> list[str]:
    return [line.strip() for line in RUNTIMES[target](plan).text.splitlines()]


def test_the_nearest_precision() -> None:
    assert {nearest(each, EVERY) for each in EVERY} == EVERY
    assert nearest("bf16-autocast", KEPT) == "bf16"
    assert nearest("fp16", frozenset({"fp32", "fp16-autocast"})) == "fp16-autocast"
    assert nearest("fp16", frozenset({"fp32", "bf16"})) == "fp32"


@pytest.mark.parametrize("target", sorted(RUNTIMES))
def test_fp32_is_said_by_all(target: str) -> None:
    for plan in (of("fp32"), of("fp32", 2), of("fp32", 1, 2, 3)):
        assert told(plan, target) == []


MEGATRON_GRADS = "accumulate_allreduce_grads_in_fp32"


@pytest.mark.parametrize(
    ("plan", "switches"),
    [
        (of("fp32"), []),
        (of("bf16"), ["bf16"]),
        (of("bf16", grad_dtype="bf16"), ["bf16", "grad_reduce_in_bf16"]),
        (of("fp16"), ["fp16", MEGATRON_GRADS]),
        (of("fp16", grad_dtype="fp16"), ["fp16"]),
        (of("bf16-autocast"), ["bf16"]),
    ],
)
def test_megatron_and_flagscale(plan: Plan, switches: list[str]) -> None:
    known = {
        f"--{name.replace('_', '-')}" for name in (*KEPT, MEGATRON_GRADS, "grad_reduce_in_bf16")
    }
    wanted = [f"--{name.replace('_', '-')}" for name in switches]
    assert [line for line in lines(plan, "megatron") if line in known] == wanted
    system = yaml.safe_load(RUNTIMES["flagscale"](plan).text)["system"]
    assert system.get("precision", {}) == dict.fromkeys(switches, True)
    autocast = plan.precision == "bf16-autocast"
    for target in ("megatron", "flagscale"):
        said = ["the precision bf16-autocast: it runs in bf16"] if autocast else []
        assert told(plan, target) == said


def test_megatron_starts_with_all_sharded() -> None:
    """Its FSDP asserts the format of checkpoints, and an environment variable."""
    sharded = lines(of("bf16", 1, 2, 3), "megatron")
    assert "--ckpt-format fsdp_dtensor" in sharded
    assert any("CUDA_DEVICE_MAX_CONNECTIONS=1" in line for line in sharded if line[0] == "#")
    for plan in (of("bf16", 1, 2, 1), of("bf16", 1, 1, 3)):
        assert not {"ckpt-format", "CUDA_DEVICE"} & {*RUNTIMES["megatron"](plan).text.split()}
        assert "fsdp" not in RUNTIMES["megatron"](plan).text


SHARDS = "bf16 beside pp or tp without ZeRO-3: mixed_precision_param acts only with"


@pytest.mark.parametrize(
    ("plan", "param", "said"),
    [
        (of("bf16", 1, 2, 3), "bfloat16", []),
        (of("bf16", 2, 2, 3), "bfloat16", []),
        (of("bf16-autocast"), "bfloat16", []),
        (of("bf16-autocast", 1, 2), "bfloat16", []),
        (of("bf16", 1, 2), "bfloat16", ["the precision bf16: it runs in bf16-autocast"]),
        (
            of("bf16-autocast", 1, 2, 3),
            "bfloat16",
            ["the precision bf16-autocast: it runs in bf16"],
        ),
        (of("bf16", 2, 2), "float32", ["the precision bf16: it runs in fp32", SHARDS]),
        (of("fp16"), "float32", ["the precision fp16: it runs in fp32"]),
        (of("fp16-autocast", 2), "float32", ["the precision fp16-autocast: it runs in fp32"]),
    ],
)
def test_torchtitan(plan: Plan, param: str, said: list[str]) -> None:
    assert f"mixed_precision_param='{param}'," in lines(plan, "torchtitan")
    found = told(plan, "torchtitan")
    assert len(found) == len(said)
    assert all(line.startswith(start) for line, start in zip(found, said, strict=True)), found


def test_torchtitan_without_masters() -> None:
    """Its `dtype` is of parameters, gradients and optimizer state, on any mesh."""
    plan = of("bf16", 2, grad_dtype="bf16", optimizer_dtype="bf16")
    assert "dtype='bfloat16'," in lines(plan, "torchtitan") and told(plan, "torchtitan") == []
    (said,) = told(replace(plan, grad_dtype="fp32"), "torchtitan")
    assert said == "sums of gradients in fp32: it has bf16"
    assert "dtype='bfloat16'," not in lines(of("bf16", 2), "torchtitan")


@pytest.mark.parametrize(
    ("plan", "words", "said"),
    [
        (of("bf16", 1, 2, 1), {"bf16": {"enabled": True}, "data_types": "fp32"}, []),
        (of("fp16", 1, 2, 3), {"fp16": {"enabled": True}, "data_types": "fp32"}, []),
        (
            of("bf16", 1, 2, 2, grad_dtype="bf16"),
            {"bf16": {"enabled": True}, "data_types": "bf16"},
            [],
        ),
        (
            of("bf16", 1, 2),
            {"bf16": {"enabled": True}},
            ["sums of gradients in fp32: it has bf16"],
        ),
        (of("bf16", grad_dtype="bf16"), {"bf16": {"enabled": True}}, []),
        (of("bf16-autocast", 1, 2, 3), {"torch_autocast": "bfloat16"}, []),
        (of("fp16-autocast"), {"torch_autocast": "float16"}, []),
        (of("fp32", 1, 2, 1), {}, []),
    ],
)
def test_deepspeed(plan: Plan, words: dict[str, object], said: list[str]) -> None:
    found = json.loads(RUNTIMES["deepspeed"](plan).text)
    names = {"bf16", "fp16", "data_types", "torch_autocast"} & found.keys()
    assert names == words.keys()
    for name in names & {"bf16", "fp16"}:
        assert found[name] == words[name]
    assert found.get("data_types", {}).get("grad_accum_dtype") == words.get("data_types")
    assert found.get("torch_autocast", {}).get("dtype") == words.get("torch_autocast")
    assert told(plan, "deepspeed") == said


@pytest.mark.parametrize(
    ("plan", "word", "said"),
    [
        (of("fp32"), "no", []),
        (of("bf16-autocast"), "bf16", []),
        (of("fp16-autocast", 1, 2), "fp16", []),
        (of("bf16", 1, 2), "bf16", ["the precision bf16: it runs in bf16-autocast"]),
        (of("bf16", 1, 2, 3), "bf16", ["sums of gradients in fp32: it has bf16"]),
        (of("bf16", 1, 2, 3, grad_dtype="bf16"), "bf16", []),
        (
            of("bf16-autocast", 1, 2, 3),
            "bf16",
            [
                "the precision bf16-autocast: it runs in bf16",
                "sums of gradients in fp32: it has bf16",
            ],
        ),
    ],
)
def test_accelerate(plan: Plan, word: str, said: list[str], tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    (tmp_path / "config.yaml").write_text(RUNTIMES["accelerate"](plan).text)
    read = load_config_from_file(str(tmp_path / "config.yaml"))
    assert read.mixed_precision == word
    assert told(plan, "accelerate") == said


@pytest.mark.parametrize(
    ("plan", "mixed", "said"),
    [
        (of("bf16", 1, 2, 3), True, []),
        (of("bf16-autocast", 1, 2, 3), True, ["the precision bf16-autocast: it runs in bf16"]),
        (of("fp16", 1, 2, 3), False, ["the precision fp16: it runs in fp32"]),
        (of("bf16", 2), False, ["the precision bf16: the trainer's, or the loaded model's"]),
    ],
)
def test_transformers(plan: Plan, mixed: bool, said: list[str]) -> None:
    found = json.loads(RUNTIMES["transformers"](plan).text)
    assert found.get("fsdp_mixed_precision", False) is mixed
    assert told(plan, "transformers") == said


@pytest.mark.parametrize("target", sorted(RUNTIMES.keys() - {"pipelining", "torchtitan"}))
def test_no_masters_are_told(target: str) -> None:
    plan = of("bf16", 1, 2, 1, grad_dtype="bf16", optimizer_dtype="bf16")
    sentence = "an optimizer of parameters in bf16, without fp32 master weights"
    assert sentence in told(plan, target)
