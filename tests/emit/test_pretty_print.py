"""Expressions as text: laid out as `ruff format` itself does; and names that are not taken."""

import math
import random
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from autopipe.emit.pretty_print import (
    WIDTH,
    Call,
    Expression,
    Names,
    behind,
    comment,
    flat,
    identifier,
    lay_out,
    literal,
    member,
    table,
)


def words(count: int, length: int) -> tuple[str, ...]:
    return tuple(f"{'word' * 10}"[:length] for _ in range(count))


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (words(2, 12), "total = add(wordwordword, wordwordword)"),
        (
            words(2, 37),
            """\
            total = add(
                wordwordwordwordwordwordwordwordwordw, wordwordwordwordwordwordwordwordwordw
            )""",
        ),
        (
            (*words(2, 37), Call("low", ("weight",))),
            """\
            total = add(
                wordwordwordwordwordwordwordwordwordw,
                wordwordwordwordwordwordwordwordwordw,
                low(weight),
            )""",
        ),
        (
            (Call("", words(3, 30)),),
            """\
            total = add(
                (
                    wordwordwordwordwordwordwordwo,
                    wordwordwordwordwordwordwordwo,
                    wordwordwordwordwordwordwordwo,
                )
            )""",
        ),
    ],
)
def test_a_statement_is_opened_at_its_brackets(
    items: tuple[Expression, ...], expected: str
) -> None:
    assert "\n".join(lay_out(Call("add", items), 0, "total = ")) == dedent(expected)


def drawn(rng: random.Random, depth: int = 0) -> Expression:
    """An expression as stages have them: names, numbers, calls, tuples, dicts of calls."""
    kind = (
        rng.choice(("name", "name", "number", "call", "tuple", "states")) if depth < 3 else "name"
    )
    if kind == "name":
        return "self." + "_".join(rng.choices(["mlp", "attention", "up"], k=rng.randint(1, 5)))
    if kind == "number":
        return literal(rng.choice([1, -1, 1e-05, 3.4e38, 0.1, True, None, torch.int64, "text"]))
    items = tuple(drawn(rng, depth + 1) for _ in range(rng.randint(1, 5)))
    if kind == "call":
        return Call(rng.choice(["aten.add.Tensor", "draw", "low"]), items)
    if kind == "tuple":
        return Call("", items)
    entries = tuple(
        behind(f'"{n}": ', Call("States", (behind("weight=", item),)))
        for n, item in enumerate(items)
    )
    return Call("States", (Call("", entries, "{}"),))


def test_ruff_would_leave_it(tmp_path: Path) -> None:
    rng = random.Random(0)
    lines = ["class Stage:", "    def forward(self):"]
    for number in range(400):
        items = tuple(drawn(rng) for _ in range(rng.randint(1, 6)))
        lines += lay_out(Call("aten.cat.default", items), 8, f"value_{number} = ")
    file = tmp_path / "stage.py"
    file.write_text("\n".join(lines) + "\n")
    command = (sys.executable, "-m", "ruff", "format", "--diff", "--isolated", str(file))
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 0, told.stdout


def test_constants() -> None:
    found = [1, -0.5, 1e-05, 1e30, math.inf, -math.inf, None, True, "it's", 'say "it"']
    assert [flat(literal(value)) for value in found] == [
        *("1", "-0.5", "1e-05", "1e30", 'float("inf")', 'float("-inf")', "None", "True"),
        *('"it\'s"', "'say \"it\"'"),
    ]
    assert flat(literal((2, (3,), ()))) == "(2, (3,), ())"
    assert flat(literal((torch.bfloat16, torch.strided))) == "(torch.bfloat16, torch.strided)"
    assert flat(literal(torch.device("cpu"))) == "DEVICE"
    assert flat(literal(1 + 2j)) == "complex(1.0, 2.0)"


def test_names() -> None:
    names = Names(["low"])
    wishes = ["add", "add", "low", "sum", "or", "0_linear", "l", "image.mask", "aten"]
    assert [names.new(wish) for wish in wishes] == [
        *("add", "add_2", "low_2", "sum_0", "or_0", "x_0_linear", "l_0", "image_mask", "aten_2"),
    ]
    assert identifier("loss()_mean@1") == "loss_mean_1"
    assert member("body.0.lambda.weight") == 'self.body["0"]["lambda"].weight'


def test_comments_and_tables() -> None:
    assert comment("two\n   words", 4) == "    # two words"
    long = comment("word " * 40, 4)
    assert len(long) <= WIDTH and long.endswith("...")
    assert table([("takes", "x", "[2]"), ("", "mask", "[2, 3]")], 2) == [
        "  takes  x     [2]",
        "         mask  [2, 3]",
    ]
