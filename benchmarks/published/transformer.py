"""A transformer as the kernels that one rank of a tensor-parallel group runs on a micro-batch.

Megatron's division (Shoeybi et al., 2019, arXiv:1909.08053) over t ranks: n = micro-batch * seq
tokens, h hidden, f the feed-forward width, d the width of a head, a and g heads of queries and of
keys.

    x [n,h] - norm - qkv [n,h]x[h,(a+2g)d/t] - attention - out [n,h/t]x[h/t,h] =sum=> + x
            - norm - up  [n,h]x[h,f/t]       - gelu      - down [n,f/t]x[f/t,h] =sum=> + x

    head      [n,h] x [h,V/t], then the loss over the n V/t logits

Each sum is an all-reduce of 2nh bytes; with sequence parallelism it is a reduce-scatter and an
all-gather, which take as long, and what stands between sums is divided by t too (Korthikanti et
al., 2022, arXiv:2205.05198). Elements have 16 bits. Backward has each matmul twice, once for the
gradient of its input and once for that of its weight, which is added to the sum of gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.published.rows import Run


class Kernel(NamedTuple):
    """Operations and bytes of `times` equal kernels together.

    Attributes:
        flops: operations.
        bytes: read and written.
        dims: (m, k, n) of a matmul.
        times: how many kernels.
        what: `flash` or `flash1` of FlashAttention, whose rates are its own whatever the dims.
    """

    flops: float = 0.0
    bytes: float = 0.0
    dims: tuple[float, ...] = ()
    times: int = 1
    what: str = ""


Kernels = tuple[Kernel, ...]


@dataclass(frozen=True)
class Work:
    """What a part of the model does with one micro-batch.

    Args:
        forward, backward_input, backward_weight: the kernels.
        sums_forward, sums_backward: bytes of each all-reduce over the tensor-parallel ranks.
        parameters: weights on one rank.
    """

    forward: Kernels
    backward_input: Kernels
    backward_weight: Kernels
    sums_forward: tuple[float, ...]
    sums_backward: tuple[float, ...]
    parameters: float


def matmul(m: float, k: float, n: float, batch: float = 1) -> Kernel:
    """(m, k) @ (k, n), `batch` of them in one kernel."""
    return Kernel(2 * batch * m * k * n, 2 * batch * (m * k + k * n + m * n), (m, k, n))


def elementwise(size: float, times: int = 1) -> Kernel:
    """`times` kernels that move `size` bytes together."""
    return Kernel(bytes=size, times=times)


class Parts(NamedTuple):
    """The three kinds of parts that stages are made of."""

    layer: Work
    embedding: Work
    head: Work


def parts_of(run: Run) -> Parts:
    """What the parts of a run's model do."""
    return Parts(layer(run), embedding(run), head(run))


def layer(run: Run) -> Work:
    """One layer, with what its recomputation adds to backward."""
    model, n, t = run.model, run.micro_batch * run.model.seq, run.tp
    h, f = model.hidden, model.ffn
    projected = (model.heads + 2 * model.kv_heads) * model.head_dim
    linears = [
        (n, h, projected / t),
        (n, h / t, h),
        (n, h, (2 if model.gated else 1) * f / t),
        (n, f / t, h),
    ]
    matmuls = tuple(matmul(*dims) for dims in linears)
    core, core_back = _attention(run)
    passes, passes_back = _elementwise(run)
    forward = (*matmuls, *core, *passes)
    backward = (*(matmul(m, o, k) for m, k, o in linears), *core_back, *passes_back)
    sums = (2.0 * n * h,) * 2
    again: dict[str, Kernels] = {
        "none": (),
        "attention": core,
        "elementwise": passes,
        "alternate": (),
        "full": forward,
    }
    full = run.recompute == "full"
    return Work(
        forward=forward,
        backward_input=(*again[run.recompute], *backward),
        backward_weight=tuple(
            kernel for dims in linears for kernel in _weight_gradient(run, *dims)
        ),
        sums_forward=sums,
        sums_backward=sums * (2 if full else 1),
        parameters=model.layer_parameters / t,
    )


