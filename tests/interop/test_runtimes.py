"""Plans in other runtimes' words, each read by the runtime itself where it is installed, else by
the grammar that it documents.

accelerate, transformers and torch are; megatron-core, torchtitan and deepspeed are read where they
are found.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import re
import subprocess
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from autopipe.interop.layers import layers_of
from autopipe.interop.targets import RUNTIMES
from autopipe.planfile.contents import Plan, check
from autopipe.planfile.parts import BlockClass, Mesh, Place, WrittenPlacement
from autopipe.schedules.registry import SCHEDULES
from tests.support.plans import chain
from tests.support.scripts import check_script

LAYERS = tuple(f"h.{number}" for number in range(8))


def planned(
    pp: int = 1, dp: int = 1, tp: int = 1, *, zero: int = 0, schedule: str = "1f1b", chunks: int = 1
) -> Plan:
    """Eight layers in so many stages, the first stages with one more where they do not divide."""
    plan = chain(pp, 4, schedule=schedule, chunks=chunks)
    size, more = divmod(len(LAYERS), pp * chunks)
    stages, first = [], 0
    for index, stage in enumerate(plan.stages):
        own = LAYERS[first : first + size + (index < more)]
        first += len(own)
        names = [f"{layer}.up.weight" for layer in own]
        names = ["wte.weight", *names] if index == 0 else names
        names = [*names, "head.weight"] if index == len(plan.stages) - 1 else names
        stages.append(replace(stage, parameters=tuple(names), zero=zero, recompute=()))
    mesh = Mesh(
        pp, dp, tp,
        tuple(
            Place(rank, *at, 0, rank, "cuda:0")
            for rank, at in enumerate(product(range(pp), range(dp), range(tp)))
        ),
    )  # fmt: skip
    (group,) = plan.cluster.nodes[0].groups
    node = replace(plan.cluster.nodes[0], groups=(replace(group, count=pp * dp * tp),))
    states = (
        WrittenPlacement("up.weight", "S(0)"),
        WrittenPlacement("up/linear/0", "S(2)", ("I", "S(0)")),
        WrittenPlacement("down/linear/0", "P", ("S(2)", "S(1)")),
    )
    return replace(
        plan,
        cluster=replace(plan.cluster, nodes=(node,)),
        mesh=mesh,
        batch=replace(plan.batch, rows=8 * dp),
        precision="bf16",
        stages=tuple(stages),
        blocks=(BlockClass("h.0", LAYERS, states if tp > 1 else ()),),
    )


def again(plan: Plan, *ops: str) -> Plan:
    """The plan with these ops of all layers run again."""
    stages = tuple(
        replace(stage, recompute=tuple(f"{layer}.{op}" for layer in own for op in ops))
        for stage, own in zip(plan.stages, layers_of(plan).stages, strict=True)
    )
    return replace(plan, stages=stages)


SELECTIVE = "attn/scaled_dot_product_attention/0", "ln_1/layer_norm/0"

PLANS = {
    "one": planned(),
    "pipeline": planned(3),
    "interleaved": planned(2, schedule="interleaved", chunks=2),
    "three axes": planned(2, 2, 2),
    "zero 1": planned(1, 4, zero=1),
    "zero 3": planned(1, 4, zero=3),
    "zero 3 and tensors": planned(1, 2, 2, zero=3),
    "replicas and tensors": planned(1, 2, 2),
    "selective": again(planned(2), *SELECTIVE),
}


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest) -> Plan:
    found = PLANS[request.param]
    check(found)
    return found


def made(plan: Plan, target: str) -> str:
    """The text, which names its version and what it leaves out."""
    exported = RUNTIMES[target](plan)
    if target != "pipelining":
        assert "autopipe" in exported.text and "cannot" in exported.text
        flat = " ".join(exported.text.replace("\n#", " ").split())
        for sentence in exported.unsupported:
            assert " ".join(sentence.split()) in flat or json.dumps(sentence) in exported.text
    return exported.text


# --- Megatron-LM


def arguments(text: str) -> dict[str, str]:
    """Its arguments as bash passes them on."""
    code = f"{text}\nprintf '%s\\n' \"${{PARALLEL[@]}}\""
    words = subprocess.run(["bash", "-c", code], capture_output=True, text=True).stdout.splitlines()
    found: dict[str, str] = {}
    for word in words:
        if word.startswith("--"):
            found[word] = ""
            last = word
        else:
            found[last] = f"{found[last]} {word}".lstrip()
    return found


_KNOWN = {
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--num-layers",
    "--pipeline-model-parallel-layout", "--sequence-parallel", "--micro-batch-size",
    "--global-batch-size", "--bf16", "--fp16", "--use-distributed-optimizer", "--use-megatron-fsdp",
    "--data-parallel-sharding-strategy", "--ckpt-format", "--recompute-granularity",
    "--recompute-method", "--recompute-num-layers", "--recompute-modules",
}  # fmt: skip


def unrolled(layout: str) -> list[str]:
    """Its layout by its documented grammar: `*` repeats the letter before it, `|` ends a stage."""
    assert re.fullmatch(r"E?(t(\*\d+)?)?(\|(t(\*\d+)?)?)*L?", layout), layout
    return re.sub(r"t\*(\d+)", lambda match: "t" * int(match[1]), layout).split("|")


def test_megatron(plan: Plan) -> None:
    text = made(plan, "megatron")
    check_script(text)
    found, mesh = arguments(text), plan.mesh
    assert found.keys() <= _KNOWN
    assert int(found["--tensor-model-parallel-size"]) == mesh.tp
    assert int(found["--pipeline-model-parallel-size"]) == mesh.pp
    rows = int(found["--micro-batch-size"]) * mesh.dp * plan.batch.micro_batches
    assert rows == int(found["--global-batch-size"]) == plan.batch.rows
    assert ("--use-distributed-optimizer" in found) == (plan.zero == 1)
    assert ("--use-megatron-fsdp" in found) == (plan.zero == 3)
    if mesh.pp > 1:
        stages = unrolled(found["--pipeline-model-parallel-layout"])
        assert len(stages) == len(plan.stages)
        assert sum(stage.count("t") for stage in stages) == int(found["--num-layers"]) == 8
        assert (stages[0][0], stages[-1][-1]) == ("E", "L")


def test_the_layout_of_uneven_stages() -> None:
    found = arguments(made(PLANS["pipeline"], "megatron"))
    assert found["--pipeline-model-parallel-layout"] == "Et*3|t*3|t*2L"


def test_megatron_reads_its_layout() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        name = "megatron.core.transformer.pipeline_parallel_layer_layout"
        module = pytest.importorskip(name, reason="megatron-core is not installed")
    for name in ("pipeline", "interleaved", "three axes"):
        plan = PLANS[name]
        layout = arguments(made(plan, "megatron"))["--pipeline-model-parallel-layout"]
        read = module.PipelineParallelLayerLayout(layout, plan.mesh.pp)
        read.validate_layer_layout(num_layers=8, mtp_num_layers=0)
        assert read.virtual_pipeline_model_parallel_size == len(plan.stages) // plan.mesh.pp


def test_megatron_recomputes_what_it_has_names_for() -> None:
    found = arguments(made(PLANS["selective"], "megatron"))
    assert found["--recompute-granularity"] == "selective"
    assert found["--recompute-modules"] == "core_attn layernorm"
    whole = replace(PLANS["one"], stages=(replace(PLANS["one"].stages[0], recompute=LAYERS),))
    found = arguments(made(whole, "megatron"))
    assert found["--recompute-granularity"] == "full"
    assert "--recompute-modules" not in found
    assert "--recompute-granularity" not in arguments(made(PLANS["one"], "megatron"))


@pytest.mark.parametrize("target", sorted(RUNTIMES))
def test_what_blocks_offload_no_runtime_has_words_for(target: str) -> None:
    (stage,) = PLANS["one"].stages
    away = replace(PLANS["one"], stages=(replace(stage, offload=LAYERS[:2]),))
    said = [s for s in RUNTIMES[target](away).unsupported if "offload" in s]
    assert len(said) == 1 and "what backward needs of 2 of 8 layers: " in said[0], said


def test_megatron_reads_its_recomputation() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        name = "megatron.core.transformer.transformer_config"
        module = pytest.importorskip(name, reason="megatron-core is not installed")
        found = arguments(made(PLANS["selective"], "megatron"))
        module.TransformerConfig(
            num_layers=8, hidden_size=64, num_attention_heads=4,
            recompute_granularity=found["--recompute-granularity"],
            recompute_modules=found["--recompute-modules"].split(),
        )  # fmt: skip


@pytest.mark.parametrize("target", sorted(RUNTIMES.keys() - {"megatron", "flagscale"}))
def test_what_runs_again_by_op_is_told(target: str) -> None:
    """No other runtime has words for it, and none is silent."""
    lost = RUNTIMES[target](PLANS["selective"]).unsupported
    (sentence,) = (s for s in lost if "recomputation" in s)
    assert sentence == "recomputation of attention and norms of 8 blocks, of which the rest is kept"


# --- torchtitan


def test_torchtitan(plan: Plan) -> None:
    """By its fields; where it is installed, by its own classes."""
    text = made(plan, "torchtitan")
    calls = {
        node.func.id: {word.arg: ast.literal_eval(word.value) for word in node.keywords}
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    parallelism, mesh = calls["ParallelismConfig"], plan.mesh
    degrees = [
        parallelism[f"{name}_degree"]
        for name in (
            "pipeline_parallel", "data_parallel_replicate", "data_parallel_shard", "tensor_parallel"
        )
    ]  # fmt: skip
    shards = mesh.dp if plan.zero == 3 else 1
    assert degrees == [mesh.pp, mesh.dp // shards, shards, mesh.tp]
    if mesh.pp > 1:
        parts = parallelism["module_fqns_per_model_part"]
        assert len(parts) == len(plan.stages)
        assert [name for part in parts for name in part] == ["wte", *LAYERS, "head"]
    training = calls["TrainingConfig"]  # a pipeline alone cuts a local batch into micro-batches
    local = parallelism.get("pipeline_parallel_microbatch_size", training["local_batch_size"])
    assert local * mesh.dp * plan.batch.micro_batches == training["global_batch_size"]
    try:
        from torchtitan.config import (  # type: ignore[import-not-found]
            ParallelismConfig,
            TrainingConfig,
        )
    except ImportError:
        return
    ParallelismConfig(**parallelism)
    TrainingConfig(**calls["TrainingConfig"])


# --- DeepSpeed


def test_deepspeed(plan: Plan) -> None:
    """Beside tensor parallelism it has no ZeRO-3: its engine asserts so as it starts."""
    found = json.loads(made(plan, "deepspeed"))
    most = 3 if plan.mesh.tp == 1 else 2
    stage = min(plan.zero, most) if plan.mesh.dp > 1 else 0
    assert found["zero_optimization"]["stage"] == stage
    told = [line for line in found["autopipe"]["cannot_express"] if line.startswith("ZeRO")]
    lost = plan.mesh.dp > 1 and plan.zero > most
    assert told == ["ZeRO-3 over 2 replicas; it has ZeRO-0, ZeRO-1, ZeRO-2"] * lost
    assert found["train_batch_size"] == (
        found["train_micro_batch_size_per_gpu"]
        * found["gradient_accumulation_steps"]
        * plan.mesh.dp
    )


def test_deepspeed_reads_it(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first of the plan's ranks does, which is told how many replicas there are."""
    config = pytest.importorskip("deepspeed.runtime.config", reason="deepspeed is not installed")
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)

    class Replicas:
        get_data_parallel_world_size = staticmethod(lambda: plan.mesh.dp)

    written = json.loads(made(plan, "deepspeed"))
    read = config.DeepSpeedConfig(written, mpu=Replicas)
    assert read.train_batch_size == plan.batch.rows
    assert read.zero_config.stage == written["zero_optimization"]["stage"]
    assert read.bfloat16_config.enabled


