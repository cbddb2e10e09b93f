"""What Python reads from tensors while a model runs, and what becomes of it."""

import inspect
import re

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from autopipe.batch.description import describe
from autopipe.errors import CaptureError, ModelError
from autopipe.frontend.construct import fake_copy
from autopipe.ir import torch_private
from autopipe.ir.graph import READ_OP
from autopipe.planfile.parts import Read
from autopipe.tracing.capture.value_guards import check
from autopipe.tracing.source import parameter_bytes, trace_source
from autopipe.tracing.trace import trace
from autopipe.util import codec, host_memory
from tests.support.row_graphs import ones
from tests.support.staged import lowered, one_micro_batch, trace_model


class Reader(nn.Module):
    """`read(self, x, hidden)` is the line under test; x is an input, hidden comes from weights."""

    def __init__(self, read):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("table", torch.tensor([1.0, 2.0, 3.0]))
        self.read = read

    def forward(self, x):
        hidden = self.layer(x)
        found = self.read(self, x, hidden)
        return (hidden * (1.0 if found else 2.0)).mean()


def traced(read, **options):
    return trace_model(Reader(read), ones, **options)


def text(found):
    return [(read.kind, read.value) for read in found.reads]


KINDS = {
    "bool": (lambda m, x, h: bool((x > 0).all()), [("__bool__", True)]),
    "if": (lambda m, x, h: 1 if (x > 5).any() else 0, [("__bool__", False)]),
    "int": (lambda m, x, h: int(x[0, 0] + 2), [("__int__", 3)]),
    "float": (lambda m, x, h: float(x[0, 0] / 2), [("__float__", 0.5)]),
    "index": (lambda m, x, h: [0, 7][x[0, 0].long()], [("__index__", 1)]),
    "item of a buffer": (lambda m, x, h: m.table.max().item(), [("item", 3.0)]),
    "infinity": (lambda m, x, h: m.table.sub(torch.inf).min().item() < 0, [("item", "-Infinity")]),
    "tolist": (lambda m, x, h: m.table.tolist() == [1, 2, 3], [("tolist", "[1.0, 2.0, 3.0]")]),
    "in": (lambda m, x, h: 2.0 in m.table, [("__contains__", True)]),
    "equal": (lambda m, x, h: torch.equal(x, x.clone()), [("equal", True)]),
    "equal of other shapes": (lambda m, x, h: torch.equal(x, m.table), [("equal", False)]),
    "allclose": (lambda m, x, h: torch.allclose(x, x + 1, atol=0.5), [("allclose", False)]),
    "method equal": (lambda m, x, h: x.equal(x.clone()), [("equal", True)]),
    "is_nonzero": (lambda m, x, h: torch.is_nonzero(x.sum()), [("is_nonzero", True)]),
    "two": (lambda m, x, h: x[0, 0] > 0 and x[0, 1] > 5, [("__bool__", True), ("__bool__", False)]),
    "shape only": (lambda m, x, h: x.shape[1] == 3, []),
}  # fmt: skip


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize(("read", "reads"), KINDS.values(), ids=KINDS)
def test_reads_of_inputs_and_buffers_are_answered_truly_without_the_weights(read, reads):
    found = traced(read, real=None)
    assert text(found) == reads
    assert [n.args[1] for n in found.graph.nodes if n.op == READ_OP] == list(range(len(reads)))


def test_a_read_knows_its_line():
    found = traced(lambda m, x, h: bool((x > 0).all()))
    assert found.reads[0].place.startswith(f"{__file__}:")


def test_a_read_of_what_depends_on_a_weight_is_made_with_the_real_model():
    def read(m, x, hidden):
        return bool(hidden.sum() > -1e9)

    assert text(traced(read)) == [("__bool__", True)]


def test_a_model_whose_file_seeds_before_it_builds_is_built_anew_for_a_read():
    """Bug: a `torch.manual_seed(0)` in the user's `model()` was taken for one in forward, and the
    dropout behind the read was refused with a hint that led nowhere."""

    class Dropping(Reader):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x))

    def seeded():
        torch.manual_seed(0)
        return Dropping(lambda m, x, hidden: bool(hidden.sum() > -1e9))

    found = trace_source(seeded, ones(2), describe(ones(2), ones(3), 2, 3), None)
    assert text(found) == [("__bool__", True)]


