"""What a graph cannot have is said in a true sentence, with the user's line where there is one."""

import copy
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn import functional as F
from torch.nn.modules.module import register_module_full_backward_hook

from autopipe.errors import CaptureError, ModelError
from autopipe.tracing.source import bare
from tests.support.long import chosen
from tests.support.odd_models import Net, built, inputs, planned, refusal, square, traced, unlike
from tests.support.staged import trace_model
from tests.support.torch_versions import NOTES_LINES_OF_LOSSES


class Hidden(Net):
    """Layers in a Python list, as who hides a teacher from the optimizer has them."""

    def begin(self):
        self.layers = [nn.Linear(8, 8)]

    def inside(self, hidden):
        return self.middle(hidden) + self.layers[0](hidden)


def test_a_module_in_a_plain_list_is_named_as_the_cause():
    """Bug: "We found a fake tensor in the exported program constant's list"."""
    said = refusal(lambda: built(Hidden))
    assert "computes with a tensor that is none of the model's parameters and buffers" in said
    assert "nn.ModuleList" in said


class NamedAsAMethod(Net):
    """As a well-known N-BEATS has its parameters."""

    def begin(self):
        self.parameters = nn.ParameterList(nn.Module.parameters(self))


def test_a_module_that_a_method_hides_is_named_as_the_cause():
    """Bug: "the model cannot be captured: TypeError", and a hint about tensors without values."""
    said = refusal(lambda: built(NamedAsAMethod))
    assert "the model has a module 'parameters', whose name is that of a method" in said
    assert "give the module another name" in said


class FromBank(Net):
    """A layer's weight is computed when the model is built, from a parameter."""

    def begin(self):
        self.bank = nn.Parameter(torch.randn(2, 8, 8))
        del self.middle.weight
        self.middle.weight = self.bank[0]


def test_a_tensor_computed_from_parameters_before_is_not_read():
    """Bug: it was to be registered as a buffer, which would not train the bank."""
    with pytest.raises(CaptureError, match="middle.weight.* computed from parameters"):
        trace_model(built(FromBank), inputs, square)


class WritesAt(Net):
    """A queue, as MoCo has it, whose place Python reads: both in a call that runs as it is."""

    def begin(self):
        self.register_buffer("queue", torch.randn(8, 8))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def inside(self, hidden):
        at = int(self.at)
        with torch.no_grad():
            self.queue[at : at + hidden.shape[0]] = hidden
            self.at[0] = (at + hidden.shape[0]) % 8
        return self.middle(hidden) + hidden @ self.queue.clone()


class SortsByNumpy(Net):
    def inside(self, hidden):
        order = torch.from_numpy(hidden.detach().numpy().argsort(axis=1))
        return self.middle(hidden).gather(1, order)


@pytest.mark.parametrize("kind", chosen([WritesAt, SortsByNumpy], now=(SortsByNumpy,)))
def test_what_no_trace_can_have_runs_as_it_is(kind):
    """Each was refused, by what an earlier look had found or by what autopipe asks itself."""
    assert len(traced(kind).regions) == 1
    assert unlike(built(kind), traced=traced(kind)) == []


def test_a_backward_hook_on_all_modules_is_called_so():
    """Bug: "BackwardHookFunction is torch's own, and not for one process alone"."""
    hook = register_module_full_backward_hook(lambda *_: None)
    try:
        assert "a backward hook is set on every module, by torch.nn.modules" in refusal(built(Net))
    finally:
        hook.remove()


class Marked(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("given", ["module", "function"])
@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        (torch.ones(8).as_subclass(Marked), "'gain' is a Marked, a class of tensors that overri"),
        (torch.ones(1).expand(8), "'gain' is an expanded tensor: several of its entries are one"),
    ],
)
def test_a_parameter_that_is_no_plain_tensor_is_refused_by_its_name(tensor, sentence, given):
    """Bugs: export's own error about constants; a traceback where the model is compared."""
    model = Net()
    if given == "module":
        model.gain = nn.Parameter(tensor)
        with pytest.raises(ModelError, match=sentence):
            bare(model)
        return

    def build():
        made = Net()
        made.gain = nn.Parameter(tensor)
        return made

    with pytest.raises(ModelError, match=sentence):
        bare(build)


@pytest.mark.parametrize("given", ["module", "function"])
def test_a_model_in_evaluation_mode_is_said_to_be_trained_all_the_same(given):
    """As `from_pretrained` returns one. Parts of a model in training may be in evaluation mode."""
    for prepare, told in ((nn.Module.eval, 1), (nn.Module.train, 0), (_half_in_evaluation, 0)):
        said: list[str] = []
        made = prepare(built(Net))
        bare(made if given == "module" else lambda made=made: made, said.append)
        assert len(said) == told
        assert all("given in evaluation mode (.eval()); steps run it as after" in s for s in said)


