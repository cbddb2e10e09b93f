"""Find tensors of a model whose values nobody has written, or which planning cannot know.

    self.projection = nn.Parameter(torch.empty(64, 64))      and no nn.init after it

Such a parameter has the values that its memory held: a bad start in one process, and different
weights on each rank. To find it, torch fills new memory with nan (`marked`): a parameter that is
still nan after the constructor was never written.

A module that `model()` returns a second time has lost its values too (`refuse_again`).

While a model is planned its parameters have no values, nor have tensors that a constructor computes
from them (`WrongTensors`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopipe.errors import ModelError
from autopipe.ir.tensors import tensors_in
from autopipe.ir.torch_patches import one_process
from autopipe.ir.torch_private import fake_like, is_fake, no_function_modes, storage_key

_HINT = (
    "initialise it in model(), with nn.init for example, or start from weights that have it "
    "(--weights)"
)


@contextmanager
def marked() -> Iterator[None]:
    """Within, new memory is filled with nan, if its dtype has one."""
    algorithms = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # whose one attribute no type checker knows
    fills = memory.fill_uninitialized_memory
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have a deterministic implem")
            torch.use_deterministic_algorithms(True, warn_only=True)
            memory.fill_uninitialized_memory = True
            yield
    finally:
        memory.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(algorithms, warn_only=warns)


def with_numbers(
    factory: Callable[[], nn.Module], read: Container[str], say: Callable[[str], None]
) -> nn.Module:
    """Build a model; give parameters that it does not write small random numbers.

    Args:
        read: the names of the parameters that the model computes with.
        say: receives a line for each such parameter: a run may load its values.
    """
    with marked(), one_process():
        model = factory()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if _has_nan(parameter):
                parameter.normal_(std=0.02)
                if name in read:
                    say(f"{_never_written(name)}; a run refuses that, but for one from --weights")
    return model


def refuse(parameters: Mapping[str, Tensor]) -> None:
    """Refuse parameters, made while `marked`, that were not written.

    Raises:
        ModelError: names the first one.
    """
    for name, parameter in parameters.items():
        if _has_nan(parameter):
            raise ModelError(_never_written(name), hint=_HINT)


def refuse_again(model: nn.Module, skeleton: nn.Module) -> None:
    """Refuse a module that an earlier call of `model()` has returned already.

    Args:
        skeleton: the module of the earlier call, whose parameters are fake by now.

    Raises:
        ModelError: both are the same object, so its parameters have lost their values.
    """
    fake = {id(parameter) for parameter in skeleton.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in fake:
            raise ModelError(
                f"model() gives the same {name!r} each time: the module was made before the call, "
                "or is kept from the first one, and each rank builds it to have its own part",
                hint="make the module inside of model(), anew in each call; what else needs it, as "
                "a loss that is its method, finds it in a global that model() sets",
            )


def refuse_others(model: nn.Module, skeleton: nn.Module, seed: int) -> None:
    """Refuse a model whose attributes, computed from its weights, differ from the planned ones.

    self.scale = float(self.layer.weight.norm())     planned with the weights of seed 0

    Args:
        model: the model with the weights of this run.
        skeleton: the model that was traced; its constructor has read values of its weights.
        seed: the seed of this run's weights.

    Raises:
        ModelError: names the first such attribute.
    """
    for path, module in skeleton.named_modules():
        attributes = vars(model.get_submodule(path))
        for name in vars(module).keys() - _MODULE_ATTRIBUTES:
            planned, found = _numbers(vars(module)[name]), _numbers(attributes.get(name))
            if len(planned) != len(found) or not all(map(_same, planned, found)):
                raise ModelError(
                    f"model() computes {f'{path}.{name}'.strip('.')!r} from its weights, or draws "
                    f"it after them; with seed {seed} it is another one than it was planned with",
                    hint="let model() draw the same weights each time, by torch.manual_seed(0) at "
                    f"its head; or keep it as a buffer: self.register_buffer({name!r}, ...)",
                )


def _numbers(value: object) -> list[int | float | Tensor]:
    """The numbers and tensors in nested lists, tuples and dicts."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        return [number for item in value for number in _numbers(item)]
    return [value] if isinstance(value, int | float | Tensor) else []


def _same(planned: int | float | Tensor, found: int | float | Tensor) -> bool:
    """Whether two values are equal; nan equals nan, and a fake tensor equals everything."""
    expected, actual = torch.as_tensor(planned), torch.as_tensor(found)
    if is_fake(expected):
        return True
    if (expected.dtype, expected.shape) != (actual.dtype, actual.shape):
        return False
    wide = torch.promote_types(expected.dtype, torch.float64)  # bool, integers are compared too
    expected, actual = expected.to_dense().to(wide), actual.to_dense().to(wide)
    return torch.allclose(expected, actual, 0.0, 0.0, equal_nan=True)


def _never_written(name: str) -> str:
    """The sentence about a parameter that nobody has written."""
    return (
        f"model() makes the parameter {name!r} and writes no values into all of it, as by "
        "torch.empty alone: what its memory held would be its values, others on each rank"
    )


def _has_nan(parameter: Tensor) -> bool:
    tensor = parameter.detach()
    if is_fake(parameter) or tensor.is_meta:
        return False
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    # A sum takes no memory; an infinite one may be nan too.
    return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())


