"""Blocks that run again in backward: nothing changes but what is kept in between."""

import copy
import threading

import pytest
import torch
from torch import nn

from autopipe.errors import ModelError, PlanError
from autopipe.ir.blocks import Block, find_blocks
from autopipe.ir.opaque_ops import observing
from autopipe.stages.lower import lower
from autopipe.stages.precision import arithmetic, computing
from autopipe.stages.recompute import Recomputed, blocks_meant
from autopipe.stages.rng import stream
from autopipe.stages.saved_storages import SavedStorages
from tests.support.long import chosen
from tests.support.staged import micro_batches, split, trace_model, traced
from tests.support.zoo import ZOO

FLOAT = 4


def step(name, recompute, *, precision="fp32", count=2, in_thread=False):
    """Losses and gradients of a model of the zoo in one stage. Streams and arithmetic end with the
    forward, as they do for a GPU's backward, which runs in a thread of its own."""
    found, model = traced(name), copy.deepcopy(ZOO[name].model())
    module, low = whole(found, model, recompute, precision)
    (stage,) = split(found, [])
    how = arithmetic(precision, "cpu", [model.get_parameter(name) for name in low])
    losses = []
    for k, leaves in enumerate(micro_batches(found, ZOO[name].inputs(2 * count), count)):
        with stream(0, 0, k), computing(how):
            losses.append(module(*[leaves[path] for path in stage.inputs])[0])
    for loss in losses:
        if in_thread:
            backward = threading.Thread(target=_backward, args=(loss, torch.get_num_threads()))
            backward.start()
            backward.join()
        else:
            loss.backward()
    return [loss.detach() for loss in losses], {n: p.grad for n, p in model.named_parameters()}


def _backward(loss, cores):
    torch.set_num_threads(cores)  # a thread's own: sums over more cores have other bits
    loss.backward()


def whole(found, model, asked=("all",), precision="fp32", rows=2):
    """A model as one stage that recomputes the blocks asked for."""
    blocks, (stage,) = find_blocks(found.graph), split(found, [])
    named = dict(model.named_parameters()) | dict(model.named_buffers()) | found.graph.constants
    states = {name: named[name] for name in stage.states}
    made = lower(
        found.graph,
        stage,
        blocks,
        states,
        found.reads,
        rows,
        last=True,
        recompute=blocks_meant(blocks, asked),
        precision=precision,
    )
    return made.module, made.low


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast"])
@pytest.mark.parametrize(
    "name",
    chosen(
        ("gpt", "dropout", "gpt2", "llama", "t5", "whisper", "mask", "resnet"),
        now=("dropout", "gpt2", "mask", "resnet"),
    ),
)
def test_gradients_are_bit_for_bit_the_same(name, precision):
    """Dropout included: the second run draws what the first has drawn."""
    losses, gradients = step(name, (), precision=precision)
    again_losses, again = step(name, ("all",), precision=precision)
    assert all(map(torch.equal, losses, again_losses))
    assert gradients.keys() == again.keys()
    for parameter, gradient in gradients.items():
        assert gradient is again[parameter] or torch.equal(gradient, again[parameter]), parameter


@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast"])
def test_backward_may_run_in_another_thread(precision):
    """As it does on a GPU, where no stream and no arithmetic of the forward's thread is seen."""
    _, gradients = step("dropout", (), precision=precision)
    _, again = step("dropout", ("all",), precision=precision, in_thread=True)
    for parameter, gradient in gradients.items():
        assert torch.equal(gradient, again[parameter]), parameter


class Layer(nn.Module):
    """x [b, 8] -> [b, 8]"""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """The mean of what `run(self, x)` makes of x [b, 8]."""

    def __init__(self, run, block=Layer):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.run = run

    def forward(self, x):
        return self.run(self, x).square().mean()


def found_of(run, block=Layer):
    model = Model(run, block)
    return trace_model(model, lambda b: {"x": torch.ones(b, 8)}), model


def in_a_row(model, x):
    x = model.first(x)
    for block in model.blocks:
        x = block(x)
    return x


@pytest.mark.parametrize(
    ("asked", "saved", "most"),
    [
        ((), (3 * 40 + 8) * 2, 0),
        (("blocks.1", "blocks.2"), (40 + 2 * 8 + 8) * 2, (32 - 8) * 2),
        (("all",), (3 * 8 + 8) * 2, (32 - 8) * 2),
    ],
)
def test_bytes_worked_by_hand(asked, saved, most):
    """Two rows. A block keeps x [2, 8] and tanh [2, 32]; recomputed, x alone. square keeps [2, 8].

    When the last block makes its tanh again square has let go of its 8: 32 - 8 a row are held
    besides what was kept. Before an earlier block's turn, a later one has let go of as much.
    """
    found, model = found_of(in_a_row)
    blocks = find_blocks(found.graph)
    if "blocks.1" in asked:  # the first of a class gives it its name, and would mean them all
        assert blocks_meant(blocks, asked) == asked
    module, _ = whole(found, model, asked)
    x = torch.ones(2, 8)
    kept = SavedStorages([*model.parameters(), x])
    with observing(kept.keep):
        (loss,) = module(x)
        assert kept.now == saved * FLOAT
        kept.most = kept.now
        loss.backward()
    assert kept.most - saved * FLOAT == most * FLOAT
    assert kept.now == 0


