"""The command line: one sentence and exit code 2 for each mistake of a user; nothing is written."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from autopipe import cli
from autopipe.util import codec
from tests.support.inprocess import machine
from tests.support.shell import Said, Shell


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of a cluster of four processes on this machine."""
    path = tmp_path_factory.mktemp("cluster") / "four.json"
    codec.save(machine(4), path)
    return str(path)


# --- words that mean nothing, and wishes that cannot be met


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "--planner best",
            "there is no planner 'best'\n\nhint: one of dynamic, exhaustive, uniform",
        ),
        (
            "--schedule zb-h3",
            "there is no schedule 'zb-h3', and no file of that name\n\n"
            "hint: one of naive, gpipe, 1f1b, ",
        ),
        (
            "--schedule 1f1b --depth 2",
            "depth=2 was asked for, and 1f1b takes none\n\nhint: schedule='eager-1f1b' does",
        ),
        (
            "--schedule 1f1b --chunks 2",
            "chunks=2 was asked for, and 1f1b puts 1 stage on each rank\n\n"
            "hint: schedule='interleaved' takes any number from 2 on",
        ),
        (
            "--precision fp8",
            "there is no precision 'fp8'\n\n"
            "hint: one of fp32, bf16, fp16, bf16-autocast, fp16-autocast",
        ),
        ("--zero 4", "there is no ZeRO stage 4\n\nhint: one of 0, 1, 2, 3"),
        (
            "--zero 3 --schedule zb-h1 --pp 2",
            "zb-h1 and zero=3 do not go together: it gathers for both halves of a backward at once"
            "\n\nhint: the schedule 1f1b, or zero=1",
        ),
        (
            "--recompute all",
            "recompute: 'all' was asked for, and the model has no blocks: modules of one class, "
            "one after the other\n\nhint: leave recompute out",
        ),
        (
            "--recompute none --recompute all",
            "recompute=none was asked for, and recompute=all too, which contradict each other"
            "\n\nhint: leave out one of the two: none stands alone",
        ),
        (
            "--cluster 8xA100-81GB",
            "'8xA100-81GB': no device 'A100-81GB' is known\n\nhint: did you ",
        ),
        ("--cluster gone.json", "gone.json: no such file, asked for the cluster"),
        ("--cluster local:x", "'local:x': expected a number of processes, found 'x'"),
        ("--cluster 4xcpu", "'4xcpu': no device 'cpu' is known\n\nhint: did you mean cpu:4 (4 pro"),
        (
            "--cluster 0xA100-80GB",
            "'0xA100-80GB': expected at least 1 for the devices in a node, found 0\n\nhint: 2x8x",
        ),
        (
            "--cluster local:0",
            "'local:0': expected at least 1 for the processes, found 0\n\nhint: ",
        ),
        (
            "--memory 1GiB,1GiB",
            "memory: 2 limits were given for the 4 devices of local:4\n\n"
            "hint: one limit for all devices, or one for each, as 80GiB,40GiB,40GiB",
        ),
        ("--memory plenty", "memory 'plenty' is no size\n\nhint: 24GiB, 512MB or bytes"),
        ("--memory 0", "memory '0' is 0 bytes, expected at least 1"),
        (
            "--tp 3",
            "tp=3 was asked for, and no parameter divides into 3 equal parts: their matrices have "
            "dims of 16, 8, 4\n\nhint: tp of 2, 4",
        ),
        ("--tp 5", "tp=5 was asked for, and local:4 has 4 devices\n\nhint: tp of at most 4"),
        ("--pp 5", "pp=5 needs 5 devices, found 4\n\nhint: pp of at most 4"),
        ("--dp 5", "dp=5 needs 5 devices, found 4\n\nhint: dp of at most 4"),
        (
            "--dp 3",
            "a batch of 32 rows does not divide into dp=3 equal parts\n\n"
            "hint: a batch of 30 or 33 rows",
        ),
        (
            "--batch 10 --dp 4",
            "a batch of 10 rows does not divide into dp=4 equal parts\n\n"
            "hint: a batch of 8 or 12 rows",
        ),
        (
            "--batch 10 --dp 2 --micro-batches 3",
            "a batch of 10 rows does not divide into dp=2 x micro_batches=3 equal parts\n\n"
            "hint: --micro-batches 1, or a batch of 6 or 12 rows",
        ),
        (
            "--batch 2 --micro-batches 3",
            "a batch of 2 rows does not divide into micro_batches=3 equal parts\n\n"
            "hint: --micro-batches 2, or a batch of 3 rows",
        ),
        ("-o gone/plan.json", "gone/plan.json cannot be written: there is no folder "),
    ],
)
def test_an_argument_that_cannot_be_met(
    arguments: str, sentence: str, autopipe: Shell, four: str
) -> None:
    cluster = [] if "--cluster" in arguments else ["--cluster", four]
    assert autopipe("plan", "net.py", *cluster, *arguments.split()).error.startswith(sentence)
    assert autopipe.files() == ["net.py"]