def _half_in_evaluation(model):
    model.middle.eval()
    return model


class Fields(nn.Module):
    def forward(self, outputs, batch):
        return F.mse_loss(outputs, batch["z"])


def test_an_error_of_a_loss_that_is_a_module_is_the_losss():
    """Bug: "the model raises"."""
    with pytest.raises(CaptureError, match=r"loss\(outputs, batch\) raises KeyError: 'z'"):
        trace_model(built(Net), inputs, Fields())


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class TakesAPair(Net):
    def forward(self, pair):
        assert isinstance(pair, Pair)
        return super().forward(pair.left + pair.right)


def test_a_named_tuple_in_a_batch_stays_one():
    """Bug: it came as a plain tuple, and "the model raises AttributeError"."""

    def pairs(rows):
        batch = inputs(rows)
        return {"pair": Pair(batch["x"], batch["x"].sin()), "y": batch["y"]}

    assert trace_model(built(TakesAPair), pairs, square).inputs[0].path == "pair.0"


class Linearised(Net):
    """A layer to first order about the weights that it was built with."""

    def begin(self):
        self.old = copy.deepcopy(self.middle).requires_grad_(False)

    def inside(self, hidden):
        old = dict(self.old.named_parameters())
        off = {name: p - old[name] + 0.1 for name, p in self.middle.named_parameters()}
        value, slope = jvp(lambda p: functional_call(self.middle, p, (hidden,)), (old,), (off,))
        return value + slope


@pytest.mark.long
def test_a_layer_that_is_called_with_other_parameters_runs_as_it_is():
    """Bug: "the model raises KeyError: 140526282273600"."""
    assert [region.method for region in traced(Linearised).regions] == ["inside_lines_4_to_4"]
    assert unlike(built(Linearised), traced=traced(Linearised)) == []


class InLowPrecision(Net):
    """One weight, read twice, in bf16: eager keeps the cast and sums its gradients in bf16."""

    def inside(self, hidden):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.middle(self.middle(hidden).relu()).float()


def test_an_island_in_16_bits_is_compared_as_one():
    """Bug: held to 1e-4, its gradients were "other ones by its graph"."""
    planned(built(InLowPrecision))


class Wrapped(nn.Module):
    """Hands on whatever it is given, as wrappers do."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, **kwargs):
        return self.net(**kwargs)


def test_a_wrapper_that_takes_any_keyword_is_told_that_it_is_given_the_labels_too():
    """Bug: "Net.forward() got an unexpected keyword argument 'y'" alone, of what is the loss's."""
    with pytest.raises(CaptureError, match="unexpected keyword argument 'y'") as refused:
        planned(built(Wrapped))
    assert refused.value.hint.endswith(
        "A forward that takes **kwargs is given all entries of the batch: x, y"
    )


class ArgumentOfMax(Net):
    def forward(self, x):
        return (super().forward(x).argmax(1, keepdim=True) == 0).float()


class UnderNoGrad(Net):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


class AllFrozen(Net):
    def begin(self):
        self.requires_grad_(False)


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (ArgumentOfMax, "no gradient comes through argmax() here, and the loss has none"),
        (UnderNoGrad, "no gradient comes through linear() here, and the loss has none"),
        (AllFrozen, "no parameter that is trained goes into the loss"),
    ],
)
def test_a_loss_that_would_train_nothing_is_refused(kind, why):
    """Bug: such a model was planned, and ran step after step; torch refuses its backward."""
    with pytest.raises(ModelError) as error:
        planned(kind)
    assert why in str(error.value)


def test_a_loss_that_is_detached_is_refused_with_its_line():
    """Where torch notes no lines of a loss, the node is named."""
    place = r"test_sentences.py:\d+" if NOTES_LINES_OF_LOSSES else r"loss\(\)/detach/0"
    with pytest.raises(ModelError, match=f"{place}: no gradient comes through detach"):
        planned(Net, lambda outputs, batch: square(outputs, batch).detach())


def test_a_model_that_deals_out_its_rows_is_refused():
    with pytest.raises(ModelError) as error:
        bare(lambda: nn.DataParallel(built(Net)))
    assert "the model is in a DataParallel" in str(error.value) and ".module" in error.value.hint


def test_a_class_is_no_loss():
    """Bug: torch's error was that of a tensor taken for its option `size_average`."""
    with pytest.raises(ModelError) as error:
        planned(Net, nn.MSELoss)
    assert "loss is the class MSELoss" in str(error.value)
    assert error.value.hint.startswith("loss = MSELoss()")
