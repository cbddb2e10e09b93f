"""A stage in shards trains as one process does; the stories are in `zero_worker`."""

import torch

from autopipe.ir.graph import StateSpec, TensorSpec
from autopipe.stages.block_owners import gathered_in
from tests.support.zero_told import Stories


class TestStories(Stories):
    file = "fully_sharded"


def test_what_is_read_in_one_dtype_is_gathered_in_it() -> None:
    """Masters in 16 bits; beside a batch norm's weights, which are read in fp32, in fp32."""
    low, wide = (TensorSpec((4,), dtype) for dtype in (torch.bfloat16, torch.float32))
    master = StateSpec(low, "parameter", trainable=True, master=torch.float32)
    frozen, norm = StateSpec(low, "parameter"), StateSpec(wide, "parameter", trainable=True)
    statistics = StateSpec(wide, "buffer")
    assert gathered_in([master, frozen, statistics]) == torch.bfloat16
    assert gathered_in([master, norm]) is None
    assert gathered_in([norm, norm]) == torch.float32
