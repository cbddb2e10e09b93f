"""The batches of a run: what becomes of each, and the sentence for shards that are none.

Ranks of one replica are alike; what two replicas tell each other is in the runs of two processes.
"""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import autopipe
from autopipe import CheckpointError, ModelError, Pipe, Plan
from autopipe.frontend import model_file
from autopipe.frontend.model_file import ModelFile
from autopipe.runtime.feed import Feed
from tests.support.inprocess import machine
from tests.support.pipes import traced_once
from tests.support.shell import NET, ranks, save_plans

Load = Callable[[str], tuple[Pipe, ModelFile]]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[Plan]) -> Load:
    """A pipe of one rank for `net.py` with more in it: 4 rows in two micro-batches."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)

    def make(more: str) -> tuple[Pipe, ModelFile]:
        Path("net.py").write_text(NET + more)
        file = model_file.load("net.py")
        with traced_once("net.py in four rows"):
            if not made:
                made.append(
                    autopipe.plan(
                        file.model, file.inputs, loss=file.loss, cluster=machine(1), batch_size=4,
                        micro_batches=2,
                    )
                )  # fmt: skip
            return autopipe.parallelize(file.model, made[0], loss=file.loss), file

    return make


@pytest.fixture(scope="module")
def made() -> list[Plan]:
    """The plan for `net.py`, once it has been made: what more the file says is not planned."""
    return []


def fed(
    pipe: Pipe, file: ModelFile, epochs: int | None = None, steps: int | None = None
) -> tuple[list[int], list[str]]:
    """The rows of the batches that are given, and what is said."""
    said: list[str] = []
    feed = Feed(pipe, file, epochs, said.append)
    rows = [len(batch["x"]) for batch in feed]
    feed.report_end(steps)
    return rows, said


LISTED = "\nbatches = [inputs(rows) for rows in {rows}]\n"


@pytest.mark.parametrize(
    ("rows", "given", "said"),
    [
        ([4, 4, 4], [4, 4, 4], []),
        ([4, 2, 8], [4, 2, 8], []),  # other rows that divide are a step
        (
            [4, 4, 3],
            [4, 4],
            [
                "net.py: batches: a batch of 3 rows is left out, which do not divide into 2 "
                "micro-batches"
            ],
        ),
        (
            [4, 3, 4, 3],
            [4, 4],
            [
                "net.py: batches: a batch of 3 rows is left out, which do not divide into 2 "
                "micro-batches",
                "net.py: batches: 2 batches were left out in all",
            ],
        ),
        (
            [8, 8],
            [8, 8],
            [
                "net.py: batches gives batches of 8 rows, and the plan is for 4: its seconds and "
                "bytes are not those of this run"
            ],
        ),
    ],
)
def test_what_becomes_of_a_list(
    rows: list[int], given: list[int], said: list[str], load: Load
) -> None:
    assert fed(*load(LISTED.format(rows=rows))) == (given, said)


def test_a_first_batch_that_does_not_divide_is_for_the_step_to_refuse(load: Load) -> None:
    pipe, file = load(LISTED.format(rows=[3, 4]))
    first = next(iter(Feed(pipe, file, None, print)))
    with pytest.raises(ModelError) as refused:
        pipe.step(first)
    assert refused.value.message == (
        "the batch has 3 rows, which do not divide into 2 micro-batches"
    )


LOADER = """
from torch.utils.data import DataLoader, TensorDataset


class Named(TensorDataset):
    def __getitem__(self, row):
        return {"x": self.tensors[0][row], "target": self.tensors[1][row]}