LINK = {"latency": 1e-5, "bandwidth": 1e9}


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        # Bug: those of a device alone were looked at, and 25 GB/s planned as 25 bytes a second.
        ("within.bandwidth", 25, "within.bandwidth: expected at least 1e5 a second, found 25"),
        ("between.latency", 5, "between.latency: expected less than 1 s, found 5 s"),
        ("across", {**LINK, "summing": 12.5}, "across.summing: expected at least 1e5 a second"),
        ("nodes.0.within", {**LINK, "latency": 5}, "nodes[0].within.latency: expected less than"),
        (
            "nodes.0.groups.0.device.host",
            64,
            "nodes[0].groups[0].device.host: expected at least 1e6 a second, found 64",
        ),
    ],
)
def test_a_link_of_a_cluster_file_in_other_units(
    place: str, value: object, sentence: str, autopipe: Shell, four: str
) -> None:
    data = json.loads(Path(four).read_text())
    *parts, last = place.split(".")
    part: Any = data
    for word in parts:
        part = part[int(word) if word.isdigit() else word]
    part[last] = value
    autopipe.write("cluster.json", json.dumps(data))
    error = autopipe("plan", "net.py", "--cluster", "cluster.json").error
    assert error.startswith(f"cluster.{sentence}")
    assert "hint: `autopipe probe -o FILE`" in error


@pytest.mark.parametrize(
    ("cluster", "sentence"),
    [
        # Bug: planned for minutes, and until memory was full.
        ("100000000x8xA100-80GB", "expected at most 1,000,000 devices, found 800,000,000"),
        (
            "10x90000xA100-80GB+2x90000xA100-80GB",
            "expected at most 1,000,000 devices, found 1,080,000",
        ),
        ("cpu:100000000", "expected at most 1,024 processes on one machine, found 100,000,000"),
    ],
)
def test_more_devices_than_anyone_has(cluster: str, sentence: str, autopipe: Shell) -> None:
    error = autopipe("plan", "net.py", "--cluster", cluster).error
    assert error.startswith(f"{cluster!r}: {sentence}") and "hint: " in error