def of_constructor(func: object, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments for a constructor's call of torch on a fake parameter.

    self.mask = self.weight.new_ones(8)      has values: only the parameter's dtype matters
    self.weight.data = torch.from_numpy(w)   the data become fake: a fake tensor with real memory
                                             is an argument that no op takes
    a.data_ptr() == b.data_ptr()             raises: the answer would be that of two tied ones

    Raises:
        ValueError: the call asks where in memory the parameter is.
    """
    fake: Any = args[0] if args else None
    if not isinstance(fake, Tensor) or not is_fake(fake):
        return args
    if func in _PLACES:  # torch says 0 of all that have no memory
        raise ValueError("it reads where in memory a parameter is")
    with no_function_modes():
        like = torch.empty(1, dtype=fake.dtype)
        if func in _NEW:
            return like, *args[1:]
        if func in _LIKE and fake.is_contiguous():
            return like.expand(fake.shape), *args[1:]
        if func == _SET_DATA and not is_fake(args[1]):
            return fake, fake_like(cast(Any, fake).fake_mode, args[1].detach())
    return args


class WrongTensors:
    """Finds real tensors of a constructor that have wrong values, as its parameters are fake.

    self.anchor = torch.zeros(8, 8)
    self.anchor.copy_(self.layer.weight)     wrong: stays zero, for the weight has no values
    self.double = self.anchor * 2            wrong too

    self.layer = nn.Linear(8, 8)             draws nothing for a fake weight, so that
    self.order = torch.randperm(8)           draws the numbers that the weight should have had
    """

    def __init__(self) -> None:
        self._wrong: dict[int, Tensor] = {}  # by storage, which lives as long as this
        self._drawn: dict[int, Tensor] = {}
        self._skipped_draws = False

    def noted(self, func: Any, args: Any, named: Mapping[str, Any], result: Any) -> Any:
        """Note a call of torch, and return its result.

        Raises:
            ValueError: the call reads a value of a wrong tensor.
        """
        with no_function_modes():
            given = [*tensors_in((args, named))]
            self._note_draws(func, named, given, result)
            if func in (*_NEW, *_LIKE) or not any(is_fake(t) or self._is_wrong(t) for t in given):
                return result
            if getattr(func, "__name__", "") in _READS and not any(map(is_fake, given)):
                raise ValueError("it reads values that follow from those of a parameter")
            target = named.get("out", args[0] if args and _writes(func) else None)
            for tensor in tensors_in((target, result)):
                if not is_fake(tensor):
                    self._wrong[storage_key(tensor)] = tensor
        return result

    def _note_draws(
        self, func: Any, named: Mapping[str, Any], given: list[Tensor], made: Any
    ) -> None:
        name = str(getattr(func, "__name__", ""))
        follows = any(storage_key(t) in self._drawn for t in given if not is_fake(t))
        if follows and name in _READS:
            raise ValueError("it reads numbers that are drawn after weights")
        draws = bool(_DRAWS.search(name)) and named.get("generator") is None
        if draws and any(map(is_fake, (*given, *tensors_in(made)))):
            self._skipped_draws = True
        elif follows or (draws and self._skipped_draws):
            written = given[:1] if _writes(func) else []
            for tensor in (*tensors_in(made), *written):
                if not is_fake(tensor):
                    self._drawn[storage_key(tensor)] = tensor

    def make_fake(self, model: nn.Module, mode: Any) -> None:
        """Make wrong tensors that a module keeps fake, like its parameters. Drawn buffers may stay.

        Raises:
            ValueError: such a tensor is in a list or a dict, or was drawn and is in an attribute.
        """
        for module in model.modules() if self._drawn else ():
            for name, value in vars(module).items():
                if name not in _MODULE_ATTRIBUTES and any(
                    storage_key(t) in self._drawn for t in tensors_in(value) if not is_fake(t)
                ):
                    raise ValueError(f"{name} is drawn after weights, and is no buffer")
        for module in model.modules() if self._wrong else ():
            for name, value in [*vars(module).items(), *module.named_buffers(recurse=False)]:
                if isinstance(value, Tensor) and self._is_wrong(value):
                    with no_function_modes():
                        setattr(module, name, fake_like(mode, value.detach()))
                elif name not in _MODULE_ATTRIBUTES and any(map(self._is_wrong, tensors_in(value))):
                    raise ValueError(f"{name} holds what it has made of parameters")

    def _is_wrong(self, tensor: Tensor) -> bool:
        known = bool(self._wrong) and not is_fake(tensor)
        return known and storage_key(tensor) in self._wrong


def _writes(func: Any) -> bool:
    """Whether a call writes its first argument."""
    name = str(getattr(func, "__name__", ""))
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in _IN_PLACE or func == _SET_DATA


_DRAWS = re.compile(
    "rand|normal(?!i)|uniform|bernoulli|exponential_|geometric_|cauchy_|multinomial|poisson|dropout"
)
"""Names of functions that draw: torch.randperm, Tensor.log_normal_, nn.init.kaiming_uniform_."""

_READS = {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero"} | {
    f"__{name}__" for name in "bool float int complex index array".split()
}
_IN_PLACE = {"__setitem__"} | {
    f"__i{name}__"
    for name in "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift".split()
}

_NEW = (
    Tensor.new_zeros,
    Tensor.new_ones,
    Tensor.new_full,
    Tensor.new_tensor,
)
_PLACES = Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage
_LIKE = torch.zeros_like, torch.ones_like, torch.full_like
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]  # a property, says the stub

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""What every module has in its `__dict__`."""