def test_a_model_that_is_built_anew_for_a_read_is_built_as_in_one_process(monkeypatch):
    """Bug: a `model()` that asks torch.distributed built other layers there than it was traced
    with."""

    def is_initialized():
        return inspect.stack()[1].filename == __file__  # torch is told the truth

    monkeypatch.setattr(torch.distributed, "is_initialized", is_initialized)
    asked = []

    def asking():
        asked.append(torch.distributed.is_initialized())
        return Reader(lambda m, x, hidden: bool(hidden.sum() > -1e9))

    trace_source(asking, ones(2), describe(ones(2), ones(3), 2, 3), None)
    assert len(asked) > 1
    assert not any(asked)


@pytest.mark.parametrize("kind", ["if", "tolist", "numpy"])
def test_without_the_real_model_it_is_refused_with_its_line(kind):
    reads = {
        "if": lambda m, x, h: bool(h.sum() > 0),
        "tolist": lambda m, x, h: h.tolist(),
        "numpy": lambda m, x, h: h.detach().sum().item(),
    }
    with pytest.raises(CaptureError) as error:
        traced(reads[kind], real=None)
    assert str(error.value).startswith(f"{__file__}:")
    assert "depends on the model's weights, which are not at hand" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("read", "depends on the model's weights; the model must run once with its weights: they"),
        ("mistake", "the model raises TypeError"),
    ],
)
def test_where_there_is_no_room_for_weights_a_mistake_is_told_as_one(monkeypatch, kind, said):
    """Bug: of any error in the forward of a large model it was said that Python reads values."""
    does = {
        "read": lambda m, x, hidden: bool(hidden.sum() > 0),
        "mistake": lambda m, x, hidden: torch.topk(hidden, k=None),
    }
    weights = parameter_bytes(Reader(does[kind]))
    monkeypatch.setattr(host_memory, "available", lambda: 2 * weights - 1)  # not for gradients
    with pytest.raises(CaptureError, match=re.escape(said)) as error:
        trace_source(lambda: Reader(does[kind]), ones(2), describe(ones(2), ones(3), 2, 3), None)
    assert str(error.value).startswith(f"{__file__}:")


WRITTEN = {
    "item assigned": lambda out, h: out.__setitem__(0, h.sum()),
    "copied": lambda out, h: out.copy_(h[0]),
    "added": lambda out, h: out.add_(h[0]),
    "out=": lambda out, h: torch.add(h[0], 1, out=out),
    "through a view": lambda out, h: out[1:].view(-1).copy_(h[0, 1:]),
    "scattered": lambda out, h: out.index_put_((torch.tensor([0]),), h[0, :1]),
}


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize("write", WRITTEN.values(), ids=WRITTEN)
def test_a_real_tensor_that_a_fake_one_was_written_into_is_not_believed(write):
    """Its zeros stay zeros: `out.any()` would be recorded as False, which is a lie."""

    def read(m, x, hidden):
        out = torch.zeros(3)
        write(out, hidden.detach())
        return bool((out + 1).sum() != 3)

    with pytest.raises(CaptureError, match="depends on the model's weights"):
        traced(read, real=None)
    assert text(traced(read)) == [("__bool__", True)]


def test_a_tensor_beside_a_tainted_one_is_still_believed():
    def read(m, x, hidden):
        out = torch.zeros(3)
        out[0] = hidden.sum()
        return bool(x.sum() > 0)

    assert text(traced(read, real=None)) == [("__bool__", True)]


def test_recording_leaves_random_numbers_and_buffers_alone():
    def read(m, x, hidden):
        m.table.add_(torch.rand(3))
        return bool(x.sum() > 0)

    model = Reader(read)
    torch.manual_seed(0)
    before, table = torch.get_rng_state(), model.table.clone()
    for real in (None, lambda: model):
        trace_model(model, ones, real=real)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(table, model.table)


# From one record to another run.


def test_a_trace_with_a_record_asks_nobody():
    """Ranks have no true inputs: they replay what the plan says."""

    def read(m, x, hidden):
        return bool(x.sum() > 0)

    first = traced(read)
    model = fake_copy(Reader(read))
    zeros = {"x": torch.zeros(2, 3)}
    again = trace(model, zeros, first.inputs, reads=first.reads)
    assert str(again.graph) == str(first.graph)
    assert again.reads == first.reads


