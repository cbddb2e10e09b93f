"""Ops whose kernels read values: a dry run answers them as a run on values does."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe.ir.blocks import find_blocks
from autopipe.ir.opaque_ops import observing
from autopipe.stages.dry_run import rehearse
from tests.support.odd_models import ROWS, Net, built, inputs, planned, square, unlike
from tests.support.staged import split, trace_model


class Spectrum(Net):
    """Changes the phases of a short signal, as models of speech and music do."""

    def begin(self):
        self.register_buffer("window", torch.hann_window(8))

    def inside(self, hidden):
        signal = F.pad(hidden, (0, 24))
        spectrum = torch.stft(signal, 8, 2, window=self.window, return_complex=True)
        changed = torch.istft(spectrum * 1j, 8, 2, window=self.window, length=32)
        return self.middle(changed[:, :8])


class OwnWindow(Net):
    def inside(self, hidden):
        window = torch.hann_window(8)
        spectrum = torch.stft(F.pad(hidden, (0, 24)), 8, 2, window=window, return_complex=True)
        return self.middle(torch.istft(spectrum, 8, 2, window=window)[:, :8])


class LastStep(Net):
    """The usual classifier: the next op saves the LSTM's result, which the LSTM has saved."""

    kind = nn.LSTM

    def begin(self):
        self.rnn = self.kind(1, 8, batch_first=True)

    def inside(self, hidden):
        return self.middle(self.rnn(hidden[:, :, None])[0][:, -1])


class LastOfGRU(LastStep):
    kind = nn.GRU


@pytest.mark.parametrize("kind", [Spectrum, pytest.param(OwnWindow, marks=pytest.mark.long)])
def test_istft_is_planned_and_split(kind):
    """Bug: planning ended in a traceback: istft reads whether its windows leave gaps, and the
    tensors of a dry run have no values."""
    planned(built(kind))
    planned(built(kind), schedule="zb-h1")
    assert unlike(built(kind), cuts=["relu/0", "istft/0"]) == []


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize("kind", [Spectrum, LastStep, LastOfGRU])
def test_the_bytes_that_are_kept_are_those_of_a_real_run(kind):
    """Bug: an LSTM's result was counted twice where the next op saves it as it is."""
    found = trace_model(built(kind), inputs, square)
    counted = rehearse(found.graph, split(found, []), find_blocks(found.graph), ROWS).saved
    model, kept = built(kind), {}
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    batch = inputs(ROWS)
    own |= {t.untyped_storage().data_ptr() for t in batch.values()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = 0 if storage.data_ptr() in own else storage.nbytes()
        return tensor

    with observing(pack):
        loss = square(model(batch["x"]), batch)
    assert counted == (sum(kept.values()),) and loss.requires_grad