rows = torch.arange(20.0).repeat_interleave(8).view(20, 8)
batches = DataLoader(Named(rows, torch.zeros(20, 4)), batch_size=4, shuffle=True)
"""


def test_a_data_loader(load: Load) -> None:
    """Each epoch has every row once, in another order, which is the same in every run."""
    pipe, file = load(LOADER)
    assert file.length == 5

    def order() -> list[float]:
        torch.manual_seed(0)
        feed = Feed(pipe, file, 2, print)
        assert feed.of == 10
        return torch.cat([batch["x"][:, 0] for batch in feed]).tolist()

    both = order()
    assert sorted(both[:20]) == sorted(both[20:]) == [float(row) for row in range(20)]
    assert both[:20] != both[20:] and both == order()


@pytest.mark.parametrize(
    ("epochs", "steps", "given", "said"),
    [
        (None, None, 3, []),
        (None, 3, 3, []),
        (
            None,
            10,
            3,
            ["net.py: batches(4) ended after 3 of 10 steps; --epochs 4 goes through them 4 times"],
        ),
        (4, 10, 12, []),
        (
            2,
            10,
            6,
            ["net.py: batches(4) ended after 6 of 10 steps; --epochs 4 goes through them 4 times"],
        ),
    ],
)
def test_epochs_and_batches_that_run_dry(
    epochs: int | None, steps: int | None, given: int, said: list[str], load: Load
) -> None:
    pipe, file = load("\ndef batches(batch_size): return [inputs(batch_size)] * 3\n")
    assert fed(pipe, file, epochs, steps) == ([4] * given, said)


def test_epochs_of_batches_that_never_end(load: Load) -> None:
    pipe, file = load("")
    with pytest.raises(ModelError) as refused:
        Feed(pipe, file, 2, print)
    assert str(refused.value) == (
        "--epochs 2: net.py has no batches, so there is no end to an epoch\n"
        "hint: --steps 2, or def batches(batch_size): ... in the file"
    )


def test_batches_that_can_be_read_once(load: Load) -> None:
    pipe, file = load(
        "\ngiven = iter([inputs(4), inputs(4)])\ndef batches(batch_size): return given\n"
    )
    with pytest.raises(ModelError) as refused:
        fed(pipe, file, epochs=2)
    assert str(refused.value) == (
        "net.py: batches(4) gave batches once only: epoch 2 has none\n"
        "hint: return a list, a DataLoader or a new generator from each call"
    )


# --- two replicas


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_plans(tmp_path_factory.mktemp("feed"))


DRAWN = """

def whole(step, rows=8):
    generator = torch.Generator().manual_seed(step)
    x, target = (torch.randn(rows, n, generator=generator) for n in (8, 4))
    return {"x": x, "target": target}


def rows(batch, part):
    return {name: tensor[part] for name, tensor in batch.items()}


def batches(batch_size, shard, num_shards):
    for step in range(4):
"""


def run(planned: Path, body: str, *more: str) -> Any:
    (planned / "sharded.py").write_text(NET + DRAWN + f"        {body}\n")
    argv = ("-m", "autopipe", "run", "dp2.json", "--model", "sharded.py", "--quiet", *more)
    return ranks(2, *argv, folder=planned)


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            "yield rows(whole(step), slice(0, 4))",
            "sharded.py: batches(8, shard=0, num_shards=2) and batches(8, shard=1, num_shards=2) "
            "gave the same first batch: replicas would train on the same rows\n\n"
            "hint: give each shard rows of its own, as batch[shard::num_shards], or leave the two "
            "arguments out: each replica then takes its rows of a batch\n",
        ),
        (
            "yield whole(2 * step + shard)",
            "sharded.py: batches(8, shard=0, num_shards=2) gave 8 rows, as many as the whole batch "
            "has; a shard has 4 of them\n\n"
            "hint: batch_size is of all shards together: batch_size // num_shards rows each\n",
        ),
    ],
)
def test_shards_that_are_none(body: str, sentence: str, planned: Path) -> None:
    said = run(planned, body)
    assert (said.code, said.out, said.err) == (2, "", f"error: {sentence}")


def test_shards_of_a_constant_are_alike_rightly(planned: Path) -> None:
    said = run(planned, "yield {'x': torch.ones(4, 8), 'target': torch.zeros(4, 4)}")
    assert said.code == 0 and said.out.startswith("loss ")


def test_shards_that_end_apart_or_have_other_rows(planned: Path) -> None:
    """Two batches, one whose shards have 2 and 4 rows, and one that shard 1 has no more."""
    said = run(
        planned,
        "part = slice(shard, 2 if step == 2 and not shard else 8, 2)\n"
        "        if step < 3 or not shard: yield rows(whole(step), part)",
    )
    assert said.code == 0, said.err
    assert said.err.splitlines()[:2] == [
        "sharded.py: batches(8): a batch of 1, 4 rows in its shards is left out, which do not "
        "divide into 2 micro-batches on each of 2 replicas",
        "sharded.py: batches(8, shard=1, num_shards=2) ended after 2 batches, and other shards "
        "have more: they are left out",
    ]


def test_batches_that_end_on_one_rank_alone(planned: Path) -> None:
    """Bug: gloo ended the process of rank 1, whose next message was another one than rank 0's."""
    text = "for step in range(4 - int(os.environ['RANK'])): yield inputs(batch_size)"
    (planned / "ends.py").write_text(
        f"{NET}\n\nimport os\n\ndef batches(batch_size):\n    {text}\n"
    )
    argv = ("-m", "autopipe", "run", "dp2.json", "--model", "ends.py", "--quiet")
    said = ranks(2, *argv, folder=planned)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(
        "error: the batches of rank 1 have ended, and rank 0 has another one: all ranks must be "
        "given the same\n"
    )


