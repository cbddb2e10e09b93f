"""torch's own way: `torch.distributed.pipelining.pipeline` over two stages, beside autopipe's.

It is told where to split, before the middle of the longest list of modules, and gets a module whose
output is the loss. Its two stages run one after the other in this process, so that only what it
traced and split is compared.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn
from torch.distributed.pipelining import SplitPoint, pipeline

from benchmarks.zoo.one_process import Result
from benchmarks.zoo.subject import Batch, Model


class WithLoss(nn.Module):
    """A model and its loss; takes the batch by its names, all of them tensors."""

    def __init__(self, model: nn.Module, given: Model) -> None:
        super().__init__()
        self.model = model
        self.given = given

    def forward(self, **batch: Any) -> Tensor:
        """The loss of a micro-batch."""
        return self.given.eager(self.model, batch)


def run(given: Model, micro_batches: list[Batch]) -> Result:
    """Losses and gradients of one step.

    Raises:
        Exception: what torch raises where it cannot trace, split or run the model.
    """
    model = given.build()
    names = {p: name for name, p in model.named_parameters()}
    first = {n: names[p] for n, p in model.named_parameters(remove_duplicate=False)}
    whole = WithLoss(model, given)
    place = middle(whole)
    piped = pipeline(whole, (), dict(micro_batches[0]), split_spec={place: SplitPoint.BEGINNING})
    losses = []
    for batch in micro_batches:
        loss = fx.Interpreter(piped.split_gm).run(*batch.values())
        loss = loss[0] if isinstance(loss, tuple | list) else loss
        (loss / len(micro_batches)).backward()
        losses.append(loss.detach())
    gradients: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    for _, stage in piped.split_gm.named_children():
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            own = name.removeprefix("model.")
            if parameter.grad is not None:  # of a tied one that is two now, the first's
                gradients.setdefault(first.get(own, own), parameter.grad)
        buffers |= {name.removeprefix("model."): tensor for name, tensor in stage.named_buffers()}
    return Result(losses, gradients, buffers)


def middle(module: nn.Module) -> str:
    """The path of the middle one of the longest list of modules, or else of all that are called.

    Raises:
        ValueError: there are not two.
    """
    lists = {
        name: list(inner)
        for name, inner in module.named_modules()
        if isinstance(inner, nn.ModuleList | nn.Sequential) and len(inner) > 1
    }
    name = max(lists, key=lambda name: (len(lists[name]), -len(name))) if lists else "model"
    keys = list(dict(module.get_submodule(name).named_children()))
    if len(keys) < 2:
        raise ValueError("there is no second module to begin a stage with")
    return f"{name}.{keys[len(keys) // 2]}"
