"""The text of a page: its contents in the template, with styles, a script and its data inside.

The template escapes every text; data for the script is JSON in which `<` is written as `\\u003c`.
"""

from __future__ import annotations

import functools
import re
from importlib import resources

import jinja2
from markupsafe import Markup

from autopipe.page.contents import Contents
from autopipe.report import colours

ASSETS = "assets"


def page(contents: Contents) -> str:
    """The HTML text of a page, which loads nothing."""
    return (
        _environment()
        .get_template("page.html")
        .render(page=contents, style=_style(), script=_script(), data=_data(contents))
    )


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("autopipe.page", ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_unbroken,
    )
    environment.filters |= {"capital": _capital, "sentence": _sentence, "zip": zip}
    return environment


_UNIT = re.compile(r"(?<=\d) (?=(%|[mu]?s|[KMGT]i?B|bytes?)\b|%)")


def _unbroken(value: object) -> object:
    """A text with its figures and their units on one line each."""
    return _UNIT.sub("\N{NO-BREAK SPACE}", value) if type(value) is str else value


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _sentence(text: str) -> str:
    """A clause as a sentence: with a capital letter and a full stop."""
    return f"{_capital(text)}."


def _data(contents: Contents) -> Markup:
    """The JSON data that the page's script evaluates."""
    if contents.sliders is None:
        return Markup("null")
    found: Markup = jinja2.utils.htmlsafe_json_dumps(contents.sliders.data())
    return found


def _style() -> Markup:
    """The style sheet after the colours that it names."""
    kinds = "".join(f"--{kind.value}:{colour};" for kind, colour in colours.KINDS.items())
    dark = f"@media screen and (prefers-color-scheme:dark){{:root{{{_theme(colours.DARK)}}}}}"
    names = f":root{{{_theme(colours.LIGHT)}{kinds}--sum:{colours.SUM}}}\n{dark}\n"
    return Markup(names + _asset("style.css"))


def _theme(found: colours.Theme) -> str:
    activation, gradient = found.flows.values()
    return (
        f"--page:{found.page};--ink:{found.ink};--muted:{found.muted};--line:{found.line};"
        f"--idle:{found.idle};--accent:{activation};--warm:{gradient};"
    )


def _script() -> Markup:
    return Markup(_asset("formulas.js") + _asset("page.js"))


def _asset(name: str) -> str:
    return (resources.files("autopipe.page") / ASSETS / name).read_text(encoding="utf-8")
