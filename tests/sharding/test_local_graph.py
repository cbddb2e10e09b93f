"""The graph of one rank computes what the whole does, with the same names."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import analyse
from autopipe.ir.graph import Ref, shape_at
from autopipe.ir.partition import partition
from autopipe.planfile.placements import I, P, S, Sharding
from autopipe.sharding.collectives import CONVERT
from autopipe.sharding.local_graph import shard_graph, shardable
from autopipe.sharding.strategies import possible_in
from autopipe.stages.lower import lower
from autopipe.stages.rng import stream
from autopipe.tracing.traced import Trace
from tests.support import simulated
from tests.support.long import chosen
from tests.support.simulated import (
    Meeting,
    axis,
    dealt,
    everywhere,
    one_process,
    shard,
    states_of,
    step,
)
from tests.support.staged import micro_batches, trace_model, traced
from tests.support.zoo import ZOO, integers


class Words(nn.Module):
    """tokens [b, 12] of 127 words -> their logits; word 3 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(127, 16, padding_idx=3)
        self.head = nn.Linear(16, 127)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).tanh())


def words(rows: int) -> dict[str, Tensor]:
    tokens = integers(rows, 12, below=127)
    tokens[:, 2] = 3
    labels = integers(rows, 12, below=127, seed=5)
    labels[:, 4] = 7
    return {"tokens": tokens, "labels": labels}


def told_apart(logits: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=7)


def agrees(trace: Trace, model: nn.Module, batch: Any, sharding: Sharding, rows: int) -> None:
    (leaves,) = micro_batches(trace, batch, 1)
    loss, gradients = one_process(trace, model, leaves, rows)
    losses, found = step(trace, model, leaves, rows, sharding)
    for each in losses:
        torch.testing.assert_close(each, loss)
    off, name = simulated.worst(found, gradients)
    assert off < 1e-5, name


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_vocabulary_of_127(ranks: int) -> None:
    """Embedding and loss over unequal parts, a word without a gradient and a label that counts not.

    The state of each is given: what is cheapest is no matter here.
    """
    torch.manual_seed(0)
    model = Words()
    trace = trace_model(model, words, told_apart)
    flow = analyse(trace.graph)
    found = shard(flow, (), axis(ranks), 2)
    assert found.states["head.weight"] == S(0)
    agrees(trace, model, words(2), found, 2)


@pytest.mark.parametrize(("where", "word"), [("tokens", 127), ("tokens", -1), ("labels", -1)])
def test_a_word_that_no_rank_has_is_refused_as_torch_does(where: str, word: int) -> None:
    """Bug: each rank took it for another one's: its embedding was zeros, its loss had no logit."""
    model, batch = Words(), words(2)
    trace = trace_model(model, words, told_apart)
    found = shard(analyse(trace.graph), (), axis(2), 2)
    if where == "tokens":
        lookup = {"embedding/embedding/0": ((S(0), I), P)}
        found = Sharding(2, {"embedding.weight": S(0)}, lookup)
    assert S(0) in found.states.values()
    batch[where][1, 3] = word
    (leaves,) = micro_batches(trace, batch, 1)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds|out of range"):
        one_process(trace, model, leaves, 2)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds|out of range"):
        step(trace, model, leaves, 2, found)


class TwoHeads(nn.Module):
    """[b, 6, 8] -> [b, 6, 8]; squeeze() is meant for the last dim, and a rank has one head."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys = nn.Linear(8, 16), nn.Linear(8, 16)
        self.out = nn.Linear(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys = (
            part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (self.queries, self.keys)
        )
        scores = (queries * keys).sum(-1, keepdim=True).squeeze()
        return self.out(scores.tanh().transpose(1, 2))


def test_a_dim_of_which_a_rank_has_one_is_not_squeezed() -> None:
    """Bug: the heads' dim was gone on each rank; IndexError, where later ops named dims."""
    torch.manual_seed(0)
    model = TwoHeads()
    trace = trace_model(
        model, lambda rows: {"x": torch.randn(rows, 6, 8)}, lambda made, batch: made.square().mean()
    )
    found = shard(analyse(trace.graph), (), axis(2), 2)
    assert found.states["queries.weight"].sharded
    agrees(trace, model, {"x": torch.randn(2, 6, 8)}, found, 2)


