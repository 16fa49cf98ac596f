"""Tool calls that a model wrote, as names and arguments.

The markup of MiniMax-M3, in which the namespace token NS stands before every tag:

    NS<tool_call>
    NS<invoke name="search">NS<query>cats NS</query>NS<tags>NS<item>aNS</item>NS<item>bNS</item>NS</tags>NS</invoke>
    NS</tool_call>

One tag per parameter, nested objects as tags, lists as <item>. The markup has no types: they come from the tool's JSON
schema, and text that the schema does not speak of is a string.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

NAMESPACE: Final = "]<]minimax[>["  #: stands before every tag of a tool call
INVOKE_END: Final = NAMESPACE + "</invoke>"
TOOL_END: Final = NAMESPACE + "</tool_call>"

MAX_DEPTH: Final = 64  #: of tags inside each other

_INVOKE: Final = re.compile(r"""invoke\s+name\s*=\s*["']?([^"'<>]*)["']?\s*""")
_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,299})(?:\.0+)?")
_UNFINISHED: Final = "it is not finished"
_MAX_CHOICES: Final = 200  # parts of one schema that are looked at
_LIST_TAG: Final = "item"

Schema: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """A call that is whole."""

    name: str  #: as the model wrote it, whether there is such a tool or not
    arguments: dict[str, Any]  #: JSON values


@dataclass(frozen=True)
class BrokenCall:
    """A call that ended early or whose tags do not fit together."""

    text: str  #: what the model wrote, without namespace tokens
    why: str


@dataclass
class ToolCalls:
    """What the markup of a reply holds, each in the order in which it came."""

    calls: list[ToolCall] = field(default_factory=list)
    broken: list[BrokenCall] = field(default_factory=list)

    def add(self, call: ToolCall | BrokenCall) -> None:
        if isinstance(call, ToolCall):
            self.calls.append(call)
        else:
            self.broken.append(call)


def parse_tool_calls(text: str, tools: Sequence[Schema] | None = None) -> list[ToolCall]:
    """The calls of a reply that are whole; `read_tool_calls` tells of the others too.

    text: `Reply.tools`, or a whole reply. tools: as for `ToolCallParser`.
    """
    return read_tool_calls(text, tools).calls


def read_tool_calls(text: str, tools: Sequence[Schema] | None = None) -> ToolCalls:
    """All that `ToolCallParser` finds in a text."""
    parser, found = ToolCallParser(tools), ToolCalls()
    for call in (*parser.push(text), *parser.finish()):
        found.add(call)
    return found


class ToolCallParser:
    """Reads the markup of tool calls while it streams. How it is cut makes no difference.

    A call is given out when its `</invoke>` has come, also without a `<tool_call>` around it and before
    `</tool_call>`. Text outside of calls is passed over. A value is typed by the schema of its parameter: "5" stays a
    string where the schema says string. Text that is not of the schema's type stays a string, for whoever runs the tool
    to refuse; where the schema allows several types, null, boolean, integer and number come before array, object, and
    string. JSON is read too where an array or object is expected. Without a schema lists and objects come from the
    tags, and all else is a string.
    """

    def __init__(self, tools: Sequence[Schema] | None = None) -> None:
        """tools: as the chat template takes them, {"type": "function", "function": {"name", "parameters"}}, or what
        stands under "function". Nothing in them is an error; a schema that says nothing usable counts as none."""
        self._schemas: dict[str, Schema] = {}
        for tool in tools or ():
            function = tool.get("function", tool)
            if isinstance(function, Mapping):
                self._schemas[str(function.get("name"))] = _as_schema(function.get("parameters"))
        self._pending = ""

    def push(self, text: str) -> Iterator[ToolCall | BrokenCall]:
        """Calls that have ended in `text`."""
        self._pending += text
        while end := self._first_end():
            part, self._pending = self._pending[:end], self._pending[end:]
            yield from self._part(part)

    def finish(self) -> Iterator[BrokenCall]:
        """What is left when the reply ends."""
        part, self._pending = self._pending, ""
        for call in self._part(part):
            assert isinstance(call, BrokenCall)
            yield call

    def _first_end(self) -> int:
        """Behind the first closing tag of a call or of a block of calls; 0 if there is none."""
        places = [(at, tag) for tag in (INVOKE_END, TOOL_END) if (at := self._pending.find(tag)) >= 0]
        return min(at + len(tag) for at, tag in places) if places else 0

    def _part(self, part: str) -> Iterator[ToolCall | BrokenCall]:
        """At most one call: what lies between two ends."""
        start = part.find(NAMESPACE)
        if start < 0:
            return
        try:
            call = self._call(part[start:])
        except _MarkupError as error:
            yield BrokenCall(_without_namespace(part[start:]), str(error))
            return
        if call is not None:
            yield call

    def _call(self, part: str) -> ToolCall | None:
        pieces = part.split(NAMESPACE)[1:]
        block = ""
        while pieces and (not pieces[0].startswith("<") or pieces[0].startswith(("<tool_call>", "</tool_call>"))):
            block = pieces.pop(0) or block
        if not pieces:
            if block.startswith("<tool_call>"):
                raise _MarkupError(_UNFINISHED)
            return None
        opening, text = _tag(pieces[0])
        match = _INVOKE.fullmatch(opening)
        if match is None:
            raise _MarkupError(f"<{_shown(opening)}> is no call, expected <invoke name=...>")
        name = match[1].strip()
        if not name:
            raise _MarkupError("the call has no name")
        root = _Element("invoke", [text])
        _fill(root, [_tag(piece) for piece in pieces[1:] if piece])
        if any(piece.strip() for piece in root.texts):
            raise _MarkupError("text outside of the parameters")
        schema = self._schemas.get(name, {})
        return ToolCall(name, _object(root, _Typing(schema), schema))


class _MarkupError(Exception):
    """Tags that do not fit together; the text says how."""


def _without_namespace(part: str) -> str:
    """The markup for people to read; the reply may have ended inside a namespace token."""
    cut = max((n for n in range(2, len(NAMESPACE)) if part.endswith(NAMESPACE[:n])), default=0)
    return part[: len(part) - cut].replace(NAMESPACE, "").strip()


@dataclass
class _Element:
    name: str
    texts: list[str]  #: in front of, between and behind the children
    children: "list[_Element]" = field(default_factory=list)


def _shown(tag: str) -> str:
    return tag if len(tag) <= 40 else f"{tag[:40]}..."


def _tag(piece: str) -> tuple[str, str]:
    """What follows a namespace token: a tag without its brackets, and the text behind it."""
    if not piece.startswith("<"):
        raise _MarkupError("no tag after a namespace token")
    tag, bracket, text = piece[1:].partition(">")
    if not bracket:
        raise _MarkupError(_UNFINISHED)
    return tag, text


def _fill(root: _Element, tags: Sequence[tuple[str, str]]) -> None:
    """Puts the elements that the tags make into `root`, whose closing tag must be the last one."""
    open_elements = [root]
    for tag, text in tags:
        if not open_elements:
            raise _MarkupError(f"<{_shown(tag)}> after the end of the call")
        inner = open_elements[-1]
        if tag.startswith("/"):
            if tag[1:] != inner.name:
                if tag[1:] == "tool_call":
                    raise _MarkupError(_UNFINISHED)
                raise _MarkupError(f"<{_shown(tag)}> closes <{_shown(inner.name)}>")
            open_elements.pop()
            if open_elements:
                open_elements[-1].texts.append(text)
        elif _INVOKE.fullmatch(tag):
            raise _MarkupError("a call begins inside it")
        elif len(open_elements) > MAX_DEPTH:
            raise _MarkupError(f"tags nested deeper than {MAX_DEPTH}")
        else:
            element = _Element(tag, [text])
            inner.children.append(element)
            open_elements.append(element)
    if open_elements:
        raise _MarkupError(_UNFINISHED)


# --------------------------------------------------------------------------------------------------------- values


def _as_schema(schema: object) -> Schema:
    return schema if isinstance(schema, Mapping) else {}


def _value(element: _Element, typing: "_Typing", schema: object) -> Any:
    if not element.children:
        return _text_value(element.texts[0], typing.choices(schema))
    if any(text.strip() for text in element.texts):
        raise _MarkupError(f"text between the tags in <{_shown(element.name)}>")
    choices = typing.choices(schema)
    is_list = all(child.name == _LIST_TAG for child in element.children)
    for choice in choices:
        if "array" in choice.types and is_list:
            items = [typing.item(choice.schema, i) for i in range(len(element.children))]
            return [_value(child, typing, item) for child, item in zip(element.children, items, strict=True)]
        if "object" in choice.types:
            return _object(element, typing, choice.schema)
    if is_list:
        return [_value(child, typing, {}) for child in element.children]
    return _object(element, typing, {})


def _object(element: _Element, typing: "_Typing", schema: object) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for child in element.children:
        if child.name in value:
            raise _MarkupError(f"<{_shown(child.name)}> stands there twice")
        value[child.name] = _value(child, typing, typing.member(schema, child.name))
    return value


@dataclass(frozen=True)
class _Choice:
    """One of the alternatives of a schema."""

    types: tuple[str, ...]
    schema: Schema


@dataclass(frozen=True)
class _Typing:
    """Schemas inside the schema of a tool's parameters."""

    root: Schema

    def choices(self, schema: object) -> list[_Choice]:
        """What a value may be, references followed and alternatives listed."""
        found: list[_Choice] = []
        waiting, n_seen = [schema], 0
        while waiting and n_seen < _MAX_CHOICES:  # references may go round in circles
            part, n_seen = waiting.pop(0), n_seen + 1
            if not isinstance(part, Mapping):
                continue
            if isinstance(reference := part.get("$ref"), str):
                waiting.append(self._referenced(reference))
            if types := _types(part):
                found.append(_Choice(types, part))
            for key in ("anyOf", "oneOf", "allOf"):
                waiting += _parts(part.get(key))[:_MAX_CHOICES]
        return found

    def member(self, schema: object, name: str) -> object:
        """The schema of a member of an object."""
        for choice in self.choices(schema) or [_Choice((), _as_schema(schema))]:
            members = choice.schema.get("properties")
            if isinstance(members, Mapping) and name in members:
                return members[name]
        return _as_schema(_as_schema(schema).get("additionalProperties"))

    def item(self, schema: Schema, i: int) -> object:
        """The schema of element i of an array."""
        first = _parts(schema.get("prefixItems"))
        return first[i] if i < len(first) else schema.get("items")

    def _referenced(self, reference: str) -> object:
        here: object = self.root
        if reference != "#" and not reference.startswith("#/"):
            return None
        for step in reference.split("/")[1:]:
            here = here.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(here, Mapping) else None
        return here


