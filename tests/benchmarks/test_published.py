"""Published runs: how a row is read, what is predicted of it, and how predictions are scored."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.published import memory, pipeline, zero_bubble
from benchmarks.published.__main__ import predicted, summaries, table
from benchmarks.published.constants import EXPECTED, FITTED, Constants, fitted
from benchmarks.published.fit import descend, known, logarithm
from benchmarks.published.machine import kind_of, machine_of
from benchmarks.published.rows import Row, Run, Unsupported, read
from benchmarks.published.scores import (
    Prediction,
    balanced_accuracy,
    quantile,
    rank_correlation,
    sweeps,
)
from benchmarks.published.step import predict
from benchmarks.published.transformer import kept, layer

ROOT = Path(__file__).parents[2]


def row(**changes: object) -> Row:
    """A made-up run: a small GPT on a node of 8, two stages, two tensor-parallel ranks."""
    known = {
        **{"run_id": "made-up-1", "table": "made_up_table1", "model": "GPT", "arch": "gpt"},
        **{"layers": 8, "hidden": 1024, "heads": 16, "vocab": 50304, "seq": 512},
        **{"gbs": 32, "mbs": 2, "tp": 2, "pp": 2, "schedule": "1F1B", "gpu": "A100-SXM4-80GB"},
        **{"n_gpus": 8, "gpus_per_node": 8, "precision": "bf16", "recompute": "none"},
        **{"step_time_s": 0.5, "status": "ok", "confidence": "read"},
    }
    return {name: str(value) for name, value in {**known, **changes}.items()}


def test_what_a_row_leaves_out_is_derived() -> None:
    """8 devices / (tp 2 * pp 2) = dp 2;  32 sequences / (dp 2 * mbs 2) = 8 micro-batches."""
    run = read(row())
    assert (run.dp, run.micro_batches, run.chunks) == (2, 8, 1)
    assert (run.model.ffn, run.model.kv_heads) == (4096, 16)
    assert run.origin == "made_up"  # tables of one paper have one origin


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
    ("gpu", "kind"),
    [
        ("A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),  # not 10080 GB
        ("H100-96GB-HBM2e (500W, 2.4TB/s)", "H100-96GB"),
        ("H100 PCIe", "H100-PCIe-80GB"),
        ("A800-SXM4-80GB", "A800-80GB"),
        ("GeForce RTX 4090", "RTX4090"),
        ("GB200", "GB200"),
    ],
)
def test_a_device_is_found_by_any_of_its_names(gpu: str, kind: str) -> None:
    assert kind_of(gpu, None) == kind


def test_an_unknown_device_is_said() -> None:
    with pytest.raises(Unsupported, match="device TPU v4"):
        kind_of("TPU v4", None)


def test_links_are_those_that_the_row_counts() -> None:
    """4 links of 25 GB/s between two devices, where a switch would give all 12."""
    few = machine_of(read(row(intra_node="NVLink3 (4 links inter-GPU)")))
    full = machine_of(read(row(intra_node="NVLink3")))
    assert few.tensor[0].link.bandwidth * 3 == pytest.approx(full.tensor[0].link.bandwidth)


def test_one_layer_has_the_operations_of_its_formula() -> None:
    """Forward 24 n h^2 and 4 n s h of attention; backward twice that; each of tp ranks its part."""
    run = read(row(attention="torch"))
    n, h, s = 2 * 512, 1024, 512
    work = layer(run)
    forward = sum(kernel.flops for kernel in work.forward)
    backward = sum(kernel.flops for kernel in (*work.backward_input, *work.backward_weight))
    assert forward == pytest.approx((24 * n * h**2 + 4 * n * s * h) / 2)
    assert backward == pytest.approx(2 * forward)


def test_a_layer_keeps_what_korthikanti_says() -> None:
    """Table 2: s b h (10 + 24/t + 5 a s / (h t)) with tensor parallelism,

    the scores' part less with selective recomputation, 2 s b h with full, all / t with sequence
    parallelism. (The masks of dropout are in it.)
    """
    s, b, h, a, t = 512, 2, 1024, 16, 2
    whole = s * b * h
    run = read(row())
    assert kept(run) == pytest.approx(whole * (10 + 24 / t + 5 * a * s / (h * t)))
    split = dataclasses.replace(run, recompute="attention", sequence_parallel=True)
    assert kept(split) == pytest.approx(whole * 34 / t)
    assert kept(dataclasses.replace(run, recompute="full")) == 2 * whole


def test_memory_kinds_add_up() -> None:
    constants = Constants(fragmented=0.1, context=2.0)
    assert memory.needed(100.0, "allocated", constants) == 100
    assert memory.needed(100.0, "reserved", constants) == pytest.approx(110)
    assert memory.needed(100.0, "device", constants) == pytest.approx(110 + 2 * 2**30)


def test_stages_that_hold_the_tables_have_a_layer_less() -> None:
    """22 layers on 8 ranks: with embedding and head they are 24, three each."""
    assert pipeline.layers_of(read(row(layers=22, pp=8, tp=1))) == (2, 3, 3, 3, 3, 3, 3, 2)


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


def test_many_micro_batches_take_what_simulating_all_of_them_does() -> None:
    run = read(row(gbs=256))  # 64 micro-batches on 2 ranks, of which 12 are simulated
    machine = machine_of(run)
    longer = predict(run, machine, EXPECTED).pipeline
    each = longer - predict(read(row(gbs=252)), machine, EXPECTED).pipeline
    first = predict(read(row(gbs=48)), machine, EXPECTED).pipeline
    assert longer == pytest.approx(first + 52 * each)


@pytest.mark.parametrize(
    ("slower", "quicker"),
    [
        ({"recompute": "full"}, {}),
        ({"attention": "torch"}, {"attention": "flash_attention2"}),
        ({"attention": "flash_attentionv1.0.8"}, {"attention": "flash_attention2"}),
        ({"hidden": 1040}, {"hidden": 1088}),  # 1040 = 65 * 16 begins no row at 128 bytes
        ({"opt_shard": "zero1"}, {"opt_shard": "none"}),
        ({"gpu": "A100-SXM4-80GB"}, {"gpu": "H100-SXM5-80GB"}),
    ],
)
def test_what_costs_costs(slower: dict[str, object], quicker: dict[str, object]) -> None:
    def seconds(changes: dict[str, object]) -> float:
        return predicted(row(**changes), EXPECTED).seconds

    assert seconds(slower) > seconds(quicker)


def test_a_source_is_predicted_without_its_own_constants() -> None:
    names = json.loads(FITTED.read_text())
    assert "" in names
    assert fitted("nobody has seen it") == fitted("")
    assert {fitted(name) for name in names} != {fitted("")}


def test_a_fit_finds_the_constants_that_made_the_rows() -> None:
    """Times as slower matmuls would make them, published by two sources."""
    truth = dataclasses.replace(EXPECTED, steady=0.7)
    rows = []
    for hidden in (1024, 2048, 4096):
        for source in ("one", "other"):
            made = {"hidden": hidden, "table": source, "run_id": f"{source}{hidden}"}
            seconds = predicted(row(**made), truth).seconds
            rows.append(row(**made, step_time_s=seconds))
    sources = known(rows)
    found = descend(sources)
    assert found.steady == pytest.approx(0.7, rel=0.05)
    assert found.flash1 == EXPECTED.flash1  # of which no row says anything
    assert max(abs(logarithm(found, k)) for rows in sources.values() for k in rows) < 0.03


def prediction(seconds: float, published: float, **changes: object) -> Prediction:
    run: Run = read(row(step_time_s=published, **changes))
    return Prediction(run, seconds, memory=1.0, needed=1.0, capacity=2.0)


def test_scores() -> None:
    assert quantile([1, 2, 3, 4, 5], 0.9) == pytest.approx(4.6)
    assert balanced_accuracy([(True, True), (True, False), (False, False)]) == 0.75
    assert balanced_accuracy([(False, False)]) is None
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


def test_the_command_line(tmp_path: Path) -> None:
    """One line a row; what is not modelled says so; a table by source for a person."""
    rows = [row(), row(cp=2, run_id="made-up-2")]
    lines = [",".join(rows[1])] + [",".join(found.get(n, "") for n in rows[1]) for found in rows]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(lines))
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.published", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert found.returncode == 0, found.stderr
    first, second, *_ = (json.loads(line) for line in found.stdout.splitlines())
    assert first["run_id"] == "made-up-1"
    assert first["error"] == pytest.approx(first["predicted_step_s"] / 0.5 - 1, abs=1e-4)
    assert second["unsupported"].startswith("context parallelism")
    assert "made_up_table1" in found.stderr
