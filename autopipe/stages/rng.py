"""Draw random numbers that do not depend on how the model is split.

Every random node draws from a seed of its own, made of (run, step, global micro-batch, node name):
dropout is bitwise the same for every number of stages, schedule, recomputation and resume.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from autopipe.rewriting.gpu_kernels import kernel_of
from autopipe.stages import op_tape
from autopipe.util.seeding import seed

DRAWN = "autopipe_drawn"
"""The key, in a traced node's meta, of the name of the graph node that it draws for."""

Key = tuple[int, int, int]
"""A stream's key: run, step and global micro-batch."""

_current = threading.local()
# The generators below are the process's own; threads (tests run one per stage) take turns.
_generators = threading.Lock()


class stream:
    """Within, random nodes draw for this run, step and global micro-batch.

    A context manager; it is a class for speed, since every forward and backward enters it.
    """

    __slots__ = ("_before", "_key")

    def __init__(self, run: int, step: int, microbatch: int) -> None:
        self._key: Key | None = (run, step, microbatch)

    @classmethod
    def resumed(cls, key: Key | None) -> stream:
        """The stream that `current()` returned, perhaps in another thread; None: no stream."""
        again = cls(0, 0, 0)
        again._key = key
        return again

    def __enter__(self) -> None:
        self._before = current()
        _current.key = self._key

    def __exit__(self, *error: object) -> None:
        _current.key = self._before


def current() -> Key | None:
    """The key of this thread's stream; None: there is none."""
    return getattr(_current, "key", None)


def draw(op: Callable[..., Any], node: str, *args: Any, **kwargs: Any) -> Any:
    """Call a random op with the generators seeded for `node`, then restore their states.

    Outside a stream (fake tensors draw nothing) the op is called unchanged. A tape marks the
    recorded op with the node's name.
    """
    key = current()
    if op_tape.running() is not None or key is None:
        with op_tape.marking(DRAWN, node):
            return kernel_of(op)(*args, **kwargs)
    number = seed(*key, node)
    with _generators:
        own = _drawn_from(op, args, kwargs)
        before = [generator.get_state() for generator in own]
        try:
            for generator in own:
                generator.manual_seed(number)
            return op(*args, **kwargs)
        finally:
            for generator, state in zip(own, before, strict=True):
                generator.set_state(state)


_OF_THEIR_DEVICE = frozenset(
    "dropout dropout_ native_dropout feature_dropout feature_dropout_ alpha_dropout alpha_dropout_ "
    "feature_alpha_dropout feature_alpha_dropout_ bernoulli bernoulli_ normal_ uniform_ "
    "exponential_ geometric_ rand_like randn_like randint_like multinomial poisson rrelu rrelu_ "
    "scaled_dot_product_attention _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention".split()
)
"""Ops of aten that draw from the generator of the device that their tensors are on, and no other.

An LSTM of a GPU, for one, draws a seed for its dropout from the CPU's.
"""


def _drawn_from(
    op: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> list[torch.Generator]:
    """The generators that an op may draw from, of this process's devices.

    Each that is seeded costs: of a GPU its state is copied. Where it is not clear, it is those of
    the CPU and of the current GPU. `torch.manual_seed` and `fork_rng` go through all devices of the
    machine; on a CPU alone that takes a tenth of a millisecond, in which a small dropout would be
    done.
    """
    gpus: Any = torch.cuda.default_generators  # none until CUDA is in use
    if not gpus:
        return [torch.default_generator]
    device = device_drawn_on(op, args, kwargs)
    if device is None:
        return [torch.default_generator, gpus[torch.cuda.current_device()]]
    return [gpus[device.index] if device.type == "cuda" else torch.default_generator]


def device_drawn_on(
    op: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> torch.device | None:
    """The device whose generator an op draws from, a CPU or a GPU; None: it is not clear."""
    namespace, _, name = str(op).partition(".")
    if namespace != "aten" or name.partition(".")[0] not in _OF_THEIR_DEVICE:
        return None
    if kwargs.get("device") is not None or kwargs.get("generator") is not None:
        return None
    found = {a.device for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)}
    device = found.pop() if len(found) == 1 else None
    return device if device is not None and device.type in ("cpu", "cuda") else None