class WritesOver(nn.Module):
    def forward(self, x):
        return x.sigmoid().add_(1.0).sin()


def test_what_a_block_writes_over_is_told_as_without_a_second_run():
    """The second run saves the sigmoid, goes on to what sin needs, and gave the sum for both."""
    result = Recomputed(WritesOver())(torch.ones(2, requires_grad=True)).sum()
    with pytest.raises(ModelError, match="at version 1; expected version 0 instead"):
        result.backward()


def test_without_gradients_a_block_is_a_block():
    found, model = found_of(in_a_row)
    x = torch.ones(2, 8)
    with torch.no_grad():
        (loss,) = whole(found, model)[0](x)
        assert torch.equal(loss, model(x))


def test_parameters_keep_their_names():
    found, model = found_of(in_a_row)
    module, _ = whole(found, model)
    assert isinstance(module.get_submodule("blocks.1"), Recomputed)
    named = dict(module.named_parameters())
    assert named.keys() == dict(model.named_parameters()).keys()
    assert named["blocks.1.up.weight"] is model.blocks[1].up.weight


def test_a_second_backward_has_it_run_once_more():
    """Every saved tensor is handed out once; who keeps the graph may ask again."""
    found, model = found_of(in_a_row)
    (loss,) = whole(found, model)[0](torch.ones(2, 8))
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    loss.backward()
    assert all(torch.equal(p.grad, 2 * once[name]) for name, p in model.named_parameters())


def test_the_second_run_ends_with_the_last_tensor_that_is_needed():
    """The last linear of a block keeps its input and its weight; its product is not made again."""
    products = []

    class Watch(nn.Module):
        def forward(self, x):
            products.append("tanh")
            x = torch.tanh(x)
            products.append("add")
            return x + 1

    x = torch.ones(2, requires_grad=True)
    Recomputed(Watch())(x).sum().backward()
    assert products == ["tanh", "add", "tanh"]


def test_a_shared_weight_goes_in_as_itself():
    """It is an argument of every block, and its copy in low precision is found by its identity."""

    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(8, 8)

        def forward(self, x, weight):
            return x + torch.tanh(self.own(x)) @ weight

    def run(model, x):
        for block in model.blocks:
            x = block(x, model.first.weight)
        return x

    found, model = found_of(run, Sharing)
    module, low = whole(found, model, precision="bf16-autocast")
    assert "first.weight" in low
    how = arithmetic("bf16-autocast", "cpu", [model.get_parameter(name) for name in low])
    x = torch.ones(2, 8)
    kept = SavedStorages([*model.parameters(), *how.copies.values(), x])
    with computing(how), observing(kept.keep):
        (loss,) = module(x)
    arguments = kept.now
    with observing(kept.keep):
        loss.backward()
    weight = 8 * 8 * 2
    assert kept.most - arguments < weight, "no block has made a copy of its own"


# What cannot be made again


def refusal(found, model, asked=("all",)):
    with pytest.raises(PlanError) as caught:
        whole(found, model, asked)
    return str(caught.value)


class Normed(nn.Module):
    """x [b, 8] -> [b, 8]"""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.norm(self.up(x))))


def test_a_micro_batch_is_counted_once_in_running_statistics():
    """The second run writes copies: torch.utils.checkpoint averages each micro-batch twice."""
    found, model = found_of(in_a_row, Normed)
    once = copy.deepcopy(model)
    module, _ = whole(found, model, rows=4)
    for x in torch.randn(3, 4, 8).unbind():
        (loss,) = module(x)
        loss.backward()
        once(x).backward()
    kept = dict(model.named_buffers())
    assert kept["blocks.0.norm.num_batches_tracked"] == 3
    for name, buffer in once.named_buffers():
        assert torch.equal(kept[name], buffer), name
    for name, parameter in once.named_parameters():
        assert torch.equal(model.get_parameter(name).grad, parameter.grad), name


