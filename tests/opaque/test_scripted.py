"""Parts that torch.jit has scripted or traced run as they are, with the model's own tensors."""

import inspect
import io
import warnings

import pytest
import torch
from torch import Tensor, nn

from autopipe.errors import CaptureError
from autopipe.opaque.scripted import Scripted, plain
from autopipe.stages.dry_run import rehearse
from autopipe.stages.saved_storages import SavedStorages
from tests.support.long import chosen
from tests.support.odd_models import (
    Net,
    built,
    inputs,
    square,
    unlike_whole_or_cut,
)
from tests.support.staged import lowered, split, trace_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),  # Block's branch, on a size
]


class Block(nn.Module):
    """Counts batches in a buffer that compiled code assigns; a branch depends on sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.size(0) > 100:
            hidden = hidden + 1
        return hidden + self.norm(self.layer(hidden)).relu()


def by_example(module, size=8):
    return torch.jit.trace(module, torch.zeros(3, size))


class AScript(Net):
    def begin(self):
        self.middle = torch.jit.script(Block())


class ATrace(Net):
    def begin(self):
        self.middle = by_example(Block())


class InEachBlock(Net):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.scripted, self.last = torch.jit.script(Block()), nn.Linear(8, 8)

        def forward(self, hidden):
            return self.last(self.scripted(hidden))

    def begin(self):
        self.middle = nn.Sequential(*(self.Layer() for _ in range(4)))


class Backbone(Net):
    """Traced with all that is within, scripts too."""

    def begin(self):
        self.middle = by_example(nn.Sequential(Block(), nn.GELU(), torch.jit.script(Block())))


class Loaded(Net):
    """Its parameters are plain tensors."""

    def begin(self):
        file = io.BytesIO()
        torch.jit.save(torch.jit.script(Block()), file)
        file.seek(0)
        self.middle = torch.jit.load(file)


class Tied(Net):
    """A weight is in a script, and outside of it too; another one is frozen."""

    def begin(self):
        self.other = nn.Linear(8, 8)
        self.other.weight = self.middle.weight
        self.middle.bias.requires_grad_(False)
        self.middle = torch.jit.script(self.middle)

    def inside(self, hidden):
        return self.other(self.middle(hidden).relu())


class APartByItself(Net):
    def begin(self):
        self.middle = torch.jit.script(nn.Sequential(nn.Linear(8, 8), Block()))

    def inside(self, hidden):
        first, second = self.middle.children()
        return second(first(hidden)) * len(self.middle.original_name)


class Pair(nn.Module):
    def forward(self, hidden: Tensor, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
        return hidden * scale, {"signs": hidden.sign()}


def doubled(module: nn.Module, args: tuple[Tensor], made: Tensor) -> Tensor:
    return made * 2


class Hooked(Net):
    """torch.jit compiles hooks too, and takes none afterwards."""

    def begin(self):
        self.middle.register_forward_hook(doubled)
        self.middle = torch.jit.script(nn.Sequential(self.middle))


class Several(Net):
    """Called twice, with an argument by name; gives a tuple with a dict."""

    def begin(self):
        self.pair = torch.jit.script(Pair())

    def inside(self, hidden):
        made, more = self.pair(self.middle(hidden), scale=0.5)
        return made + self.pair(more["signs"])[0]


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        if bool(hidden.sum() > 0):
            return self.first(hidden)
        return self.second(hidden)


class BranchesInside(Net):
    """By values, which compiled code may read: micro-batches go different ways."""

    def begin(self):
        self.middle = torch.jit.script(Chosen())

    def inside(self, hidden):
        return self.middle(hidden - hidden.mean() + 0.01 * hidden[:1, :1])


WORK = [AScript, ATrace, InEachBlock, Backbone, Loaded, Tied, APartByItself, Hooked, Several]


@pytest.mark.parametrize(
    "kind",
    chosen([*WORK, BranchesInside], now=(AScript,)),
    ids=lambda kind: kind.__name__,
)
def test_it_computes_what_eager_computes(kind):
    """Loss, every gradient and every buffer of three micro-batches, in one stage and in two."""
    assert unlike_whole_or_cut(built(kind), cuts=["relu/1"]) == []


def test_it_is_as_small_as_the_compiled_module():
    regions = trace_model(built(InEachBlock), inputs, square).regions
    assert [one.name for one in regions] == [f"middle.{n}.scripted" for n in range(4)]
    assert regions[0].why == "torch.jit has compiled it"
    norm, kept = "middle.0.scripted.norm", ("num_batches_tracked", "running_mean", "running_var")
    assert regions[0].written == tuple(f"{norm}.{name}" for name in kept)
    assert f"{norm}.weight" in regions[0].states


@pytest.mark.parametrize(
    "kind", chosen([AScript, Backbone], now=(AScript,)), ids=lambda kind: kind.__name__
)
def test_bytes_kept_for_backward_are_those_that_were_measured(kind):
    model = built(kind)
    traced = trace_model(model, inputs, square)
    graph, (stage,) = traced.graph, split(traced, ())
    (module,) = lowered(traced, model, (), 2)
    leaves = inputs(2)
    own = (*model.parameters(), *model.buffers(), *leaves.values(), *graph.constants.values())
    for _ in range(3):  # torch.jit compiles once more in the second call
        kept = SavedStorages(own)
        with torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda tensor: tensor):
            made = module.module(*(leaves[path] for path in stage.inputs))
    assert made[0].requires_grad and kept.now == rehearse(graph, [stage], (), 2).saved[0]


def test_the_users_own_module_stays_as_it_is():
    model = built(Backbone).eval()
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict().items()}
    copied = plain(model)
    assert type(copied.middle) is Scripted and type(copied.middle.get_submodule("0.norm"))
    assert {id(p) for p in copied.parameters()} == {id(p) for p in model.parameters()}
    copied.train()
    copied.middle(torch.ones(2, 8)).sum().backward()
    assert not model.middle.training and isinstance(model.middle, torch.jit.ScriptModule)
    for name, tensor in model.state_dict().items():
        own, value = before[name]
        assert tensor.data_ptr() == own.data_ptr()
        assert "norm" in name or torch.equal(tensor, value)


# What is refused.


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1  # here
        return hidden * self.calls


class Listing(nn.Module):
    seen: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.seen = [1]

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen.append(1)  # here
        return hidden * len(self.seen)


class WritesAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(8)  # no buffer

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.size(0) > 1:
            self.table[0] = self.table[0] + 1  # here
        return hidden * self.table


@pytest.mark.parametrize("kind", [Counting, Listing, WritesAView], ids=lambda kind: kind.__name__)
def test_what_compiled_code_keeps_outside_of_its_buffers_is_refused_with_its_line(kind):
    """Copies of the code, one a rank, would each keep their own."""
    lines, first = inspect.getsourcelines(kind)
    line = next(first + n for n, text in enumerate(lines) if "# here" in text)
    model = built(Net)
    model.middle = nn.Sequential(torch.jit.script(kind()), nn.Linear(8, 8))
    with pytest.raises(CaptureError) as error:
        plain(model)
    assert str(error.value).startswith(f"{__file__}:{line}: middle.0, which is compiled by")
    assert "\nhint: make it one: self.register_buffer" in str(error.value)


class AMethod(Net):
    def begin(self):
        class More(nn.Module):
            def forward(self, hidden: Tensor) -> Tensor:
                return hidden

            @torch.jit.export
            def other(self, hidden: Tensor) -> Tensor:
                return hidden * 2

        self.more = torch.jit.script(More())

    def inside(self, hidden):
        return self.more.other(hidden)


def test_another_method_of_compiled_code_is_refused():
    with pytest.raises(CaptureError) as error:
        trace_model(built(AMethod), inputs, square)
    assert "other() of a module that is compiled by torch.jit is called" in str(error.value)
    assert "\nhint: use the module that it was made from" in str(error.value)


def test_a_model_that_is_compiled_as_a_whole_cannot_be_cut():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = by_example(built(Net), 6)
    with pytest.raises(CaptureError, match="the model is compiled by torch.jit as a whole"):
        plain(model)
