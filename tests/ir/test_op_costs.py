"""The table of operations beside torch's own counter, and seconds worked by hand."""

from dataclasses import replace

import pytest
import sympy
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autopipe.cluster.cluster import Device, Kernel, Pace
from autopipe.cluster.measured import KERNELS, LIKE
from autopipe.errors import AutopipeError
from autopipe.ir import op_costs
from autopipe.ir.dataflow import gradient_values
from autopipe.ir.graph import BATCH, Ref, State, at_batch
from autopipe.ir.op_costs import RULES, costs, rule
from autopipe.ir.op_seconds import roofs, seconds
from autopipe.rewriting.loss_in_parts import in_parts
from autopipe.tracing.capture.low_precision import SixteenBits
from tests.support.inprocess import traced
from tests.support.staged import trace_model
from tests.support.zoo import ZOO

ROWS = 3
ATTENTION = "scaled_dot_product_attention"
"""Left out: of a causal one torch's counter takes the half that is masked too, or, on a CPU before
torch 2.15, nothing."""


def counted(graph, *, without=(ATTENTION,)):
    """(forward, backward) operations of the nodes that have a rule."""
    total = [0, 0]
    for node, found in zip(graph.nodes, costs(graph), strict=True):
        short = node.short
        if short in RULES and short not in without:
            total[0] += at_batch(sympy.sympify(found.forward_flops), ROWS)
            total[1] += at_batch(sympy.sympify(found.backward_flops), ROWS)
    return tuple(total)


def by_torch(run):
    """(forward, backward) operations that FlopCounterMode sees, but for those of attention."""

    def total(mode):
        return sum(
            n
            for op, n in mode.get_flop_counts()["Global"].items()
            if "scaled_dot_product" not in str(op)
        )

    with FlopCounterMode(display=False) as forward:
        loss = run()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return total(forward), total(backward)


@pytest.mark.parametrize("name", ["gpt", "gpt2", "llama", "whisper", "unet", "resnet", "frozen"])
def test_operations_are_those_torch_counts(name):
    case = ZOO[name]
    model = case.model()
    real = by_torch(lambda: case.eager(model, case.inputs(ROWS)))
    assert counted(traced(name)[0].graph) == real


class One(nn.Module):
    """One op with a weight; x [b, ...] is behind a parameter of its own, so all need gradients."""

    def __init__(self, op, weights, shape):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(w)) for w in weights])
        self.scale = nn.Parameter(torch.ones(()))
        self.op, self.shape = op, shape

    def forward(self, x):
        return self.op(x * self.scale, *self.weights).sum()

    def inputs(self, rows):
        return {"x": torch.ones(rows, *self.shape)}


