"""How the command line comes to life: what it does not load, and the words of every command."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.shell import ROOT, Shell, python, ranks


def test_a_ctrl_c_before_there_is_a_command(tmp_path: Path) -> None:
    """Bug: whoever pressed it in the first half second saw where Python was just then."""
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")  # pressed while it is imported
    done = subprocess.run(
        [sys.executable, "-m", "autopipe", "--version"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is full")
@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        ("simulate zb-v --ranks 2 >&-", 0, ""),
        ("simulate zb-v --ranks 2 >&- 2>&-", 0, ""),
        (
            "simulate zb-v --ranks 2 > /dev/full",
            2,
            "error: stdout cannot be written: No space left on device\n\n"
            "hint: make room where the shell sends it, or send it elsewhere\n",
        ),
    ],
)
def test_stdout_is_closed_or_full(words: str, code: int, error: str) -> None:
    """Bug: `'NoneType' object has no attribute 'isatty'`, on stdout if stderr was closed; and
    `OSError: [Errno 28]` with code 1, which the person who made the disk full can mend."""
    done = subprocess.run(
        ["bash", "-c", f"'{sys.executable}' -m autopipe {words}"],
        env={"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", error)


# --- what is not loaded

SLOW = ("torch", "transformers", "scipy", "sympy", "pandas")
LOADS = """
import sys
from autopipe import cli
sys.argv[1:] = {argv!r}
try:
    cli.main()
finally:
    loaded = [name for name in {slow!r} if name in sys.modules]
    print(*loaded, file=sys.stderr)
