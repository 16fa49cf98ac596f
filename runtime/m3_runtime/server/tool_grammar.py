"""The grammar of tool calls in the markup of MiniMax-M3, for requests that ask for a call."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from m3_runtime.errors import InputError
from m3_runtime.text import ChatTokenizer
from m3_runtime.tool_call import NAMESPACE

_MAX_DEPTH: Final = 8  #: of schemas in each other; below, any text
_TAG_NAME: Final = re.compile(r"[^<>\s\"'/][^<>\n]*")
_TERMINALS: Final = r"""
TEXT: /(.|\n)*/
INTEGER: /-?(0|[1-9][0-9]{0,17})/
NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,3})?/
BOOLEAN: "true" | "false"
"""
_SCALARS: Final = {"integer": "INTEGER", "number": "NUMBER", "boolean": "BOOLEAN", "string": "TEXT", "null": '"null"'}


def tool_grammar(tools: Sequence[Mapping[str, Any]], tokenizer: ChatTokenizer, *, parallel: bool) -> str:
    """Lark text of one call of these tools, or of several.

    tools: {"name", "parameters"} each. Parameters come in the order of the schema, required ones always. Strings,
    integers, numbers, booleans, enums, objects and lists are kept to their types; what the markup or this grammar
    cannot tell apart (references, alternatives of several types) is any text. Raises InputError for a name that
    is no tag, and for a tokenizer without the namespace token.
    """
    return _Grammar(tokenizer).of(tools, parallel)


class _Grammar:
    def __init__(self, tokenizer: ChatTokenizer) -> None:
        namespace = tokenizer.token_id(NAMESPACE)
        if namespace is None:
            raise InputError(
                f"tool_choice: the tokenizer of this file has no token {NAMESPACE}, calls cannot be forced"
            )
        self._namespace = f"<[{namespace}]>"
        self._tokenizer = tokenizer
        self._rules: list[str] = []

    def of(self, tools: Sequence[Mapping[str, Any]], parallel: bool) -> str:
        calls = [self._call(str(tool["name"]), tool.get("parameters") or {}) for tool in tools]
        # An alternative of one member is taken as it is: Lark has no empty brackets.
        some = f"({' | '.join(calls)}){'+' if parallel else ''}"
        start = f'start: {self._tag("<tool_call>")} "\\n" {some} {self._tag("</tool_call>")}'
        return "\n".join([start, *self._rules]) + _TERMINALS

    def _tag(self, text: str) -> str:
        """A tag behind a namespace token; one of the tokenizer's named tokens is that token."""
        id = self._tokenizer.token_id(text)
        return f"{self._namespace} {_quoted(text) if id is None else f'<[{id}]>'}"

    def _rule(self, body: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _call(self, name: str, parameters: Mapping[str, Any]) -> str:
        end = f'{self._namespace} "</invoke>\\n"'
        opening = _quoted(f'<invoke name="{name}">')
        return self._rule(f"{self._namespace} {opening} {self._members(parameters, 0)} {end}")

    def _members(self, schema: Mapping[str, Any], depth: int) -> str:
        properties = schema.get("properties")
        required = schema.get("required")
        parts = []
        for name, inner in properties.items() if isinstance(properties, Mapping) else ():
            is_required = isinstance(required, Sequence) and name in required
            parts.append(self._element(name, inner, depth) + ("" if is_required else "?"))
        return " ".join(parts)

    def _element(self, name: str, schema: object, depth: int) -> str:
        if not _TAG_NAME.fullmatch(name):
            raise InputError(f"tools: the parameter name {name[:80]!r} cannot be a tag, so the call cannot be forced")
        opening, closing = (f"{self._namespace} {_quoted(f'<{slash}{name}>')}" for slash in ("", "/"))
        return self._rule(f"{opening} {self._value(schema, depth + 1)} {closing}")

    def _value(self, schema: object, depth: int) -> str:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return "TEXT"
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, Sequence) and not isinstance(values, str) and values:
            if any(isinstance(value, Mapping | list) for value in values):
                return "TEXT"
            return f"({' | '.join(_quoted(_text(value)) for value in values)})"
        kind = schema.get("type")
        if kind == "object" and isinstance(schema.get("properties"), Mapping) and schema["properties"]:
            return self._members(schema, depth)
        if kind == "array" and isinstance(schema.get("items"), Mapping):
            return f"{self._element('item', schema['items'], depth)}*"
        return _SCALARS.get(kind, "TEXT") if isinstance(kind, str) else "TEXT"


def _text(value: object) -> str:
    """A scalar as it stands in the markup."""
    return value if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