OPS = {
    "linear": (F.linear, [(5, 4)], (7, 4)),
    "matmul of two batches": (lambda x, w: x @ (x.transpose(1, 2) @ w), [(7, 7)], (7, 4)),
    "bmm": (lambda x: torch.bmm(x, x.transpose(1, 2)), [], (7, 4)),
    "addmm": (lambda x, bias, w: torch.addmm(bias, x, w), [(5,), (4, 5)], (4,)),
    "einsum": (lambda x, w: torch.einsum("bsd,dk->bsk", x, w), [(4, 5)], (7, 4)),
    "einsum of two batches": (lambda x: torch.einsum("bsd,btd->bst", x, x), [], (7, 4)),
    "einsum with dots": (lambda x, w: torch.einsum("...d,dk", x, w), [(4, 5)], (7, 4)),
    "einsum of three": (lambda x, w, v: torch.einsum("sd,dk,kl", x, w, v), [(4, 5), (5, 6)], (4,)),
    "tensordot": (lambda x, w: torch.tensordot(x, w, ([2, 1], [0, 1])), [(4, 7, 5)], (7, 4)),
    "inner": (torch.inner, [(5, 4)], (7, 4)),
    "linalg.matmul": (torch.linalg.matmul, [(4, 5)], (7, 4)),
    "lstm_cell": (lambda x, *w: torch.lstm_cell(x, (x, x), *w)[0], [(16, 4), (16, 4)], (4,)),
    "gru_cell": (lambda x, i, h: torch.gru_cell(x, x[:, :2], i, h), [(6, 4), (6, 2)], (4,)),
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1), [(6, 4, 3)], (4, 9)),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2), [(6, 4, 3, 3)], (4, 9, 9)),
    "conv3d": (F.conv3d, [(6, 4, 2, 2, 2)], (4, 5, 5, 5)),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w), [(4, 6, 3, 3)], (4, 5, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", ["t5", "frozen", "whisper", "lstm"])
def test_what_looks_the_same_costs_the_same(name):
    """Formulas are made once for nodes that differ in nothing but names: each asked by itself."""
    graph = traced(name)[0].graph
    carrying = gradient_values(graph)
    assert costs(graph) == tuple(op_costs._cost(graph, node, carrying) for node in graph.nodes)


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize("of", OPS.values(), ids=OPS)
def test_each_rule_is_what_torch_counts(of):
    model = One(*of)
    real = by_torch(lambda: model(**model.inputs(ROWS)))
    assert counted(trace_model(model, model.inputs).graph) == real


def test_a_bilinear_layer_multiplies_both_inputs_by_each_matrix():
    """Which torch's counter does not see: [3, 4] x [6, 4, 5] x [3, 5]."""
    model = One(lambda x, w: F.bilinear(x, x[:, :1].expand(-1, 5), w), [(6, 4, 5)], (4,))
    assert counted(trace_model(model, model.inputs).graph)[0] == 2 * 3 * 6 * 4 * 5


def test_a_linear_layer_by_a_vector_is_a_dot_product_for_each_row():
    """[3, 7, 4] x [4]: 3 * 7 sums of 4 products; D-FINE reads distances from histograms so."""
    model = One(F.linear, [(4,)], (7, 4))
    assert counted(trace_model(model, model.inputs).graph)[0] == 2 * 3 * 7 * 4


def test_an_inner_product_with_a_scalar_scales():
    """Bug: a scalar has no last dim."""
    model = One(lambda x, w: torch.inner(w, x), [()], (4,))
    assert counted(trace_model(model, model.inputs).graph)[0] == 3 * 4


def test_a_linear_layer_of_no_inputs_adds_its_bias():
    """Bug: [b, 0] has 0 / 0 rows: seconds were nan, and so were those of every plan. A model has
    such a layer where a data set has none of its optional features."""
    model = One(F.linear, [(8, 0)], (0,))
    formula = the(trace_model(model, model.inputs).graph, "linear")
    assert formula.dims == (BATCH, 0, 8)
    device = replace(DEVICE, half=64.0)
    assert seconds([formula], 10, device)[0] == pytest.approx([4 * 80 / 1e8 + 1e-3])


def test_a_convolution_in_groups_costs_backward_twice_its_forward():
    """torch's counter forgets the groups for the weight's gradient and says three times."""
    model = One(lambda x, w: F.conv2d(x, w, groups=2), [(6, 2, 3, 3)], (4, 9, 9))
    forward, backward = counted(trace_model(model, model.inputs).graph)
    assert forward == by_torch(lambda: model(**model.inputs(ROWS)))[0]
    assert backward == 2 * forward


def the(graph, op):
    (found,) = (c for n, c in zip(graph.nodes, costs(graph), strict=True) if n.short == op)
    return found


@pytest.mark.parametrize(("causal", "share"), [(False, 1), (True, sympy.Rational(1, 2))])
def test_attention(causal, share):
    """q, k, v [b, 4, 6, 8]: scores 2 * 6 * 6 * 8 a head, the weighted sum as many; five matmuls
    in backward. Half of it above the diagonal, which a causal kernel leaves out."""
    attend = lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=causal)  # noqa: E731
    model = One(attend, [], (4, 6, 8))
    found = the(trace_model(model, model.inputs).graph, ATTENTION)
    assert found.forward_flops == share * 4 * BATCH * 2 * (2 * 6 * 6 * 8)
    assert found.backward_flops == share * 4 * BATCH * 5 * (2 * 6 * 6 * 8)
    # MFU counts four matmuls of backward: the scores are there from the forward.
    assert found.model_flops == share * 4 * BATCH * 6 * (2 * 6 * 6 * 8)


def test_mfu_counts_what_a_matmul_does_once_each_way_and_no_other_op():
    fixed = torch.ones(8, 6)

    def through(x, w):
        return F.gelu(F.linear(F.linear(x, fixed), w))

    graph = trace_model(model := One(through, [(5, 8)], (6,)), model.inputs).graph
    whole, forwards = (
        [getattr(cost, name) for cost in costs(graph) if cost.dims]
        for name in ("model_flops", "forward_flops")
    )
    # Of a weight that is not trained backward has the input's gradient alone.
    assert whole == [2 * forwards[0], 3 * forwards[1]]
    assert the(graph, "gelu").model_flops == 0 < the(graph, "gelu").forward_flops


