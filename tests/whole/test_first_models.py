"""The first models that people bring, from the model file to a trained step.

    trace, plan for two local processes     explain     run --local 2: three steps

Each step's gradients and the losses are held to a plain loop in one process, bit by bit.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from autopipe.frontend import model_file
from autopipe.planfile.contents import Plan
from autopipe.util import codec
from tests.support.inprocess import machine
from tests.support.long import chosen
from tests.support.shell import Shell, ranks

ROWS, STEPS, MICRO_BATCHES = 8, 3, 2

HEAD = """\
from __future__ import annotations
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, **kind):
        super().__init__()
        self.up = nn.Linear(8, 16, **kind)
        self.middle = nn.Linear(16, 16, **kind)
        self.down = nn.Linear(16, 4, **kind)

    def forward(self, x):
        return self.down(self.middle(self.up(x).relu()).relu())
"""

VECTORS = """
def inputs(batch_size):
    return {"x": torch.randn(batch_size, 8, dtype=DTYPE), "target": torch.randn(batch_size, 4)}

def loss(outputs, batch):
    return ((outputs.float() - batch["target"]) ** 2).mean()
"""

IMAGES = """
def inputs(batch_size):
    labels = torch.randint(4, (batch_size,))
    return {"pixel_values": torch.randn(batch_size, 3, 16, 16, dtype=DTYPE), "labels": labels}
"""

ENTROPY = """
def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs.float(), batch["labels"])
"""

TAIL = """
import os

class Recorded(torch.optim.SGD):
    made = 0

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        if "RANK" in os.environ:  # planning takes a step too, to see what is kept of it
            torch.save(gradients, f"gradients.{os.environ['RANK']}.{self.made}.pt")
        self.made += 1
        return super().step(closure)

def optimizer(parameters):
    return Recorded(parameters, lr=0.1)
"""
"""What a run leaves behind for the test: each rank's gradients of each step."""

BATCHES = """
def batches(batch_size):
    torch.manual_seed(1)
    while True:
        yield inputs(batch_size)
"""


@dataclass(frozen=True)
class Story:
    """A model file, what lies beside it, and what it is called on the command line."""

    text: str
    name: str = "net.py"
    source: str = "net.py"
    beside: dict[str, str] = field(default_factory=dict)
    own: str = "fp32"
    batches: str = BATCHES

    def write(self, folder: Path) -> None:
        files = {self.name: self.text + self.batches + TAIL, **self.beside}
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


def vectors(model: str, dtype: str = "torch.float32", **how: Any) -> Story:
    """The net of three layers, built by these lines."""
    body = "".join(f"    {line}\n" for line in model.splitlines())
    return Story(f"{HEAD}\ndef model():\n{body}{VECTORS.replace('DTYPE', dtype)}", **how)


STORIES = {
    "bf16": vectors("return Net().to(torch.bfloat16)", "torch.bfloat16", own="bf16"),
    "half": Story(
        """\
import torch
from torch import nn

def model():
    body = nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3), nn.Flatten()
    return Images(nn.Sequential(*body, nn.Linear(8 * 14 * 14, 4))).half()

class Images(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, pixel_values):
        return self.layers(pixel_values)
"""
        + IMAGES.replace("DTYPE", "torch.float16")
        + ENTROPY,
        own="fp16",
    ),
    "double": vectors("return Net().double().to('cpu')", "torch.float64", own="fp64"),
    "meta": vectors(
        'with torch.device("meta"):\n'
        "    net = Net()\n"
        'net.to_empty(device="cpu")\n'
        "for part in (net.up, net.middle, net.down):\n"
        "    part.reset_parameters()\n"
        "return net"
    ),
    "default dtype": vectors(
        "torch.set_default_dtype(torch.float64)\nreturn Net()", "None", own="fp64"
    ),
    "transformers' ViT": Story(
        """\
import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

def model():
    size = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    return ViTForImageClassification(ViTConfig(**size, image_size=16, patch_size=8, num_labels=4))
"""
        + IMAGES.replace("DTYPE", "torch.float32")
    ),
    "ViT by hand": Story(
        """\
import torch
from torch import nn

class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, stride=8)
        self.places = nn.Parameter(torch.zeros(1, 4, 16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 4)
        nn.init.trunc_normal_(self.places, std=0.02)
        self.apply(self.initialise)
        for parameter in self.parameters():
            assert torch.isfinite(parameter).all()

    def initialise(self, module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            module.weight.data.mul_(0.02 / module.weight.std().item())
            module.bias.data[0].zero_()

    def forward(self, pixel_values):
        x = self.patches(pixel_values).flatten(2).transpose(1, 2) + self.places
        return self.head(self.layer(x).mean(dim=1))

def model():
    return ViT()
"""
        + IMAGES.replace("DTYPE", "torch.float32")
        + ENTROPY
    ),
    "batch norm": Story(
        """\
import torch
from torch import nn

def model():
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4), nn.BatchNorm1d(4)
    return Rows(nn.Sequential(*layers))

class Rows(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x)
"""
        + VECTORS.replace("DTYPE", "torch.float32")
    ),
    "odd": Story(
        """\
import torch
from torch import nn

class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.by * gradient, None

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.middle = nn.Linear(16, 16)
        self.down = nn.Linear(16, 4)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        hidden = self.up(x).relu()
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        hidden = Reversed.apply(hidden - self.mean, 0.5)
        return self.down(self.middle(hidden).relu())

NET = []

def model():
    NET[:] = [Net()]
    return NET[0]

def loss(outputs, batch):
    return ((outputs - batch["target"]) ** 2).mean() + 0.1 * NET[0].down.weight.norm()
"""
        + VECTORS.replace("DTYPE", "torch.float32").partition("def loss")[0]
    ),
    "a package beside the file": Story(
        """\
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from schichten.lineare import lineare

@dataclass
class Config:
    width: int = int((Path(__file__).parent / "breite.txt").read_text())
    depth: int = 2

class Net(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.layers = nn.Sequential(lineare(8, config.width), nn.Tanh(), lineare(config.width, 4))

    def forward(self, x):
        return self.layers(x)

def model():
    return Net(Config())
"""
        + VECTORS.replace("DTYPE", "torch.float32"),
        name="Mein Ordner mit Ümläuten/Mein Netz.py",
        source="Mein Ordner mit Ümläuten/Mein Netz.py",
        beside={
            "Mein Ordner mit Ümläuten/schichten/__init__.py": "",
            "Mein Ordner mit Ümläuten/schichten/lineare.py": (
                "from torch import nn\n\ndef lineare(a, b):\n    return nn.Linear(a, b)\n"
            ),
            "Mein Ordner mit Ümläuten/breite.txt": "16\n",
        },
    ),
    "a script with a DataLoader": Story(
        """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)
SET = TensorDataset(*torch.load("data.pt"))
LOADER = DataLoader(SET, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(2))

def build():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def inputs(batch_size):
    return torch.randn(batch_size, 8), torch.randn(batch_size, 4)

def loss(outputs, batch):
    return ((outputs - batch[1]) ** 2).mean()

if __name__ == "__main__":
    raise SystemExit("this part is for `python script.py`")
""",
        name="lib/script.py",
        source="lib.script:build",
        batches="""
def batches(batch_size):
    while True:
        yield from LOADER
""",
    ),
}


