"""CTC as an op of known sizes: the loss and the gradients of torch's own, and it can be traced."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe.ir import opaque_ops
from tests.support.odd_models import Net, built, unlike

ForCTCLoss = pytest.importorskip(
    "transformers.loss.loss_ctc", reason="this release of transformers has no such loss"
).ForCTCLoss

STEPS, ROWS, KINDS, LONGEST = 12, 3, 5, 4


def example():
    """Log-probabilities [T, b, C], targets [b, U], lengths [b], target lengths [b]."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(STEPS, ROWS, KINDS, generator=generator)
    targets = torch.randint(1, KINDS, (ROWS, LONGEST), generator=generator)
    return logits, targets, torch.tensor([12, 9, 2]), torch.tensor([4, 1, 3])


def both(one, other, given):
    """Value and gradient of two functions of the same tensor."""
    found = []
    for function in (one, other):
        own = given.clone().requires_grad_()
        value = function(own)
        value.sum().backward()
        found.append((value.detach(), own.grad))
    return zip(*found, strict=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_it_is_torchs_to_the_bit(reduction):
    """The last row's target is longer than its input: an infinite loss, here counted as 0."""
    logits, *rest = example()

    def with_(function):
        return lambda x: function(
            x.log_softmax(-1), *rest, blank=0, reduction=reduction, zero_infinity=True
        )

    for mine, theirs in both(with_(opaque_ops.ctc_loss), with_(F.ctc_loss), logits):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_is_of_fp32_as_torchs(dtype):
    """Bug: a plan in bf16-autocast ended in its first step: "not implemented for 'BFloat16'"."""
    logits, *rest = example()

    def with_(function):
        def under_autocast(x):
            with torch.autocast("cpu", dtype):
                return function(x.log_softmax(-1), *rest, zero_infinity=True)

        return under_autocast

    for mine, theirs in both(with_(opaque_ops.ctc_loss), with_(F.ctc_loss), logits.to(dtype)):
        assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype


def test_labels_that_do_not_count_may_stand_anywhere():
    """transformers selects those that count by a mask; here they are moved to the front."""
    logits = example()[0].transpose(0, 1).contiguous()
    labels = torch.tensor([[1, -100, 2, 3], [4, 4, -100, -100], [0, 2, 0, 1]])
    lengths = torch.tensor([12, 9, 12])

    def with_(function):
        return lambda x: function(x, labels, lengths, blank_token_id=0)

    for mine, theirs in both(with_(opaque_ops.of_labels), with_(ForCTCLoss), logits):
        assert torch.equal(mine, theirs)


class Speech(Net):
    def begin(self):
        self.down = nn.Linear(8, 4 * KINDS)


def speech_loss(outputs, batch):
    """Of four steps of each row; the targets are made from the labels."""
    log_probs = outputs.view(-1, 4, KINDS).transpose(0, 1).log_softmax(-1)
    targets = (batch["y"][:, :2] > 0).long() + 1
    rows = targets.shape[0]
    return F.ctc_loss(log_probs, targets, torch.full((rows,), 4), torch.full((rows,), 2))


def test_a_model_with_the_loss_is_cut_and_has_the_gradients_of_eager():
    """Bug: "a size here depends on the values of a tensor": no CTC model could be planned."""
    assert unlike(built(Speech), speech_loss) == []
    assert unlike(built(Speech), speech_loss, cuts=["relu/1"]) == []