def _parts(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else ()


def _types(schema: Schema) -> tuple[str, ...]:
    given = schema.get("type")
    if isinstance(given, str):
        return (given,)
    if given:
        return tuple(name for name in _parts(given) if isinstance(name, str))
    values = [schema["const"]] if "const" in schema else _parts(schema.get("enum"))
    if values:
        return tuple({_json_type(value): None for value in values})
    if "properties" in schema:
        return ("object",)
    return ("array",) if "items" in schema or "prefixItems" in schema else ()


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"), (Mapping, "object")):
        if isinstance(value, kind):
            return name
    return "array"


_NOTHING: Final = object()


def _null(text: str) -> object:
    return None if text.strip().lower() in ("null", "none") else _NOTHING


def _boolean(text: str) -> object:
    return {"true": True, "false": False}.get(text.strip().lower(), _NOTHING)


def _integer(text: str) -> object:
    return int(text.strip().partition(".")[0]) if _INTEGER.fullmatch(text.strip()) else _NOTHING


def _number(text: str) -> object:
    if (whole := _integer(text)) is not _NOTHING and "." not in text:
        return whole
    value = _json(text)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else _NOTHING


def _array(text: str) -> object:
    value = _json(text) if text.strip() else []
    return value if isinstance(value, list) else _NOTHING


def _object_text(text: str) -> object:
    value = _json(text) if text.strip() else {}
    return value if isinstance(value, dict) else _NOTHING


# Best first where a schema allows several.
_READERS: Final[dict[str, Callable[[str], object]]] = {
    "null": _null,
    "boolean": _boolean,
    "integer": _integer,
    "number": _number,
    "array": _array,
    "object": _object_text,
}


def _text_value(text: str, choices: Sequence[_Choice]) -> Any:
    allowed = {name for choice in choices for name in choice.types}
    if not text and "string" in allowed:
        return text
    for name, read in _READERS.items():
        if name in allowed and (value := read(text)) is not _NOTHING:
            return value
    return text


def _json(text: str) -> object:
    """A JSON value that can be written again as JSON in UTF-8, or _NOTHING."""
    try:
        value: object = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (ValueError, RecursionError):
        return _NOTHING
    return _NOTHING if isinstance(value, float) and not math.isfinite(value) else value


def _refuse_constant(name: str) -> None:
    raise ValueError(name)
