"""Emitted files that a user has edited: they run as edited, or are refused by the place."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from autopipe import PlanError, ScheduleError
from autopipe.planfile import programs
from autopipe.runtime.step.emitted_files import Emitted, check_whole
from autopipe.schedules.instructions import parse_programs
from tests.support.emitted_cases import case, equal


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case("gpt", 2).emit(tmp_path_factory.mktemp("gpt") / "out")


@pytest.fixture(scope="module")
def before() -> dict[str, Tensor]:
    """What the plan computes."""
    return case("gpt", 2).run()


@pytest.fixture
def edit(gpt: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the folder in which a file has another text, and stands for what `old` was."""

    def change(file: str, old: str, new: str) -> Path:
        folder = tmp_path / "edited"
        shutil.copytree(gpt, folder, dirs_exist_ok=True)
        text = (folder / file).read_text()
        assert old in text, f"{old!r} is not in {file}"
        (folder / file).write_text(text.replace(old, new))
        return folder

    return change


Edit = Callable[..., Path]


@pytest.mark.long
def test_another_order_of_programs_runs(edit: Edit, before: dict[str, Tensor]) -> None:
    """Rank 0 computes two forwards before it sends the first: later, and the same numbers."""
    folder = edit("programs.txt", "0F0 0SEND_F0>1 0F1", "0F0 0F1 0SEND_F0>1")
    changed, plan = Emitted.load(folder, case("gpt", 2).plan), case("gpt", 2).plan
    assert changed.programs != programs.step(plan)
    assert equal(case("gpt", 2).run(folder), before)


def test_a_backward_in_two_halves_runs(edit: Edit, before: dict[str, Tensor]) -> None:
    folder = edit("programs.txt", "0REDUCE 0B3", "0I3 0REDUCE 0W3")
    assert equal(case("gpt", 2).run(folder), before)


FIRST = "0SEND_F0>1 0F1 0FREE_F0>1 0SEND_F1>1"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            f"0F0 {FIRST} 0WAIT_B0<1",
            f"0F0 0WAIT_B0<1 {FIRST}",
            "deadlock: rank 0 waits at 0WAIT_B0<1 for 1SEND_B0>0, which comes after 1WAIT_F0<0 of "
            "rank 1; rank 1 waits at 1WAIT_F0<0 for 0SEND_F0>1, which comes after 0WAIT_B0<1 of "
            "rank 0",
        ),
        ("0WAIT_B0<1 ", "", "rank 0 lacks 0WAIT_B0<1"),
        (" 0STEP", " 0FREE_F9>1 0STEP", "rank 0 has no use for 0FREE_F9>1"),
        ("0F0 ", "", "rank 0: 0B0 needs 0F0 before it, which is missing"),
        ("0SEND_F0>1", "0SENT_F0>1", "rank 0: expected an instruction, found '0SENT_F0>1'"),
        ("rank 1:", "rank 2:", "expected a line `rank 1: ...`, found"),
    ],
)
def test_programs_that_cannot_be(edit: Edit, old: str, new: str, said: str) -> None:
    """They are read before anything else, and every rank reads all of them."""
    folder = edit("programs.txt", old, new)
    with pytest.raises(ScheduleError) as error:
        Emitted.load(folder, case("gpt", 2).plan)
    assert error.value.message.startswith(f"{folder / 'programs.txt'}: {said}")


def test_long_programs_are_compared_in_one_pass() -> None:
    """Of 40,000 instructions in another order; a set of all for each of them takes an hour."""
    (whole,) = parse_programs("rank 0: " + " ".join(f"0F{k} 0B{k}" for k in range(20_000)))
    check_whole((whole[::-1],), (whole,))
    with pytest.raises(ScheduleError, match="rank 0 lacks 0B19999$"):
        check_whole((whole[:-1],), (whole,))


def test_a_stage_runs_as_edited(edit: Edit, before: dict[str, Tensor]) -> None:
    """Stage 1 doubles the loss: so it is, and so are all gradients."""
    result = "return (loss_cross_entropy_loss,)"
    folder = edit("stage_1.py", result, result.replace(",)", " * 2,)"))
    found = case("gpt", 2).run(folder)
    assert equal(found, {name: 2 * tensor for name, tensor in before.items()})


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("ROWS = 2", "ROWS = 3", "it is for micro-batches of 3 rows (ROWS), and these have 2"),
        ("class Stage1(", "class Stage7(", "it has no class Stage1, an nn.Module"),
        (
            "self.norm = States(weight=parameter(32), ",
            "self.norm = States(",
            "it lacks 'norm.weight'; the stage has it as a parameter float32[32]",
        ),
        (
            "self.head = States(weight=parameter(64, 32))",
            "self.head = States(weight=parameter(64, 31))",
            "it declares 'head.weight' as float32[64, 31]; the stage has it as a parameter "
            "float32[64, 32]",
        ),
        (
            "self.head = States(",
            "self.head = States(bias=parameter(64), ",
            "it declares 'head.bias' float32[64], which the stage does not have",
        ),
        (
            "super().__init__()",
            "super().__init__(1)",
            "stage_1.py cannot be run: TypeError: 'int' object is not a mapping",
        ),
        ("import torch\n", "import torch torch\n", "invalid syntax"),
    ],
)
def test_a_stage_that_cannot_be(edit: Edit, old: str, new: str, said: str) -> None:
    """Refused by name before the first step."""
    folder = edit("stage_1.py", old, new)
    with pytest.raises(PlanError, match=re.escape(said)) as error:
        case("gpt", 2).run(folder)
    assert str(folder / "stage_1.py") in str(error.value)
    assert "emit" in str(error.value.hint) or "the model's" in str(error.value.hint)


def test_a_stage_that_is_gone(edit: Edit) -> None:
    """Bug: it was told as `stage_1.py cannot be run: PlanError: ...`, with the hint within."""
    folder = edit("stage_1.py", "import torch", "import torch")
    (folder / "stage_1.py").unlink()
    with pytest.raises(PlanError) as error:
        case("gpt", 2).run(folder)
    assert error.value.message.endswith("stage_1.py: no such file in the emitted folder")
    assert error.value.hint == "emit it again, with --force"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("return (blocks_2,)", "return (blocks_3,)", "NameError: name 'blocks_3' is not defined"),
        ("return (blocks_2,)", "return (blocks_2 @ blocks_2,)", "RuntimeError: Expected size"),
    ],
)
def test_a_stage_whose_forward_fails(edit: Edit, old: str, new: str, said: str) -> None:
    """Bug: it was told as a bug of the run, without the file and its line."""
    folder = edit("stage_0.py", old, new)
    place = rf"{folder}/stage_0.py:\d+ `{re.escape(new)}`: stage_0.py cannot be run: {said}"
    with pytest.raises(Exception, match=place):
        case("gpt", 2).run(folder)


def test_a_stage_that_gives_what_nobody_has_room_for(edit: Edit) -> None:
    folder = edit("stage_0.py", "return (blocks_2,)", "return (blocks_2[:1],)")
    said = (
        r"stage_0.py: result 0 of forward is float32\[1, 12, 32\]; the stages that it goes to "
        r"expect float32\[2, 12, 32\]"
    )
    with pytest.raises(Exception, match=said):
        case("gpt", 2).run(folder)


def test_another_plan_is_refused(edit: Edit) -> None:
    folder = edit("plan.json", '"window": 2', '"window": 1')
    with pytest.raises(PlanError, match="was emitted from another plan than the one given"):
        Emitted.load(folder, case("gpt", 2).plan)