@pytest.mark.parametrize(
    ("reads", "expected"),
    [((), "no further read"), ((Read("item", 1.0, "x.py:1"),), "has item")],
)
def test_a_run_that_reads_otherwise_than_the_record_is_refused(reads, expected):
    with pytest.raises(CaptureError, match=rf"reads a tensor here \(__bool__\).*{expected}"):
        traced(lambda m, x, h: bool(x.sum() > 0), reads=reads)


def test_a_run_that_reads_less_than_the_record_is_refused():
    record = [Read("__bool__", True, "x.py:1"), Read("item", 1.0, "x.py:2")]
    with pytest.raises(CaptureError, match=r"x.py:2: Python read a tensor here \(item\) when"):
        traced(lambda m, x, h: bool(x.sum() > 0), reads=record)


def test_a_list_comes_back_from_the_record_as_a_list():
    def read(m, x, hidden):
        assert m.table.tolist() == [1.0, 2.0, 3.0]
        return True

    assert len(traced(read).reads) == 1


# At run time.


def test_what_is_no_finite_number_can_be_written_down(tmp_path):
    """Bug: a plan whose model had read -inf of its mask was made, and could not be saved."""
    lowest = traced(lambda m, x, h: m.table.sub(torch.inf).min().item() < 0).reads[0]
    path = tmp_path / "read.json"
    codec.save(lowest, path)
    assert codec.load(Read, path, root="read") == lowest
    check(torch.tensor(-torch.inf), lowest)
    with pytest.raises(ModelError, match="Python read -inf from a tensor here .* and reads inf in"):
        check(torch.tensor(torch.inf), lowest)


COMPLEX = {
    "item": lambda m, x, h: (m.table * 1j).sum().item() == 6j,
    "text": lambda m, x, h: f"{(x * 1j).mean()}",
}


@pytest.mark.parametrize("read", COMPLEX.values(), ids=COMPLEX)
def test_a_complex_number_is_refused_with_its_line(read):
    """Bug: its plan was made, and then no file could hold it."""
    with pytest.raises(CaptureError, match=r"test_value_guards.py:\d+: torch takes a number from"):
        traced(read, real=None)


def test_a_micro_batch_that_takes_the_other_branch_is_refused():
    def read(m, x, hidden):
        return bool((x > 0).all())

    found = traced(read)
    modules = lowered(found, Reader(read), [], rows=2)
    one_micro_batch(modules, ones(2), 1.0)
    with pytest.raises(ModelError) as error:
        one_micro_batch(modules, {"x": torch.zeros(2, 3)}, 1.0)
    assert str(error.value) == (
        f"{found.reads[0].place}: Python read True from a tensor here when the model was traced, "
        "and reads False in this micro-batch: the traced branch is not the one it would take\n"
        "hint: plan with inputs that take the branch your batches take, or make the branch part "
        "of the computation (torch.where)"
    )


def test_every_kind_is_checked_as_it_was_read():
    check(torch.tensor([1, 2]), Read("tolist", "[1, 2]", "x.py:1"))
    check(torch.tensor(1.5), Read("item", 1.5, "x.py:1"))
    check(torch.tensor(True), Read("__contains__", True, "x.py:1"))
    with pytest.raises(ModelError, match=r"read \[1, 2\].*reads \[1, 3\]"):
        check(torch.tensor([1, 3]), Read("tolist", "[1, 2]", "x.py:1"))


def test_a_value_that_is_no_number_equals_itself():
    check(torch.tensor(float("nan")), Read("item", float("nan"), "x.py:1"))


def test_a_check_is_an_op_that_a_trace_of_fake_tensors_keeps():
    """It has no result, and fake tensors no value that it could check."""
    read = Read("__bool__", True, "x.py:1")

    def run(x):
        check((x > 0).all(), read)
        return x + 1

    with torch_private.fake_mode():
        found = make_fx(run)(torch.ones(3))
    assert torch.ops.autopipe.check.default in [node.target for node in found.graph.nodes]
    assert found(torch.ones(3)).tolist() == [2, 2, 2]
    with pytest.raises(ModelError, match="x.py:1: Python read True"):
        found(torch.zeros(3))
