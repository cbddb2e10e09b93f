"""What the command line says to unknown options, arguments and commands, and to a bug."""

import sys

import pytest

from autopipe import cli
from tests.support.shell import Said, Shell


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
    ("arguments", "sentence"),
    [
        (["run", "p.json", "--checkpoints", ""], "--checkpoints: expected a value, found ''"),
        (["run", "p.json", "--checkpoints="], "--checkpoints: expected a value, found ''"),
        (["run", "", "--local", "2"], "one of the arguments is ''"),
    ],
)
def test_a_variable_that_is_unset(arguments: list[str], sentence: str, autopipe: Shell) -> None:
    """Bug: `--checkpoints "$FOLDER"` saved into the current folder, and `--save "$FILE"` ended in
    `ValueError: PosixPath('.') has an empty name`."""
    assert autopipe(*arguments).error == (
        f"{sentence}\n\nhint: is a variable on the command line unset? `autopipe run --help` lists "
        "all options"
    )


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
