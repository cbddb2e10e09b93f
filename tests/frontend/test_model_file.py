"""A model file: what is read from it, and the sentence for each way in which it can be wrong."""

import os
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopipe.errors import AutopipeError, ModelError
from autopipe.frontend import model_file
from autopipe.frontend.model_file import ModelFile
from autopipe.planfile.parts import Batch
from tests.support.plans import example_plan

SMALLEST = """\
import torch
from torch import nn


def model():
    return nn.Linear(3, 1)


def inputs(batch_size):
    return {"input": torch.randn(batch_size, 3)}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder; what a model file adds to `sys.path` and `sys.modules` goes again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def load(text: str, more: str = "") -> ModelFile:
    Path("net.py").write_text(text + more)
    return model_file.load("net.py")


def refused(text: str, more: str = "") -> ModelError:
    with pytest.raises(ModelError) as error:
        load(text, more)
    return error.value


def rows(stream: Iterator[Any], steps: int) -> list[torch.Tensor]:
    return [batch["input"] for batch in islice(stream, steps)]


# --- what is there


def test_model_and_inputs_are_enough() -> None:
    file = load(SMALLEST)
    assert isinstance(file.model(), nn.Linear)
    assert file.inputs(5)["input"].shape == (5, 3)
    assert (file.loss, file.batches, file.optimizer, file.scheduler, file.batch_size) == (None,) * 5
    assert not file.sharded and file.called


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("def optimiser(parameters): ...", "optimizer"),
        ("def optimizers(parameters): ...", "optimizer"),
        ("def configure_optimizers(parameters): ...", "optimizer"),
        ("def batch(batch_size): ...", "batches"),
        ("train_loader = [inputs(4)]", "batches"),
        ("def schedulers(optimizer): ...", "scheduler"),
        ("def losses(outputs, batch): ...", "loss"),
        ("criterion = nn.MSELoss()", "loss"),
        ("def loss_fn(outputs, batch): ...", "loss"),
        ("BATCH_SIZE = 64", "batch_size"),
        ("grad_norm: float = 1.0", "max_grad_norm"),
    ],
)
def test_a_name_that_is_nearly_one(line: str, meant: str) -> None:
    """It would be passed over, and another optimizer, loss or batch be taken without a word."""
    name = line.removeprefix("def ").replace("(", " ").replace(":", " ").split()[0]
    argument = f"def used({name}): return {name}"
    error = refused(SMALLEST, f"\n\n{line}\n{argument}\nused(1)\n")
    assert error.message.startswith(f"net.py:13 defines {name!r}, which nothing uses: ")
    assert error.hint == f"call it {meant!r}; or '_{name}', if it is something else"
    for more in (
        f"{line}\nused = {name}\n",  # by the file itself
        f"{line}\n__all__ = [{name!r}]\n",  # by other files
        f"{line}\n{meant} = None\n",  # beside the one that it is not
        line.replace(name, f"_{name}") + "\n",
    ):
        load(SMALLEST, more)


def test_a_module_of_a_package_may_have_them_for_the_rest_of_it() -> None:
    Path("own_trainer.py").write_text(f"{SMALLEST}\n\ndef build_optimizer(model): ...\n")
    assert model_file.load("own_trainer:model").optimizer is None


@pytest.mark.parametrize(
    "line",
    [
        "patches = 4",
        "length = 128",
        "input_size = 3",
        "num_batches = 2",
        "def no_optimizer(p): ...",
    ],
)
def test_names_of_other_things(line: str) -> None:
    load(SMALLEST, line + "\n")


@pytest.mark.parametrize(
    ("batches", "found"),
    [
        ("3", "an int, which gives no batches"),
        ("inputs(4)", "a dict, which gives no batches"),
        ("(inputs(4) for _ in range(3))", "a generator, which can be read once only"),
    ],
)
def test_batches_that_are_no_list(batches: str, found: str) -> None:
    error = refused(SMALLEST, f"batches = {batches}\n")
    assert str(error) == (
        f"net.py: batches is {found}\n"
        "hint: def batches(batch_size): ..., a list of batches, or a DataLoader"
    )


def test_batches_are_not_begun_as_the_file_is_read() -> None:
    """Bug: a DataLoader started its workers, also where a model was only planned."""
    loader = "class Loader:\n    def __iter__(self): raise OSError\n"
    assert not load(SMALLEST, f"{loader}batches = Loader()\n").called


@pytest.mark.parametrize(
    ("more", "optimizer", "said"),
    [
        ("", "adamw", []),
        ("batch_size = 4\n", "adamw", []),
        (
            "batch_size = 6\n",
            "adamw",
            ["net.py: batch_size is 6, and the plan is for 4 rows: a run takes batches of 4 rows"],
        ),
        (
            "",
            "custom",
            [
                "net.py: the plan was made with its optimizer(parameters), which it has no more: "
                "AdamW is used"
            ],
        ),
        (
            "def optimizer(parameters): return torch.optim.SGD(parameters)\n",
            "adamw",
            [
                "net.py: the plan was made for adamw, and the file's own optimizer(parameters) is "
                "used: it may hold more or fewer bytes than predicted"
            ],
        ),
    ],
)
def test_what_has_changed_since_planning(more: str, optimizer: str, said: list[str]) -> None:
    plan = replace(example_plan(), batch=Batch(4, 2), optimizer=optimizer)
    assert load(SMALLEST, more).since_planning(plan) == said


def test_everything() -> None:
    file = load(
        SMALLEST,
        "batch_size = 12\n"
        "def loss(outputs, batch): return outputs.sum()\n"
        "def batches(batch_size, shard=0, num_shards=1):\n"
        "    return [inputs(batch_size // num_shards)]\n"
        "def optimizer(parameters): return torch.optim.SGD(parameters, lr=0.5)\n",
    )
    assert file.batch_size == 12 and file.sharded
    assert file.loss is not None and file.loss(torch.ones(3), None) == 3
    assert [batch["input"].shape for batch in file.stream(8, 1, 4, seed=0)] == [(2, 3)]
    assert file.optimizer is not None
    assert isinstance(file.optimizer(file.model().parameters()), torch.optim.SGD)


def test_a_model_is_made_on_the_cpu_and_its_optimizer_where_its_rank_is() -> None:
    """No machine has a GPU of this number."""
    file = load(
        SMALLEST.replace("Linear(3, 1)", "Linear(3, 1, device='cuda:63')")
        + "\n\ndef optimizer(parameters):\n    torch.zeros(1, device='cuda:63')\n"
    )
    assert next(file.model().parameters()).device.type == "cpu"
    assert file.optimizer is not None
    with pytest.raises(ModelError, match="optimizer"):
        file.optimizer([nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize("path", ["sub/net.py", "link.py"])
def test_its_neighbours_can_be_imported(folder: Path, path: str) -> None:
    """As `python net.py` lets it, which follows a symbolic link."""
    (folder / "sub").mkdir()
    (folder / "sub" / "widths.py").write_text("WIDTH = 3\n")
    (folder / "sub" / "net.py").write_text("from widths import WIDTH\n" + SMALLEST)
    (folder / "link.py").symlink_to("sub/net.py")
    assert model_file.load(path).inputs(1)["input"].shape == (1, 3)


def test_an_edit_in_the_same_second_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: as many letters, and Python took the byte code of the file before."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = folder / "net.py"
    for out in (4, 5):
        path.write_text(SMALLEST.replace("nn.Linear(3, 1)", f"nn.Linear(3, {out})"))
        os.utime(path, (1e9, 1e9))
        assert model_file.load("net.py").model().out_features == out


def test_what_it_draws_is_the_same_on_every_rank() -> None:
    """Bug: a perceptual loss of random weights; planning had drawn before it read the file, a rank
    had not, and its plan "was made for another model or another loss"."""
    draws = "\nimport torch\nFEATURES = torch.randn(3)\ndef loss(o, batch):\n    return FEATURES\n"
    first = load(SMALLEST, draws).loss
    torch.rand(1)
    again = load(SMALLEST, draws).loss
    assert first is not None and again is not None
    assert torch.equal(first(None, None), again(None, None))


def test_a_dataclass_in_it_finds_its_module() -> None:
    more = "import dataclasses\n@dataclasses.dataclass\nclass Config:\n    width: 'int' = 3\n"
    assert load(SMALLEST, more).batch_size is None


def test_a_factory_of_a_module(folder: Path) -> None:
    (folder / "nets").mkdir()
    (folder / "nets" / "__init__.py").write_text("")
    (folder / "nets" / "small.py").write_text(SMALLEST.replace("def model", "def tiny"))
    file = model_file.load("nets.small:tiny")
    assert isinstance(file.model(), nn.Linear)
    with pytest.raises(ModelError, match=r"nets.small:huge has no function huge\(\), which builds"):
        model_file.load("nets.small:huge")
    with pytest.raises(ModelError, match="there is no module 'nets.large', asked for"):
        model_file.load("nets.large:tiny")


# --- the batches of a run


def test_without_batches_inputs_are_drawn_again_each_step_and_alike_on_every_rank() -> None:
    file = load(SMALLEST)
    first, second = rows(file.stream(4, 0, 2, seed=0), 2)
    assert not torch.equal(first, second)
    torch.rand(3)  # a rank may have drawn other numbers before
    assert torch.equal(rows(file.stream(4, 1, 2, seed=0), 2)[1], second)
    assert not torch.equal(rows(file.stream(4, 0, 2, seed=1), 1)[0], first)


def test_drawing_inputs_leaves_the_random_state_as_it_was() -> None:
    file = load(SMALLEST)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    next(file.stream(4, 0, 1, seed=0))
    assert torch.equal(torch.rand(1), expected)


def test_batches_that_do_not_shard_are_whole_on_every_rank() -> None:
    file = load(SMALLEST, "def batches(batch_size): return [inputs(batch_size)] * 3\n")
    assert not file.sharded
    assert [batch.shape[0] for batch in rows(file.stream(8, 1, 2, seed=0), 9)] == [8, 8, 8]


def test_a_generator_that_fails_at_its_second_batch() -> None:
    more = (
        "def batches(batch_size):\n    yield inputs(batch_size)\n    raise OSError('disk gone')\n"
    )
    stream = load(SMALLEST, more).stream(8, 0, 1, seed=0)
    next(stream)
    with pytest.raises(ModelError) as error:
        next(stream)
    line = SMALLEST.count("\n") + 3
    assert error.value.message == (
        f"{Path('net.py').resolve()}:{line} `raise OSError('disk gone')`: "
        "net.py: batches() raised OSError: disk gone"
    )


def test_batches_that_are_none() -> None:
    stream = load(SMALLEST, "def batches(batch_size): pass\n").stream(8, 0, 1, seed=0)
    with pytest.raises(
        ModelError, match=r"net.py: batches\(\) raised TypeError: 'NoneType' object"
    ):
        next(stream)


# --- what is refused


def test_no_file() -> None:
    with pytest.raises(ModelError) as error:
        model_file.load("gone.py")
    assert str(error.value) == "there is no model file 'gone.py'\nhint: autopipe plan model.py"


def test_a_module_without_a_function_and_no_module() -> None:
    with pytest.raises(ModelError) as error:
        model_file.load("package.net")
    assert error.value.hint == "package.net:model names the function model() of a module"
    with pytest.raises(ModelError, match="'..net' is no name of a module"):
        model_file.load("..net:model")


def test_a_folder() -> None:
    with pytest.raises(ModelError, match="there is no model file '.', it is a folder"):
        model_file.load(".")


def test_no_python() -> None:
    Path("net.txt").write_text("hello\n")
    with pytest.raises(ModelError, match="net.txt is no Python file"):
        model_file.load("net.txt")


def test_a_syntax_error() -> None:
    error = refused("import torch\ndef model(:\n")
    assert error.message == f"{Path('net.py').resolve()}:2: invalid syntax"


def test_an_error_on_import() -> None:
    error = refused("WIDTH = 3\nprint(WIDTH / 0)\n")
    assert error.message == (
        f"{Path('net.py').resolve()}:2 `print(WIDTH / 0)`: net.py cannot be run: "
        "ZeroDivisionError: division by zero"
    )


def test_a_program_that_ends_when_it_is_imported() -> None:
    """It once ended autopipe with it, with the program's own code and not a word."""
    error = refused("import sys\nsys.exit(3)\n")
    assert error.message == (
        f"{Path('net.py').resolve()}:2 `sys.exit(3)`: net.py ends the program (exit code 3) when "
        "it is imported"
    )
    assert error.hint is not None and "__main__" in error.hint


