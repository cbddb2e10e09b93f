"""Published runs: how a row is read, what is predicted of it, and how predictions are scored."""

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from autopipe.report import schedule_page
from benchmarks.published import deepspeed, tool, workers, zero_bubble
from benchmarks.published.__main__ import readable
from benchmarks.published.rows import Run, Unsupported, read
from benchmarks.published.scores import (
    Prediction,
    counted,
    quantile,
    rank_correlation,
    sweeps,
)
from benchmarks.published.software import Row
from benchmarks.published.summary import chosen, far, misfits, summaries, table
from tests.support.long import LONG
from tests.support.published_rows import row
from tests.support.shell import ranks

ROOT = Path(__file__).parents[2]


def test_what_a_row_leaves_out_is_derived() -> None:
    """8 devices / (tp 2 * pp 2) = dp 2;  32 sequences / (dp 2 * mbs 2) = 8 micro-batches."""
    run = read(row())
    assert (run.dp, run.micro_batches, run.chunks) == (2, 8, 1)
    assert (run.model.ffn, run.model.kv_heads) == (4096, 16)


def test_vocabularies_are_padded_as_megatron_does() -> None:
    """To a multiple of 128 tp, so that each rank has whole tiles; FSDP divides no matmul."""
    assert read(row(vocab=50257)).model.vocab == 50432  # 197 * 256
    assert read(row(vocab=50257, opt_shard="FSDP2 (zero3)")).model.vocab == 50257


@pytest.mark.parametrize(
    ("rate", "seconds"),
    [
        ({"tokens_per_s_per_gpu": 4096}, 32 * 512 / (4096 * 8)),
        ({"samples_per_s_per_gpu": 8}, 32 / (8 * 8)),
    ],
)
def test_seconds_of_a_step_come_from_rates(rate: dict[str, float], seconds: float) -> None:
    assert read(row(step_time_s="", **rate)).seconds == pytest.approx(seconds)


def test_recomputed_work_is_counted_where_the_source_counts_it() -> None:
    """Narayanan et al., SC21, equation 3: 96 B s l h^2 (1 + s / 6h + V / 16 l h) operations."""
    batch, s, layers, h, v = 32, 512, 8, 1024, 50432
    eq3 = 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    run = read(
        row(
            **{"step_time_s": "", "tflops_per_gpu": 100, "vocab": v, "recompute": "full"},
            tflops_kind="hardware incl. recompute",
        )
    )
    assert run.seconds == pytest.approx(eq3 / (100e12 * 8))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cp": 2}, "context parallelism"),
        ({"ep": 4}, "expert parallelism"),
        ({"precision": "amp_fp8"}, "precision amp_fp8"),
        ({"precision": "fp32"}, "precision fp32"),
        ({"schedule": "DualPipe"}, "schedule DualPipe"),
        ({"hidden": ""}, "no hidden"),
        ({"gbs": "", "mbs": ""}, "neither two of"),
    ],
)
def test_what_is_not_modelled_is_said(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        read(row(**changes))


@pytest.mark.parametrize(
    ("says", "profile"),
    [
        ({}, "megatron"),  # two stages of two tensor-parallel ranks, and not a word besides
        ({"tp": 1, "pp": 1}, "eager"),
        ({"opt_shard": "FSDP FULL_SHARD (zero3)"}, "eager"),
        ({"opt_shard": "FSDP2 (zero3)", "extra": "2D compile"}, "compiled"),
        ({"opt_shard": "FSDP2 (zero3)", "extra": "no compilation"}, "eager"),
        ({"opt_shard": "FSDP2 (zero3)", "notes": "without torch.compile"}, "eager"),
        ({"opt_shard": "FSDP2 (zero3)", "notes": "compile=False"}, "eager"),
        ({"tp": 1, "pp": 1, "attention": "flash (TE)"}, "megatron"),
        ({"tp": 1, "pp": 1, "attention": "unfused, ALiBi"}, "eager"),
        ({"attention": "fused"}, "eager"),  # the softmax alone
        ({"attention": "flash_attention2 + RMS kernel"}, "megatron"),
        ({"notes": "torch's DDP below 18 B"}, "megatron"),
        ({"tp": 1, "pp": 1, "framework": "NeMo 25.02"}, "megatron"),
    ],
)
def test_the_profile_is_what_the_row_says(says: dict[str, object], profile: str) -> None:
    assert read(row(**says)).software.name == profile


@pytest.mark.parametrize(
    ("says", "even"),
    [
        ({}, True),
        ({"source": "bigscience train/tr11-176B-ml/chronicles-prequel.md"}, True),
        ({"schedule": "1F1B (alpa)"}, False),
        ({"source": "Aleph-Alpha/NeurIPS-WANT-submission"}, False),
    ],
)
def test_layers_are_dealt_out_as_the_row_s_software_does(says: Row, even: bool) -> None:
    assert read(row(**says)).software.even == even


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_zb_2p_has_no_bubble_inside(ranks: int) -> None:
    """With F = I = W and no transfers each rank computes from its first forward to its last W."""
    times = {"p": ranks, "m": 4 * ranks, "layers": ranks, "T_comm_ms": 0}
    each = {name: 1000 for name in ("T_F_ms", "T_B_ms", "T_W_ms")}
    made = {name: str(value) for name, value in {**times, **each}.items()}
    assert zero_bubble.bubble(made, "zb-2p") == pytest.approx(0, abs=1e-9)


def test_the_bubble_of_1f1b() -> None:
    """(p - 1) (F + B) of (m + p - 1) (F + B), as everyone knows; transfers add to it."""
    made = {"p": "4", "m": "8", "layers": "4", "T_F_ms": "10", "T_B_ms": "12", "T_W_ms": "8"}
    assert zero_bubble.bubble({**made, "T_comm_ms": "0"}, "1f1b") == pytest.approx(3 / 11)
    assert zero_bubble.bubble({**made, "T_comm_ms": "1"}, "1f1b") > 3 / 11


def prediction(seconds: float, published: float, **changes: object) -> Prediction:
    run: Run = read(row(step_time_s=published, **changes))
    return Prediction(run, seconds, memory=1.0, needed=1.0, capacity=2.0)


def test_scores() -> None:
    assert quantile([1, 2, 3, 4, 5], 0.9) == pytest.approx(4.6)
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3], [5, 5, 5]) == 0


