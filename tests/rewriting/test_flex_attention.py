"""torch's flex_attention is traced as products and a softmax, or as one attention."""

import math

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
)

from autopipe.rewriting.flex_attention import written_out
from tests.support.odd_models import Net, built, inputs, planned, refusal, square, unlike
from tests.support.staged import trace_model

TOKENS = 6
IDS = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 2, 2]])
BIAS = torch.randn(2, 2 * TOKENS, generator=torch.Generator().manual_seed(1))


def given(heads=2, seed=0, tokens=TOKENS):
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(2, heads, tokens, 8, generator=drawn)


def causal(b, h, i, j):
    return i >= j


def same_document(b, h, i, j):
    return IDS[b, i] == IDS[b, j]


def masked(mask_mod, tokens=TOKENS, **more):
    return create_block_mask(mask_mod, more.pop("B", None), None, tokens, tokens, "cpu", **more)


CASES = {
    "plain": lambda: {},
    "scaled": lambda: {"scale": 0.3},
    "causal": lambda: {"block_mask": masked(causal)},
    "documents": lambda: {"block_mask": masked(and_masks(causal, same_document), B=2)},
    "a table": lambda: {"score_mod": lambda s, b, h, i, j: s + BIAS[h, i - j + TOKENS]},
    "a row of a table": lambda: {
        "score_mod": lambda s, b, h, i, j: torch.where(IDS[b][i] == IDS[b][j], s, -math.inf)
    },
    "capped": lambda: {"score_mod": lambda s, b, h, i, j: 1 + 3 * torch.tanh(s / 3) - 2 ** (-h)},
    "some see nothing": lambda: {
        "block_mask": masked(lambda b, h, i, j: (i > j) & (h == 0)),
        "score_mod": lambda s, b, h, i, j: s * (2 << h) - (i >> 1) - (8 >> h),
    },
}


unfused = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@unfused
@pytest.mark.sweep(of=8)
@pytest.mark.parametrize("case", CASES)
def test_it_gives_what_torchs_own_gives(case):
    """torch's own runs on a CPU where no gradients are asked for."""
    arguments = given(), given(seed=1), given(seed=2)
    expected = flex_attention(*arguments, **CASES[case]())
    with written_out():
        found = flex_attention(*arguments, **CASES[case]())
    torch.testing.assert_close(found, expected)


@unfused
def test_heads_share_keys():
    q, k, v = given(4), given(2, seed=1), given(2, seed=2)
    options = {"enable_gqa": True, "score_mod": lambda s, b, h, i, j: s + 0.1 * h}
    expected = flex_attention(q, k, v, **options)
    with written_out():
        torch.testing.assert_close(flex_attention(q, k, v, **options), expected)


def test_what_else_it_gives_of_the_scores():
    """torch's own gives neither on a CPU."""
    q, k, v = given(), given(seed=1), given(seed=2)
    mask = masked(lambda b, h, i, j: i > j)
    with written_out():
        _, aux = flex_attention(q, k, v, block_mask=mask, return_aux=AuxRequest(True, True))
    below = torch.ones(TOKENS, TOKENS).tril(-1).bool()
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(~below, -math.inf)
    torch.testing.assert_close(aux.lse, scores.logsumexp(-1))
    assert torch.equal(aux.lse[:, :, 0], torch.full((2, 2), -math.inf))
    torch.testing.assert_close(aux.max_scores, scores.amax(-1))


def test_blocks_that_are_left_out_are_not_seen():
    """Kernels on GPUs skip them, whatever the function says; a full block is not asked.

    keys     0 1 | 2 3 | 4 5
    query 0  a a           .       a: in a block of which the function is asked
          2        . .   f f       f: in a full block
          4  .     a a             .: not seen
    """
    partly = torch.tensor([[[1, 0, 1]]]), torch.tensor([[[[0, 1, 2], [0, 1, 2], [1, 0, 2]]]])
    fully = torch.tensor([[[0, 1, 0]]]), torch.tensor([[[[0, 1, 2], [2, 0, 1], [0, 1, 2]]]])
    mask = BlockMask.from_kv_blocks(
        *(each.int() for each in (*partly, *fully)), BLOCK_SIZE=(2, 2), mask_mod=causal
    )
    allowed = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    allowed[0, 0] = allowed[1, :2] = True
    allowed[2:4, 4:] = True
    allowed[4:, 2:4] = True
    q, k, v = given(), given(seed=1), given(seed=2)
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(~allowed, -math.inf)
    with written_out():
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=mask), scores.softmax(-1) @ v)


