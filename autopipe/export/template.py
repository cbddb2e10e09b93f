"""Shell scripts from templates in which a missing value is an error and every value is quoted."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterable

import jinja2


def shell(name: str, **values: object) -> str:
    """The script that the template `name` of this room makes of `values`.

    In a template `{{ x | q }}` is x as one word of the shell, and `{{ xs | qs }}` several words. A
    value without either filter is a number, or a word that `words.check` has accepted.
    """
    return _environment().get_template(name).render(**values)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("autopipe.export", "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["q"] = lambda value: shlex.quote(str(value))
    environment.filters["qs"] = _join
    return environment


def _join(values: Iterable[object]) -> str:
    return shlex.join(map(str, values))
