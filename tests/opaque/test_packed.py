"""RNNs over packed sequences: ops on padded ones, with torch's own forward and backward."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from autopipe.errors import CaptureError, ModelError
from autopipe.ir.dataflow import analyse, is_random
from autopipe.ir.opaque_ops import PACKED_OP
from autopipe.stages.dry_run import rehearse
from autopipe.stages.saved_storages import SavedStorages
from tests.support.long import chosen
from tests.support.odd_models import MICRO_BATCHES, ROWS, built
from tests.support.staged import Step, differences, lowered, split, staged_step, trace_model

LENGTH = 5


class Net(nn.Module):
    """An RNN between two layers; `options` are those of the RNN, `packed` of packing it."""

    kind, options, sort, total = nn.LSTM, {}, False, LENGTH

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.rnn = self.kind(8, 8, batch_first=True, **self.options)
        self.down = nn.LazyLinear(4)
        with torch.no_grad():
            self(**{key: inputs(2)[key] for key in ("x", "lengths")})

    def forward(self, x, lengths):
        hidden = self.up(x).relu()
        packed = pack_padded_sequence(hidden, lengths, True, enforce_sorted=self.sort)
        made, last = self.rnn(packed)
        made, lengths = pad_packed_sequence(made, batch_first=True, total_length=self.total)
        last = last[0] if isinstance(last, tuple) else last
        return self.down(made) * lengths[:, None, None] + last.sum()


def inputs(rows):
    drawn = torch.randn(16, LENGTH, 10, generator=torch.Generator().manual_seed(0))[:rows]
    lengths = torch.tensor([5, 2, 4, 3, 5, 1] * 3)[:rows]
    return {"x": drawn[..., :6].clone(), "y": drawn[..., 6:].clone(), "lengths": lengths}


def square(outputs, batch):
    return ((outputs - batch["y"][:, : outputs.shape[1]]) ** 2).mean()


def unlike(model, cuts=()):
    trace = trace_model(model, inputs, square)
    batch, losses = inputs(ROWS * MICRO_BATCHES), []
    found = staged_step(model, trace, batch, cuts, MICRO_BATCHES)
    for k in range(MICRO_BATCHES):
        rows = {key: t[k * ROWS : (k + 1) * ROWS] for key, t in batch.items()}
        losses.append(square(model(rows["x"], rows["lengths"]), rows))
        (losses[-1] / MICRO_BATCHES).backward()
    return differences(found, Step.of(losses, model))


class Sorted(Net):
    sort = True


class BothWays(Net):
    kind, options = nn.GRU, {"bidirectional": True, "num_layers": 2}


class Plain(Net):
    kind, options = nn.RNN, {"bias": False, "nonlinearity": "relu"}


class Projected(Net):
    options = {"proj_size": 3, "num_layers": 2, "bidirectional": True}


class TimeFirst(Net):
    """With states of its own, two RNNs one after the other, and another padding."""

    def __init__(self):
        super().__init__()
        self.start = nn.Parameter(torch.randn(2, 1, 1, 8))
        self.second = nn.GRU(8, 8)

    def forward(self, x, lengths):
        hidden = self.up(x).relu().transpose(0, 1)
        packed = pack_padded_sequence(hidden, lengths, enforce_sorted=False)
        if not hasattr(self, "second"):
            return self.down(hidden)
        assert isinstance(packed, PackedSequence)
        states = self.start.expand(-1, -1, x.shape[0], -1).contiguous()
        made, (_, cell) = self.rnn(packed, (states[0], states[1]))
        made, _ = self.second(made, cell)
        made, _ = pad_packed_sequence(made, padding_value=0.5, total_length=LENGTH)
        again, _ = pad_packed_sequence(packed, total_length=LENGTH)
        return self.down(made + again).transpose(0, 1)


class Longest(Net):
    """Padded to the longest row of a micro-batch, which is as long in each."""

    total = None

    def forward(self, x, lengths):
        return super().forward(x, torch.where(torch.arange(len(x)) == 0, 4, lengths.clamp(max=4)))


class FromAMask(Net):
    def forward(self, x, lengths):
        mask = torch.arange(LENGTH) < lengths[:, None]
        return super().forward(x, mask.sum(1).cpu())


class Full(Net):
    def forward(self, x, lengths):
        return super().forward(x, torch.full((x.shape[0],), LENGTH))


class First(Net):
    """The RNN is the first that reads the batch; Python reads a value of what it makes."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(6, 8, batch_first=True)
        self.up = nn.Identity()

    def forward(self, x, lengths):
        made = super().forward(x, lengths)
        return made if made.isfinite().all() else made.nan_to_num()


WORK = [Net, Sorted, BothWays, Plain, Projected, TimeFirst, Longest, FromAMask, Full, First]


