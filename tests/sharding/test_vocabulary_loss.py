"""A loss from parts of the vocabulary beside F.cross_entropy of all logits; alone and on ranks."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from autopipe.ir.dataflow import analyse
from autopipe.planfile.placements import I, R, S
from autopipe.rewriting.loss_in_parts import in_parts
from autopipe.sharding import collectives
from autopipe.sharding.ilp import shard
from autopipe.sharding.local_graph import shard_graph
from autopipe.sharding.vocabulary_loss import LOSS, vocabulary_loss
from tests.support.long import chosen
from tests.support.simulated import Meeting, axis, everywhere
from tests.support.staged import traced

TP = collectives.TENSOR_PARALLEL
WORDS, WIDTH, IGNORED = 50, 16, -100


def drawn(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [4, 7, h], weight [v, h], bias [v], and targets of which some do not count."""
    torch.manual_seed(0)
    target = torch.randint(0, WORDS, (4, 7))
    target[0, :3] = IGNORED
    x, weight = torch.randn(4, 7, WIDTH), torch.randn(WORDS, WIDTH) / 4
    return x.to(dtype), weight.to(dtype), torch.randn(WORDS).to(dtype), target


def gradients(loss: Callable[..., Tensor], *leaves: Tensor) -> list[Tensor]:
    """Three times the loss, and its gradients by the leaves."""
    own = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    found = 3 * loss(*own)
    return [found.detach(), *torch.autograd.grad(found, own)]


def whole(target: Tensor, reduction: int = 1) -> Callable[..., Tensor]:
    """What a model writes: logits in its own dtype, made wider for the loss."""

    def loss(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        logits = F.linear(x, weight, bias).to(torch.promote_types(x.dtype, torch.float32))
        word = {1: "mean", 2: "sum"}[reduction]
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction=word)

    return loss


