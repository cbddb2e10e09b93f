"""The description of a model file for `autopipe plan --help` and `autopipe init`."""

CONTRACT = """\
A model file is plain Python; `autopipe init model.py` writes one. Functions are found by name:

\b
model() -> nn.Module                            required: the model, built
inputs(batch_size) -> dict or tuple             required: an example batch of batch_size rows
loss(outputs, batch) -> Tensor or SumCount      default: the output itself, or its .loss
batches(batch_size, shard=0, num_shards=1)      default: inputs(batch_size), again and again
batches = DataLoader(...)                       or: whole batches; each replica takes its rows
optimizer(parameters) -> Optimizer              default: AdamW; or (named_parameters)
scheduler(optimizer) -> LRScheduler             default: the learning rate stays
batch_size = 32                                 default: 8 a device
max_grad_norm = 1.0                             default: gradients are not clipped
loss_over = "batch" or "micro-batch"            default: "rows", a mean over the batch's rows
lengths = (128, 256, 512)                       default: tokens of a row as inputs gives, or fewer

In printed shapes b is the rows of one micro-batch: a step's batch is divided over dp replicas, and
on each into equal micro-batches. window: micro-batches that a stage lets the one before it send
ahead of need. depth: micro-batches in flight beyond those of 1f1b.
"""

TEMPLATE = '''\
"""A model file: what `autopipe plan` splits and `autopipe run` trains. Plain PyTorch.

autopipe plan {name}
autopipe run plan.json --local 2 --steps 5
"""

import torch
from torch import nn

# Rows of a whole batch, over all processes. Default: 8 a device.
batch_size = 64


class Block(nn.Module):
    """A residual block; put your own modules here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """Reads numbers 0 to 63 in a row, and says of each which comes next."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 64)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(numbers)))


def model() -> nn.Module:
    """Required: builds the model. While planning its weights take no memory."""
    return Net()


def inputs(batch_size: int) -> dict[str, torch.Tensor]:
    """Required: an example batch of so many rows; what `forward` does not take is the loss's.

    A dict is passed as `model(**batch)`, a tuple as `model(*batch)`.
    """
    numbers = torch.randint(64, (batch_size, 129))
    return {{"numbers": numbers[:, :-1], "following": numbers[:, 1:]}}


def loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a step makes smaller: a scalar, the mean over the rows of the batch.

    Default: the output itself if it is a scalar, or its `.loss`.
    """
    return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["following"].flatten())


def batches(batch_size: int, shard: int = 0, num_shards: int = 1):
    """What it trains on: of each batch the rows of one shard; each replica asks for its own.

    Default: `inputs(batch_size)`, again and again.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):  # counts upwards from anywhere: easy to learn
        start = torch.randint(64, (batch_size, 1), generator=generator)
        numbers = (start + torch.arange(129)) % 64
        rows = numbers[shard * batch_size // num_shards : (shard + 1) * batch_size // num_shards]
        yield {{"numbers": rows[:, :-1], "following": rows[:, 1:]}}


def optimizer(parameters) -> torch.optim.Optimizer:
    """What makes the steps. Default: torch.optim.AdamW(parameters)."""
    return torch.optim.AdamW(parameters, lr=1e-3)
'''


def template(name: str) -> str:
    """The text of a complete model file that runs unchanged.

    Args:
        name: the file's name.
    """
    return TEMPLATE.format(name=name)