@pytest.mark.parametrize(
    ("figure", "value", "sentence"),
    [
        ("memory", None, "memory: missing; expected an integer"),
        ("memory", -1, "memory: expected more than 0, found -1"),
        ("memory", "80GiB", 'memory: expected an integer, found "80GiB"'),
        ("bandwidth", 0, "bandwidth: expected more than 0, found 0.0"),
        ("launch", -1e-6, "launch: expected at least 0, found -1e-06"),
        ("flops", {"fp32": -1e12}, "flops.fp32: expected more than 0, found -1000000000000.0"),
        ("flops", {}, "flops: expected at least one entry, found none"),
        # Bug: a step of 44,687,921 s was planned without a word.
        ("memory", 80, "memory: expected at least 1e6 bytes, found 80"),
        ("flops", {"fp32": 19.5}, "flops.fp32: expected at least 1e6 a second, found 19.5"),
        ("bandwidth", 2000, "bandwidth: expected at least 1e6 a second, found 2000"),
        ("launch", 6, "launch: expected less than 1 s, found 6 s"),
    ],
)
def test_a_figure_of_a_cluster_file(
    figure: str, value: object, sentence: str, autopipe: Shell, four: str
) -> None:
    """Its place in the file, what was expected there, and how to come by a right one."""
    data = json.loads(Path(four).read_text())
    device = data["nodes"][0]["groups"][0]["device"]
    del device[figure]
    if value is not None:
        device[figure] = value
    autopipe.write("cluster.json", json.dumps(data))
    error = autopipe("plan", "net.py", "--cluster", "cluster.json").error
    place, _, hint = error.partition("\n\nhint: ")
    assert place == f"cluster.nodes[0].groups[0].device.{sentence}"
    assert hint.startswith("`autopipe probe -o FILE` writes a whole one")
    assert autopipe.files() == ["cluster.json", "net.py"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "cluster.json: the cluster is an empty file\n\nhint: was it copied whole?"),
        ("[]", "cluster: expected an object, found [] in cluster.json\n\nhint: "),
        ('{"name": "x"', "cluster.json, line 1, column 13: the file ends in the middle\n\nhint: "),
        ('{"nodos": []}', "cluster.nodos: unknown field; Cluster has name, nodes, within, "),
    ],
)
def test_a_cluster_file_that_is_none(text: str, sentence: str, autopipe: Shell) -> None:
    autopipe.write("cluster.json", text)
    error = autopipe("plan", "net.py", "--cluster", "cluster.json").error
    assert error.startswith(sentence) and "\n\nhint: " in error


HEADS = """\
import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x):
        q, k, v = (part.view(-1, 6, 8, 3).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def model():
    return Attention()


def inputs(batch_size):
    return {"x": torch.randn(batch_size, 6, 24)}


def loss(outputs, batch):
    return outputs.square().mean()
"""


def test_heads_that_do_not_divide(autopipe: Shell, four: str) -> None:
    """Eight heads over three ranks; that 24 and 72 do divide by three is no help."""
    autopipe.write("net.py", HEADS)
    assert autopipe("plan", "net.py", "--cluster", four, "--tp", "3").error == (
        "tp=3 was asked for, and the 8 heads of scaled_dot_product_attention/0 do not divide into "
        "3 equal parts\n\nhint: tp of 1, 2, 4, 8"
    )
    assert autopipe("plan", "net.py", "--cluster", four, "--tp", "2").code == 0


