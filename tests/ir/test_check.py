"""The checker of a graph: it finds nothing in what autopipe makes, and each way to break it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch

from autopipe.errors import AutopipeError
from autopipe.ir import check
from autopipe.ir.dataflow import analyse
from autopipe.ir.graph import BATCH, Graph, Input, Node, Ref, State, StateSpec, TensorSpec
from autopipe.ir.partition import Stage, broken, partition
from autopipe.util import self_checks
from tests.support.staged import traced

F32 = torch.float32


def node(name: str, op: str, *args: Any, shape: tuple[Any, ...], dtype: Any = F32) -> Node:
    return Node(name, op, args, {}, (TensorSpec(shape, dtype),), False, (), f"model.py:{len(name)}")


def graph() -> Graph:
    """x [b, 3] and [w] [5, 3]: linear, relu, and the sum of all."""
    return Graph(
        {"x": TensorSpec((BATCH, 3), F32)},
        {"w": StateSpec(TensorSpec((5, 3), F32), "parameter", True, ("tied",))},
        (
            node("a", "aten.linear.default", Input("x"), State("w"), shape=(BATCH, 5)),
            node("bb", "aten.relu.default", Ref("a"), shape=(BATCH, 5)),
            node("ccc", "aten.sum.default", Ref("bb"), shape=()),
        ),
        (Ref("ccc"),),
    )


def with_node(position: int, **changed: Any) -> Graph:
    nodes = list(graph().nodes)
    nodes[position] = replace(nodes[position], **changed)
    return replace(graph(), nodes=tuple(nodes))


def test_a_whole_graph_has_nothing_wrong() -> None:
    assert list(check.broken(graph())) == []


BROKEN: dict[str, tuple[Callable[[], Graph], str]] = {
    "a name twice": (lambda: with_node(1, name="a"), "two nodes have the name 'a' (model.py:2)"),
    "a later node": (
        lambda: with_node(0, args=(Ref("bb"), State("w"))),
        "node 'a' reads bb, which a later node makes (model.py:1)",
    ),
    "no node": (
        lambda: with_node(1, args=(Ref("gone"),)),
        "node 'bb' reads gone, which no node makes (model.py:2)",
    ),
    "no such output": (
        lambda: with_node(1, args=(Ref("a", 1),)),
        "node 'bb' reads a:1, and 'a' has 1 outputs (model.py:2)",
    ),
    "an output that is no tensor": (
        lambda: with_node(0, op="autopipe.x.default", outputs=(None,)),
        "node 'bb' reads a, which is no tensor (model.py:2)",
    ),
    "several outputs and not packed": (
        lambda: with_node(0, outputs=graph().nodes[0].outputs * 2),
        "node 'a' is not packed and has 2 outputs (model.py:1)",
    ),
    "no input": (
        lambda: replace(graph(), inputs={}),
        "node 'a' reads <x>, which is no input (model.py:1)",
    ),
    "no state": (
        lambda: replace(graph(), states={}),
        "node 'a' reads [w], which is no state (model.py:1)",
    ),
    "an alias that is a state": (
        lambda: replace(graph(), states={**graph().states, "tied": graph().states["w"]}),
        "'tied' is a state and an alias of the state 'w'",
    ),
    "a constant without a value": (
        lambda: replace(graph(), states={"w": replace(graph().states["w"], kind="constant")}),
        "the constant 'w' has no value",
    ),
    "a strange symbol": (
        lambda: with_node(2, outputs=(TensorSpec((sympy.Symbol("u0"),), F32),)),
        "node 'ccc' makes float32[u0], of a size in u0 (model.py:3)",
    ),
    "another shape": (
        lambda: with_node(0, outputs=(TensorSpec((BATCH, 4), F32),)),
        "node 'a' has output 0 as float32[b, 4], and aten.linear.default makes float32[4, 5] "
        "with 4 rows (model.py:1)",
    ),
    "another dtype": (
        lambda: with_node(2, outputs=(TensorSpec((), torch.float64),)),
        "node 'ccc' has output 0 as float64[], and aten.sum.default makes float32[] "
        "with 4 rows (model.py:3)",
    ),
    "a result from nowhere": (
        lambda: replace(graph(), outputs=(Ref("gone"),)),
        "the graph gives gone, which no node makes",
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_graph_is_refused_with_the_pass_the_node_and_the_line(rule: str) -> None:
    make, message = BROKEN[rule]
    with pytest.raises(AutopipeError) as refused:
        check.after("fusing", make())
    assert refused.value.message == f"after fusing the graph is broken: {message}"


def test_an_op_that_cannot_run_on_its_operands() -> None:
    wide = replace(graph(), inputs={"x": TensorSpec((BATCH, 7), F32)})
    with pytest.raises(AutopipeError, match=r"node 'a' cannot run on its operands: .*\(model"):
        check.after("fusing", wide)


@pytest.mark.parametrize("name", ["gpt2", "lstm", "unet", "t5"])
def test_graphs_of_the_zoo_are_whole(name: str) -> None:
    assert list(check.broken(traced(name).graph)) == []


def stages() -> tuple[Stage, ...]:
    return partition(analyse(graph()), [1])


STAGES: dict[str, tuple[int, dict[str, Any], str]] = {
    "a node that no stage runs": (1, {"nodes": (2,)}, "no stage runs node 'bb'"),
    "no such state": (0, {"states": ("w", "v")}, "stage 0 has 'v', which is no state"),
    "no such input": (0, {"inputs": ("x", "y")}, "stage 0 has 'y', which is no input"),
    "a receive without a send": (
        0,
        {"sends": ()},
        "stage 1 receives a, which stage 0 does not send it",
    ),
    "a send without a receive": (
        1,
        {"receives": ()},
        "stage 0 sends a, which stage 1 does not receive",
    ),
    "a value that is not at hand": (0, {"states": ()}, "stage 0 runs node 'a' without [w]"),
}


@pytest.mark.parametrize("rule", STAGES)
def test_broken_stages_are_found(rule: str) -> None:
    index, changed, message = STAGES[rule]
    found = list(stages())
    assert list(broken(graph(), found)) == []
    found[index] = replace(found[index], **changed)
    assert message in [wrong for wrong, _ in broken(graph(), found)]


def test_without_self_checks_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(self_checks.VARIABLE)
    wrong = BROKEN["a name twice"][0]()
    assert check.after("fusing", wrong) is wrong
