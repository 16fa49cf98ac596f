"""The Jinja environment for chat templates, which are programs of whoever made the file.

Jinja's immutable sandbox keeps a template away from Python's internals and from changing the messages. It does not
bound the time that a template takes: Ctrl-C ends one that runs on.
"""

import json
from datetime import datetime
from typing import NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment


class RefusedError(TemplateError):
    """A template called `raise_exception`."""


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the model's own text for training; rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Macro) -> str:
        return str(caller())


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Behaves as the environment of transformers' `apply_chat_template` (5.24).

    Same options, extensions, `tojson`, `raise_exception` and `strftime_now`. Stricter in one point: a forbidden
    attribute is an error at once instead of an undefined value.
    """

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def unsafe_undefined(self, obj: object, attribute: str) -> NoReturn:
        raise SecurityError(f"the sandbox forbids the attribute {attribute!r} of {type(obj).__name__}")


def _raise_exception(message: str) -> NoReturn:
    raise RefusedError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter; the arguments of `json.dumps`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