# --- Hugging Face


def test_transformers_reads_it(plan: Plan) -> None:
    from transformers.distributed import DistributedConfig
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    found = json.loads(made(plan, "transformers"))
    read = DistributedConfig.from_dict(found)
    mesh = plan.mesh
    replicas = mesh.dp if mesh.pp == 1 else 1  # it has no pipelines beside each other, and says so
    shards = replicas if plan.zero == 3 else 1
    assert (read.pp_size, read.tp_size, read.fsdp_size) == (mesh.pp, mesh.tp, shards)
    assert read.dp_replicate_size == replicas // shards
    if mesh.tp > 1:
        assert read.tp_plan == {"h.*.up": "colwise", "h.*.down": "rowwise"}
        assert {*read.tp_plan.values()} <= {*ALL_PARALLEL_STYLES.keys()}


def test_accelerate_reads_it(plan: Plan, tmp_path: Path) -> None:
    from accelerate import ParallelismConfig
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    (tmp_path / "config.yaml").write_text(made(plan, "accelerate"))
    read = load_config_from_file(str(tmp_path / "config.yaml"))
    assert isinstance(read, ClusterConfig)
    assert (read.num_processes, read.num_machines) == (len(plan.mesh.places), 1)
    assert read.mixed_precision == "bf16"
    prefix = "parallelism_config_"
    sizes = {name.removeprefix(prefix): size for name, size in read.parallelism_config.items()}
    if sizes:
        assert ParallelismConfig(**sizes).total_size * plan.mesh.pp == len(plan.mesh.places)
    assert ("FSDP" in str(read.distributed_type)) == (sizes.get("dp_shard_size", 1) > 1)