def test_a_sweep_is_held_to_its_best_or_to_its_order() -> None:
    """Three alike: the predicted best takes 4 % longer than the best. Eight unlike: their order."""
    (alike,) = sweeps([prediction(2, 1.0), prediction(1, 1.04), prediction(3, 1.1)])
    assert alike["held_to"] == "best"
    assert alike["best"] == pytest.approx(0.04)
    assert alike["held"]
    (unlike,) = sweeps([prediction(k, 9.0 - k) for k in range(1, 9)])
    assert (unlike["held_to"], unlike["held"]) == ("order", False)
    assert "rank correlation -1.000" in table(summaries([prediction(k, 9.0 - k) for k in range(9)]))


def test_memory_is_scored_as_its_source_counts_it() -> None:
    """100 GiB of tensors: 3.8 % of gaps besides, and 2 GiB of what is no tensor."""
    gib = 2**30
    assert counted(100 * gib, "allocated") == 100 * gib
    assert counted(100 * gib, "reserved") == pytest.approx(103.8 * gib)
    assert counted(100 * gib, "device") == pytest.approx(105.8 * gib)


DEEPSPEED = {"opt_shard": "zero1", "source": "bigscience", "tp": 1, "pp": 4, "vocab": 50304}


@pytest.mark.parametrize(
    ("says", "gradients", "held"),
    [
        # A plan of 9 GB, 1 of them activations, 0.5 passing gradients. Two replicas; of 80e6
        # parameters a bucket takes 0.16 GB, and a partition, 40e6 of the embedding's 50304 x 1024,
        # 8 x 40e6 = 0.32: less than what passes.
        ({"precision": "fp16"}, 0.16e9, (9e9, 9e9)),
        # Of 1600e6 a bucket has 500e6, 1 GB; the step flattens 800e6 twice, 6 x 800e6 = 4.8 GB,
        # beside 7.5 GB of states.
        ({"precision": "fp16"}, 3.2e9, (7.5e9 + 4.8e9, 8.5e9 + 1e9 + 4.8e9)),
        ({"precision": "bf16 (BF16 optimizer, fp32 grads)"}, 3.2e9, (9e9 + 1.6e9, 9e9 + 1.6e9)),
        ({"precision": "fp16", "source": "Megatron-LM"}, 3.2e9, (9e9, 9e9)),
    ],
)
def test_what_deepspeed_holds_of_gradients(
    says: Row, gradients: float, held: tuple[float, float]
) -> None:
    parts = {**dict.fromkeys(deepspeed.STATES, 0), "activations": int(1e9), "passing": int(0.5e9)}
    parts |= {"gradients": int(gradients), "optimizer": int(7.5e9 - gradients)}
    run = read(row(**{**DEEPSPEED, **says}))
    assert deepspeed.held(run, int(9e9), parts) == held


