"""`autopipe` as it would be with one mistake in it; and those mistakes.

    python -m tests.support.mutated "a swapped argument" check FOLDER        a rank of a check

Each mutation changes one real function of tracing, lowering, sharding, joint graphs or the runtime,
as a slip of the keyboard might: no error follows, but another gradient somewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from autopipe.ir.graph import Graph, Node, Ref, State, swap
from autopipe.ir.torch_private import is_fake
from autopipe.joint import split_backward
from autopipe.runtime.comm import shared_memory_axis
from autopipe.runtime.parameters import gradient_sum, hold, zero1
from autopipe.runtime.script import clipping
from autopipe.runtime.step import engine, microbatches, stage
from autopipe.sharding import collectives
from autopipe.stages import precision, rng
from autopipe.tracing import tracer

SAMPLE = '''\
"""Whatever can be got wrong, in two layers: numbers [b, 6] -> logits [b, 6, 32]."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 16


class Damped(torch.autograd.Function):
    """x, whose gradient is multiplied by 1 / (1 + x^2)."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient / (1 + x.square())


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        z = self.dropout(self.down(F.gelu(self.up(y))))
        return z - 0.5 * x


class Watch(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer(), Layer(), Layer()])
        self.watch = Watch()
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[1].register_forward_hook(lambda module, args, output: output * 1.5)

    def forward(self, numbers):
        x = self.embedding(numbers)
        for layer in self.layers:
            x = layer(x)
        return self.head(CUSTOM(self.watch(x)))


def model():
    return Net()


def inputs(batch_size):
    numbers = torch.randint(32, (batch_size, 7))
    return {"numbers": numbers[:, :-1], "following": numbers[:, 1:]}


def loss(outputs, batch):
    return F.cross_entropy(outputs.flatten(0, 1), batch["following"].flatten())


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
'''


@dataclass(frozen=True)
class Setup:
    """What a check is asked for: degrees, other words, and how the sample is written."""

    pp: int = 2
    dp: int = 1
    tp: int = 1
    words: dict[str, Any] = field(default_factory=dict)

    @property
    def sample(self) -> str:
        """With dropout, and a backward of its own, where one process can draw and sharding can."""
        dropout, custom = ("0.0", "") if self.tp > 1 else ("0.1", "Damped.apply")
        return SAMPLE.replace("DROPOUT", dropout).replace("CUSTOM", custom)


SETUPS = {
    "pipeline": Setup(words={"schedule": "1f1b"}),
    "replicas": Setup(pp=1, dp=2),
    "ZeRO-1": Setup(pp=1, dp=2, words={"zero": 1}),
    "zero bubble": Setup(words={"schedule": "zb-h1"}),
    "tensor parallel": Setup(pp=1, tp=2),
    "bf16": Setup(words={"precision": "bf16", "schedule": "1f1b"}),
    "recomputed": Setup(words={"recompute": "all", "schedule": "1f1b"}),
}

Mutation = Callable[[], AbstractContextManager[Any]]
MUTATIONS: dict[str, tuple[str, Mutation]] = {}
"""By name: the setup in which it does harm, and what makes it."""


def mutation(setup: str, name: str) -> Callable[[Mutation], Mutation]:
    def enter(made: Mutation) -> Mutation:
        MUTATIONS[name] = setup, made
        return made

    return enter


# Tracing: the graph is another one than the model.


@contextmanager
def converted(change: Callable[[Graph], Graph]) -> Iterator[None]:
    convert = tracer.convert

    def changed(*args: Any, **kwargs: Any) -> Graph:
        return change(convert(*args, **kwargs))

    with patch.object(tracer, "convert", changed):
        yield


def node_of(graph: Graph, name: str) -> Node:
    return next(node for node in graph.nodes if node.name == name)


def with_node(graph: Graph, node: Node) -> Graph:
    return replace(graph, nodes=tuple(node if n.name == node.name else n for n in graph.nodes))


def without(graph: Graph, name: str) -> Graph:
    """What reads the node reads its first argument."""
    gone = node_of(graph, name)
    values = {Ref(name): gone.args[0]}
    nodes = (
        replace(
            n, args=swap(n.args, values), kwargs={k: swap(a, values) for k, a in n.kwargs.items()}
        )
        for n in graph.nodes
        if n is not gone
    )
    return replace(graph, nodes=tuple(nodes))


@mutation("pipeline", "a swapped argument")
def swapped() -> AbstractContextManager[None]:
    def change(graph: Graph) -> Graph:
        node = node_of(graph, "layers.2/sub/0")
        return with_node(graph, replace(node, args=(node.args[1], node.args[0])))

    return converted(change)


@mutation("pipeline", "a lost buffer write")
def unwritten() -> AbstractContextManager[None]:
    return converted(lambda graph: without(graph, "watch/add_/0"))


@mutation("pipeline", "a buffer whose writes are all lost")
def unmoved() -> AbstractContextManager[None]:
    """No stage has it then."""
    return converted(lambda graph: without(without(graph, "watch/add_/0"), "watch/mul_/0"))


@mutation("pipeline", "a wrong alias")
def aliased() -> AbstractContextManager[None]:
    def change(graph: Graph) -> Graph:
        one, other = State("layers.0.up.weight"), State("layers.1.up.weight")
        for number, values in ((0, {one: other}), (1, {other: one})):
            node = node_of(graph, f"layers.{number}.up/linear/0")
            graph = with_node(graph, replace(node, args=swap(node.args, values)))
        return graph

    return converted(change)


@mutation("pipeline", "a dropped hook")
def hookless() -> AbstractContextManager[None]:
    def change(graph: Graph) -> Graph:
        scaled = [n for n in graph.nodes if n.short == "mul" and 1.5 in n.args]
        return without(graph, scaled[0].name)

    return converted(change)


@mutation("pipeline", "a factor that is a little off")
def off() -> AbstractContextManager[None]:
    """0.505 for 0.5: gradients are off by a hundredth, which bf16 rounds as much."""

    def change(graph: Graph) -> Graph:
        node = node_of(graph, "layers.2/mul/0")
        return with_node(graph, replace(node, args=(node.args[0], 0.505)))

    return converted(change)


@mutation("pipeline", "a dropped dropout")
def sober() -> AbstractContextManager[None]:
    return converted(lambda graph: without(graph, "layers.3.dropout/dropout/0"))


@mutation("pipeline", "a gradient that is cut off")
def cut() -> AbstractContextManager[None]:
    return converted(
        lambda graph: with_node(graph, replace(node_of(graph, "layers.0/gelu/0"), grad=False))
    )


@mutation("pipeline", "attention that sees what follows")
def sighted() -> AbstractContextManager[None]:
    def change(graph: Graph) -> Graph:
        node = node_of(graph, "layers.0/scaled_dot_product_attention/0")
        args, kwargs = node.args[:3], {**node.kwargs, "is_causal": False}
        return with_node(graph, replace(node, args=args, kwargs=kwargs))

    return converted(change)


# Stages: the graph is right, and lowered wrongly.


@mutation("pipeline", "dropout that is the same in every micro-batch")
def repeated() -> AbstractContextManager[Any]:
    seed = rng.seed
    return patch.object(rng, "seed", lambda run, step, _, node: seed(run, step, 0, node))


@mutation("recomputed", "recomputed dropout that is drawn anew")
def drawn_anew() -> AbstractContextManager[Any]:
    return patch.object(rng.stream, "resumed", lambda key: rng.stream(1, 2, 3))


@mutation("bf16", "16-bit copies that are not renewed")
def stale() -> AbstractContextManager[Any]:
    copy, first = precision._copy, dict[int, Tensor]()

    def copied(parameter: Tensor, dtype: torch.dtype) -> Tensor:
        made = copy(parameter, dtype)
        if is_fake(parameter):
            return made
        old = first.setdefault(id(parameter), made.detach().clone())
        return made + (old - made).detach()

    return patch.object(precision, "_copy", copied)


# Sharding: conversions between placements.


@mutation("tensor parallel", "a dropped all-reduce")
def unreduced() -> AbstractContextManager[Any]:
    axis = shared_memory_axis.SharedAxis
    return patch.object(axis, "all_reduce", lambda self, x, op: x)


@mutation("tensor parallel", "a dropped all-reduce of a gradient")
def undual() -> AbstractContextManager[Any]:
    return patch.object(collectives, "_dual", lambda text: text)


@mutation("tensor parallel", "another rank's part of a weight")
def misdealt() -> AbstractContextManager[Any]:
    own_part = collectives.own_part

    def other(x: Tensor, lies: Any, ranks: int, rank: int) -> Tensor:
        first = lies.dim == 0 and x.ndim == 1
        return own_part(x, lies, ranks, ranks - 1 - rank if first else rank)

    return patch.object(collectives, "own_part", other)


# Joint graphs: backward in halves.


@mutation("zero bubble", "two gradients in each other's place")
def exchanged() -> AbstractContextManager[Any]:
    differentiate = split_backward.differentiate

    def changed(*args: Any, **kwargs: Any) -> Any:
        graph = differentiate(*args, **kwargs)
        of = dict(graph.of_parameters)
        ups = [name for name in of if name.endswith("up.weight")][:2]
        of.update(zip(ups, [of[name] for name in reversed(ups)], strict=True))
        return replace(graph, of_parameters=of)

    return patch.object(split_backward, "differentiate", changed)


@mutation("zero bubble", "a gradient that is not added up")
def overwritten() -> AbstractContextManager[Any]:
    def accumulate(parameter: Tensor, gradient: Tensor, *, own: bool = False) -> None:
        parameter.grad = gradient.to(parameter.dtype)

    return patch.object(engine, "accumulate", accumulate)


# The runtime: what ranks exchange, and when.


@mutation("replicas", "replicas that do not sum gradients")
def unsummed() -> AbstractContextManager[Any]:
    return patch.object(gradient_sum.GradientSum, "_begin", lambda self, queue, stop: None)


@mutation("pipeline", "tied gradients that are not summed")
def untied() -> AbstractContextManager[Any]:
    owners = hold._owners

    def alone(*args: Any) -> dict[str, tuple[int, ...]]:
        return {name: ranks[:1] for name, ranks in owners(*args).items()}

    return patch.object(hold, "_owners", alone)


@mutation("pipeline", "a norm that counts tied gradients twice")
def counted_twice() -> AbstractContextManager[Any]:
    def all_of_them(self: Any) -> dict[str, Tensor]:
        return {n: p.grad for n, p in self.shards().items() if p.grad is not None}

    return patch.object(gradient_sum.GradientSum, "owned_gradients", all_of_them)


@mutation("pipeline", "gradients that are not clipped")
def unclipped() -> AbstractContextManager[Any]:
    return patch.object(clipping, "multiply", lambda parameters, factor: None)


@mutation("pipeline", "a loss that is seeded as if it were the only one")
def alone() -> AbstractContextManager[Any]:
    return patch.object(stage.StageRun, "_seed", lambda self, loss, step: torch.ones_like(loss))


@mutation("pipeline", "targets of another micro-batch")
def out_of_turn() -> AbstractContextManager[Any]:
    inputs = microbatches.Microbatches.inputs

    def others(self: Any, held: Any, k: int, device: torch.device) -> list[Tensor]:
        return inputs(self, held, (k + held.index) % self.count, device)

    return patch.object(microbatches.Microbatches, "inputs", others)


@mutation("ZeRO-1", "updated rows that are not gathered")
def ungathered() -> AbstractContextManager[Any]:
    return patch.object(zero1.OptimizerShards, "gather", lambda self: None)


if __name__ == "__main__":
    from autopipe import cli

    _, name, *argv = sys.argv
    sys.argv = ["autopipe", *argv]
    with MUTATIONS[name][1]():
        cli.main()
