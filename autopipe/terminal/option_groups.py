"""Options of a command that stand together as the fields of a dataclass.

    @dataclass(frozen=True)
    class Start:
        local: Annotated[int | None, typer.Option(help=...)] = None
        log_dir: Annotated[Path | None, typer.Option(help=...)] = None

    def run(plan: PlanArgument, start: Start) -> None: ...

`spread(run)` has the parameters plan, local and log_dir, from which typer makes the command.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY


def given(options: object) -> dict[str, Any]:
    """The options of a group that were given, by name: None stands for one that was not."""
    return {name: value for name, value in vars(options).items() if value is not None}


def spread(function: Callable[..., None]) -> Callable[..., None]:
    """The same function with a parameter for each field of its dataclass parameters."""
    hints = typing.get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {n: hint for n, hint in hints.items() if is_dataclass(hint)}

    @functools.wraps(function)
    def wrapper(**given: Any) -> None:
        options = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        function(**given, **options)

    def parameters() -> Iterator[inspect.Parameter]:
        for name, parameter in inspect.signature(function).parameters.items():
            if name in groups:
                yield from _parameters_of(groups[name])
            else:
                yield parameter.replace(kind=KEYWORD_ONLY, annotation=hints[name])

    return with_parameters(wrapper, parameters())


def _parameters_of(group: Any) -> Iterator[inspect.Parameter]:
    hints = typing.get_type_hints(group, include_extras=True)
    for field in fields(group):
        yield inspect.Parameter(
            field.name, KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )


def with_parameters(
    wrapper: Callable[..., None], parameters: Iterable[inspect.Parameter]
) -> Callable[..., None]:
    """Give a wrapper the parameters that typer is to read, in the place of the wrapped ones."""
    signature = inspect.Signature(list(parameters))
    wrapper.__annotations__ = {
        name: parameter.annotation for name, parameter in signature.parameters.items()
    }
    wrapper.__signature__ = signature  # type: ignore[attr-defined]  # what typer reads
    del wrapper.__wrapped__  # type: ignore[attr-defined]  # typer would seek hints there
    return wrapper
