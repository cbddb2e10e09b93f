"""All that autopipe knows of the library transformers; only a user's model imports the library.

without_cache     a block in which models fill no cache of keys and values
eager_branches    a block in which models take under a trace the branches of eager
narrowed          a model with smaller widths
initialiser       how one module of a model is initialised alone
LOGGER, SETTINGS  what makes the library quiet
EXPANDS           where it asks how many rows there are, to expand a tensor to them
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autopipe.errors import ModelError

if TYPE_CHECKING:  # the command line asks for SETTINGS before torch is loaded
    from torch import nn

LOGGER = "transformers"
"""The name of its logger."""

SETTINGS = {"TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
"""Environment variables that it reads when it is imported."""

EXPANDS = ("transformers.masking_utils", "_preprocess_mask_arguments")
"""The function that expands position ids where there are several rows: for one it does nothing.

Nearly all of its language models call it. What an unknown question makes of a single row is found
by a second trace (`rows.one_row`).
"""

_CACHES = "transformers.pytorch_utils"
"""The module that caches results by their arguments, unless a trace runs."""

_EXPERTS = "transformers.integrations.moe"
"""The module of experts, which under a trace takes a matmul that has a fake version."""

_LOSSES, _CTC = "transformers.loss.loss_utils", "ForCTC"
"""The module that has a table of losses by kinds of models, and the key of one."""

_ASKED_WHILE_TRACING = (
    "is_tracing",
    "is_torchdynamo_exporting",
    "is_torchdynamo_compiling",
    "is_jit_tracing",
    "is_torch_fx_proxy",
    "is_fake_tensor",
    "is_cuda_stream_capturing",
)


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Within, turn off the key-value cache in the configurations of a model.

    The cache is on by default, and holds a copy of all keys and values until backward. No loss
    depends on it: without it the loss is the same to the bit if a kernel computes attention, else
    to rounding, as keys have other strides (T5). A caller who passes `use_cache` still gets one.
    """
    with ExitStack() as until:
        for config in map(_config, model.modules()):
            if getattr(config, "use_cache", None) is True:  # many modules may share a configuration
                config.use_cache = False
                until.callback(setattr, config, "use_cache", True)
        yield


def _config(module: nn.Module) -> Any:
    """A module's configuration if its class comes from transformers, else None."""
    config = vars(module).get("config")
    packages = (base.__module__.partition(".")[0] for base in type(config).__mro__)
    return config if "transformers" in packages else None


@contextmanager
def eager_branches() -> Iterator[None]:
    """Within, make the library take its eager branches although a trace runs.

    Under a trace the library builds whole masks where eager passes `is_causal=True`: the same
    values by another program (9 % more bytes saved for backward on llama, no flash kernel).

    Two parts are still told that a trace runs: experts, whose eager matmul in fp32 has no version
    for fake tensors; and a cache of tables by size (DETR), since a size in a trace is no key. The
    library's CTC loss selects labels by a mask; it is replaced by `opaque_ops.of_labels`, which
    gives the same for labels in their rows.
    """
    with ExitStack() as until:
        losses = getattr(sys.modules.get(_LOSSES), "LOSS_MAPPING", {})
        if _CTC in losses:
            from autopipe.ir import opaque_ops  # torch is loaded where the library is

            until.callback(losses.__setitem__, _CTC, losses[_CTC])
            losses[_CTC] = opaque_ops.of_labels
        for module, flag in _asking(len(sys.modules)):
            until.callback(setattr, module, flag, getattr(module, flag))
            setattr(module, flag, _yes if module.__name__ in (_CACHES, _EXPERTS) else _no)
        yield


@lru_cache(maxsize=1)
def _asking(loaded: int) -> tuple[tuple[ModuleType, str], ...]:
    """Modules of the library, each with its functions that answer whether a trace runs.

    Args:
        loaded: how many modules are loaded: several thousand, too many to look through each time.
    """
    return tuple(
        (module, flag)
        for name, module in list(sys.modules.items())
        if name.startswith("transformers")
        for flag in _ASKED_WHILE_TRACING
        if callable(getattr(module, "__dict__", {}).get(flag))
    )


def _yes(*args: object, **kwargs: object) -> bool:
    return True


def _no(*args: object, **kwargs: object) -> bool:
    return False


def initialiser(model: nn.Module, path: str) -> Callable[[], object] | None:
    """The model's function that initialises the module at `path`; None if it defines none.

    A model of transformers has `_init_weights`, which its library calls with every module, parents
    after their children, whose parameters they may scale; it overrules `reset_parameters`.
    """
    shared = getattr(model, "_init_weights", None)
    if callable(shared):
        parts = path.split(".") if path else []
        paths = [".".join(parts[:length]) for length in range(len(parts), -1, -1)]
        return lambda: [shared(model.get_submodule(each)) for each in paths]
    reset: object = getattr(model.get_submodule(path), "reset_parameters", None)
    return reset if callable(reset) else None


WIDTHS = frozenset(
    "hidden_size intermediate_size head_dim d_model d_ff d_kv n_embd n_inner ffn_dim hidden_dim "
    "dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size embedding_size word_embed_proj_dim "
    "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size q_lora_rank "
    "kv_lora_rank qk_rope_head_dim qk_nope_head_dim qk_head_dim v_head_dim rotary_dim".split()
)
"""Entries of a configuration that grow with a model's width."""


def narrowed(factory: Callable[[], nn.Module], divisor: int) -> nn.Module:
    """Build a model whose configurations have every one of `WIDTHS` divided by `divisor`.

    The numbers of layers, heads, experts and words stay. A model that is not of transformers is
    built as it is; the caller's own configuration objects are as they were afterwards.

    Raises:
        ModelError: a width does not divide.
    """
    if divisor == 1:
        return factory()
    try:  # `factory` may be the first to ask for it
        library = importlib.import_module("transformers.modeling_utils")
    except ImportError:
        return factory()
    originals: dict[int, tuple[Any, dict[str, int]]] = {}
    init = library.PreTrainedModel.__init__

    @wraps(init)  # transformers reads the signature for a docstring, and prints faults
    def build(model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        _narrow(config, divisor, originals)  # in place: the class goes on with the same object
        init(model, config, *args, **kwargs)

    library.PreTrainedModel.__init__ = build
    try:
        model = factory()
        copies = {key: copy.deepcopy(config) for key, (config, _) in originals.items()}
    finally:
        library.PreTrainedModel.__init__ = init
        for config, entries in originals.values():
            vars(config).update(entries)
            vars(config).pop(_NARROWED, None)
    for module in model.modules():
        config = vars(module).get("config")
        if id(config) in copies:
            module.config = config = copies[id(config)]
        getattr(config, "__dict__", {}).pop(_NARROWED, None)
    return model


_NARROWED = "autopipe_narrowed"
"""Marks a configuration whose widths have been divided: a model may go on with copies of it."""


def _narrow(config: Any, divisor: int, originals: dict[int, tuple[Any, dict[str, int]]]) -> None:
    """Divide the widths of a configuration and of those inside it; each once."""
    if _NARROWED in vars(config):
        return
    widths = {k: v for k, v in vars(config).items() if k in WIDTHS and type(v) is int}
    for name, width in widths.items():
        if width % divisor:
            raise ModelError(f"{name} is {width}, which {divisor} does not divide")
    originals[id(config)] = config, widths
    vars(config).update({name: width // divisor for name, width in widths.items()})
    vars(config)[_NARROWED] = True
    for inner in [*vars(config).values()]:
        if type(inner).__name__.endswith("Config") and hasattr(inner, "__dict__"):
            _narrow(inner, divisor, originals)