# --- where a run stands, for one that goes on from it


def taken(pipe: Pipe, file: ModelFile, count: int, feed: Feed | None = None) -> tuple[Feed, Any]:
    """So many batches of a feed, and its position after them, as it comes back from JSON."""
    feed = feed or Feed(pipe, file, 2, lambda line: None)
    batches = iter(feed)
    for _ in range(count):
        next(batches)
    return feed, json.loads(json.dumps(feed.position()))


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "body",
    [
        "def batches(size):\n    for _ in range(3): yield inputs(size)\n",
        "batches = [inputs(rows) for rows in (4, 3, 4, 4)]\n",
        "class Rows(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 12\n"
        "    def __getitem__(self, n): return {'x': torch.full((8,), n), 'target': torch.rand(4)}\n"
        "batches = torch.utils.data.DataLoader(Rows(), batch_size=4, shuffle=True)\n",
        "import random\n"
        "def batches(size):\n"
        "    for n in random.sample(range(3), 3):\n"
        "        yield {'x': torch.zeros(4, 8), 'target': torch.full((4,), n + random.random())}\n",
        "import numpy\n"
        "def batches(size):\n"
        "    for n in numpy.random.permutation(3):\n"
        "        target = torch.full((4,), n + numpy.random.normal())\n"
        "        yield {'x': torch.zeros(4, 8), 'target': target}\n",
    ],
    ids=["random", "one left out", "shuffled", "by Python", "by numpy"],
)
def test_the_batches_after_a_position(body: str, count: int, load: Load) -> None:
    """In this epoch and in the next one they are those of a run that was never stopped."""
    pipe, file = load(body)
    torch.manual_seed(0)
    expected = [batch["target"] for batch in Feed(pipe, file, 2, lambda line: None)]
    torch.manual_seed(0)
    _, position = taken(pipe, file, count)
    torch.manual_seed(0)
    random.seed(7)
    numpy.random.seed(7)
    again = Feed(pipe, file, 2, lambda line: None)
    again.go_to(position)
    found = [batch["target"] for batch in again]
    assert len(found) == len(expected) - count
    assert all(map(torch.equal, found, expected[count:]))


@pytest.mark.parametrize(
    ("rows", "does"), [(8, "gives some rows twice"), (2, "leaves some rows out")]
)
def test_a_position_in_batches_of_other_rows(rows: int, does: str, load: Load) -> None:
    """A position is a number of batches: under a plan for other rows it is another place."""
    pipe, file = load("def batches(size):\n    for _ in range(3): yield inputs(size)\n")
    _, position = taken(pipe, file, 2)
    for saved, told in ((4, 0), (rows, 1)):
        said: list[str] = []
        Feed(pipe, file, 1, said.append).go_to({**position, "rows": saved})
        assert said == told * [
            "net.py: batches(4) goes on after 2 batches, as the checkpoint says; but its batches "
            f"had {rows} rows, so this {does}"
        ]


STATEFUL = """
class Counting:
    at = asked = 0
    def __iter__(self):
        for self.at in range(self.at, 6):
            Counting.asked += 1
            yield {"x": torch.zeros(4, 8), "target": torch.full((4, 4), float(self.at))}
        self.at = 0
    def state_dict(self): return {"at": self.at + 1}
    def load_state_dict(self, state): self.at = state["at"]


def batches(size): return Counting()
"""


def test_batches_that_know_where_they_are(load: Load) -> None:
    """They are asked, and what lies before is not drawn again."""
    pipe, file = load(STATEFUL)
    _, position = taken(pipe, file, 4)
    again = Feed(pipe, file, 1, lambda line: None)
    again.go_to(position)
    assert [float(batch["target"][0, 0]) for batch in again] == [4.0, 5.0]


@pytest.mark.parametrize("position", [{}, None, {"epoch": "x", "drawn": 0}, {"epoch": 0}])
def test_a_position_that_is_none(position: Any, load: Load) -> None:
    pipe, file = load("")
    with pytest.raises(CheckpointError, match="the position in the batches was not written by"):
        Feed(pipe, file, None, lambda line: None).go_to(position)