class Attending(Net):
    """Compiled, with a trained table of distances, as users write it."""

    attend = staticmethod(torch.compile(flex_attention, fullgraph=True))

    def begin(self):
        self.mix, self.back = nn.Linear(8, 32), nn.Linear(32, 8)
        self.table = nn.Parameter(torch.randn(2, 8))

    def inside(self, hidden):
        tokens = self.mix(hidden).view(-1, 4, 2, 4).transpose(1, 2)
        mask = create_block_mask(causal, None, None, 4, 4, device=hidden.device)
        return self.back(self.attended(tokens, mask).flatten(1))

    def attended(self, tokens, mask):
        def distance(score, b, h, i, j):
            return score + self.table[h, i - j + 4]

        return self.attend(tokens, tokens, tokens, score_mod=distance, block_mask=mask)


class ByTheMaskAlone(Attending):
    def attended(self, tokens, mask):
        return self.attend(tokens, tokens, tokens, block_mask=mask)


class NotRecursively(ByTheMaskAlone):
    """As transformers hides its compiled attention. Bug: refused, as torch.export refuses it."""

    @torch.compiler.disable(recursive=False)
    def attended(self, tokens, mask):
        return super().attended(tokens, mask)


@pytest.fixture
def on_a_cpu():
    """Plain PyTorch has no gradients of it on a CPU."""
    with written_out(), torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize("kind", [Attending, ByTheMaskAlone, NotRecursively])
def test_models_with_it_are_split(kind, on_a_cpu):
    assert unlike(built(kind), cuts=["back/linear/0"]) == []


def test_models_with_it_are_planned_and_compared_on_a_cpu():
    assert planned(built(Attending)).stages


class BesideASelection(ByTheMaskAlone):
    """What follows values runs as it is, and the attention beside it."""

    def attended(self, tokens, mask):
        found = super().attended(tokens, mask)
        return found * found[found > 0].mean()


def test_in_a_part_that_runs_as_it_is():
    assert planned(built(BesideASelection)).regions


def test_a_mask_alone_is_one_attention():
    ops = [node.short for node in trace_model(built(ByTheMaskAlone), inputs, square).graph.nodes]
    assert "scaled_dot_product_attention" in ops and "softmax" not in ops


class Sums(Attending):
    def attended(self, tokens, mask):
        return self.attend(tokens, tokens, tokens, score_mod=lambda s, *_: s - s.sum())


class AddsATable(Attending):
    def attended(self, tokens, mask):
        return self.attend(tokens, tokens, tokens, score_mod=lambda s, *_: s + self.table.sum(0))


class Largest(Attending):
    def attended(self, tokens, mask):
        return self.attend(tokens, tokens, tokens, score_mod=lambda s, *_: s - s.max())


class LargestOfAQuery(Attending):
    def attended(self, tokens, mask):
        mod = lambda s, *_: s - s.amax(-1, keepdim=True)  # noqa: E731 (as users write it)
        return self.attend(tokens, tokens, tokens, score_mod=mod)


class Slices(Attending):
    def attended(self, tokens, mask):
        mod = lambda s, b, h, i, j: s + self.table[h, 1:][i]  # noqa: E731 (as users write it)
        return self.attend(tokens, tokens, tokens, score_mod=mod)


class ReadsBlocks(Attending):
    def attended(self, tokens, mask):
        return tokens * mask.kv_num_blocks.sum()


@pytest.mark.parametrize(
    "kind, what",
    [
        (Sums, "calls sum;"),
        (AddsATable, "calls add with a whole tensor;"),
        (Largest, "calls max over all scores;"),
        (LargestOfAQuery, "calls amax;"),
        (Slices, "indexes a tensor by slice;"),
        (ReadsBlocks, ".kv_num_blocks of a block mask is read"),
    ],
)
def test_what_is_no_function_of_numbers_is_refused(kind, what):
    """Called for all scores at once, it would compute something else without a word."""
    found = refusal(built(kind))
    assert what in found and "test_flex_attention.py:" in found
