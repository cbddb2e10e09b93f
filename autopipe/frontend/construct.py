"""A model without memory for its weights: by its constructor, or as a copy of a model.

A constructor has three attempts, each of which makes parameters fake at a later moment:

    1  when a parameter is registered: nothing is ever written to its memory
    2  if the constructor reads weights: when the parameter's module is attached to another one
    3  if it reads them even then: when the whole model is built

Buffers are real, since Python may read them. Tensors that a constructor asks for on the meta device
or a GPU are made on the CPU (`on_cpu`): initialisers can fill them, and Python can read them.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from autopipe.errors import ModelError
from autopipe.frontend import user_lines
from autopipe.frontend.functions import HeldFunctions
from autopipe.frontend.unwritten import WrongTensors, of_constructor
from autopipe.ir.tensors import attributes_of, default_device, tensors_in
from autopipe.ir.torch_patches import one_process
from autopipe.ir.torch_private import (
    constructing,
    fake_like,
    fake_mode,
    fake_parameter,
    is_fake,
    no_function_modes,
    storage_key,
)
from autopipe.util import numbers
from autopipe.util.host_memory import in_turn

Factory = Callable[[], nn.Module]
_CPU = torch.device("cpu")
_Pair = tuple[weakref.ref[nn.Parameter], nn.Parameter]
_PAIRS: weakref.WeakKeyDictionary[nn.Module, list[_Pair]] = weakref.WeakKeyDictionary()
OF_VALUES: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The models whose constructors have read values of their weights."""


