"""What the words of `--recompute` mean, by the names of nodes."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopipe
from autopipe.errors import PlanError
from autopipe.ir.graph import Graph
from autopipe.planfile.again import is_exchange, repeated
from autopipe.planners.costs.asked_ops import GATHERS, check_meant, meant
from tests.support.inprocess import traced
from tests.support.pipes import ZOO

pytestmark = pytest.mark.usefixtures("traces_remembered")

WIDTH, TOKENS, HEADS, LAYERS = 16, 64, 2, 2


class Attention(nn.Module):
    """Causal, of torch's ops one by one, with a bias that is learned for each distance."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(TOKENS, TOKENS))
        later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        self.register_buffer("mask", later, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        scores = q @ k.mT / 3.0 + self.bias
        weights = scores.masked_fill(self.mask, -1e4).softmax(dim=-1)
        found = F.dropout(weights, 0.1, self.training) @ v
        return self.out(found.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention, and two experts that a router mixes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        share = self.router(x).softmax(dim=-1)
        made = torch.stack([F.gelu(expert(x)) for expert in self.experts], dim=-1)
        return x + (made * share.unsqueeze(-2)).sum(-1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def inputs(rows: int) -> tuple[Tensor]:
    return (torch.arange(rows * TOKENS * WIDTH).reshape(rows, TOKENS, WIDTH).sin(),)


def plan(recompute: str | list[str] | None, **asked: object) -> autopipe.Plan:
    shape = {"pp": 2, "micro_batches": 4, "schedule": "1f1b", "batch_size": 8, **asked}
    return autopipe.plan(Model, inputs, cluster="1x2xA100-80GB", recompute=recompute, **shape)  # type: ignore[arg-type]


def names(graph: Graph, positions: frozenset[int], block: str) -> set[str]:
    own = (graph.nodes[position].name for position in positions)
    return {name.removeprefix(f"{block}.") for name in own if name.startswith(f"{block}.")}


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_attention_is_from_its_first_product_to_its_second(compiled: bool) -> None:
    """The views between them cost nothing and are not told. Compiled stages run what only moves
    memory again anyway. The router's softmax, which no product follows, stays."""
    made = plan("attention", compile=compiled)
    first = {name for name in made.stages[0].recompute if name.startswith("layers.0.")}
    ops = {"matmul/0", "matmul/1", "div/0", "add/0", "masked_fill/0", "softmax/0", "dropout/0"}
    asked = {f"layers.0.attention/{op}" for op in ops}
    products = {"layers.0.attention/matmul/0", "layers.0.attention/dropout/0"}
    assert products <= first <= asked
    assert [str(own) for own in repeated(made, made.stages)] == [f"attention of {LAYERS} blocks"]
    usual = plan("none", compile=compiled)
    for mine, its in zip(made.stages, usual.stages, strict=True):
        assert mine.predicted.memory.activations < its.predicted.memory.activations
        assert mine.predicted.backward_seconds > its.predicted.backward_seconds
        assert mine.predicted.spent.recompute > 0


def test_an_attention_that_is_one_op() -> None:
    found, flow, blocks = traced("llama")
    own = names(found.graph, meant(flow, blocks, ["attention"]), blocks[0].path)
    assert own == {"self_attn/scaled_dot_product_attention/0"}


def test_norms_and_activations() -> None:
    found, flow, blocks = traced("gpt2")
    for word, op in (("norms", "layer_norm"), ("activations", "tanh")):
        every = meant(flow, blocks, [word])
        assert op in {found.graph.nodes[position].short for position in every}
        assert len(every) >= len(blocks)


def test_all_but_products_and_attention() -> None:
    """What PyTorch's selective checkpointing runs again where products and attention are saved."""
    found, flow, blocks = traced("llama")
    every = meant(flow, blocks, ["elementwise"])
    again = {found.graph.nodes[position].short for position in every}
    assert {"silu", "mul", "add"} <= again
    assert not again & {"linear", "scaled_dot_product_attention"}


def test_what_tensor_parallel_ranks_gather() -> None:
    """They keep their parts alone, and gather once more in backward. One rank gathers nothing."""
    usual, made = (
        plan(word, pp=1, tp=2, schedule=None, compile=False) for word in ("none", GATHERS)
    )
    mine, its = (one.stages[0].predicted for one in (made, usual))
    assert made.stages[0].recompute and all(map(is_exchange, made.stages[0].recompute))
    assert mine.memory.activations < its.memory.activations
    assert mine.spent.recompute > 0
    assert not any(stage.recompute for stage in plan(GATHERS, compile=False).stages)


@pytest.mark.long
def test_words_and_blocks_go_together() -> None:
    made = plan(["layers.1", "attention"], compile=False)
    again = [name for stage in made.stages for name in stage.recompute]
    assert "layers.1" in again and not any(name.startswith("layers.1.") for name in again)
    assert {name.split(".")[1] for name in again} == {*map(str, range(LAYERS))}


def test_a_node_is_meant_in_all_blocks_of_its_class() -> None:
    """By its name in one of them; a name that no block has is refused, but for what ranks exchange:
    that is in no graph of the model's own."""
    found, flow, blocks = traced("llama")
    third = f"{blocks[2].path}.mlp.up_proj/linear/0"
    every = meant(flow, blocks, [third])
    assert [found.graph.nodes[position].name for position in sorted(every)] == [
        f"{block.path}.mlp.up_proj/linear/0" for block in blocks
    ]
    check_meant(flow, blocks, [third, f"{third}>R"])
    with pytest.raises(PlanError, match="lm_head/linear/0 was asked for, and no block"):
        check_meant(flow, blocks, ["lm_head/linear/0"])


@pytest.mark.parametrize(
    ("name", "word", "said", "hint"),
    [
        ("unet", "attention", "'attention' was asked for, and the model has no blocks", "leave"),
        ("resnet", "attention", "attention was asked for, and no block", "all, none, norms, "),
        (
            "resnet",
            "norm",
            "the model has no block and no class of blocks 'norm'",
            "all, attention, ",
        ),
    ],
)
def test_what_a_model_does_not_have_is_refused(name: str, word: str, said: str, hint: str) -> None:
    """With the words that mean something in this model, or those that there are."""
    case = ZOO[name]
    with pytest.raises(PlanError) as refused:
        autopipe.plan(
            case.model, case.inputs, loss=case.loss, batch_size=8, recompute=word,
            cluster="1x2xA100-80GB",
        )  # fmt: skip
    assert refused.value.message.startswith(f"recompute: {said}")
    assert str(refused.value.hint).startswith(hint)


@pytest.mark.long
def test_ops_run_again_under_zero_3() -> None:
    assert plan("attention", pp=1, dp=2, zero=3).stages[0].ops_again