def test_attention_is_what_torch_counts_of_its_matmuls():
    model = One(
        lambda x: F.scaled_dot_product_attention(x, x[:, :, :5], x[:, :, :5]), [], (4, 6, 8)
    )
    with sdpa_kernel(SDPBackend.MATH):
        forward, _ = by_torch(lambda: model(**model.inputs(ROWS)))
    found = the(trace_model(model, model.inputs).graph, ATTENTION)
    assert at_batch(found.forward_flops, ROWS) == forward


def test_a_grouped_matmul_gives_each_token_one_expert() -> None:
    """4 b tokens of 8 through one of 2 matrices [8, 16] each: Mixtral's feed-forward was taken for
    an op of one operation an element, and its step for a fourth of what it is."""

    def experts(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1).bfloat16()
        ends = torch.tensor([tokens.shape[0] // 2, tokens.shape[0]], dtype=torch.int32)
        return F.grouped_mm(tokens, weights.bfloat16(), offs=ends)

    model = One(experts, [(2, 8, 16)], (4, 8))
    found = the(trace_model(model, model.inputs).graph, "_grouped_mm")
    assert found.forward_flops == 2 * 4 * BATCH * 8 * 16
    assert found.backward_flops == 2 * found.forward_flops
    assert found.dims == (4 * BATCH / 2, 8, 16)


def test_an_lstm_multiplies_every_matrix_once_a_step():
    """Two layers of 32: x and h by [128, 32] each, at 12 steps of b rows."""
    found = the(traced("lstm")[0].graph, "lstm")
    assert found.forward_flops == BATCH * 12 * 4 * 2 * 128 * 32


def test_other_ops_do_one_operation_an_element_and_are_bound_by_their_bytes():
    model = One(torch.tanh, [], (5,))
    found = the(trace_model(model, model.inputs).graph, "tanh")
    assert found.forward_flops == 5 * BATCH
    assert found.forward_bytes == 2 * 5 * BATCH * 4
    assert found.backward_bytes == 3 * 5 * BATCH * 4
    assert found.launches == (1, 1)


def test_a_view_costs_a_launch_and_a_write_in_place_what_it_writes():
    model = One(lambda x: F.relu(x.view(-1), inplace=True), [], (5,))
    graph = trace_model(model, model.inputs).graph
    assert the(graph, "view").forward_bytes == 0
    assert the(graph, "view").launches == (1, 1)
    assert the(graph, "relu_").forward_bytes == 2 * 5 * BATCH * 4


def test_an_embedding_reads_only_the_rows_it_looks_up():
    found = the(traced("lstm")[0].graph, "embedding")
    assert found.forward_bytes == 2 * BATCH * 12 * 32 * 4


def test_gradients_flow_through_what_trains_alone():
    carrying = gradient_values(traced("frozen")[0].graph)
    assert State("embedding.weight") not in carrying and State("layers.2.bias") not in carrying
    assert Ref("layers.0/linear/0") not in carrying
    assert Ref("layers.1/linear/0") in carrying
    (first, *_, last) = costs(traced("frozen")[0].graph)
    assert first.backward_flops == 0 and first.launches == (1, 0)
    assert last.launches == (1, 1)


def test_two_rules_for_one_op_are_refused():
    with pytest.raises(AssertionError, match="two rules for linear"):
        rule("linear")(RULES["linear"])


# Seconds.

DEVICE = Device("made up", 2**30, {"fp32": 1e9}, 1e8, 1e-3, "round numbers")


def test_the_slower_of_computing_and_moving_and_the_launches():
    """linear [b, 4] x [100, 4] at 10 rows: 8 000 operations and 4 * (40 + 400 + 1 000) bytes

    forward     max(8e3 / 1e9, 5760 / 1e8) + 1e-3               = 57.6 us + 1 ms
    backward    gradients of both: 16 000 operations,
                bytes 4 * (1 000 + 440 + 440) = 7520            = 75.2 us + 2 ms
                the weight's 1600 bytes are added to what is there: two are read, one is written,
                3 * 1600 / 1e8                                  = 48 us
    """
    model = One(F.linear, [(100, 4)], (4,))
    graph = trace_model(model, model.inputs).graph
    (formula,) = (the(graph, "linear"),)
    forward, backward = seconds([formula], 10, DEVICE)
    assert forward == pytest.approx([57.6e-6 + 1e-3])
    assert backward == pytest.approx([75.2e-6 + 2e-3 + 48e-6])
    fast = Device("all memory", 2**30, {"fp32": 1e6}, 1e12, 0.0, "")
    assert seconds([formula], 10, fast)[0] == pytest.approx([8e-3])


def test_a_gradient_of_16_bits_is_cast_before_it_is_added_to_a_sum_in_fp32():
    """The same layer in bf16 with an fp32 master: half the bytes, and after the matmuls

    cast    800 bytes are read, 1600 written    2400 / 1e8 = 24 us, and a launch
    add     as above                                         48 us
    """
    model = One(F.linear, [(100, 4)], (4,))
    wide = the(trace_model(model, model.inputs).graph, "linear")
    graph = trace_model(model, model.inputs, kept=SixteenBits(torch.bfloat16)).graph
    formula = the(graph, "linear")
    assert (wide.casts, formula.casts) == ((0, 0), (1, 2400))
    device = replace(DEVICE, flops={"bf16": 1e9})
    (backward,) = seconds([formula], 10, device)[1]
    assert backward == pytest.approx(37.6e-6 + 2e-3 + 24e-6 + 1e-3 + 48e-6)
    ((_, roof),) = roofs([formula], device)
    computing, moving, besides = (sympy.sympify(part).subs(BATCH, 10) for part in roof)
    assert float(max(computing, moving) + besides) == pytest.approx(backward)
    whole = SixteenBits(torch.bfloat16, gradients=torch.bfloat16)
    assert the(trace_model(model, model.inputs, kept=whole).graph, "linear").casts == (0, 0)


def test_all_nodes_of_a_model_at_once():
    formulas = costs(traced("gpt2")[0].graph)
    forward, backward = seconds(formulas, 4, DEVICE)
    assert forward.shape == backward.shape == (len(formulas),)
    assert (forward > 0).all() and (backward >= 0).all()
    one, _ = seconds(formulas[:1], 4, DEVICE)
    assert one[0] == forward[0]


@pytest.mark.parametrize("kernels", [{}, {"gelu": Kernel(Pace(1e-3, 1e6), Pace(2e-3, 2e6))}])
@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_seconds_as_formulas_have_the_same_values(name, kernels):
    formulas = costs(traced(name)[0].graph)
    device = replace(DEVICE, half=32.0, kernels=kernels)
    for rows in (1, 4, 64):
        meant = zip(*seconds(formulas, rows, device), strict=True)
        for both, values in zip(roofs(formulas, device), meant, strict=True):
            for roof, value in zip(both, values, strict=True):
                computing, moving, besides = (
                    float(sympy.sympify(part).subs(BATCH, rows)) for part in roof
                )
                assert max(computing, moving) + besides == pytest.approx(value, rel=1e-12)


def product(dtype, dims=(1, 1, 1)):
    """A matrix product of 1e9 operations, which moves nothing."""
    return op_costs.NodeCost(1e9, 0, 0, 0, (1, 0), dtype, dims)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bfloat16, "bf16"),
        (torch.float16, "fp16"),
        (torch.float64, "fp64"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
    ],
)
def test_a_matrix_product_in_a_dtype_without_a_rate_is_refused(dtype, name):
    with pytest.raises(AutopipeError) as error:
        seconds([product(dtype)], 1, DEVICE)
    assert str(error.value) == (
        f"the model computes in {name}, and made up has no rate for it, only for fp32\n"
        f"hint: add '{name}' to the device's flops in the cluster file"
    )


