"""A model file that is wrong: one sentence with the user's own line, and nothing is written."""

import sys

import pytest
import torch
from torch.nn import functional as F

from tests.support.shell import LINE, NET, Shell, changed


def torchs_words() -> str:
    """What torch says of rows of nine for a layer of eight; since 2.15 with the op's name."""
    with pytest.raises(RuntimeError) as error:
        F.linear(torch.empty(2, 9), torch.empty(16, 8), torch.empty(16))
    return str(error.value)


UP = "        y = self.up(x)\n"
FORWARD = LINE["        y = self.up(x)"]
SQUARE = """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, net):
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient
"""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param(
            "def model(:\n",
            "{path}:1: invalid syntax\n\nhint: python -m py_compile net.py shows where",
            id="syntax",
        ),
        pytest.param(
            "import torch\nimport nothing_of_that_name\n",
            "{path}:2 `import nothing_of_that_name`: net.py cannot be run: ModuleNotFoundError: "
            "No module named 'nothing_of_that_name'\n\n"
            "hint: install what has nothing_of_that_name beside autopipe, or name its folder: "
            "PYTHONPATH=FOLDER autopipe ...",
            id="import",
        ),
        pytest.param(
            changed("def model()", "def build()"),
            "net.py has no function model(), which builds the model\n\nhint: def model(): ...",
            id="no model",
        ),
        pytest.param(
            changed("def inputs(", "def batch("),
            "net.py has no function inputs(batch_size), which gives an example batch\n\n"
            "hint: def inputs(batch_size): ...",
            id="no inputs",
        ),
        pytest.param(
            changed("return Net()", "raise OSError('no weights')"),
            f"{{path}}:{LINE['    return Net()']} `raise OSError('no weights')`: "
            "net.py: model() raised OSError: no weights\n\n"
            "hint: does model() go well by itself? --debug shows all calls",
            id="model raises",
        ),
        pytest.param(
            changed("def model()", "def model(size)"),
            "net.py: model() raised TypeError: model() missing 1 required positional argument: "
            "'size'\n\nhint: it is called as model()",
            id="model wants more",
        ),
        pytest.param(
            changed("def inputs(batch_size)", "def inputs()"),
            "net.py: inputs() raised TypeError: inputs() takes 0 positional arguments but 1 was "
            "given\n\nhint: it is called as inputs(batch_size)",
            id="inputs takes nothing",
        ),
        pytest.param(
            changed("return Net()", "raise SystemExit(3)"),
            f"{{path}}:{LINE['    return Net()']} `raise SystemExit(3)`: "
            "net.py: model() ends the program (exit code 3)\n\n"
            "hint: let it raise an error that says what is missing",
            id="model ends the program",
        ),
        pytest.param(
            changed("return Net()", "return Net"),
            "net.py: model() returned <class 'autopipe_model_net.Net'>, expected nn.Module\n\n"
            "hint: def model(...): return an object of it",
            id="model gives its class",
        ),
        pytest.param(
            changed("return Net()", "Net()"),
            "net.py: model() returned None, expected nn.Module\n\n"
            "hint: does it end without a `return`?",
            id="model gives nothing",
        ),
        pytest.param(
            changed("forward(self, x)", "forward(self, x, mask)"),
            "inputs do not fit the model: Net.forward(x, mask) called with ['x', 'target']: "
            "missing a required argument: 'mask'",
            id="missing argument",
        ),
        pytest.param(
            changed("def loss(", "def unused("),
            "inputs do not fit the model: Net.forward(x) takes no target, and there is no "
            "loss(outputs, batch) that could read it",
            id="extra entry",
        ),
        pytest.param(
            changed('"x": torch.randn(batch_size, 8)', '"x": torch.randn(batch_size, 9)'),
            rf"{{path}}:{FORWARD} `y = self.up(x)`: the model raises RuntimeError: "
            f"{torchs_words()} (it is traced with two rows)\n\n"
            "hint: does model(**inputs(2)) go well by itself?",
            id="shape",
        ),
        pytest.param(
            changed("torch.randn(batch_size, 8)", "torch.randn(batch_size, 8 * batch_size)"),
            "inputs(2)['x'] has the shape (2, 16), inputs(3)['x'] (3, 24): one dim must grow in "
            "proportion to the rows and the others stay\n\nhint: pad to one length",
            id="two dims grow",
        ),
        pytest.param(
            changed("torch.randn(batch_size, 8)", "torch.randn(batch_size + 1, 8)"),
            "inputs(2)['x'] has the shape (3, 8), inputs(3)['x'] (4, 8): one dim must grow in "
            "proportion to the rows and the others stay\n\nhint: pad to one length",
            id="grows by no factor",
        ),
        pytest.param(
            NET.replace("randn(batch_size", "randn(4"),
            "no entry of the batch has a batch dim, so it cannot be cut into rows\n\n"
            "hint: def inputs(batch_size): a tensor of it has batch_size rows",
            id="no dim grows",
        ),
        pytest.param(
            changed(".mean()", ""),
            f"{{path}}:{LINE['def loss(outputs, batch):']}: loss(outputs, batch) gives a tensor of "
            "shape (2, 4); a loss is a scalar tensor or autopipe.SumCount(sum, count)\n\n"
            "hint: return its mean over the rows: .mean()",
            id="loss is a vector",
        ),
        pytest.param(
            changed(".mean()", ".mean().item()"),
            f"{{path}}:{LINE['def loss(outputs, batch):']}: loss(outputs, batch) gives a float; "
            "a loss is a scalar tensor or autopipe.SumCount(sum, count)\n\n"
            "hint: return the tensor itself, without .item() or float()",
            id="loss is a number",
        ),
        pytest.param(
            changed('batch["target"]', 'batch["label"]'),
            f"{{path}}:{LINE['def loss(outputs, batch):'] + 1} "
            '`return ((outputs - batch["label"]) ** 2).mean()`: '
            "loss(outputs, batch) raises KeyError: 'label' (it is traced with two rows)\n\n"
            "hint: the batch has the entries x, target",
            id="loss raises",
        ),
        pytest.param(
            changed(UP, UP + "        return y[y > 0][:, None, None]\n"),
            f"{{path}}:{FORWARD + 1} `return y[y > 0][:, None, None]`: a size here depends on the",
            id="a size that depends on values",
        ),
        pytest.param(
            changed(UP, UP.replace("self.up(x)", "Square.apply(self.up(x), self)")) + SQUARE,
            "the model raises RuntimeError: function SquareBackward returned an incorrect number "
            "of gradients (expected 2, got 1) (it is traced with two rows)\n\n"
            "hint: does model(**inputs(2)) go well by itself?",
            id="autograd.Function",
        ),
        pytest.param(
            changed(UP, UP + "        if y.sum() > 0: y = y + 1\n").replace(
                "    return Net()",
                "    built.append(None)\n"
                "    if len(built) == 2: raise MemoryError('too big for this machine')\n"
                "    return Net()\n\nbuilt = []",
            ),
            "{path}:19 `if len(built) == 2: raise MemoryError('too big for this machine')`: "
            "net.py: model() raised MemoryError: too big for this machine",
            id="a branch on weights that cannot be had",
        ),
        pytest.param(
            NET + "def optimizer(parameters): torch.optim.SGD(parameters)\n",
            "net.py: optimizer() returned None, expected torch.optim.Optimizer\n\n"
            "hint: does it end without a `return`?",
            id="no optimizer",
        ),
    ],
)
def test_a_model_file_that_is_wrong(text: str, sentence: str, autopipe: Shell, four: str) -> None:
    autopipe.write("net.py", text)
    found = autopipe("plan", "net.py", "--cluster", four).error
    assert found.startswith(sentence.replace("{path}", str(autopipe.folder / "net.py")))
    assert autopipe.files() == ["net.py"]