def test_copies_of_statistics_are_not_kept():
    """Batch norm saves them for its backward, which does not read them."""
    found, model = found_of(in_a_row, Normed)
    module, _ = whole(found, model, rows=4)
    x = torch.randn(4, 8)
    kept = SavedStorages([*model.parameters(), *model.buffers(), x])
    with observing(kept.keep):
        (loss,) = module(x)
    arguments = kept.now
    with observing(kept.keep):
        loss.backward()
    # Of the last block: what the product before the norm made, tanh, and the batch's mean and
    # deviation; by then square has let go of its [4, 8].
    assert kept.most - arguments == FLOAT * (2 * 4 * 32 + 2 * 32 - 4 * 8)


def test_a_block_that_computes_with_what_it_counts_is_refused():
    """All such blocks are named at once: whoever left one out was told of the next."""

    class Counting(Normed):
        def forward(self, x):
            return super().forward(x) / self.norm.num_batches_tracked

    found, model = found_of(in_a_row, Counting)
    assert refusal(found, model) == (
        "stage 0: block 'blocks.0' cannot be recomputed: blocks.0.norm/add_/0 reads "
        "[blocks.0.norm.num_batches_tracked], which blocks.0.norm/add_/0 writes\n"
        "hint: leave 'blocks.0', 'blocks.1', 'blocks.2' out of what is recomputed"
    )


def test_a_block_that_computes_with_an_average_of_its_own_is_refused():
    class Centred(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x):
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return super().forward(x - self.mean)

    assert "reads [blocks.0.mean]" in refusal(*found_of(in_a_row, Centred))


def test_a_block_whose_argument_changes_later_is_refused():
    """x + bias keeps nothing of x, so autograd would let the change pass, and run on 2x again."""

    class Shifted(Layer):
        def forward(self, x):
            return torch.tanh(self.down(torch.tanh(self.up(x + 1))))

    def run(model, x):
        x = model.first(x)
        y = model.blocks[0](x)
        x.mul_(2)
        return model.blocks[2](model.blocks[1](y)) + x

    found, model = found_of(run, Shifted)
    assert "block 'blocks.0' cannot be recomputed" in (said := refusal(found, model))
    assert "which mul_/0 writes" in said
    whole(found, model, ("blocks.1", "blocks.2"))  # these have nothing to do with x


def test_a_block_that_writes_its_argument_is_refused():
    class InPlace(Layer):
        def forward(self, x):
            return self.down(torch.tanh(self.up(x.mul_(2))))

    found, model = found_of(in_a_row, InPlace)
    assert "reads first/linear/0, which blocks.0/mul_/0 writes" in refusal(found, model)


def test_what_was_written_before_a_block_is_no_hindrance():
    def run(model, x):
        return in_a_row(model, x.clone().mul_(2))

    whole(*found_of(run))


def test_a_block_with_an_opaque_kernel_is_refused():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.norm = nn.LSTM(8, 8, batch_first=True), nn.LayerNorm(8)

        def forward(self, x):
            return self.norm(self.lstm(x[:, None])[0][:, 0])

    found, model = found_of(in_a_row, Recurrent)
    assert "reads or keeps what only its kernel knows" in refusal(found, model)


def test_a_path_that_is_no_block_of_the_stage_is_refused():
    found, model = found_of(in_a_row)
    named = dict(model.named_parameters())
    stages = split(found, ["blocks.1.up/linear/0"])
    blocks = find_blocks(found.graph)
    with pytest.raises(PlanError) as caught:
        states = {name: named[name] for name in stages[1].states}
        lower(found.graph, stages[1], blocks, states, None, 2, last=True, recompute=["blocks.0"])
    assert str(caught.value) == (
        "stage 1: 'blocks.0' is to be recomputed and is no block of the stage\n"
        "hint: its blocks are blocks.1, blocks.2"
    )


# Which blocks are meant


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ([], []),
        (["all"], ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]),
        (["decoder"], ["decoder.0", "decoder.1"]),
        (["decoder.1", "encoder.1"], ["encoder.1", "decoder.1"]),
        (["encoder.0"], ["encoder.0", "encoder.1"]),
    ],
)
def test_blocks_by_path_and_by_class(asked, meant):
    """In the graph's order, whatever the order asked in; a class is named after its first."""
    blocks = (
        Block("encoder.0", 0, 5, "encoder.0"),
        Block("encoder.1", 5, 10, "encoder.0"),
        Block("decoder.0", 10, 17, "decoder.0"),
        Block("decoder.1", 17, 24, "decoder.0"),
    )
    assert list(blocks_meant(blocks, asked)) == meant


def test_an_unknown_block_is_told_what_there_is():
    with pytest.raises(PlanError) as caught:
        blocks_meant(find_blocks(traced("gpt").graph), ["blocks.7"])
    assert str(caught.value) == (
        "recompute: the model has no block and no class of blocks 'blocks.7'\n"
        "hint: all, or of a class blocks.0 (4 of them)"
    )
