"""The whole model out of its ranks: saved and loaded into one process, it is what one has trained.

`Net` has what makes that hard: a tied weight, a buffer that training changes, a buffer and a
parameter that forward does not use, a number of rows that does not divide by two, and stacked
experts, fewer than there are ranks.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn

import autopipe
from autopipe.frontend import model_file
from tests.support.inprocess import machine
from tests.support.shell import ranks

NET = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(22, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 22, bias=False)
        self.head.weight = self.embedding.weight
        self.spare = nn.Linear(5, 3)
        self.experts = nn.Parameter(torch.randn(2, 16, 16) / 8)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((7,), 2.0))
        self.register_buffer("cache", torch.ones(4), persistent=False)

    def forward(self, tokens):
        self.steps.add_(1)
        x = self.embedding(tokens)
        x = x + self.down(self.up(x).relu()) * self.cache.mean()
        return self.head(self.norm(x + (x[None] @ self.experts[:, None]).sum(0)))


def model():
    return Net()


def inputs(batch_size):
    return {"tokens": torch.randint(22, (batch_size, 6))}


def loss(outputs, batch):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["tokens"].flatten())


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True)


def batches(batch_size):
    generator = torch.Generator().manual_seed(0)
    return [{"tokens": torch.randint(22, (batch_size, 6), generator=generator)} for _ in range(3)]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def trained() -> nn.Module:
    """What one process makes of three batches, in two micro-batches each."""
    file = model_file.load("net.py")
    torch.manual_seed(0)
    model = file.model()
    assert file.optimizer is not None and file.batches is not None and file.loss is not None
    optimizer = file.optimizer(model.parameters())
    for batch in file.batches(8):
        optimizer.zero_grad()
        for tokens in batch["tokens"].split(4):
            (file.loss(model(tokens), {"tokens": tokens}) / 2).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("name", "constraints"),
    [
        pytest.param("one", {"pp": 1}, marks=pytest.mark.long),
        ("pp", {"pp": 2}),
        pytest.param("tp", {"tp": 2, "pp": 1, "dp": 1}, marks=pytest.mark.long),
        ("zero-1", {"dp": 4, "zero": 1}),
        ("zero-3", {"dp": 2, "zero": 3}),
        pytest.param("zero-3 of four", {"dp": 4, "zero": 3}, marks=pytest.mark.long),
        pytest.param("pp from a file", {"pp": 2}, marks=pytest.mark.long),
        pytest.param("tp from a file", {"tp": 2, "pp": 1, "dp": 1}, marks=pytest.mark.long),
        pytest.param("zero-3 from a file", {"dp": 2, "zero": 3}, marks=pytest.mark.long),
    ],
)
def test_a_saved_model_is_that_of_one_process(
    name: str, constraints: dict[str, Any], folder: Path
) -> None:
    """Also where ranks read what they start from out of a file, which says not what is trained."""
    file = model_file.load("net.py")
    torch.manual_seed(0)
    save_model(file.model(), "start.safetensors")
    start = ("--weights", "start.safetensors") if name.endswith("from a file") else ()
    replicas = constraints.get("dp", 1)
    processes = 1 if name == "one" else max(2, replicas)
    micro_batches = 1 if replicas > 1 else 2  # parts of four rows, or of two
    autopipe.plan(
        file.model, file.inputs, loss=file.loss, optimizer=file.optimizer or "sgd",
        cluster=machine(processes), batch_size=8, micro_batches=micro_batches, source="net.py",
        **constraints,
    ).save("plan.json")  # fmt: skip
    said = ranks(
        processes, "-m", "autopipe", "run", "plan.json", "--save", "net.safetensors", "--quiet",
        *start, folder=folder,
    )  # fmt: skip
    assert said.code == 0, said.err
    assert said.err == ""
    expected, found = trained(), model_file.load("net.py").model()
    found.load_state_dict(load_file("net.safetensors"), strict=True)
    for key, tensor in expected.state_dict().items():
        if key == "steps" and replicas > 1:
            tensor = tensor // 2  # each replica counts its own micro-batch
        torch.testing.assert_close(found.state_dict()[key], tensor, rtol=2e-5, atol=2e-6)
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == [
        "net.py", "net.safetensors", "plan.json", "start.safetensors",
    ]  # fmt: skip


def test_state_dict_is_the_whole_one(folder: Path) -> None:
    """Tied names, buffers, and what forward does not use: nothing is missing, nothing is more."""
    file = model_file.load("net.py")
    plan = autopipe.plan(file.model, file.inputs, loss=file.loss, cluster=machine(1), batch_size=4)
    pipe = autopipe.parallelize(file.model, plan, loss=file.loss, seed=3)
    torch.manual_seed(3)
    expected = file.model().state_dict()
    found = pipe.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()
    assert repr(pipe) == (
        "Pipe(rank 0 of 1: stage 0 of 1, replica 0 of 1, part 0 of 1; 1f1b, 1 x 4 rows; "
        "3,024 parameters here)"
    )
    assert pipe.train() is pipe.eval() is pipe
    pipe.step(file.inputs(4))
    assert all(parameter.grad is not None for parameter in pipe.parameters())
    pipe.zero_grad()
    assert all(parameter.grad is None for parameter in pipe.parameters())