@pytest.mark.parametrize(("recompute", "exchanges"), [("full", 4), ("none", 3)])
def test_zero_3_of_2021_waits_for_each_weight(recompute: str, exchanges: int) -> None:
    """Two nodes of 8. Of 3, 1, 4 and 4 times h^2 elements each rank gathers 7/8 within its node,
    and meanwhile an eighth of 1/2 from the other. Every list has 16 tensors, each a launch, to
    which the whole is copied."""
    says = {"source": "Narayanan et al. SC'21", "notes": "ZeRO-3 via DeepSpeed", "tp": 1, "pp": 1}
    run = read(row(**says, opt_shard="zero3", n_gpus=16, recompute=recompute))
    cluster = tool.cluster_of(run.gpu, None, run.devices, run.per_node, "", "")
    near, far_off = cluster.within, cluster.between
    moved = 2 * 12 * 1024**2
    wire = max(7 / 8 * moved / near.gathers, 1 / 2 * moved / 8 / far_off.bandwidth)
    copies = 2 * moved / cluster.copying
    starts = 4 * (2 * 7 * near.hop + far_off.latency + 16 * 5e-6)
    waits = 8 * exchanges * (wire + copies + starts)
    assert deepspeed.waits(run, cluster) == pytest.approx(waits)
    # Of a layer that is gathered whole, 24 GB, no more than 1e9 elements are there at once.
    parts = {**dict.fromkeys(deepspeed.STATES, 0), "copies": int(24e9)}
    assert deepspeed.held(run, int(60e9), parts) == (38e9, 38e9)
    later = read(row(**{**says, "source": "a later DeepSpeed"}, opt_shard="zero3", n_gpus=16))
    assert deepspeed.waits(later, cluster) == 0


@pytest.mark.long
def test_what_zero_3_of_2021_waits_for_is_added_to_computing() -> None:
    """Whatever the links, what is left without the waits is the same."""
    says = {"source": "Narayanan et al. SC'21", "notes": "ZeRO-3 via DeepSpeed", "tp": 1, "pp": 1}
    computing = []
    for links in ("NVLink3 (12 links)", "NVLink3 (1 links)"):
        run = read(row(**says, opt_shard="zero3", layers=2, intra_node=links))
        cluster = tool.cluster_of(run.gpu, None, 8, 8, run.within, "")
        computing.append(tool.own_layout(run).seconds - deepspeed.waits(run, cluster))
    assert computing[0] == pytest.approx(computing[1]) and computing[0] > 0


def test_nvidia_smi_shows_what_the_allocator_reserves() -> None:
    run = read(row(**DEEPSPEED, precision="fp16", mem_kind="nvidia-smi"))
    parts = {**dict.fromkeys(deepspeed.STATES, 0), "activations": int(1.5e9), "passing": 0}
    parts |= {"gradients": int(3.2e9), "optimizer": int(4.3e9)}
    line = {"bytes": parts, "needed_bytes": int(9e9), "capacity_bytes": int(12e9)}
    found = Prediction.of(run, {**line, "predicted_step_s": 1.0})
    assert (found.needed, found.oom) == (12.3e9, True)
    assert found.memory == pytest.approx(14.8e9 * 1.038 + 2 * 2**30)


def test_rows_that_are_far_off_or_said_not_to_fit_are_shown() -> None:
    near, off = prediction(1.2, 1.0), prediction(1.3, 1.0, run_id="off")
    full = dataclasses.replace(near, needed=3.0 * 2**30, capacity=2.0 * 2**30)
    full = dataclasses.replace(full, bytes={"gradients": 2**20, "activations": 3 * 2**30})
    assert [line.split(" | ")[0] for line in far([near, off]).splitlines()[2:]] == ["| off"]
    assert misfits([near, full]).endswith("| 3 | 2 |  | activations 3 |")


@pytest.mark.long
def test_recomputation_of_every_other_layer_is_half_of_all() -> None:
    """And that of ops saves more than half of the layers, and costs less than all of them."""
    alone = {"tp": 1, "pp": 1, "gated_ffn": 1, "arch": "llama", "attention": "flash (SDPA)"}
    ways = {
        word: tool.own_layout(read(row(**alone, layers=4, recompute=word)))
        for word in ("none", "selective layer", "selective op", "full")
    }
    none, half, ops, full = ways.values()
    assert half.seconds - none.seconds == pytest.approx((full.seconds - none.seconds) / 2, rel=0.02)
    assert full.needed < half.needed < none.needed and ops.needed < none.needed
    assert none.seconds < ops.seconds < full.seconds


def test_ddp_and_who_says_so_sum_gradients_in_the_last_backward() -> None:
    """DeepSpeed, and Megatron-LM without its option, begin when it has ended."""
    assert read(row(tp=1, pp=1)).software.sums
    assert read(row(notes="--overlap-grad-reduce")).software.sums
    assert not read(row()).software.sums
    assert read(row(opt_shard="FSDP2 (zero3)")).software.sums
    assert not read(row(tp=1, pp=1, notes="DeepSpeed")).software.sums
    assert not read(row(tp=1, pp=1, opt_shard="zero1")).software.sums