def parted(
    target: Tensor, reduction: int = 1, *, width: int = 13, begin: int = 0, over: str = ""
) -> Callable[..., Tensor]:
    def loss(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        how = IGNORED, reduction, wide, width, begin, over
        found: Tensor = vocabulary_loss(x, weight, bias, target, *how)[0]
        return found

    return loss


def off(found: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest entry."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize("reduction", [1, 2])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("dtype", "allowed"),
    [(torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 2**-7)],
)
def test_loss_and_gradients(
    dtype: torch.dtype, allowed: float, biased: bool, reduction: int
) -> None:
    """Parts of 13, 13, 13 and 11 words. In bf16 the gradient of x rounds once a part."""
    x, weight, bias, target = drawn(dtype)
    leaves = [x, weight, bias][: 2 + biased]
    expected = gradients(whole(target, reduction), *leaves)
    found = gradients(parted(target, reduction), *leaves)
    assert max(map(off, found, expected)) < allowed
    assert off(found[0], expected[0]) < 1e-6, "the loss itself is of fp32 logits in both"


def test_one_part_in_bf16_is_the_whole_to_the_bit_of_its_weights_gradient() -> None:
    x, weight, _, target = drawn(torch.bfloat16)
    expected, found = (
        gradients(loss, x, weight) for loss in (whole(target), parted(target, width=WORDS))
    )
    assert torch.equal(found[2], expected[2])


def observed(run: Callable[[], Any]) -> list[Any]:
    """The ops that a call runs, those within ops of ours too, with the shapes that they read."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as seen:
        run()
    return list(seen.events())


@pytest.mark.parametrize(("trained", "products"), [("x", 4), ("weight", 4), ("bias", 0)])
def test_what_is_frozen_gets_no_gradient(trained: str, products: int) -> None:
    """Nor is one computed: of each of the four parts there is one product besides its logits."""
    *tensors, target = drawn()
    leaves = dict(zip(("x", "weight", "bias"), tensors, strict=True))
    leaves[trained].requires_grad_()
    loss = parted(target)(**leaves)
    ops = Counter(event.name for event in observed(lambda: loss.backward()))
    assert (ops["aten::linear"], ops["aten::mm"]) == (4, products)
    assert [name for name, leaf in leaves.items() if leaf.grad is not None] == [trained]


def test_no_tensor_has_all_logits_and_none_of_a_part_is_kept() -> None:
    """28 rows of 50 words are 1400 logits; no tensor is larger than the weight, of 800."""
    x, weight, _, target = drawn()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    def largest(loss: Callable[..., Tensor]) -> int:
        events = observed(lambda: gradients(loss, x, weight))
        shapes = [shape for event in events for shape in event.input_shapes if shape]
        return max(math.prod(shape) for shape in shapes if isinstance(shape[0], int))

    assert (largest(whole(target)), largest(parted(target))) == (28 * WORDS, WORDS * WIDTH)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        gradients(parted(target), x, weight)
    sizes = sorted(tensor.numel() for tensor in kept)
    assert sizes == [28, 28, x.numel(), weight.numel()], "targets, log-sum-exps, x, the weight"


def test_no_word_that_counts() -> None:
    """A mean of nothing is nan, as torch's, with gradients of zero; a sum is 0."""
    x, weight, _, target = drawn()
    nothing = torch.full_like(target, IGNORED)
    assert not any(gradient.any() for gradient in gradients(parted(nothing), x, weight)[1:])
    assert parted(nothing)(x, weight).isnan() and whole(nothing)(x, weight).isnan()
    assert parted(nothing, 2)(x, weight) == 0


@pytest.mark.parametrize("word", [-1, WORDS])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_target_that_is_no_word_is_refused_as_torch_does(word: int, ranks: int) -> None:
    """Bug: labels padded with -1, where -100 does not count, gave a loss without their logit."""
    x, weight, _, target = drawn()
    target[3] = word
    with pytest.raises(IndexError, match=f"Target {word} is out of bounds"):
        whole(target)(x, weight)

    def rank(number: int) -> Tensor:
        begin, own = number * WORDS // ranks, weight.chunk(ranks)[number]
        return parted(target, begin=begin, over=TP if ranks > 1 else "")(x, own)

    with pytest.raises(IndexError, match=f"Target {word} is out of bounds"):
        everywhere(Meeting(ranks), rank)


def test_large_logits_do_not_overflow() -> None:
    x, weight, _, target = drawn()
    expected, found = (gradients(loss, 1e4 * x, weight) for loss in (whole(target), parted(target)))
    assert max(map(off, found, expected)) < 1e-6


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # opcheck's own
def test_torch_accepts_the_op() -> None:
    """Its schema, its fake version, its registration for autograd and for torch.compile."""
    x, weight, bias, target = drawn()
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    args = (*leaves, target, IGNORED, 1, torch.float32, 13, 0, "")
    torch.library.opcheck(vocabulary_loss, args)


# On several ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_some_words_each(ranks: int) -> None:
    """Three ranks have 17, 17 and 16 words. The gradient of x is a summand on each."""
    x, weight, bias, target = drawn(torch.float64)
    expected = gradients(whole(target), x, weight, bias)

    def rank(number: int) -> list[Tensor]:
        own = [tensor.chunk(ranks)[number] for tensor in (weight, bias)]
        begin = number * weight.chunk(ranks)[0].shape[0]
        return gradients(parted(target, begin=begin, over=TP), x, *own)

    loss, of_x, of_weight, of_bias = zip(*everywhere(Meeting(ranks), rank), strict=True)
    found = loss[-1], sum(of_x), torch.cat(of_weight), torch.cat(of_bias)
    assert max(map(off, found, expected)) < 1e-14
    assert len({float(each) for each in loss}) == 1


@pytest.mark.parametrize("name", chosen(("gpt2", "llama"), now=("gpt2",)))
def test_the_sharding_deals_out_the_vocabulary(name: str) -> None:
    """Nothing of the vocabulary's size is gathered; each rank's op begins with its own words."""
    graph = in_parts(traced(name).graph, 3)
    flow = analyse(graph)
    sharding = shard(flow, (), axis(2), 2)
    weight = "transformer.wte.weight" if name == "gpt2" else "lm_head.weight"
    assert sharding.states[weight] == S(0)
    inputs, output = sharding.nodes["cross_entropy_loss/0"]
    assert (inputs[:2], output) == ((R, S(0)), I)
    words, _ = graph.states[weight].spec.shape
    for rank in (0, 1):
        (loss,) = (node for node in shard_graph(flow, sharding, rank).nodes if node.op == LOSS)
        assert loss.args[-2:] == (rank * words / 2, TP)