@pytest.mark.parametrize("name", chosen(("llama", "gpt", "gpt2", "t5"), now=("llama",)))
def test_models_of_the_zoo(name: str) -> None:
    """With four ranks llama has fewer heads of keys and values, two, than there are ranks."""
    trace, case = traced(name), ZOO[name]
    sharding = shard(analyse(trace.graph), find_blocks(trace.graph), axis(4), 2)
    assert any(lies.sharded for lies in sharding.states.values())
    agrees(trace, case.model(), case.inputs(2), sharding, 2)


def test_other_rows_than_it_was_planned_for() -> None:
    trace, case = traced("gpt2"), ZOO["gpt2"]
    sharding = shard(analyse(trace.graph), find_blocks(trace.graph), axis(2), 2)
    for rows in (1, 3):
        agrees(trace, case.model(), case.inputs(rows), sharding, rows)


class Positions(nn.Module):
    """tokens [b, s] -> their logits; of 24 positions the first s are read."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.positions = nn.Parameter(torch.randn(24, 16))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head((self.embedding(tokens) + self.positions[: tokens.shape[1]]).tanh())


@pytest.mark.parametrize("length", [12, 13])
def test_shorter_rows_than_it_was_planned_for(length: int) -> None:
    """Bug: each rank took the first 6 of its own 12 positions, and the loss was another one."""
    torch.manual_seed(0)
    model = Positions()

    def tokens(rows: int, length: int = 24) -> dict[str, Tensor]:
        return {"tokens": integers(rows, length, below=32)}

    def loss(made: Tensor, batch: Any) -> Tensor:
        return made.square().mean()

    long, short = (
        trace_model(model, lambda rows, n=n: tokens(rows, n), loss) for n in (24, length)
    )
    by_tokens = Sharding(
        2,
        {"positions": S(0)},
        {"slice/0": ((S(0),), S(0)), "add/0": ((S(1), S(0)), S(1)), "tanh/0": ((S(1),), S(1))},
    )
    agrees(long, model, tokens(2), by_tokens, 2)
    found = possible_in(shardable(short.graph), by_tokens)
    assert [*found.nodes] == ["add/0", "tanh/0"]
    agrees(short, model, tokens(2, length), found, 2)


def test_nodes_keep_their_names_and_order() -> None:
    graph = traced("llama").graph
    sharding = shard(analyse(graph), find_blocks(graph), axis(2), 2)
    local = [shard_graph(analyse(graph), sharding, rank) for rank in range(2)]
    names = [[node.name for node in each.nodes] for each in local]
    assert names[0] == names[1]
    own = [name for name in names[0] if name in graph.index]
    kept = [node.name for node in graph.nodes if node.name in set(own)]
    assert own == kept
    # k and v of each layer, and up, are in one node with q and with gate (`columns`).
    gone = [node.name for node in graph.nodes if node.name not in set(own)]
    assert {name.split("/")[0].rpartition(".")[2] for name in gone} == {
        "k_proj",
        "v_proj",
        "up_proj",
    }
    assert list(local[0].states) == list(graph.states)


def test_a_rank_has_a_part_of_what_is_sharded() -> None:
    graph = traced("gpt2").graph
    sharding = shard(analyse(graph), find_blocks(graph), axis(2), 2)
    local = shard_graph(analyse(graph), sharding, 1)
    name = "transformer.h.1.attn.c_attn.weight"
    assert shape_at(graph.states[name].spec, 2) == (32, 96)
    assert shape_at(local.states[name].spec, 2) == (32, 48)


def test_what_a_sharding_does_not_know_is_replicated() -> None:
    """A sharding of nothing leaves the graph; one without a node computes that one as a whole."""
    trace, case = traced("gpt2"), ZOO["gpt2"]
    flow = analyse(trace.graph)
    assert shard_graph(flow, Sharding(2, {}, {}), 0).nodes == trace.graph.nodes
    sharding = shard(flow, find_blocks(trace.graph), axis(2), 2)
    known = list(sharding.nodes)
    for lost in (known[len(known) // 3], known[len(known) // 2]):
        rest = {name: lies for name, lies in sharding.nodes.items() if name != lost}
        fewer = Sharding(2, sharding.states, rest)
        agrees(trace, case.model(), case.inputs(2), fewer, 2)
        many = [shard_graph(flow, s, 0).nodes for s in (sharding, fewer)]
        count = [sum(node.op == CONVERT for node in nodes) for nodes in many]
        assert count[1] >= count[0]


def test_dropout_leaves_replicated_parameters_equal() -> None:
    """Where all have all of a tensor they drop the same; bit for bit over three steps."""
    trace, case = traced("dropout"), ZOO["dropout"]
    flow = analyse(trace.graph)
    sharding = shard(flow, find_blocks(trace.graph), axis(2), 2)
    whole = states_of(trace, case.model())
    (leaves,) = micro_batches(trace, case.inputs(2), 1)
    meeting = Meeting(2)

    def run(rank: int) -> tuple[list[Tensor], dict[str, Tensor]]:
        own = dealt(whole, sharding, rank)
        graph = shard_graph(flow, sharding, rank)
        (stage,) = partition(analyse(graph), [])
        module = lower(graph, stage, find_blocks(graph), own, trace.reads, 2, last=True).module
        losses = []
        for number in range(3):
            with stream(0, number, 0):
                (loss,) = module(*(leaves[path] for path in stage.inputs))
                loss.backward()
            losses.append(loss.detach())
            for name, tensor in own.items():
                if tensor.grad is None:
                    continue
                lies = sharding.states.get(name)
                if lies is not None and not lies.sharded:  # parts of a sum, once a step
                    tensor.grad = meeting.all_reduce(tensor.grad, "sum")
                with torch.no_grad():
                    tensor -= 0.1 * tensor.grad
                tensor.grad = None
        return losses, own

    (losses, first), (others, second) = everywhere(meeting, run)
    assert torch.equal(torch.stack(losses), torch.stack(others))
    assert len({loss.item() for loss in losses}) == 3
    for name, tensor in first.items():
        lies = sharding.states.get(name)
        if lies is None or not lies.sharded:
            assert torch.equal(tensor, second[name]), name


def test_a_result_that_lies_in_parts_is_gathered_by_a_node_of_the_graph() -> None:
    """What a loss over the batch reads is a result of the graph, and may be a layer's parts.

    The head's 127 words are dealt out, and nothing in the graph reads its logits.
    """
    torch.manual_seed(0)
    trace = trace_model(Words(), words, told_apart)
    (head,) = (node for node in trace.graph.nodes if node.name == "head/linear/0")
    stop = trace.graph.index[head.name] + 1
    graph = replace(trace.graph, nodes=trace.graph.nodes[:stop], outputs=(Ref(head.name),))
    states = {"head.weight": S(0), "head.bias": S(0)}
    sharding = Sharding(2, states, {head.name: ((I, S(0), S(0)), S(2))})
    for rank, part in enumerate((64, 63)):
        local = shard_graph(analyse(graph), sharding, rank)
        gathering = local.nodes[-1]
        assert gathering.op == CONVERT and gathering.name == "head/linear/0>I"
        assert local.outputs == (Ref(gathering.name),)
        assert shape_at(local.spec(Ref(head.name)), 2) == (2, 12, part)
        assert shape_at(local.spec(local.outputs[0]), 2) == (2, 12, 127)