def embedding(run: Run) -> Work:
    """The look-up, and adding up the gradients of the rows that were looked up."""
    n, h, t = run.micro_batch * run.model.seq, run.model.hidden, run.tp
    moved = elementwise(n * h * (10 if run.dropout else 6), 3)
    return Work(
        forward=(moved,),
        backward_input=(),
        backward_weight=(moved,),
        sums_forward=(2.0 * n * h,),
        sums_backward=(),
        parameters=run.model.embedding_parameters / t,
    )


def head(run: Run) -> Work:
    """The last norm, the logits and the cross entropy over them."""
    model, n, t = run.model, run.micro_batch * run.model.seq, run.tp
    dims = n, model.hidden, model.vocab / t
    logits = n * model.vocab / run.loss_ranks
    return Work(
        # fp32 copy, maximum, difference, exponentials, their sum: 6 + 4 + 8 + 8 + 4 bytes
        forward=(matmul(*dims), elementwise(LOSS_FORWARD * logits, 6)),
        backward_input=(
            matmul(dims[0], dims[2], dims[1]),
            # exponentials over their sum less the target, then in 16 bits: 8 + 8 + 6 bytes
            elementwise(LOSS_BACKWARD * logits, 3),
        ),
        backward_weight=_weight_gradient(run, *dims),
        # Gathering takes half as long as summing as many bytes.
        sums_forward=(n * model.vocab,) if run.loss_ranks < t else (),
        sums_backward=(2.0 * n * model.hidden,),
        parameters=0.0 if model.tied and run.pp == 1 else model.embedding_parameters / t,
    )


LOSS_FORWARD, LOSS_BACKWARD = 30, 22
"""Bytes that the loss moves for each logit, op by op, as Megatron-LM's `cross_entropy.py` does."""


def _weight_gradient(run: Run, m: float, k: float, n: float) -> Kernels:
    """The gradient of a weight, and adding it to that of the micro-batches before it."""
    found = matmul(k, m, n)
    if run.micro_batches == 1:
        return (found,)
    return found, elementwise((2 + 2 * run.gradient_bytes) * k * n)


def _attention(run: Run) -> tuple[Kernels, Kernels]:
    """Scores, softmax and the sum over values: forward and backward.

    FlashAttention leaves out the half above the diagonal and computes the scores again in
    backward, 5 matmuls against 2 (Dao 2023, arXiv:2307.08691, section 3.1). What is not fused moves
    all scores through memory, b a s s / t of them, once or more for each op.
    """
    model, b, t = run.model, run.micro_batch, run.tp
    s, d, rows = model.seq, model.head_dim, run.micro_batch * model.heads / t
    if run.attention.startswith("flash"):
        moved = 2 * b * s * (2 * model.heads + 2 * model.kv_heads) * d / t
        pair = 2 * 2 * rows * s * s * d / 2
        forward = Kernel(pair, moved, what=run.attention)
        slower = FLASH_BACKWARD[run.attention]
        return (forward,), (Kernel(2.5 * slower * pair, 2.5 * moved, (), 2, run.attention),)
    scores, sums = matmul(s, d, s, rows), matmul(s, s, d, rows)
    elements = rows * s * s
    passes, kernels = SOFTMAX_BYTES[run.attention], 8 if run.attention == "composed" else 1
    dropped = (5, 1) if run.dropout else (0, 0)
    forward_passes = elementwise((passes[0] + dropped[0]) * elements, kernels + dropped[1])
    backward_passes = elementwise((passes[1] + dropped[0]) * elements, kernels + dropped[1])
    return (scores, sums, forward_passes), (
        *(scores, scores, sums, sums),
        backward_passes,
    )


FLASH_BACKWARD = {"flash": 73 / 63, "flash1": 40 / 30}
"""How much slower FlashAttention's backward computes than its forward: 63 % against 73 % of A100's
peak, and of the first version 25 to 35 % against 30 to 50 % (Dao 2023, sections 1 and 3.2)."""