def test_memory_that_is_too_low(autopipe: Shell, four: str) -> None:
    """The shortfall in bytes, the stage, and what to try next."""
    said = autopipe("plan", "net.py", "--cluster", four, "--memory", "1000", "--tp", "1")
    found = re.match(
        r"no plan fits .* a device: .*pp=\d dp=\d micro_batches=\d+.* stage \d needs .*, "
        r"[\d.]+ (bytes|KiB) too many.*\n\nhint: ",
        said.error,
        re.DOTALL,
    )
    assert found, said.error
    assert autopipe.files() == ["net.py"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("plan net.py --pp 0", "--pp: expected a whole number of at least 1, found '0'"),
        ("plan net.py --chunks=1", "--chunks: expected a whole number of at least 2, found '1'"),
        ("plan net.py --depth -1", "--depth: expected a whole number of at least 0, found '-1'"),
        (
            "plan net.py --batch many",
            "--batch: expected a whole number of at least 1, found 'many'",
        ),
        (
            "simulate 1f1b --latency -1",
            "--latency: expected a number of at least 0 and at most 1e+09, found '-1'",
        ),
        ("run plan.json --seed x", "--seed: expected a whole number, found 'x'"),
        ("plan net.py --memory", "--memory needs a value"),
    ],
)
def test_what_the_parser_refuses(arguments: str, sentence: str, autopipe: Shell) -> None:
    """The option, what it takes and what it was given; no box, no usage line."""
    command = arguments.split()[0]
    hint = f"`autopipe {command} --help` lists all options"
    assert autopipe(*arguments.split()).error == f"{sentence}\n\nhint: {hint}"
    assert autopipe.files() == ["net.py"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            "plan",
            "MODEL is missing: model.py, package.module:factory, or hf:FOLDER\n\n"
            "hint: autopipe plan model.py --cluster 2x8xA100-80GB",
        ),
        (
            "explain",
            "PLAN is missing: a plan file, as `autopipe plan` writes it\n\n"
            "hint: autopipe explain plan.json",
        ),
        (
            "plan net.py --memroy 1GiB",
            "there is no option '--memroy'\n\n"
            "hint: is it --memory? `autopipe plan --help` lists all options",
        ),
        (
            "--frob",
            "there is no option '--frob'\n\nhint: `autopipe --help` lists all options",
        ),
        (
            "export plan.json",
            "--to is missing: torchrun, slurm, kubeflow, megatron, ...\n\n"
            "hint: autopipe export plan.json --to slurm -o train.sbatch",
        ),
        (
            "checkpoint look kept",
            "ACTION: 'look' is not one of 'info', 'verify', 'convert'\n\n"
            "hint: autopipe checkpoint info checkpoints",
        ),
        (
            "explain plan.json more",
            "one argument too many: more\n\n"
            "hint: autopipe explain plan.json; `autopipe explain --help` lists all options",
        ),
    ],
)
def test_what_is_missing_and_what_is_too_much(arguments: str, error: str, autopipe: Shell) -> None:
    assert autopipe(*arguments.split()).error == error


COMMANDS = (
    "the commands are init, trace, costs, plan, explain, simulate, report, check, run, export, "
    "checkpoint, emit, diff, probe"
)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("train", "autopipe run plan.json --local 4; "),
        ("launch", "autopipe run plan.json --local 4; "),
        ("split", "autopipe plan model.py --cluster 2x8xA100-80GB; "),
        ("show", "autopipe explain plan.json; "),
        ("simulat", "autopipe simulate 1f1b --ranks 4 --micro-batches 8; "),
        ("frobnicate", ""),
    ],
)
def test_a_command_that_there_is_not(typed: str, meant: str, autopipe: Shell) -> None:
    """By what people mean with a word, not by its letters alone: `train` is not `trace`."""
    assert autopipe(typed).error == f"there is no command {typed!r}\n\nhint: {meant}{COMMANDS}"


# --- a schedule in a file


@pytest.mark.parametrize(
    ("lines", "arguments", "sentence"),
    [
        ("", "", "steps.txt: expected a schedule, found no instruction"),
        ("rank 0: 0F0 0B1", "", "steps.txt: rank 0: 0B1 needs 0F1 before it, which is missing"),
        ("rank 0: 0F0 0WAIT_B0<1", "", "steps.txt: rank 0: expected compute alone, found 0WAIT"),
        ("rank 0: forward", "", "steps.txt: rank 0: expected an instruction, found 'forward'"),
        (
            "rank 0: 0F0 0B0\nrank 1: 1F0 1B0",
            "--pp 4",
            "pp=4 was asked for, and the schedule is written for pp=2\n\nhint: leave pp out, or ",
        ),
        (
            "rank 0: 0F0 0B0\nrank 1: 1F0 1B0",
            "--micro-batches 4",
            "micro_batches=4 was asked for, and the schedule is written for micro_batches=1",
        ),
        (
            "rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F0 1F1 1B0 1B1",
            "",
            "deadlock: rank 0 waits at 0WAIT_B0<1 for 1SEND_B0>0, which comes after ",
        ),
    ],
)
def test_a_written_schedule(
    lines: str, arguments: str, sentence: str, autopipe: Shell, four: str
) -> None:
    autopipe.write("steps.txt", lines)
    command = ("plan", "net.py", "--cluster", four, "--schedule", "steps.txt")
    assert autopipe(*command, *arguments.split()).error.startswith(sentence)
    if not arguments:
        assert autopipe("simulate", "steps.txt").error.startswith(sentence)
    assert autopipe.files() == ["net.py", "steps.txt"]


