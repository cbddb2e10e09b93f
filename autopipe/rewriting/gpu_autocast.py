"""Emulate a GPU's autocast on a CPU's tensors: the dtype in which each op computes.

    linear, matmul, convolutions, attention     in 16 bits; recurrent layers in fp16
    exp, pow, norms, losses, interpolations     in fp32
    softmax, sum, cumsum, prod                  in fp32, unless they are told a dtype
    addcmul, index_put, scatter_add             in the widest dtype of their arguments
    all others                                  in that of their arguments

A plan for GPUs is made where there may be none. torch's autocast of a CPU has other lists, under
which a softmax stays in 16 bits: what is kept for backward, and what one stage sends to the next,
would have other dtypes than on a GPU.

Sources: ATen's autocast_mode.h and autocast_mode.cpp; "CUDA Op-Specific Behavior" of torch's
documentation (amp.html).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopipe.ir.tensors import EMULATED, tensors_in
from autopipe.ir.torch_patches import patched
from autopipe.ir.torch_private import tree_map
from autopipe.rewriting.for_gpus import of_gpus

LOWER = frozenset(
    "_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d "
    "conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution "
    "cudnn_convolution_transpose prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear "
    "addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell "
    "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention "
    "scaled_dot_product_attention".split()
)
"""In 16 bits."""

_NEWER = ("2.12", "rms_norm"), ("2.15", "linalg_matrix_sqrth")
"""Ops that torch computes in fp32 from a version on."""

FP32 = frozenset(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan "
    "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm "
    "group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity "
    "poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div "
    "l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss "
    "soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist "
    "pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d "
    "_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d "
    "upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bicubic2d_aa".split()
) | {op for since, op in _NEWER if torch.__version__ >= since}
"""In fp32."""

FP32_UNLESS_GIVEN = frozenset(
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm "
    "linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList norm.Scalar "
    "norm.ScalarOpt_dim".split()
)
"""To fp32, from what their arguments are, unless a dtype is among the arguments."""

WIDEST = frozenset(
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot "
    "scatter_add".split()
)
"""In the widest dtype of their arguments."""

LOWER_WITHIN = frozenset("conv1d.padding conv2d.padding conv3d.padding".split())
"""Ops that call some in 16 bits and return what these give."""

HALF_WITHIN = frozenset(
    "gru.input gru.data lstm.input lstm.data rnn_tanh.input rnn_tanh.data rnn_relu.input "
    "rnn_relu.data".split()
)
"""In fp16 whatever the autocast's dtype is: cuDNN's kernels (ATen's cudnn/AutocastRNN.cpp)."""

FP32_WITHIN = frozenset(
    "square cross_entropy_loss nll_loss_nd pairwise_distance linalg_norm linalg_norm.ord_str "
    "sum_to_size upsample_nearest1d.vec _upsample_nearest_exact1d.vec upsample_nearest2d.vec "
    "_upsample_nearest_exact2d.vec upsample_nearest3d.vec _upsample_nearest_exact3d.vec "
    "upsample_linear1d.vec upsample_bilinear2d.vec _upsample_bilinear2d_aa.vec "
    "upsample_trilinear3d.vec upsample_bicubic2d.vec _upsample_bicubic2d_aa.vec".split()
)
"""Ops that call some in fp32 and return what these give: a square is a power."""

Call = tuple[Sequence[Any], Mapping[str, Any]]
"""Arguments by position and by name."""


def autocast(
    device_type: str, dtype: torch.dtype | None, *, enabled: bool = True, cached: bool | None = None
) -> AbstractContextManager[Any]:
    """`torch.autocast`; in a CPU's dry run that stands for a GPU, what it does on a GPU."""
    if of_gpus():
        return _emulated((dtype or torch.get_autocast_dtype("cuda")) if enabled else None)
    return torch.autocast(device_type, dtype, enabled=enabled, cache_enabled=cached)


def autocast_inside() -> AbstractContextManager[Any]:
    """Within, in an op of autopipe's own, the emulated autocast around the op is on again."""
    return _emulated(EMULATED.get()) if of_gpus() else nullcontext()


def autocast_as_now(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """A maker of the autocast around this call, for code that runs it again in backward."""
    if of_gpus():
        return partial(_emulated, EMULATED.get())
    enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)
    return partial(torch.autocast, device_type, dtype, enabled, cache_enabled=False)


def autocast_of_model(
    asked: str, dtype: torch.dtype | None, enabled: bool, arguments: Sequence[Any]
) -> AbstractContextManager[Any]:
    """The autocast of a model's code around an op, for the device of the op's arguments.

    A model is traced on a CPU, where `torch.autocast(x.device.type)` asks for the CPU's autocast;
    an autocast that names "cuda" casts nothing on a CPU.
    """
    kinds = (tensor.device.type for tensor in tensors_in(arguments))
    here = "cuda" if of_gpus() else next(kinds, asked)
    if asked not in ("cpu", here):
        return nullcontext()
    return autocast(here, dtype, enabled=enabled)


@contextmanager
def of_absent_gpus() -> Iterator[None]:
    """Within, `torch.autocast("cuda")` is traced as it was written, even without a GPU.

    torch would turn it off there, and the graph of a plan would differ from that of its ranks.
    """
    with ExitStack() as until:
        common = torch.cuda.amp.common
        until.enter_context(patched(common, "amp_definitely_not_available", lambda: False))
        until.enter_context(patched(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True))
        yield


def cast(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """The arguments that an op computes with, under the emulated autocast if there is one."""
    dtype, policy = EMULATED.get(), _policy(op)
    if dtype is None or policy is None:
        return args, kwargs
    if policy is FP32_UNLESS_GIVEN:
        if _names_dtype(args, kwargs) or not args or not _eligible(args[0]):
            return args, kwargs
        if "norm." in str(op):  # whose op names no dtype
            return (args[0].float(), *args[1:]), kwargs
        return args, {**kwargs, "dtype": torch.float32}
    leaves = [tensor for tensor in tensors_in((args, kwargs)) if _eligible(tensor)]
    wide = policy in (FP32, FP32_WITHIN) or (
        policy is WIDEST and any(x.dtype == torch.float32 for x in leaves)
    )
    low = torch.float16 if policy is HALF_WITHIN else dtype
    to = torch.float32 if wide else low
    found: Call = tree_map(lambda leaf: leaf.to(to) if _eligible(leaf) else leaf, (args, kwargs))
    return found


class _Casting(TorchFunctionMode):
    """Casts the arguments of every call of an op."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = cast(func, args, kwargs or {})
        return func(*args, **kwargs)


@contextmanager
def _emulated(dtype: torch.dtype | None) -> Iterator[None]:
    token = EMULATED.set(dtype)
    try:
        with _ops_of_functions(), _Casting():
            yield
    finally:
        EMULATED.reset(token)


@contextmanager
def _ops_of_functions() -> Iterator[None]:
    """Within, a mode sees the ops that torch's own Python functions call, not the functions.

    By itself `F.cross_entropy` gives itself to the mode as one call, and the mode never sees the
    ops inside.
    """
    with ExitStack() as until:
        for module in (torch.nn.functional, torch.functional):
            for name in ("", "_unary", "_variadic"):
                until.enter_context(patched(module, f"has_torch_function{name}", _sees_no_mode))
        yield


def _sees_no_mode(*_: Any) -> bool:
    return False


_LISTS = (LOWER, LOWER_WITHIN, HALF_WITHIN, FP32, FP32_WITHIN, FP32_UNLESS_GIVEN, WIDEST)
_POLICIES = {name: names for names in _LISTS for name in names}
_OF_FUNCTIONS = {name.partition(".")[0]: policy for name, policy in _POLICIES.items()}
"""Of `torch.softmax` and `Tensor.softmax`, which name no overload."""


@cache
def _policy(op: Any) -> frozenset[str] | None:
    written = str(op)
    if written.startswith("aten."):  # an overload: aten.softmax.int
        return _POLICIES.get(written.removeprefix("aten.").removesuffix(".default"))
    name = getattr(op, "__name__", "")
    return _OF_FUNCTIONS.get(name, _OF_FUNCTIONS.get(name.strip("_")))  # __matmul__


def _names_dtype(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call names the dtype of its result."""
    return kwargs.get("dtype") is not None or any(isinstance(arg, torch.dtype) for arg in args)


def _eligible(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64