SOFTMAX_BYTES = {"fused": (4, 6), "composed": (28, 32)}
"""Bytes moved for each score, forward and backward.

Fused: scores read and written once; backward reads gradient and softmax, writes one. Composed:
scaled 4, masked 4, to fp32 6, softmax 8, back 6; backward softmax 12, and the others again.
"""


def _elementwise(run: Run) -> tuple[Kernels, Kernels]:
    """Norms, residuals, positions and activation of a layer: forward and backward."""
    model, n, t = run.model, run.micro_batch * run.model.seq, run.tp
    outside = n * model.hidden / (t if run.sequence_parallel else 1)
    norm, norm_back = NORM_BYTES[run.fused_norm]
    residual, residual_back = (7, 11) if run.dropout else (6, 6)
    forward = [elementwise(2 * (norm + residual) * outside, 4 if run.fused_norm else 18)]
    backward = [elementwise(2 * (norm_back + residual_back) * outside, 8 if run.fused_norm else 32)]
    inner = n * model.ffn / t
    activation = ((6, 10) if run.fused else (10, 20)) if model.gated else (4, 6)
    forward.append(elementwise(activation[0] * inner, 2))
    backward.append(elementwise(activation[1] * inner, 2))
    heads = n * (model.heads + 2 * model.kv_heads) * model.head_dim / t
    if model.llama:
        rotary = 4 if run.fused else 14
        forward.append(elementwise(rotary * heads, 2 if run.fused else 8))
        backward.append(elementwise(rotary * heads, 2 if run.fused else 8))
    if not run.fused:  # transposes between the layouts of matmuls and of attention
        forward.append(elementwise(4 * heads, 3))
        backward.append(elementwise(4 * heads, 3))
    return tuple(forward), tuple(backward)


NORM_BYTES = {True: (4, 10), False: (36, 84)}
"""Bytes moved for each element of a norm, forward and backward, by whether it is one kernel.

Else it is RMS norm op by op: to fp32 6, square 8, mean 4, scale 8, back 6, weight 4; backward of
the weight 12, of the casts 12, of scaling 24, of the mean 4, of the square 20, and their sum 12.
"""


def kept(run: Run) -> float:
    """Bytes that a layer keeps of a micro-batch from forward to backward, on one rank.

    GPT with dropout, Korthikanti et al., Table 2:   n h (10 + 24/t + 5 a s / (h t))

        10   inputs of both norms, of qkv and of up: 2 each; two masks of dropout: 1 each
        24   queries, keys, values and their sum: 2 each; between up and down: 8 + 8
         5   of each score: softmax 2, its dropout 2 and mask 1;  4 less with FlashAttention

    and with sequence parallelism all of it is divided by t. Without dropout the masks go. A gate
    makes up's part 2 f of the gate, of what it gates, of its activation and of the product each.
    """
    model, n, t = run.model, run.micro_batch * run.model.seq, run.tp
    h = model.hidden
    outside = 8 + (2 if run.dropout else 0) + (0 if run.fused_norm else NORM_KEPT)
    between = 4 * model.hidden + 4 * model.kv_heads * model.head_dim
    between += (8 if model.gated and not run.fused else 6 if model.gated else 4) * model.ffn
    scores = 0.0
    if not run.attention.startswith("flash"):
        each = (2 if run.attention == "fused" else 6) + (3 if run.dropout else 0)
        scores = each * model.heads * model.seq / t
    split = t if run.sequence_parallel else 1
    match run.recompute:
        case "full":
            return 2 * n * h / split
        case "attention":
            scores = 0.0
        case "elementwise":  # outputs of the matmuls stay
            outside, between = 4, between - 4 * model.ffn
            scores = 0.0
    every = n * (outside * h / split + between / t + scores)
    return (every + 2 * n * h / split) / 2 if run.recompute == "alternate" else every


NORM_KEPT = 12
"""Bytes for each element that two RMS norms of single ops keep besides inputs: fp32 copies."""