"""


def loaded(argv: Sequence[str], folder: Path) -> set[str]:
    """Of the packages that are slow to import those that a command has imported."""
    code = LOADS.format(argv=[*argv], slow=(*SLOW, "numpy", "rich"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return set(done.stderr.splitlines()[-1].split())


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.shell import save_plans

    return save_plans(tmp_path_factory.mktemp("plans"))


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("--help", set()),
        ("plan --help", set()),
        ("--version", set()),
        ("init fresh.py", set()),
        ("train", set()),
        ("plan --pp 0", set()),
        ("run gone.json", set()),
        ("emit gone.json -o out", {"torch", "sympy", "scipy", "numpy"}),
        ("explain pp2.json", {"numpy", "rich"}),
        ("explain pp2.json --json", {"numpy", "rich"}),
        ("simulate 1f1b", {"numpy"}),
        ("simulate pp2.json --svg step.svg", {"numpy"}),
        ("simulate zb-v --json", {"numpy"}),
    ],
)
def test_a_command_loads_what_it_needs(command: str, expected: set[str], planned: Path) -> None:
    assert loaded(command.split(), planned) <= expected


def test_the_package_loads_nothing_slow() -> None:
    code = f"import autopipe, sys; autopipe.Plan; print([m for m in {SLOW} if m in sys.modules])"
    environ = {"PYTHONPATH": str(ROOT), "PATH": ""}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60
    )
    assert found.stdout == "[]\n", found.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "before",
    [
        "",
        "import autopipe.planners.driver.make_plan",
        "from autopipe import Plan",
    ],
)
def test_plan_is_the_function(before: str) -> None:
    """Whichever was loaded first: the module that it stands in, or nothing."""
    code = f"{before}\nimport autopipe\nassert autopipe.plan.__name__ == 'plan'"
    environ = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


# --- help, versions


COMMANDS = (
    "init trace costs plan explain simulate report check run export checkpoint emit diff "
    "probe".split()
)


def test_help_is_a_table_in_the_order_of_use(autopipe: Shell) -> None:
    out = autopipe("--help").out
    table = out[out.index("Commands, in the order of use:\n") :].splitlines()[1:]
    assert [line.split()[0] for line in table[::2]] == COMMANDS
    assert [line.split()[:3] for line in table[1::2]] == [["$", "autopipe", c] for c in COMMANDS]
    assert max(map(len, table)) <= 100


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_what_it_is(command: str, autopipe: Shell) -> None:
    out = autopipe(command, "--help").out
    options = out[out.index("Options:\n") :].split("\n\n")[0].splitlines()[1:]
    bare = [line for line in options if line.startswith("  -") and not line[30:].strip()]
    assert bare == []
    assert "-q, --quiet" in out and "--debug" in out


def test_plan_says_what_a_model_file_says(autopipe: Shell) -> None:
    out = autopipe("plan", "--help").out
    for name in ("model()", "inputs(batch_size)", "loss(outputs, batch)", "optimizer(parameters)"):
        assert f"\n  {name} -> " in out


def test_version(autopipe: Shell) -> None:
    import platform
    from importlib import metadata

    torch, own = metadata.version("torch"), metadata.version("autopipe")
    expected = f"autopipe {own}, torch {torch}, Python {platform.python_version()}\n"
    assert autopipe("--version").out == expected


def test_shells_are_taught_to_complete(tmp_path: Path) -> None:
    environ = {
        "_AUTOPIPE_COMPLETE": "complete_bash",
        "COMP_WORDS": "autopipe s",
        "COMP_CWORD": "1",
    }
    assert python(folder=tmp_path, environ=environ).out.split() == ["simulate"]


# --- quiet, debug


def test_quiet_may_stand_anywhere(autopipe: Shell) -> None:
    autopipe.plan(2, "--pp", "2")
    for argv in (["--quiet", "plan", "net.py"], ["plan", "net.py", "-q"]):
        said = autopipe(*argv, "--cluster", "cluster.json")
        assert (said.code, said.out, said.err) == (0, "plan.json\n", "")
    assert autopipe("plan", "gone.py", "-q").error.startswith("there is no model file 'gone.py'")


NOISY = """
import logging, warnings
warnings.warn("mine")
logging.getLogger("transformers").warning("an old key")
warnings.warn_explicit("of a library", FutureWarning, torch.__file__, 1)
"""


@pytest.mark.long
def test_a_library_warns_under_debug_only(tmp_path: Path) -> None:
    """What the user's own file warns of is shown in any case."""
    from tests.support.shell import NET

    (tmp_path / "net.py").write_text(NET + NOISY)
    said = python("trace", "net.py", folder=tmp_path)
    assert said.code == 0 and "UserWarning: mine" in said.err and "of a library" not in said.err
    said = python("trace", "net.py", "--debug", folder=tmp_path)
    assert "UserWarning: mine" in said.err and "FutureWarning: of a library" in said.err


# --- json


def test_json_of_a_plan(autopipe: Shell) -> None:
    """What `plan` and `explain` give are the same figures, and `explain` has the file beside."""
    autopipe.plan(2, "--pp", "2", "--batch", "8", "--micro-batches", "4")
    command = "plan net.py --cluster cluster.json --pp 2 --batch 8 --micro-batches 4 --json"
    made = json.loads(autopipe(*command.split()).out)
    assert made["file"] == "plan.json" and made["took"]["traced"] > 0
    found = json.loads(autopipe("explain", "plan.json", "--json").out)
    assert found["plan"] == json.loads(Path("plan.json").read_text())
    figures = found["figures"]
    assert figures == made["figures"]
    assert (figures["pp"], figures["dp"], figures["micro_batch_rows"]) == (2, 1, 2)
    assert (figures["devices"], figures["devices_idle"]) == (2, 0)
    for stage, planned in zip(figures["stages"], found["plan"]["stages"], strict=True):
        assert stage["peak_bytes"] == sum(stage["bytes"].values())
        assert stage["bytes"] == planned["predicted"]["memory"]