def still_real(model: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Pairs of a real parameter that something still holds (a list) and the fake one made of it."""
    return [
        (real, fake)
        for reference, fake in _PAIRS.get(model, ())
        if (real := reference()) is not None
    ]


def build_fake(
    factory: Factory,
    *,
    room: Callable[[], int] | None = None,
    say: Callable[[str], None] | None = None,
) -> nn.Module:
    """Build a model with fake parameters.

    Args:
        room: gives the bytes of host memory available for real weights; None: no limit.
        say: receives one line of text if the constructor needs real weights.

    Raises:
        ModelError: its weights must be real and there is no room for them.
    """
    building = _Building("registered")
    try:
        return building.build(factory)
    except Exception as error:  # the user's code may raise anything
        if not building.fakes:
            raise
        why = f"{user_lines.of_error(user_lines.root(error))}: {_reason(error)}"
    with in_turn():
        free = room() if room is not None else None
        model = None
        with suppress(Exception):  # values may be read of what has been attached
            model = _Building("attached", free, why).build(factory)
        if model is None:
            model = _Building("built", free, why).build(factory)
    if say is not None:
        say(f"model() was built with real weights, for it needs their values ({why})")
    return model


class _Building:
    """One run of a constructor.

    Args:
        until: when parameters turn fake: when "registered", when their module is "attached", or
            when the whole model is "built".
        room: the bytes that real parameters may take at once; None: no limit.
        why: the reason that they have to be real, for an error.
    """

    def __init__(self, until: str, room: int | None = None, why: str = "") -> None:
        self.until = until
        self.room = room
        self.why = why
        self.held = 0
        self.mode = fake_mode()
        # By identity, and only while the real one lives: its id may be taken again after that.
        self.fakes: dict[int, _Pair] = {}

    def build(self, factory: Factory) -> nn.Module:
        """Run the constructor; the caller's random numbers are left as they were."""
        instead = self.mode if self.until == "registered" else None
        cpu_mode = on_cpu(instead)
        drawn, alone = torch.random.fork_rng(devices=[]), one_process()
        with drawn, alone, self._registering(), constructing(), cpu_mode:
            torch.manual_seed(0)  # values that the constructor reads are the same on every rank
            model = factory()
            if isinstance(model, nn.Module):
                cpu_mode.wrong_tensors.make_fake(model, self.mode)
                self._make_fake(model)
                _PAIRS[model] = [*self.fakes.values()]
                if self.until != "registered":
                    OF_VALUES.add(model)
        return model

    @contextmanager
    def _registering(self) -> Iterator[None]:
        # torch's stub says that a hook returns nothing; its result is registered instead.
        hook = register_module_parameter_registration_hook(self._register)  # type: ignore[arg-type]
        with ExitStack() as until:
            until.callback(hook.remove)
            until.callback(register_module_module_registration_hook(self._attach).remove)
            yield

    def _register(self, module: nn.Module, name: str, parameter: Any) -> nn.Parameter | None:
        lazy = is_lazy(parameter)  # a first call will give it its shape, in place
        if lazy or not isinstance(parameter, nn.Parameter) or is_fake(parameter):
            return None
        _check_kind(name, parameter)
        if self.until == "registered":
            return self._fake(parameter)
        self.held += parameter.numel() * parameter.element_size()
        if self.room is not None and self.held > self.room:
            raise ModelError(
                f"the model cannot be built without memory, for {self.why}; up to {name!r} of a "
                f"{type(module).__name__} its weights take {numbers.memory(self.held)}, and "
                f"{numbers.memory(self.room)} are free",
                hint="build it without reading its weights, or where there is more memory",
            )
        return None

    def _attach(self, module: nn.Module, name: str, part: Any) -> None:
        if self.until == "attached" and isinstance(part, nn.Module):
            self._make_fake(part)

    def _make_fake(self, model: nn.Module) -> None:
        """Turn fake what is still real in a module."""
        for module in model.modules():
            for name, parameter in [*module.named_parameters(recurse=False)]:
                if not is_fake(parameter) and not is_lazy(parameter):
                    self.held -= parameter.numel() * parameter.element_size()
                    setattr(module, name, self._fake(parameter))  # an LSTM keeps a list of them

    def _fake(self, parameter: nn.Parameter) -> nn.Parameter:
        known = self.fakes.get(id(parameter))
        if known is None or known[0]() is not parameter:
            fake = fake_parameter(self.mode, parameter)
            known = self.fakes[id(parameter)] = weakref.ref(parameter), fake
        return known[1]


def _check_kind(name: str, parameter: nn.Parameter) -> None:
    """Refuse a parameter of a class that overrides torch's functions."""
    for kind in type(parameter).__mro__:
        if kind.__module__.startswith(("torch.", "autopipe.")):  # of values that a script left
            return
        if {"__torch_function__", "__torch_dispatch__"} & vars(kind).keys():
            raise ModelError(
                f"the parameter {name!r} is a {kind.__name__}, a class of tensors that overrides "
                "functions of torch; a graph has plain tensors",
                hint="keep a plain nn.Parameter, and compute in forward what the class does",
            )


def _reason(error: BaseException) -> str:
    root = user_lines.root(error)
    return f"{type(root).__name__}: {root}".splitlines()[0]


class _OnCPU(TorchFunctionMode):
    def __init__(self, kinds: Collection[str], instead: Any = None) -> None:
        super().__init__()
        self.kinds, self.instead = kinds, instead
        self.wrong_tensors = WrongTensors() if "meta" in kinds else None

    def __enter__(self) -> Any:
        self._until = ExitStack()
        self._default = default_device()
        self._had_default = self._default != _CPU
        if self._default.type in self.kinds:
            self._until.enter_context(_CPU)
            self._default = default_device()
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch's has no types

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # as above
        # A script's `set_default_device("cuda")` reads the CPU here, and stays all the same.
        if not self._had_default or default_device() != self._default:
            torch.set_default_device(None)  # that of code which trains by itself
        self._until.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(map(self._moved, args[:1] if func is torch.device else args))  # no index
        args = of_constructor(func, args) if self.wrong_tensors else args
        kwargs = {key: self._moved(arg) for key, arg in (kwargs or {}).items()}
        if kwargs.get("generator", ...) is None:  # torch's own; the op given it takes no rows
            del kwargs["generator"]
        if func is Tensor.cuda:
            return args[0]
        try:
            untouched = func is torch.zeros and self.instead is not None
            result = (_zeros if untouched else func)(*args, **kwargs)
            wrong = self.wrong_tensors
            return wrong.noted(func, args, kwargs, result) if wrong else result
        except (RuntimeError, MemoryError) as error:
            out_of_memory = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
            if self.instead is None or not out_of_memory:
                raise
            with self.instead:
                return func(*args, **kwargs)

    def _moved(self, arg: Any) -> Any:
        if isinstance(arg, str | torch.device):
            return type(arg)("cpu") if str(arg).partition(":")[0] in self.kinds else arg
        if type(arg) in (list, tuple) and any(isinstance(part, Tensor) for part in arg):
            return type(arg)(map(self._moved, arg))
        return arg.cpu() if isinstance(arg, Tensor) and _is_on_gpu(arg) else arg


_LARGE = 2**26
"""Bytes from which `torch.zeros` is replaced by pages that take no memory until written."""


def _zeros(*args: Any, **kwargs: Any) -> Tensor:
    """`torch.zeros` without writing the bytes of a large tensor: the system gives pages of zeros
    that take no memory before they are written. Those of a parameter, which turns fake, never are.

    (Llama 4 makes its experts' first matrices by `torch.zeros`, 5 GiB in each layer.)
    """
    if kwargs.get("out") is not None or kwargs.get("pin_memory"):  # memory of another's
        return torch.zeros(*args, **kwargs)
    like = torch.zeros(*args, **{**kwargs, "device": "meta"})
    if like.nbytes < _LARGE or like.requires_grad or like.layout != torch.strided:
        return torch.zeros(*args, **kwargs)
    return torch.from_numpy(np.zeros(like.nbytes, np.uint8)).view(like.dtype).view(like.shape)


def _is_on_gpu(tensor: Tensor) -> bool:
    with no_function_modes():  # to ask is no call of the user's
        return tensor.device.type == "cuda"


def on_cpu(instead: AbstractContextManager[object] | None = None) -> Any:
    """Within, tensors asked for on the meta device or on a GPU are made on the CPU, with values.

    Args:
        instead: the mode of fake tensors for what host memory has no room for; None: an error.
    """
    return _OnCPU(("meta", "cuda"), instead)


def off_gpus() -> TorchFunctionMode:
    """Within, tensors that code puts on a GPU by name (`.cuda()`) stay on the CPU."""
    return _OnCPU(("cuda",))


def fake_copy(model: nn.Module) -> nn.Module:
    """A deep copy whose parameters are fake: real buffers and Python state, no weights.

    Tied parameters stay tied. The copy takes the bytes of the buffers only; a buffer on the meta
    device, which has no values, becomes fake. Of values that `copy.deepcopy` cannot copy, results
    that a module keeps between calls (`nn.utils.weight_norm`) become fake, and scripted functions
    are shared. A tensor in the memory of a trained parameter changes with it, and becomes fake. A
    hook that closes over a part of the model closes over that part's copy.

    Raises:
        ModelError: a part cannot be copied, a generator for example; names the attribute. Or a
            parameter is of a class that overrides torch's functions.
    """
    mode = fake_mode()
    memo: dict[int, object] = {}
    for name, parameter in model.named_parameters():
        _check_kind(name, parameter)
        memo[id(parameter)] = parameter if is_fake(parameter) else fake_parameter(mode, parameter)
    for buffer in model.buffers():
        if buffer.is_meta and not is_fake(buffer):
            memo[id(buffer)] = fake_like(mode, buffer).to("cpu")
        elif buffer.layout != torch.strided:  # copy.deepcopy knows some layouts alone
            memo[id(buffer)] = buffer.detach().clone()
    trained = {storage_key(p) for p in model.parameters() if p.requires_grad and not is_fake(p)}
    for module in model.modules():
        for value in vars(module).values():
            for result in tensors_in(value):
                aliased = not isinstance(result, nn.Parameter) and storage_key(result) in trained
                if not result.is_leaf or aliased or is_fake(result):
                    memo[id(result)] = like = fake_like(mode, result.detach())
                    vars(like).update(attributes_of(result))
            if isinstance(value, torch.jit.ScriptFunction):
                memo[id(value)] = value
    functions = HeldFunctions(model, memo)
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:  # whatever is said of a generator, a lock, an open file, a logger
        raise _not_copied(model, memo, error) from error
    functions.close()
    return copied


def _not_copied(model: nn.Module, memo: Mapping[int, Any], error: Exception) -> ModelError:
    """The error for a model that copy.deepcopy refuses; names the attribute."""
    where = "the model"
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            try:
                copy.deepcopy(value, dict(memo)) if name not in _MODULE_ATTRIBUTES else None
            except Exception:  # it is among those that cannot be copied
                where = repr(f"{path}.{name}".lstrip("."))
    return ModelError(
        f"the model is given as a module, and {where} in it cannot be copied: {_reason(error)}",
        hint="give the function that builds the model, which is called instead of copied; or keep "
        "it outside of the model",
    )


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""What every module has in its `__dict__`: its parts are asked by themselves."""