@pytest.mark.parametrize("line", ["y = y * y[y > 0].mean()", "print(y.detach().numpy().shape)"])
def test_a_line_that_no_trace_can_look_into(line: str, autopipe: Shell, four: str) -> None:
    autopipe.write("net.py", changed(UP, f"{UP}        {line}\n"))
    found = autopipe("plan", "net.py", "--cluster", four, "-o", "plan.json")
    assert found.code == 0, found.err
    assert f"forward_lines_3_to_3() runs as it is, and is not looked into: {autopipe.folder}" in (
        found.err
    )
    assert f"net.py:{FORWARD + 1} `" in found.err


def test_no_model_file(autopipe: Shell) -> None:
    assert autopipe("plan", "gone.py").error == (
        "there is no model file 'gone.py'\n\nhint: autopipe plan model.py"
    )


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        (
            "shop.gone:build",
            "there is no module 'shop.gone', asked for the model in 'shop.gone'\n\n"
            "hint: modules are looked for in {folder} and where packages are installed",
        ),
        (
            "nowhere.gone:build",
            "there is no module 'nowhere', asked for the model in 'nowhere.gone'\n\n"
            "hint: modules are looked for in {folder} and where packages are installed",
        ),
        (
            "shop.window:build",
            "{folder}/shop/window.py:2 `import nothing_of_that_name`: shop.window cannot be run: "
            "ModuleNotFoundError: No module named 'nothing_of_that_name'\n\n"
            "hint: install what has nothing_of_that_name beside autopipe, or name its folder: "
            "PYTHONPATH=FOLDER autopipe ...",
        ),
        (
            "shop/window.py:build",
            "'shop/window.py' is a file, and what stands before a colon is a module\n\n"
            "hint: autopipe plan shop/window.py, where the function is called model(); "
            "or shop.window:FUNCTION",
        ),
        (
            "shop.shelf:build",
            "shop.shelf:build has no function build(), which builds the model\n\n"
            "hint: def build(): ...",
        ),
    ],
)
def test_a_module_that_is_wrong(
    argument: str, error: str, autopipe: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module, or the user's own line; nothing of Python's importing."""
    shop = autopipe.folder / "shop"
    shop.mkdir()
    (shop / "__init__.py").touch()
    (shop / "window.py").write_text("import torch\nimport nothing_of_that_name\n")
    (shop / "shelf.py").write_text(NET)
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        monkeypatch.delitem(sys.modules, name)  # of another test
    found = autopipe("trace", argument).error
    assert found == error.replace("{folder}", str(autopipe.folder))
