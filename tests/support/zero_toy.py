"""A toy of two stages, trained with sums of gradients beside one process.

Both stages stand on every rank, so that pipelines need no transfers here:

    stage 0   h = tanh(x tied^T scale + bias)        tied stands in both stages
    stage 1   loss of h wide^T and h tied            wide is float32, the rest float64
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe.runtime.parameters.gradient_sum import Gradients, total_norm

Parameters = dict[str, nn.Parameter]

USES = {0: ("tied", "bias", "scale"), 1: ("tied", "wide")}


def toy() -> Parameters:
    """The same values at every call."""
    torch.manual_seed(0)
    double = torch.float64
    return {
        "tied": nn.Parameter(torch.randn(7, 6, dtype=double)),
        "bias": nn.Parameter(torch.randn(7, dtype=double)),
        "scale": nn.Parameter(torch.tensor(0.5, dtype=double)),
        "frozen": nn.Parameter(torch.randn(4, dtype=double), requires_grad=False),
        "unused": nn.Parameter(torch.randn(3, 2, dtype=double)),
        "wide": nn.Parameter(torch.randn(5, 7)),
    }


def stage_0(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ p["tied"].T * p["scale"] + p["bias"])


def stage_1(p: Mapping[str, Tensor], h: Tensor) -> Tensor:
    return (h.float() @ p["wide"].T).square().mean().double() + (h @ p["tied"]).tanh().mean()


def batch(number: int, micro_batches: int) -> Sequence[Tensor]:
    """The micro-batches of all ranks."""
    drawn = torch.Generator().manual_seed(number)
    whole = torch.randn(2 * micro_batches, 6, dtype=torch.float64, generator=drawn)
    return whole.chunk(micro_batches)


def whole_step(p: Parameters, number: int, micro_batches: int) -> None:
    """One process, all micro-batches."""
    for parameter in p.values():
        parameter.grad = None
    for x in batch(number, micro_batches):
        (stage_1(p, stage_0(p, x)) / micro_batches).backward()


def step(p: Parameters, sums: Gradients, number: int, micro_batches: int) -> None:
    """This rank's micro-batches, all forwards first, as a program with both stages runs them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for parameter in sums.shards().values():
        parameter.grad = None
    sums.gather()
    total = world * micro_batches
    mine = batch(number, total)[rank * micro_batches :][:micro_batches]
    made = [stage_0(p, x) for x in mine]
    cut = [h.detach().requires_grad_() for h in made]
    losses = [stage_1(p, h) / total for h in cut]
    for k in range(micro_batches):
        if k == micro_batches - 1:
            sums.arm(1)
        sums.begin(1)
        losses[k].backward()
    for k in range(micro_batches):
        if k == micro_batches - 1:
            sums.arm(0)
        sums.begin(0)
        made[k].backward(cut[k].grad)
    sums.finish()


def everywhere(p: Parameters) -> dict[str, dist.ProcessGroup]:
    """Each parameter stands on all ranks."""
    group = dist.new_group(list(range(dist.get_world_size())))
    assert group is not None
    return dict.fromkeys(p, group)


def close(found: Tensor, expected: Tensor, said: str, to: float = 1e-6) -> None:
    """Equal to a part of the largest entry."""
    if found.numel() or expected.numel():
        off = float((found.detach() - expected.detach()).abs().max())
        most = to * float(expected.detach().abs().max())
        assert off <= most, f"{said}: off by {off:.2e}, allowed {most:.2e}"


OPTIMIZERS: list[Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
]


def stays_with_one_process(
    make: Callable[[Parameters, Mapping[str, dist.ProcessGroup]], Gradients],
) -> None:
    """Three steps: what the optimizer makes of the parameters, and the norm of the gradients."""
    for micro_batches in (1, 4):
        for optimizer in OPTIMIZERS:
            p, reference = toy(), toy()
            sums = make(p, everywhere(p))
            ours = optimizer(list(sums.shards().values()))
            theirs = optimizer(list(reference.values()))
            for number in range(3):
                step(p, sums, number, micro_batches)
                whole_step(reference, number, dist.get_world_size() * micro_batches)
                found = [q.grad for q in reference.values() if q.grad is not None]
                owned = list(sums.owned_gradients().values())
                norm = total_norm(owned, dist.group.WORLD, torch.device("cpu"))
                close(norm, torch.nn.utils.get_total_norm(found), f"norm {number}")
                ours.step()
                theirs.step()
            sums.gather()
            for name, parameter in p.items():
                close(parameter, reference[name], name)
            assert sums.shards()["unused"].grad is None