@pytest.fixture
def autopipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Shell]:
    threads, modules = torch.get_num_threads(), {*sys.modules}
    torch.set_num_threads(1)
    (tmp_path / "home").mkdir()
    yield Shell(tmp_path, monkeypatch, capsys)
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    for name in {*sys.modules} - modules:
        if name.startswith(("autopipe_model_", "schichten", "lib")):
            del sys.modules[name]


def one_process(source: str) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """A plain loop: the mean loss and the gradients of every step."""
    file = model_file.load(source)
    torch.manual_seed(0)
    model = file.model()
    losses, gradients = [], []
    assert file.batches is not None
    for _, batch in zip(range(STEPS), file.batches(ROWS), strict=False):
        total = 0.0
        for part in range(MICRO_BATCHES):
            rows = slice(part * ROWS // MICRO_BATCHES, (part + 1) * ROWS // MICRO_BATCHES)
            if isinstance(batch, dict):
                own: Any = {name: tensor[rows] for name, tensor in batch.items()}
                given = {k: t for k, t in own.items() if k != "target"}
                if file.loss is not None:
                    given.pop("labels", None)
                outputs = model(**given)
            else:
                own = [tensor[rows] for tensor in batch]
                outputs = model(own[0])
            loss = outputs.loss if file.loss is None else file.loss(outputs, own)
            loss.backward(torch.full_like(loss, 1 / MICRO_BATCHES))
            total += loss.item() / MICRO_BATCHES
        losses.append(total)
        named = {n: p for n, p in model.named_parameters() if p.grad is not None}
        gradients.append({n: p.grad.clone() for n, p in named.items() if p.grad is not None})
        with torch.no_grad():
            for parameter in named.values():
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None
    return losses, gradients


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("name", chosen(STORIES, now=("bf16", "transformers' ViT")))
def test_from_the_model_file_to_trained_steps(name: str, autopipe: Shell) -> None:
    story, folder = STORIES[name], autopipe.folder
    story.write(folder)
    torch.save((torch.randn(32, 8), torch.randn(32, 4)), folder / "data.pt")
    codec.save(machine(2), folder / "cluster.json")

    planned = autopipe(
        *("plan", story.source, "--cluster", "cluster.json", "--pp", "2", "--schedule", "1f1b"),
        *("--batch", str(ROWS), "--micro-batches", str(MICRO_BATCHES)),
    )
    assert planned.code == 0, planned.err
    plan = Plan.load(folder / "plan.json")
    assert plan.products == (story.own,)
    told = autopipe("explain", "plan.json").out
    assert (f"{story.own}, the model's own" in told) == (story.own != "fp32")

    said = ranks(2, "-m", "autopipe", "run", "plan.json", "--steps", str(STEPS), folder=folder)
    assert said.code == 0, said.err
    losses, gradients = one_process(story.source)
    first, last = (float(n) for n in re.findall(r"loss ([\d.]+) -> ([\d.]+)", said.out)[0])
    assert first == pytest.approx(losses[0], abs=6e-4)
    assert last == pytest.approx(losses[-1], abs=6e-4)
    for step, expected in enumerate(gradients):
        for rank, stage in enumerate(plan.stages):
            kept = torch.load(folder / f"gradients.{rank}.{step}.pt")
            assert len(kept) == len(stage.parameters)
            for parameter in stage.parameters:
                wanted = expected.pop(parameter)
                equal = [g.dtype == wanted.dtype and torch.equal(g, wanted) for g in kept]
                assert any(equal), (parameter, step)
        assert not expected