def test_json_of_a_step(autopipe: Shell) -> None:
    """1f1b, two ranks, one micro-batch, F 1 and B 2: F0 F0 B0 B0, and each rank idles half of 6."""
    command = "simulate 1f1b --ranks 2 --micro-batches 1 --json"
    (step,) = json.loads(autopipe(*command.split()).out)["steps"]
    assert (step["name"], step["seconds"], step["bubble"]) == ("1f1b", 6.0, 0.5)
    computes = [
        [(s["instruction"], s["start"], s["end"]) for s in rank["spans"] if s["computes"]]
        for rank in step["ranks"]
    ]
    assert computes == [[("0F0", 0, 1), ("0B0", 4, 6)], [("1F0", 1, 2), ("1B0", 2, 4)]]
    moved = [(m["source"], m["target"], m["flow"], m["arrival"]) for m in step["transfers"]]
    assert sorted(moved) == [(0, 1, "activation", 1), (1, 0, "gradient", 4)]
    every = json.loads(autopipe("simulate", "--json").out)["steps"]
    assert len(every) == len({step["name"] for step in every}) > 5


def test_json_of_costs(autopipe: Shell) -> None:
    """A linear layer of 8 x 16 does 2 x 8 x 16 operations a row."""
    found = json.loads(autopipe("costs", "net.py", "--json").out)
    up = next(part for part in found["parts"] if part["name"] == "up")
    assert up["count"] == 1 and up["each"]["parameters"] == str(4 * (8 * 16 + 16))
    assert "256*b" in up["each"]["forward_flops"].replace("272", "256")
    assert found["longest"] is None and found["why_no_sequence"]
    assert set(found["total"]) == set(up["each"])


# --- a model file to begin with


def test_init_plan_run(autopipe: Shell) -> None:
    """The three commands of a first hour; the plan uses both processes, and the loss falls."""
    said = autopipe("init", "model.py")
    assert (said.code, said.out, said.err) == (0, "model.py\n", "next: autopipe plan model.py\n")
    from autopipe.planfile.contents import Plan
    from autopipe.util import codec
    from tests.support.inprocess import machine

    codec.save(machine(2), Path("two.json"))
    assert autopipe("plan", "model.py", "--cluster", "two.json").code == 0
    assert len(Plan.load("plan.json").mesh.places) == 2
    run = ("-m", "autopipe", "run", "plan.json", "--steps", "5")
    said = ranks(2, *run, folder=autopipe.folder)  # as `--local 2` starts them
    assert said.code == 0, said.err
    first, last = said.out.splitlines()[-1].removeprefix("loss ").split(" -> ")
    assert float(last) < float(first)


def test_a_command_to_copy_has_names_as_a_shell_takes_them(autopipe: Shell) -> None:
    """After a command, and in hints."""
    said = autopipe("init", "my model.py")
    assert said.err == "next: autopipe plan 'my model.py'\n"
    Path("run 1").mkdir()
    assert "--record 'run 1'; or" in autopipe("report", "run 1").error
    said = autopipe("simulate", "--svg", "a step.svg")
    assert said.error.endswith("autopipe simulate 1f1b --svg 'a step.svg'")


def test_init_replaces_nothing(autopipe: Shell) -> None:
    assert autopipe("init", "net.py").error == (
        "net.py is there already\n\nhint: another name, or --force, which replaces it"
    )
    assert "class Net(nn.Module):\n    def __init__(self):" in Path("net.py").read_text()
    assert autopipe("init", "net.py", "--force").code == 0
    assert Path("net.py").read_text().startswith('"""A model file: ')
    assert autopipe("init", "net.txt").error == (
        "net.txt: expected a name that ends in .py, as `autopipe plan` asks of a model file\n\n"
        "hint: autopipe init net.py"
    )
    assert autopipe("init", ".").error == (
        ".: expected the name of a file to write, found a folder\n\nhint: autopipe init model.py"
    )
    assert autopipe("init", "gone/net.py").error.startswith(
        "gone/net.py cannot be written: there is no folder "
    )


# --- from any folder


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("example", ["gpt.py", "mini_gpt/model.py"])
def test_an_example_by_its_path(example: str, autopipe: Shell) -> None:
    """`Shell` stands in a folder of its own."""
    said = autopipe("trace", str(ROOT / "examples" / example))
    assert said.code == 0 and len(said.out.splitlines()) > 20
