"""What all steps of the story share: a 16-layer MLP, its data, and one line of report.

The model never changes. Only who computes which layer when does, and that is the whole story.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

LAYERS, WIDTH = 16, 64
ROWS, MICRO_BATCHES, STEPS = 64, 8, 50


def layers(first: int, last: int) -> nn.Sequential:
    """Layers [first, last), each with the weights it has in the whole model."""
    made: list[nn.Module] = []
    for number in range(first, last):
        torch.manual_seed(number)
        linear = nn.Linear(WIDTH, WIDTH)
        nn.init.orthogonal_(linear.weight)  # or 16 layers of tanh pass nothing back
        made.append(nn.Sequential(linear, nn.Tanh()))
    return nn.Sequential(*made)


def batch(step: int) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches (x, y) of a step, the same in every process; y is each row turned round."""
    torch.manual_seed(1000 + step)
    x = torch.rand(ROWS, WIDTH) - 0.5
    return list(zip(x.chunk(MICRO_BATCHES), x.flip(1).chunk(MICRO_BATCHES), strict=True))


def loss(found: Tensor, y: Tensor) -> Tensor:
    """A micro-batch's share of the batch's mean, so that gradients add up to the batch's."""
    return nn.functional.mse_loss(found, y) / MICRO_BATCHES


def optimizer(stage: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(stage.parameters(), lr=1e-3)


def report(losses: list[float], held: int) -> None:
    """Losses per step, which the last stage has, and the most micro-batches that a stage held."""
    told: list[tuple[list[float], int]] = [(losses, held)]
    if dist.is_initialized():
        told = told * dist.get_world_size()
        dist.all_gather_object(told, (losses, held))
    if not dist.is_initialized() or dist.get_rank() == 0:
        held_by = " ".join(str(count) for _, count in told)
        print(f"loss {told[-1][0][0]:.6f} -> {told[-1][0][-1]:.6f}, micro-batches held: {held_by}")
    if dist.is_initialized():
        dist.barrier()  # nobody leaves while another one still reads from it
        dist.destroy_process_group()  # ends gloo's threads, which else abort a process that exits
