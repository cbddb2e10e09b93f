"""A script's `torch.set_default_device`, which holds while its model is traced."""

import pytest
import torch

from tests.support.odd_models import Net, built, inputs, square
from tests.support.staged import trace_model


@pytest.mark.parametrize("kind", ["cuda", "meta"])
def test_a_default_device_is_nothing_in_a_graph(kind: str) -> None:
    """Bug: torch makes an empty tensor to tell the device, and graphs had constants of it."""
    model, alone = built(Net), trace_model(built(Net), inputs, square).graph
    batches = {rows: inputs(rows) for rows in (2, 3)}
    with torch.device(kind):
        found = trace_model(model, batches.__getitem__, square).graph
    assert not found.constants and found == alone
