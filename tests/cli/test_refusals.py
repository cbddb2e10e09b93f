"""`autopipe plan`: one sentence and exit code 2 for each wish that cannot be met."""

import re

import pytest

from tests.support.shell import Shell


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