# --- simulate


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("zb-h3", "there is no schedule 'zb-h3', and no file of that name\n\nhint: one of naive, "),
        (".", "there is no schedule '.', and no file that can be read: "),
        (
            "1f1b --depth 3",
            "--depth 3 makes no difference to 1f1b\n\n"
            "hint: chunks are for interleaved, a depth is for eager-1f1b",
        ),
        ("zb-v --chunks 3", "--chunks 3 makes no difference to zb-v\n\nhint: chunks are for inter"),
        ("gone.json", "gone.json: no such file, asked for the plan"),
        ("zb-h3 --ranks 3", "there is no schedule 'zb-h3', and no file of that name\n\nhint: one "),
        (
            "--svg step.svg",
            "--svg makes one picture, and no schedule was named\n\n"
            "hint: autopipe simulate 1f1b --svg step.svg",
        ),
        ("1f1b --svg gone/step.svg", "gone/step.svg cannot be written: there is no folder "),
    ],
)
def test_what_cannot_be_drawn(arguments: str, sentence: str, autopipe: Shell) -> None:
    assert autopipe("simulate", *arguments.split()).error.startswith(sentence)
    assert autopipe.files() == ["net.py"]


def test_what_a_file_says_itself(autopipe: Shell) -> None:
    autopipe.write("steps.txt", "rank 0: 0F0 0B0")
    autopipe.write("plan.json", "{}")
    assert autopipe("simulate", "steps.txt", "--ranks", "3").error.startswith(
        "--ranks 3 makes no difference to steps.txt\n\nhint: the file says it"
    )
    said = autopipe("simulate", "plan.json", "--latency", "0.5", "--window", "3").error
    assert said.startswith(
        "--latency 0.5 makes no difference to plan.json\n\nhint: a plan is drawn as it is"
    )


# --- --debug


def test_debug_may_stand_anywhere(autopipe: Shell) -> None:
    for argv in (["--debug", "plan", "gone.py"], ["plan", "gone.py", "--debug"]):
        said = autopipe(*argv)
        assert said.code == 2 and said.err.startswith("Traceback (most recent call last):\n")
        assert "\nerror: there is no model file 'gone.py'\n" in said.err
    assert "--debug" in autopipe("--help").out


def test_what_nobody_foresaw(autopipe: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code 1, not a user's mistake; the traceback is a flag away."""

    def fails(*_: object) -> None:
        raise ZeroDivisionError("division by zero\nand more")

    monkeypatch.setattr("autopipe.frontend.model_file.load", fails)
    said = autopipe("trace", "net.py")
    assert said == Said(
        1, "", "error: ZeroDivisionError: division by zero\n\nhint: --debug shows where\n"
    )
    monkeypatch.setattr(sys, "argv", ["autopipe", "trace", "net.py", "--debug"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


class InductorError(Exception):
    """As torch's compiler raises it, for a stage that it cannot compile for this device."""


def test_where_torchs_compiler_fails_a_hint_says_how_to_do_without(
    autopipe: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise InductorError("CppCompileError: C++ compile error")

    monkeypatch.setattr("autopipe.frontend.model_file.load", fails)
    said = autopipe("trace", "net.py")
    assert said.code == 1 and said.err.startswith("error: InductorError: CppCompileError")
    assert "a plan made with --no-compile does without" in said.err
