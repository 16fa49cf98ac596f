"""The Jinja environment for chat templates, which are programs of whoever made the file.

Jinja's immutable sandbox keeps a template away from Python's internals. On top of it stand two budgets, because the
sandbox itself lets a short template run for hours or ask for terabytes: one for executed blocks and one for the
characters that operators, joins and padding produce. Pure Python work (compiling, one call of a filter) is bounded
by them only through its inputs.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_BLOCKS = 2_000_000  #: bodies of loops, branches and macros that one rendering may enter
MACRO_BLOCKS = 10  #: what a call of a macro counts for, by its time
MAX_CHARACTERS = 1 << 28  #: characters (or list items) that one rendering may produce in all
MAX_INTEGER_BITS = 1 << 16
MAX_JSON_INDENT = 64


class RefusedError(TemplateError):
    """A template called `raise_exception`."""


@dataclass
class _Budget:
    blocks: int = MAX_BLOCKS
    characters: int = MAX_CHARACTERS


_budget: ContextVar[_Budget | None] = ContextVar("budget", default=None)


def _charge(characters: int) -> None:
    budget = _budget.get()
    if budget is None:  # a constant expression, folded while the template is compiled
        budget = _Budget()
    budget.characters -= characters
    if budget.characters < 0:
        raise SecurityError(f"produces more than {MAX_CHARACTERS} characters")


@contextmanager
def budget() -> Iterator[None]:
    """Fresh budgets for one rendering."""
    token = _budget.set(_Budget())
    try:
        yield
    finally:
        _budget.reset(token)


class _CountingGenerator(CodeGenerator):
    """Compiles a count into every block, and `~` into a checked join."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.count_block()")
        super().blockvisit(nodes, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 (Jinja's name)
        self.write("environment.concat(map(str, (")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write(")))")


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks the model's own text for training; rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Macro) -> str:
        return str(caller())


class _Dict:
    """`dict` without the type: a template may call it, not walk from it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: object = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """Jinja's `namespace` with public names only."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        for name in dict(*rest, **kwargs):
            _check_name(name)
        Namespace.__init__(self, *rest, **kwargs)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that starts with an underscore, found {name!r}")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Behaves as the environment of transformers' `apply_chat_template` (5.24), within the budgets.

    Same options, extensions, `tojson`, `raise_exception`, `strftime_now` and `dict`. Stricter in two points: a
    private attribute is an error at once instead of an undefined value, and there is no `lipsum`.
    """

    code_generator_class = _CountingGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        for name, cost in _FILTER_COSTS.items():
            self.filters[name] = _costed(self.filters[name], cost)
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def count_block(self, n: int = 1) -> None:
        """Called by the compiled template at the start of every block."""
        current = _budget.get()
        if current is None:
            raise TemplateRuntimeError("rendered outside of a budget")
        current.blocks -= n
        if current.blocks < 0:
            raise SecurityError(f"runs through more than {MAX_BLOCKS} blocks")

    def concat(self, parts: Iterable[str]) -> str:
        """Joins what a macro, a block or `~` has put together."""
        pieces = list(parts)
        _charge(sum(map(len, pieces)))
        return "".join(pieces)

    def unsafe_undefined(self, obj: object, attribute: str) -> NoReturn:
        raise SecurityError(f"the sandbox forbids the attribute {attribute!r} of {type(obj).__name__}")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _CHECKS[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if isinstance(__obj, Macro):
            __self.count_block(MACRO_BLOCKS)
        method = getattr(__obj, "__wrapped__", __obj)
        if isinstance(method, BuiltinMethodType) and isinstance(method.__self__, str | bytes | int):
            _charge(_method_cost(method.__name__, method.__self__, [*args, *kwargs.values()]))
        return super().call(__context, __obj, *args, **kwargs)


# ------------------------------------------------------------------------------------------------ globals


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
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > MAX_JSON_INDENT:
        raise SecurityError(f"tojson: indent is above {MAX_JSON_INDENT}")
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    _charge(len(text))
    return text


# ------------------------------------------------------------------------------------------------ costs


def _size(value: object) -> int:
    """Length of what has one, the value of an integer, else 0."""
    if isinstance(value, int):
        return abs(value)
    return len(value) if isinstance(value, str | bytes | list | tuple | Mapping) else 0


def _text_size(value: object) -> int:
    """Characters of a value when it is written out; a guess for what is no string."""
    return len(value) if isinstance(value, str | bytes) else 24


def _check_add(left: object, right: object) -> None:
    if not isinstance(left, int | float):
        _charge(_size(left) + _size(right))


def _check_multiply(left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_INTEGER_BITS:
            raise SecurityError(f"computes an integer of more than {MAX_INTEGER_BITS} bits")
    elif not isinstance(left, float) and not isinstance(right, float):
        _charge(_size(left) * _size(right))


def _check_power(left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_INTEGER_BITS:
        raise SecurityError(f"computes an integer of more than {MAX_INTEGER_BITS} bits")


def _check_modulo(left: object, right: object) -> None:
    if isinstance(left, str):
        _charge(_format_cost(left, list(right) if isinstance(right, tuple) else [right]))


_CHECKS: dict[str, Callable[[object, object], None]] = {
    "+": _check_add,
    "*": _check_multiply,
    "**": _check_power,
    "%": _check_modulo,
}


def _format_cost(format: str, values: list[object]) -> int:
    """At most what a format string gives: its widths and everything put into it."""
    cost = len(format) + sum(map(_text_size, values))
    widths = re.findall(r"%(?:\([^)]*\))?[-+ #0]*(\d*)(?:\.(\d+))?", format)
    braces = re.findall(r"\d+", format[format.find("{") : format.rfind("}") + 1])
    cost += sum(int(digits[:19]) for digits in [*braces, *(d for pair in widths for d in pair)] if digits)
    if "*" in format or re.search(r"\{[^}]*\{", format):  # a width that is itself a value
        cost += sum(map(_size, values))
    return cost


def _method_cost(name: str, owner: str | bytes | int, args: list[Any]) -> int:
    """Characters that a method of a string or number may give beyond a copy of its owner."""
    if name in ("format", "format_map") and isinstance(owner, str):
        return _format_cost(owner, args)
    if name == "join" and args:
        return _join_cost(args[0], owner)
    if name == "replace" and len(args) >= 2:
        return _replace_cost(owner, args[0], args[1])
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"):
        return sum(map(_size, args)) * (max(1, _size(owner)) if name == "expandtabs" else 1)
    return 0


def _replace_cost(text: object, old: object, new: object) -> int:
    if not (isinstance(text, str) and isinstance(old, str) and isinstance(new, str)):
        return 0
    return text.count(old) * len(new)


def _product_cost(value: object, *args: object) -> int:
    return max(1, _size(value)) * sum(map(_size, args))


def _sum_cost(value: object, *args: object) -> int:
    return sum(map(_size, args))


def _join_cost(value: object, separator: object = "", *rest: object) -> int:
    if not isinstance(value, str | list | tuple | Mapping):
        return 0
    return sum(map(_text_size, value)) + len(value) * _text_size(separator)


def _filter_replace_cost(text: object, old: object = "", new: object = "", *rest: object) -> int:
    return _replace_cost(text, old, new)


def _filter_format_cost(text: object, *values: object) -> int:
    return _format_cost(text, list(values)) if isinstance(text, str) else 0


_FILTER_COSTS: dict[str, Callable[..., int]] = {
    "batch": _sum_cost,
    "center": _sum_cost,
    "format": _filter_format_cost,
    "indent": _product_cost,
    "join": _join_cost,
    "replace": _filter_replace_cost,
    "slice": _sum_cost,
    "wordwrap": _product_cost,
}


def _costed(filter: Callable[..., Any], cost: Callable[..., int]) -> Callable[..., Any]:
    """`filter`, charged before it runs. Filters that take the environment or context get it first."""
    first = 1 if hasattr(filter, "jinja_pass_arg") else 0

    @wraps(filter)
    def charged(*args: Any, **kwargs: Any) -> Any:
        front, value, rest = args[:first], args[first], args[first + 1 :]
        if isinstance(value, Iterator):
            value = list(value)
        _charge(cost(value, *rest, *kwargs.values()))
        return filter(*front, value, *rest, **kwargs)

    return charged