@pytest.mark.parametrize(
    "kind",
    chosen(WORK, now=(Plain, First)),
    ids=lambda kind: kind.__name__,
)
def test_every_bit_is_that_of_the_model(kind):
    """Loss, gradients: three micro-batches with rows of other lengths, in one stage and in two."""
    if kind is Sorted:
        assert [pair.diff().item() < 0 for pair in inputs(6)["lengths"].split(2)] == [True] * 3
    assert unlike(built(kind)) == []
    assert unlike(built(kind), cuts=["relu/0"] if kind is not First else ["rnn/packed_rnn/0"]) == []


def test_the_graph_has_one_op_for_each_rnn():
    graph = trace_model(built(TimeFirst), inputs, square).graph
    assert [node.name for node in graph.nodes if node.op == PACKED_OP] == [
        "rnn/packed_rnn/0",
        "second/packed_rnn/0",
    ]


def test_what_is_padded_lies_in_memory_as_torch_lays_it():
    """Bug: products after it summed their rows in another order, which few rows do not show."""
    model = built(Net)
    trace, batch = trace_model(model, inputs, square), inputs(16)
    found = staged_step(model, trace, batch, (), 1)
    square(model(batch["x"], batch["lengths"]), batch).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(found.gradients[name], parameter.grad), name


def test_bytes_kept_for_backward_are_those_of_full_rows():
    """Shorter rows keep less: how much less, no plan knows."""
    model = built(BothWays)
    traced = trace_model(model, inputs, square)
    graph, (stage,) = traced.graph, split(traced, ())
    predicted = rehearse(graph, [stage], (), 2).saved[0]
    (module,) = lowered(traced, model, (), 2)
    found = []
    for lengths in (torch.tensor([5, 5]), torch.tensor([5, 2])):
        leaves = inputs(2) | {"lengths": lengths}
        own = (*model.parameters(), *leaves.values(), *graph.constants.values())
        kept = SavedStorages(own)
        with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda tensor: tensor):
            made = module.module(*(leaves[path] for path in stage.inputs))
        assert made[0].requires_grad
        found.append(kept.now)
    assert found[0] == predicted and found[1] < found[0]


def test_dropout_between_its_layers_is_drawn():
    class Dropped(Net):
        options = {"num_layers": 2, "dropout": 0.5}

    graph = trace_model(built(Dropped), inputs, square).graph
    assert [node.short for node in graph.nodes if is_random(node)] == ["packed_rnn"]
    assert analyse(graph)


def test_torchs_functions_are_left_as_they_were():
    before = [f.__code__ for f in (pack_padded_sequence, pad_packed_sequence)]
    trace_model(built(Net), inputs, square)
    assert [f.__code__ for f in (pack_padded_sequence, pad_packed_sequence)] == before
    assert str(inspect.signature(pack_padded_sequence)).count("=") == 2


class ReadsData(Net):
    def forward(self, x, lengths):
        hidden = self.up(x).relu()
        packed = pack_padded_sequence(hidden, lengths, True, False)
        total = self.down(packed.data).sum() + self.rnn(packed)[1][0].sum()
        return self.down(hidden) + total


class TakesApart(Net):
    def forward(self, x, lengths):
        hidden = self.up(x).relu()
        data, sizes, *_ = pack_padded_sequence(hidden, lengths, True, False)
        return self.down(hidden) + data.mean() * len(sizes)


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("kind", [ReadsData, TakesApart], ids=lambda kind: kind.__name__)
def test_lines_that_look_at_what_is_packed_run_as_they_are(kind):
    model = built(kind)
    (running,) = trace_model(model, inputs, square).graph.regions.values()
    assert "forward_lines_" in running.region.method
    assert "packed sequence" in running.region.why
    assert unlike(model) == []


class GivesData(Net):
    def forward(self, x, lengths):
        return self.down(pack_padded_sequence(self.up(x), lengths, True, False).data)  # here


def test_giving_what_is_packed_is_refused_with_its_line():
    lines, first = inspect.getsourcelines(GivesData)
    line = next(first + n for n, text in enumerate(lines) if "# here" in text)
    with pytest.raises(CaptureError) as error:
        trace_model(built(GivesData), inputs, lambda outputs, batch: outputs.mean())
    assert str(error.value).startswith(f"{__file__}:{line}: ")
    assert "packed sequence" in str(error.value) and "\nhint: give it to an RNN" in str(error.value)


def test_a_longest_row_that_changes_is_refused_when_it_comes():
    """Its length is read by Python, and checked in every micro-batch."""

    class Cut(Net):
        total = None

    model = built(Cut)
    trace = trace_model(model, inputs, square)
    (read,) = trace.reads
    assert "test_packed.py" in read.place
    with pytest.raises(ModelError, match=r"Python read 5 from a tensor here .* and reads 4"):
        staged_step(model, trace, inputs(6), (), 3)