# --- torch.distributed.pipelining


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_torch_reads_every_schedule(schedule: str) -> None:
    """By its own parser of a cell, and its own rules for a schedule of compute alone."""
    from torch.distributed.pipelining import schedules

    chunks = {"interleaved": 2, "zb-v": 2}.get(schedule, 1)
    plan = planned(2, schedule=schedule, chunks=chunks)
    rows = [*csv.reader(io.StringIO(made(plan, "pipelining")))]
    actions = {
        rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)
    }
    stages = len(plan.stages)
    schedules._validate_schedule(actions, 2, stages, plan.batch.micro_batches)


# --- FlagScale


def test_flagscale(plan: Plan) -> None:
    """By its documented fields: a mesh is [tp, cp, ep, dp, pp], a layer count for each stage."""
    found = yaml.safe_load(made(plan, "flagscale"))
    system, mesh = found["system"], plan.mesh
    assert system["tensor_model_parallel_size"] == mesh.tp
    hetero: dict[str, Any] = system.get("hetero", {})
    if mesh.pp > 1 and len(plan.stages) == mesh.pp:
        assert sum(hetero["hetero_pipeline_layer_split"]) == found["model"]["num_layers"] == 8
        assert hetero["hetero_process_meshes"] == [mesh.tp, 1, 1, mesh.dp, mesh.pp]
        assert len(hetero["hetero_device_types"]) == 1
    if plan is PLANS["selective"]:
        modules = ["core_attn", "layernorm"]
        assert system["recompute"] == {
            "recompute_granularity": "selective", "recompute_modules": modules,
        }  # fmt: skip


def test_a_hostile_name_stays_a_name(plan: Plan, tmp_path: Path) -> None:
    """Names of a plan are any text; none of them ends a comment, a string or a word."""
    mark = tmp_path / "never"
    evil = f"x'\"\n$(touch {mark})`id`\\"
    stages = tuple(
        replace(s, parameters=(f"{evil}.w", *s.parameters), recompute=(evil,)) for s in plan.stages
    )
    hostile = replace(plan, stages=stages, blocks=(BlockClass(evil, (evil, *LAYERS)),))
    texts = {target: RUNTIMES[target](hostile).text for target in RUNTIMES}
    check_script(texts["megatron"])
    arguments(texts["megatron"])
    assert not mark.exists()
    ast.parse(texts["torchtitan"])
    for target in ("deepspeed", "transformers"):
        json.loads(texts[target])
    for target in ("accelerate", "flagscale"):
        yaml.safe_load(texts[target])
