"""The ops that a word of `--recompute` means: selective recomputation, as people ask for it.

    attention      from its first product to its second: scores, mask, softmax, dropout, sums
                   (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
                   Models", 2022, section 5; Megatron-LM's `--recompute-granularity selective`)
    norms          norms, and all that modules of such a name do themselves
    activations    GELU, SiLU and their like
    elementwise    all but products, attention in one kernel and what ranks exchange, which
                   PyTorch's selective checkpointing saves (`torch.utils.checkpoint`,
                   create_selective_checkpoint_contexts)
    gathers        what tensor-parallel ranks gather, of which each then keeps its part: the input
                   of a matmul behind sequence parallelism (Korthikanti et al., section 4.2.2;
                   Megatron-LM does so always)

    q ──┐
    k ──┴─ matmul ── scale ── mask ── softmax ── dropout ──┬── matmul ──
    v ─────────────────────────────────────────────────────┘
           |---------------------- attention -----------------------|

A node's own name means that node, and its counterparts in all other blocks of its block's class.
Ops run again only within their block, so ops outside of blocks are never meant.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from autopipe.errors import PlanError
from autopipe.ir.blocks import Block, owners
from autopipe.ir.dataflow import Dataflow
from autopipe.ir.graph import Node, Ref, State
from autopipe.planfile.again import (
    BETWEEN,
    PRODUCTS,
    SOFTMAX,
    block_of,
    is_activation,
    is_exchange,
    is_norm,
    within,
)
from autopipe.planfile.placements import Placement
from autopipe.sharding.collectives import CONVERT
from autopipe.stages.recompute import check_blocks

GATHERS = "gathers"
"""The word for ops that only the graph of a tensor-parallel rank has."""


def meant(flow: Dataflow, blocks: Sequence[Block], words: Collection[str]) -> frozenset[int]:
    """The positions of the nodes in blocks that words of `WORDS`, or names of nodes, mean."""
    inside = owners(blocks, 0, len(flow.graph.nodes))
    positions = {p for word in words if word in WORDS for p in WORDS[word](flow, inside)}
    positions.update(_of_these_names(flow, inside, {word for word in words if word not in WORDS}))
    return frozenset(positions & inside.keys())


def is_for_ops(word: str) -> bool:
    """Whether a word is one of `WORDS`, or a node's name, which has a slash."""
    return word in WORDS or "/" in word


def words_of(recompute: Collection[str] | None, blocks: Sequence[Block]) -> frozenset[str]:
    """The words for ops among the names of a recompute option."""
    return frozenset(recompute or ()).difference(block.path for block in blocks)


def within_asked(
    flow: Dataflow, blocks: Sequence[Block], words: Collection[str], numbers: Sequence[int]
) -> list[int]:
    """For each node the number of its block if it may run again without the whole block, else -1.

    Args:
        words: only ops that these mean may run again; empty: all may.
        numbers: for each node the number of its block, or -1.
    """
    asked = meant(flow, blocks, words)
    return [n if not words or position in asked else -1 for position, n in enumerate(numbers)]


def check_meant(flow: Dataflow, blocks: Sequence[Block], words: Iterable[str]) -> None:
    """Refuse a word that means nothing in this model.

    "gathers" is not checked, since the model's own graph has no exchanges.

    Raises:
        PlanError: names the word; or the model has no blocks at all.
    """
    for word in words:
        check_blocks(blocks, word)
        if not is_exchange(word) and word != GATHERS and not meant(flow, blocks, [word]):
            usable = [known for known in WORDS if meant(flow, blocks, [known])]
            raise PlanError(
                f"recompute: {word} was asked for, and no block of the model has any",
                hint=f"{', '.join(['all', 'none', *usable])}, or the path of a block; without "
                "--recompute the planner chooses",
            )


def _of_these_names(
    flow: Dataflow, inside: Mapping[int, Block], names: Collection[str]
) -> Iterator[int]:
    """The nodes of these names, and those in their places in blocks of the same class."""
    kinds = {block.module: block.kind for block in inside.values()}
    homes = {name: block_of(name, kinds) for name in names}
    alike = {(kinds[path], within(path, name)) for name, path in homes.items() if path in kinds}
    for position, block in inside.items():
        name = flow.graph.nodes[position].name
        if name in names or (block.kind, within(block.module, name)) in alike:
            yield position


def _attention(flow: Dataflow, inside: Mapping[int, Block]) -> Iterator[int]:
    for position in inside:
        node = flow.graph.nodes[position]
        if node.short == "scaled_dot_product_attention":
            yield position
        elif node.short in SOFTMAX:
            block = inside[position]
            ways = _read(flow), _reading(flow)
            before, after = (_to_products(flow, block, position, way) for way in ways)
            # A router's softmax follows the product with a weight, and leads to none.
            if before and after:
                yield from before | after


def _elementwise(flow: Dataflow, inside: Mapping[int, Block]) -> Iterator[int]:
    for position in inside:
        node = flow.graph.nodes[position]
        kept = node.short in PRODUCTS | BETWEEN or node.short == "scaled_dot_product_attention"
        if not kept and not is_exchange(node.name):
            yield position


def _gathers(flow: Dataflow, inside: Mapping[int, Block]) -> Iterator[int]:
    for position in inside:
        node = flow.graph.nodes[position]
        if node.op == CONVERT and not isinstance(node.args[0], State):
            _, _, source, target, _ = node.args
            if _sharded(source) and not _sharded(target):
                yield position


def _sharded(placement: object) -> bool:
    return isinstance(placement, Placement) and placement.sharded


_Way = Callable[[int], Iterable[int]]


def _read(flow: Dataflow) -> _Way:
    """From a node to those that it reads."""

    def before(position: int) -> Iterable[int]:
        values = flow.graph.nodes[position].values()
        return [flow.position(value) for value in values if isinstance(value, Ref)]

    return before


def _reading(flow: Dataflow) -> _Way:
    """From a node to those that read it."""

    def after(position: int) -> Iterable[int]:
        node = flow.graph.nodes[position]
        made = (Ref(node.name, number) for number in range(len(node.outputs)))
        return [user for ref in made for user in flow.users.get(ref, ())]

    return after


def _to_products(flow: Dataflow, block: Block, start: int, way: _Way) -> set[int]:
    """The nodes of a block from `start` to the next products; none where there is no product."""
    found, pending, products = {start}, [start], 0
    while pending:
        for position in way(pending.pop()):
            if position in found or not block.first <= position < block.stop:
                continue
            node = flow.graph.nodes[position]
            if _multiplies_activations(node):
                found.add(position)
                products += 1
            elif node.short not in PRODUCTS | BETWEEN:
                found.add(position)
                pending.append(position)
    return found if products else set()


def _multiplies_activations(node: Node) -> bool:
    return node.short in BETWEEN and not any(isinstance(v, State) for v in node.values())


def _named(is_one: Callable[[str], bool]) -> Callable[[Dataflow, Mapping[int, Block]], list[int]]:
    def of(flow: Dataflow, inside: Mapping[int, Block]) -> list[int]:
        return [position for position in inside if is_one(flow.graph.nodes[position].name)]

    return of


WORDS: Mapping[str, Callable[[Dataflow, Mapping[int, Block]], Iterable[int]]] = {
    "attention": _attention,
    "norms": _named(is_norm),
    "activations": _named(is_activation),
    "elementwise": _elementwise,
    GATHERS: _gathers,
}
"""Of each word a function that finds its nodes."""