def test_so_is_a_product_of_any_number_of_dims():
    """Bug: an einsum in bf16 had the rate of fp32 on a T4, and its plan ended in a KeyError."""
    einsum = replace(product(torch.bfloat16, dims=()), model_flops=1e9)
    with pytest.raises(AutopipeError, match="the model computes in bf16, and made up has no rate"):
        seconds([einsum], 1, DEVICE)


def test_what_multiplies_no_matrices_is_as_fast_in_any_dtype():
    """Its bytes say how long it takes."""
    one = product(torch.float64, dims=())
    assert seconds([one], 1, DEVICE)[0] == seconds([product(torch.float32)], 1, DEVICE)[0]


def test_a_product_of_complex_numbers_is_four():
    """1 s and the launch, or 4."""
    assert seconds([product(torch.float32)], 1, DEVICE)[0] == pytest.approx([1.001])
    assert seconds([product(torch.complex64)], 1, DEVICE)[0] == pytest.approx([4.001])


@pytest.mark.parametrize(
    ("kernel", "dims", "dtype", "expected"),
    [
        ("gelu", (), torch.float32, 2.0),
        ("gelu", (), torch.bfloat16, 2.0),
        ("gelu", (), torch.float64, 4.0),
        ("attention", (1, 1, 1), torch.bfloat16, 20.0),
    ],
)
def test_a_kernel_in_another_dtype(kernel, dims, dtype, expected):
    """5e8 a second in fp32. Matmuls are ten times slower in bf16 here; a gelu is converted."""
    pace = Kernel(Pace(0.0, 5e8), Pace(0.0, 5e8))
    device = replace(DEVICE, flops={"fp32": 1e9, "bf16": 1e8}, kernels={kernel: pace})
    one = replace(product(dtype, dims), kernel=kernel)
    assert seconds([one], 1, device)[0] == pytest.approx([expected])


