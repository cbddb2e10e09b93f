"""Planned beside measured, as a run prints it in the end.

Bug: what passes, which a run does not see, was planned in "peak" and "transfers".
"""

from autopipe.planfile.parts import Memory, StagePrediction
from autopipe.report.figures import compare

PLANNED = StagePrediction(0.012, 0.0251, Memory(2**20, 2**20, 2**21, 0, 3 * 2**20, 2**19, 2**20))
MEASURED = StagePrediction(0.0113, 0.03, Memory(2**20, 2**20, 2**21, 0, 3 * 2**20, 2**18))


def test_planned_beside_measured() -> None:
    assert compare([PLANNED, PLANNED], [MEASURED, PLANNED], 0.25, 1.2) == (
        "planned / measured\n"
        "\n"
        "stage          forward           backward       peak  activations  transfers\n"
        "─────  ───────────────  ─────────────────  ─────────  ───────────  ─────────\n"
        "0      12 ms / 11.3 ms    25.1 ms / 30 ms  7.5 / 7.2    3.0 / 3.0  0.5 / 0.2\n"
        "1        12 ms / 12 ms  25.1 ms / 25.1 ms  7.5 / 7.5    3.0 / 3.0  0.5 / 0.5\n"
        "forward, backward: seconds of one micro-batch; peak (MiB): bytes at the "
        "device's fullest moment, of\n"
        "which activations and transfers are parts; without gradients on their way, which "
        "a run does not see\n"
        "a step, before the optimizer's: 250 ms / 1.2 s\n"
    )


def test_with_the_measured_bubble() -> None:
    said = compare([PLANNED], [MEASURED], 0.25, 1.2, [0.125])
    assert said.splitlines()[2].endswith("transfers  bubble")
    assert said.splitlines()[4].endswith("12 %")
    assert "; bubble: share of a step in which the device did not compute, as" in said.replace(
        "\n", " "
    )


def test_on_a_narrow_terminal_it_is_two_tables() -> None:
    said = compare([PLANNED], [MEASURED], 0.25, 1.2, [0.125], 60)
    assert max(map(len, said.splitlines())) <= 60
    assert said.count("\nstage  ") == 2