def test_gradients_that_it_turns_off() -> None:
    """Bug: it was planned, and its run was told to call pipe.step outside of torch.no_grad()."""
    error = refused("import torch\ntorch.set_grad_enabled(False)\n" + SMALLEST)
    assert error.message == "net.py turns gradients off for all that comes after it"
    assert torch.is_grad_enabled()


OPTIONS = """
import argparse
def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_known_args()[0].steps
"""


def test_its_own_options_have_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a file that is a program too took options of `autopipe`'s command line for its own: here
    layers of 100 features in a run, and of 3 in its plan. It is read as by `python net.py`."""
    command = ["autopipe", "run", "plan.json", "--steps", "100"]
    monkeypatch.setattr(sys, "argv", command)
    file = load(
        OPTIONS + "WIDTH = options()\n" + SMALLEST,
        "\ndef model():\n    return nn.Linear(options(), WIDTH)\n"
        "\ndef batches(batch_size):\n    yield options()\n",
    )
    assert (file.model().in_features, file.model().out_features) == (3, 3)
    assert [*file.stream(2, 0, 1, 0)] == [3]
    assert sys.argv is command


@pytest.mark.parametrize("in_model", [False, True])
def test_options_that_are_required(in_model: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """Bug: the hint was to put it under `if __name__ == "__main__":`, or to raise an error."""
    text = OPTIONS.replace("default=3", "required=True")
    with pytest.raises(ModelError, match=r"ends the program \(exit code 2\)") as error:
        if in_model:
            load(text + SMALLEST, "\ndef model():\n    return options()\n").model()
        load(text + "options()\n" + SMALLEST)
    assert error.value.hint == (
        "a model file is run without options: give each a default, or read it from the environment"
    )
    assert "the following arguments are required: --steps" in capfd.readouterr().err


def test_a_part_of_a_package() -> None:
    error = refused("from .layers import Net\n")
    assert error.message.endswith("attempted relative import with no known parent package")
    assert error.hint == "a file stands by itself; as a module of its package: PACKAGE.net:model"


def test_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        error = refused("width = int(input())\n")
    assert error.hint is not None and "from a file or the environment" in error.hint


@pytest.mark.parametrize("name", ["model", "inputs"])
def test_a_function_that_is_required(name: str) -> None:
    error = refused(SMALLEST.replace(f"def {name}(", f"def my_{name}("))
    arguments, does = ("", "builds the model")
    if name == "inputs":
        arguments, does = "batch_size", "gives an example batch"
    assert error.message == f"net.py has no function {name}({arguments}), which {does}"
    assert error.hint == f"def {name}({arguments}): ..."


def test_a_model_that_is_built_already() -> None:
    """Bug: `model() raised TypeError: Linear.forward() missing 1 required positional argument`."""
    error = refused("from torch import nn\nmodel = nn.Linear(4, 4)\n")
    wanted = "net.py has no function model(), which builds the model"
    assert error.message == f"{wanted}: it is a Linear, built already"


@pytest.mark.parametrize("name", ["loss", "optimizer", "scheduler"])
def test_what_is_made_already_is_no_function(name: str) -> None:
    """Bug: `optimizer = torch.optim.SGD(...)` was passed over, and AdamW trained in its place; so
    was `scheduler = StepLR(...)`, and the learning rate stayed."""
    error = refused(SMALLEST, f"{name} = torch.Generator()\n")
    assert error.message == f"net.py: {name} is a Generator, expected a function"
    assert error.hint == f"def {name}(...): ..., which gives it"


@pytest.mark.parametrize("lengths", ["(0,)", "(16, -5)", "(True,)", "'128'", "128"])
def test_lengths_that_are_no_numbers_of_tokens(lengths: str) -> None:
    error = refused(SMALLEST, f"lengths = {lengths}\n")
    assert error.message == f"net.py: lengths is {lengths}, expected numbers of tokens"


@pytest.mark.parametrize("size", ["0", "-8", "'8'", "2.5", "True"])
def test_a_batch_size_that_is_no_number_of_rows(size: str) -> None:
    error = refused(SMALLEST, f"batch_size = {size}\n")
    assert error.message == f"net.py: batch_size is {size}, expected a number of rows"


def test_a_function_that_raises_names_the_users_line() -> None:
    file = load(SMALLEST.replace("nn.Linear(3, 1)", "nn.Linear(3, 'one')"))
    with pytest.raises(ModelError) as error:
        file.model()
    place = f"{Path('net.py').resolve()}:6 `return nn.Linear(3, 'one')`"
    assert error.value.message.startswith(f"{place}: net.py: model() raised TypeError: ")


def test_inputs_that_take_no_batch_size() -> None:
    file = load(SMALLEST.replace("def inputs(batch_size)", "def inputs()"))
    with pytest.raises(ModelError) as error:
        file.inputs(2)
    assert error.value.message == (
        "net.py: inputs() raised TypeError: inputs() takes 0 positional arguments but 1 was given"
    )


def test_a_return_that_was_forgotten() -> None:
    file = load(SMALLEST.replace("return nn.Linear", "nn.Linear"), "def optimizer(p): pass\n")
    with pytest.raises(ModelError) as error:
        file.model()
    assert str(error.value) == (
        "net.py: model() returned None, expected nn.Module\nhint: does it end without a `return`?"
    )
    assert file.optimizer is not None
    with pytest.raises(ModelError, match="returned None, expected torch.optim.Optimizer"):
        file.optimizer([])


def test_an_error_of_autopipes_own_passes_as_it_is() -> None:
    more = "from autopipe.errors import AutopipeError\n"
    text = SMALLEST.replace("return nn.Linear(3, 1)", "raise AutopipeError('as it is')")
    with pytest.raises(AutopipeError) as error:
        load(text, more).model()
    assert error.value.message == "as it is"


DRAWS = """\
import random

import numpy as np

SEED
BEFORE = np.random.rand()


def model():
    net = nn.Linear(3, 1)
    net.drawn = [BEFORE, random.random(), *np.random.permutation(20)]
    return net


def inputs(batch_size):
    return {"input": torch.tensor(np.random.rand(batch_size, 3), dtype=torch.float32)}
"""


@pytest.mark.parametrize("seeded", ["", "np.random.seed(3)"])
def test_what_model_draws_from_numpy_is_the_same_in_each_process_and_call(seeded: str) -> None:
    """Each rank would have masks and permutations of its own."""
    found = []
    for process in range(2):
        random.seed(process)
        np.random.seed(process)
        file = load(SMALLEST, DRAWS.replace("SEED", seeded))
        found += [file.model().drawn for _ in range(2)]
        found.append(next(file.stream(4, 0, 1, seed=0))["input"].flatten().tolist())
    assert found[0] == found[1] == found[3] == found[4]
    assert found[2] == found[5]
    if seeded:  # as it is without autopipe
        np.random.seed(3)
        before, order = np.random.rand(), [*np.random.permutation(20)]
        assert (found[0][0], found[0][2:]) == (before, order)