def test_a_kernel_with_a_pace_of_its_own_in_bf16() -> None:
    """Torch's attention is slower in bf16 on a CPU than in fp32, though matmuls are quicker."""
    own, low = (Kernel(Pace(0.0, rate), Pace(0.0, rate)) for rate in (5e8, 2.5e8))
    kernels = {"attention": own, "attention in bf16": low}
    device = replace(DEVICE, flops={"fp32": 1e9, "bf16": 4e9}, kernels=kernels)
    both = [replace(product(d), kernel="attention") for d in (torch.float32, torch.bfloat16)]
    assert seconds(both, 1, device)[0] == pytest.approx([2.0, 4.0])


def test_a_relative_has_been_measured() -> None:
    assert set(LIKE.values()) <= set(KERNELS)


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("layernorm", "which is no op\nhint: write an op of torch.ops.aten, or one of linear,"),
        ("rms_norm", "which is counted as 'layer_norm'\nhint: give the pace of 'layer_norm'"),
        (
            "scaled_dot_product_attention",
            "which is counted as one of attention, causal attention, attention with dropout\n",
        ),
    ],
)
def test_the_pace_of_what_no_node_is_counted_by_is_refused(kernel: str, said: str) -> None:
    """It would not be used, and nobody would know."""
    pace = Kernel(Pace(0.0, 5e8), Pace(0.0, 5e8))
    device = replace(DEVICE, kind="mine", kernels={kernel: pace})
    with pytest.raises(AutopipeError) as refused:
        seconds([product(torch.float32, ())], 1, device)
    sentence = f"cluster: mine has a pace of {kernel!r} among its kernels, {said}"
    assert str(refused.value).startswith(sentence)


def test_any_op_may_have_a_pace_of_its_own() -> None:
    pace = Kernel(Pace(0.0, 5e8), Pace(0.0, 5e8))
    device = replace(DEVICE, kernels={"cumsum": pace, "attention with dropout": pace})
    assert seconds([product(torch.float32, ())], 1, device)[0].shape == (1,)


def test_a_loss_in_parts_makes_its_logits_once_more_in_backward():
    """x [b, 7, 4] by [9, 4] in bf16, in parts of 5 and 4 words: 7 passes over them, then 9."""

    def run(x, w):
        target = torch.zeros_like(x[..., 0]).long()
        return F.cross_entropy((x @ w.T).flatten(0, 1), target.flatten())

    model = One(run, [(9, 4)], (7, 4))
    graph = in_parts(trace_model(model, model.inputs, kept=SixteenBits(torch.bfloat16)).graph, 2)
    found, product = the(graph, "vocabulary_loss"), BATCH * 7 * 2 * 4 * 9
    assert (found.forward_flops, found.backward_flops) == (product, 3 * product)
    assert (found.dtype, found.dims) == (torch.bfloat16, (7 * BATCH, 4, 5))
    assert found.launches == (2 * 7, 2 * 9)
    logits = BATCH * 7 * 9 * 4
    assert found.passes == (7 * logits, 9 * logits)
    device = Device("made up", 1, {"bf16": 1e12}, 1e9, 0.0, "made up for tests")
    both = seconds([found], 3, device), seconds([replace(found, passes=(0, 0))], 3, device)
    more = [float((with_them - without)[0]) for with_them, without in zip(*both, strict=True)]
    assert more == pytest.approx([float(moved.subs(BATCH, 3)) / 1e9 for moved in found.passes])