@pytest.mark.long
def test_sums_that_follow_the_last_backward_take_longer() -> None:
    beside, after = (
        tool.own_layout(read(row(layers=2, notes=notes))) for notes in ("--overlap-grad-reduce", "")
    )
    assert beside.seconds < after.seconds and beside.bubble < after.bubble


@pytest.mark.long
def test_compiled_blocks_leave_the_loss_as_it_is() -> None:
    """Its logits in fp32 and their gradients are there, in whole."""
    alone = {"tp": 1, "pp": 1, "attention": "flash (SDPA)", "opt_shard": "FSDP2 (zero3)"}
    plain = tool.own_layout(read(row(**alone)))
    compiled = tool.own_layout(read(row(**alone, extra="compile")))
    assert compiled.bytes["passing"] == plain.bytes["passing"]
    assert compiled.seconds < plain.seconds


def test_the_free_choice_stands_beside_the_row_s_layout() -> None:
    """Below 1 the search has missed something; no ratio where the layout has no room."""
    line = {"row": "r", "layout": "pp=8", "predicted_step_s": 3.0, "fits": True}
    ours = {"layout": "dp=8", "seconds": 2.0}
    refused = {"refused": "no plan fits"}
    shown = chosen([line, {**line, "free": ours}, {**line, "fits": False, "free": refused}])
    assert shown.splitlines()[2:] == [
        "| r | pp=8 | 3 | yes | dp=8 | 2 | 1.50 |",
        "| r | pp=8 | 3 | no | no plan fits |  |  |",
    ]


def test_a_row_that_hangs_or_dies_costs_itself_alone() -> None:
    def work(item: str) -> dict[str, object]:
        if item == "hangs":
            time.sleep(60)
        if item == "dies":
            os._exit(3)
        return {"said": item}

    found = dict(workers.done(["hangs", "dies", "works"], work, jobs=3, limit=1.0))
    assert found["hangs"]["failed"] == "not done after 1 s"
    assert found["dies"]["failed"] == "its process ended with 3"
    assert found["works"]["said"] == "works"


def test_a_bad_row_is_said_and_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    """A sheet of somebody else: a row cut short, one of words, one without a measurement."""
    good = row()
    short = {name: "" for name in good}
    words = {**good, "layers": "many"}
    bare = row(step_time_s="", run_id="made-up-2")
    found = list(readable([good, short, words, bare, good]))
    assert [each.key for each in found] == ["made-up-1", "made-up-1, line 6"]
    said = [json.loads(line)["unsupported"] for line in capsys.readouterr().out.splitlines()]
    assert said == ["no layers", "no layers", "nothing was measured"]


def test_zb_2p_is_handed_over_as_a_written_schedule(tmp_path: Path) -> None:
    """It has no name in autopipe; what is written is read back, and runs to its end."""
    run = read(row(schedule="ZB-2p", pp=4, tp=1))
    path = Path(tool._schedule(run, tmp_path)["schedule"])
    assert schedule_page.from_file(path) == zero_bubble.zb_2p(4, run.micro_batches)


def test_the_command_line(tmp_path: Path) -> None:
    """One line a row; what is not modelled says so; a second run finds what the first has done."""
    rows = [row(layers=2), row(layers=2, cp=2, run_id="made-up-2")]
    lines = [",".join(rows[0])] + [",".join(found.get(n, "") for n in rows[0]) for found in rows]
    lines[0] += ",cp"
    lines[1:] = [f"{line},{cp}" for line, cp in zip(lines[1:], ("1", "2"), strict=True)]
    path, done = tmp_path / "rows.csv", tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))

    def run() -> list[dict[str, Any]]:
        found = ranks(1, "-m", "benchmarks.published", str(path), "--to", str(done), folder=ROOT)
        assert found.code == 0, found.err
        assert "made_up_table1" in found.err
        return [json.loads(line) for line in found.out.splitlines()]

    said, planned, *summary = run()
    assert said["unsupported"].startswith("context parallelism")
    assert planned["row"] == "made-up-1"
    assert planned["error"] == pytest.approx(planned["predicted_step_s"] / 0.5 - 1, abs=1e-4)
    assert sum(planned["bytes"].values()) == planned["needed_bytes"]
    if LONG:
        assert run() == [said, *summary]


@pytest.mark.long
def test_a_fused_loss_has_not_two_gradients_of_its_logits() -> None:
    """llm-foundry's makes one in 16 bits; plain PyTorch has two in fp32, of 393 MiB together."""
    alone = {"layers": 2, "tp": 1, "pp": 1, "n_gpus": 1, "gbs": 2, "opt_shard": "FSDP"}
    plain = tool.own_layout(read(row(**alone)))
    fused = tool.own_layout(read(row(**alone, source="mosaicml/llm-foundry")))
    assert plain.needed - fused.needed == 2 * 4 * 2 * 512 * 50304
    assert fused.seconds == plain.seconds
