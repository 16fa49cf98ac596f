"""Tool calls come out as names and typed arguments, however the reply is cut and whatever is wrong with it."""

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3_runtime.reply import Kind, Reply, ReplySplitter
from m3_runtime.template import ChatTemplate
from m3_runtime.tool_call import (
    MAX_DEPTH,
    NAMESPACE,
    BrokenCall,
    ToolCall,
    ToolCallParser,
    parse_tool_calls,
    read_tool_calls,
)

NS = NAMESPACE
SHARED = Path(os.environ.get("M3_SHARED", Path(__file__).resolve().parents[3] / "shared"))
OFFICIAL = SHARED / "oracle" / "chat_template.jinja"
TEMPLATE = ChatTemplate((Path(__file__).resolve().parents[1] / "chat_template.jinja").read_text(encoding="utf-8"))


def block(*calls: str) -> str:
    return f"{NS}<tool_call>\n" + "".join(f"{call}\n" for call in calls) + f"{NS}</tool_call>"


def invoke(name: str, inside: str = "") -> str:
    return f'{NS}<invoke name="{name}">{inside}{NS}</invoke>'


def tag(name: str, inside: str) -> str:
    return f"{NS}<{name}>{inside}{NS}</{name}>"


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def argument(text: str, schema: object) -> Any:
    """The value of a parameter with this markup inside and this schema."""
    (call,) = parse_tool_calls(block(invoke("f", tag("x", text))), [tool("f", x=schema)])
    return call.arguments["x"]


NESTED = invoke(
    "plan", tag("at", tag("lat", "1.5") + tag("name", "Köln")) + tag("days", tag("item", "1") + tag("item", "2"))
)

CASES: dict[str, tuple[str, list[ToolCall]]] = {
    "none": ("just text", []),
    "one": (block(invoke("f", tag("a", "1"))), [ToolCall("f", {"a": "1"})]),
    "no parameter": (block(invoke("f")), [ToolCall("f", {})]),
    "two": (
        block(invoke("f", tag("a", "1")), invoke("g", tag("b", " x\n"))),
        [ToolCall("f", {"a": "1"}), ToolCall("g", {"b": " x\n"})],
    ),
    "two blocks": ("a" + block(invoke("f")) + "b" + block(invoke("g")), [ToolCall("f", {}), ToolCall("g", {})]),
    "nested": (block(NESTED), [ToolCall("plan", {"at": {"lat": "1.5", "name": "Köln"}, "days": ["1", "2"]})]),
    "list of objects": (
        block(invoke("f", tag("l", tag("item", tag("a", "1")) + tag("item", tag("a", "2") + tag("b", ""))))),
        [ToolCall("f", {"l": [{"a": "1"}, {"a": "2", "b": ""}]})],
    ),
    "list of lists": (
        block(invoke("f", tag("l", tag("item", tag("item", "1")) + tag("item", tag("item", "2"))))),
        [ToolCall("f", {"l": [["1"], ["2"]]})],
    ),
    "brackets in a value": (
        block(invoke("f", tag("code", "if a<b and c>d:</code>"))),
        [ToolCall("f", {"code": "if a<b and c>d:</code>"})],
    ),
    "thinking tags in a value": (
        block(invoke("f", tag("a", "<mm:think>b</mm:think>"))),
        [ToolCall("f", {"a": "<mm:think>b</mm:think>"})],
    ),
    "text around": (
        "<mm:think>hm</mm:think>Look:" + block(invoke("f", tag("a", "1"))) + "done",
        [ToolCall("f", {"a": "1"})],
    ),
    "white space between tags": (
        block(invoke("f", "\n " + tag("o", "\n  " + tag("a", "1") + "\n ") + "\n")),
        [ToolCall("f", {"o": {"a": "1"}})],
    ),
    "inside the thinking": ("<mm:think>so" + block(invoke("f")), [ToolCall("f", {})]),
    "no block around": ("a" + invoke("f", tag("a", "1")) + "b", [ToolCall("f", {"a": "1"})]),
    "block not closed": (f"{NS}<tool_call>\n" + invoke("f"), [ToolCall("f", {})]),
    "a stray namespace token": (NS + block(NS + invoke("f")), [ToolCall("f", {})]),
    "empty block": (f"{NS}<tool_call>{NS}</tool_call>", []),
}

BROKEN = {
    "cut in the block": (f"{NS}<tool_call>", "it is not finished"),
    "cut in the call": (f'{NS}<tool_call>{NS}<invoke name="f', "it is not finished"),
    "cut in a value": (f'{NS}<tool_call>\n{NS}<invoke name="f">{NS}<city>Par', "it is not finished"),
    "cut in a tag": (f'{NS}<tool_call>\n{NS}<invoke name="f">{NS}<city>Paris{NS}</ci', "it is not finished"),
    "call not closed": (f'{NS}<tool_call>{NS}<invoke name="f">{tag("a", "1")}{NS}</tool_call>', "it is not finished"),
    "no name": (block(invoke("")), "the call has no name"),
    "no call": (block(tag("a", "1")), "<a> is no call, expected <invoke name=...>"),
    "other tag closed": (block(invoke("f", f"{NS}<a>1{NS}</b>")), "</b> closes <a>"),
    "closed without being open": (block(invoke("f", f"{NS}</a>")), "</a> closes <invoke>"),
    "text beside tags": (block(invoke("f", tag("a", "x" + tag("b", "1")))), "text between the tags in <a>"),
    "text beside parameters": (block(invoke("f", "x" + tag("a", "1"))), "text outside of the parameters"),
    "twice": (block(invoke("f", tag("a", "1") + tag("a", "2"))), "<a> stands there twice"),
    "call in a call": (block(invoke("f", tag("a", invoke("g")))), "a call begins inside it"),
    "namespace token in a value": (block(invoke("f", tag("a", f"x{NS}y"))), "no tag after a namespace token"),
    "deep": (block(invoke("f", f"{NS}<a>" * 5000 + f"{NS}</a>" * 5000)), f"tags nested deeper than {MAX_DEPTH}"),
}


def split(pieces: list[str]) -> tuple[Reply, list[ToolCall | BrokenCall]]:
    """The reply, and what the parser gave out while it streamed."""
    splitter, parser, reply = ReplySplitter(), ToolCallParser(), Reply()
    found: list[ToolCall | BrokenCall] = []
    for text in (*pieces, None):
        for piece in splitter.finish() if text is None else splitter.push(text):
            reply.add(piece)
            if piece.kind is Kind.TOOL:
                found += parser.push(piece.text)
    return reply, [*found, *parser.finish()]


def cuts(text: str, at: set[int]) -> list[str]:
    borders = [0, *sorted(i for i in at if 0 < i < len(text)), len(text)]
    return [text[a:b] for a, b in pairwise(borders)]


@pytest.mark.parametrize("name", CASES)
def test_calls_whole_letter_by_letter_and_at_every_cut(name: str):
    text, expected = CASES[name]
    for pieces in ([text], list(text), *(cuts(text, {at}) for at in range(1, len(text)))):
        reply, found = split(pieces)
        assert found == expected, pieces
        assert NS not in reply.text + reply.thinking and "invoke" not in reply.text
    assert reply.tool_calls().calls == parse_tool_calls(text) == expected
    assert reply.tool_calls().broken == []


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_call_is_told_apart_and_leaks_no_tag(name: str):
    text, why = BROKEN[name]
    for pieces in ([f"a{text}"], list(f"a{text}") if len(text) < 500 else [text[:99], text[99:]]):
        reply, found = split(pieces)
        assert [call.why for call in found if isinstance(call, BrokenCall)][:1] == [why]
        assert not [call for call in found if isinstance(call, ToolCall)]
        assert "<" not in reply.text
        assert all(NS not in call.text for call in reply.tool_calls().broken)


def test_a_whole_call_stays_one_beside_broken_ones():
    text = block(invoke("f", tag("a", f"x{NS}y")), invoke("g")) + f'{NS}<tool_call>{NS}<invoke name="h">{NS}<city>Pa'
    found = read_tool_calls(text)
    assert found.calls == [ToolCall("g", {})]
    assert [call.text for call in found.broken] == [
        '<tool_call>\n<invoke name="f"><a>xy</a></invoke>',
        '<tool_call><invoke name="h"><city>Pa',
    ]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("true", {"type": "string"}, "true"),
        ("null", {"type": "string"}, "null"),
        ("[1]", {"type": "string"}, "[1]"),
        ("5", {"type": "integer"}, 5),
        (" -5\n", {"type": "integer"}, -5),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("five", {"type": "integer"}, "five"),
        ("05", {"type": "integer"}, "05"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("5", {"type": "number"}, 5),
        ("5.50", {"type": "number"}, 5.5),
        ("1e3", {"type": "number"}, 1000.0),
        ("1e999", {"type": "number"}, "1e999"),
        ("NaN", {"type": "number"}, "NaN"),
        ("true", {"type": "number"}, "true"),
        ("true", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("yes", {"type": "boolean"}, "yes"),
        ("null", {"type": "null"}, None),
        ("null", {"type": ["string", "null"]}, None),
        ("5", {"type": ["string", "null"]}, "5"),
        ("", {"type": ["string", "null"]}, ""),
        ("5", {"type": ["string", "integer"]}, 5),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 5),
        ("5", {"oneOf": [{"type": "null"}, {"allOf": [{"type": "number"}]}]}, 5),
        ("5", {"enum": [1, 5]}, 5),
        ("5", {"enum": ["1", "5"]}, "5"),
        ("5", {"const": 5}, 5),
        ("", {"type": "array"}, []),
        ("", {"type": "object"}, {}),
        ("", {"type": "string"}, ""),
        ('[1, {"a": null}]', {"type": "array"}, [1, {"a": None}]),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("{'a': 1}", {"type": "object"}, "{'a': 1}"),
        ('["\\ud800"]', {"type": "array"}, '["\\ud800"]'),
        ("[" * 99999, {"type": "array"}, "[" * 99999),
        (tag("item", "1") + tag("item", "2"), {"type": "array", "items": {"type": "integer"}}, [1, 2]),
        (tag("item", "1") + tag("item", "2"), {"items": {"type": "integer"}}, [1, 2]),
        (tag("item", "1") + tag("item", "2"), {"type": "array", "prefixItems": [{"type": "integer"}]}, [1, "2"]),
        (tag("item", "1"), {"type": "object", "properties": {"item": {"type": "integer"}}}, {"item": 1}),
        (tag("item", "1"), {"type": ["array", "null"], "items": {"type": "number"}}, [1]),
        (tag("item", "1"), {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]}, [1]),
        (tag("a", "1"), {"type": "object", "properties": {"a": {"type": "integer"}}}, {"a": 1}),
        (tag("a", "1"), {"properties": {"a": {"type": "integer"}}}, {"a": 1}),
        (tag("a", "1"), {"type": "object", "additionalProperties": {"type": "integer"}}, {"a": 1}),
        (tag("a", "1"), {"type": "array"}, {"a": "1"}),
        ("5", {}, "5"),
        ("5", True, "5"),
        ("5", {"type": 7, "enum": "x", "anyOf": {"a": 1}, "$ref": 3}, "5"),
        ("5", {"$ref": "#"}, "5"),
        ("5", {"$ref": "http://elsewhere"}, "5"),
    ],
)  # fmt: skip
def test_values_are_typed_by_the_schema(text: str, schema: object, value: Any):
    found = argument(text, schema)
    assert (found, type(found)) == (value, type(value))
    json.dumps(found, allow_nan=False, ensure_ascii=False).encode()


def test_references_into_the_schema_of_the_tool():
    parameters = {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/node"}, "loop": {"$ref": "#/$defs/loop"}},
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"n": {"type": "integer"}, "next": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            },
            "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}]},
        },
    }
    inside = tag("tree", tag("n", "1") + tag("next", tag("item", tag("n", "2")))) + tag("loop", "3")
    for form in ({"function": {"name": "f", "parameters": parameters}}, {"name": "f", "parameters": parameters}):
        (call,) = parse_tool_calls(block(invoke("f", inside)), [form])
        assert call.arguments == {"tree": {"n": 1, "next": [{"n": 2}]}, "loop": "3"}


def test_tools_that_say_nothing_usable_type_nothing():
    for tools in (
        None,
        [],
        [{}],
        [{"function": None}],
        [{"function": {"name": "f"}}],
        [tool("g", a={"type": "integer"})],
    ):
        assert parse_tool_calls(block(invoke("f", tag("a", "1"))), tools) == [ToolCall("f", {"a": "1"})]


# ------------------------------------------------------------------------------------- what the template writes

TEXTS = st.text(st.characters(blacklist_categories=("Cs",)), max_size=8).filter(lambda text: NS not in text)
NAMES = st.sampled_from(["a", "b", "item", "über", "x y", "city-1"])


def schema_of(value: Any) -> dict[str, Any]:
    """A JSON schema that names the type of everything in a value."""
    if isinstance(value, dict):
        return {"type": "object", "properties": {name: schema_of(member) for name, member in value.items()}}
    if isinstance(value, list):
        return {"type": "array", "prefixItems": [schema_of(element) for element in value]}
    names = {str: "string", bool: "boolean", int: "integer", float: "number"}
    return {"type": names[type(value)]}


VALUES = st.recursive(
    TEXTS | st.integers() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(NAMES, VALUES, max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.lists(ARGUMENTS, min_size=1, max_size=3), TEXTS, st.sets(st.integers(0, 400), max_size=30))
def test_what_the_template_writes_comes_back(arguments: list[dict[str, Any]], text: str, at: set[int]):
    """Every value survives the way through the template and a reply that is cut anywhere."""
    calls = [{"function": {"name": f"f{i}", "arguments": given}} for i, given in enumerate(arguments)]
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text, "tool_calls": calls}]
    rendered = TEMPLATE.render(messages, add_generation_prompt=False)
    reply = rendered[rendered.index(f"{NS}<tool_call>") : rendered.rindex("[e~[")]
    tools = [tool(f"f{i}", **{k: schema_of(v) for k, v in given.items()}) for i, given in enumerate(arguments)]
    splitter, parser = ReplySplitter(), ToolCallParser(tools)
    found: list[ToolCall | BrokenCall] = []
    for piece in [piece for cut in cuts(reply, at) for piece in splitter.push(cut)] + list(splitter.finish()):
        assert piece.kind is Kind.TOOL
        found += parser.push(piece.text)
    assert [*found, *parser.finish()] == [ToolCall(f"f{i}", given) for i, given in enumerate(arguments)]


@pytest.mark.skipif(not OFFICIAL.exists(), reason=f"no {OFFICIAL}")
def test_what_the_official_template_writes_comes_back():
    arguments = {
        "a": "5",
        "n": 5,
        "x": [1.5, {"b": True, "c": [[], {}]}],
        "t": " <item>y</item>\n",
        "d": {"e": {"f": ""}},
    }
    call = {"function": {"name": "f", "arguments": arguments | {"none": None}}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "text", "tool_calls": [call, call]}]
    rendered = ChatTemplate(OFFICIAL.read_text(encoding="utf-8")).render(messages, add_generation_prompt=False)
    reply = rendered[rendered.rindex("]~b]ai\n") + 7 : rendered.rindex("[e~[")]
    found, pieces = Reply(), ReplySplitter()
    for piece in [piece for letter in reply for piece in pieces.push(letter)] + list(pieces.finish()):
        found.add(piece)
    assert found.text == "text" and found.content == reply.removeprefix("</mm:think>")
    tools = [tool("f", **{name: schema_of(value) for name, value in arguments.items()})]
    assert found.tool_calls(tools).calls == [ToolCall("f", arguments)] * 2


PARTS = [
    NS,
    "<tool_call>",
    "</tool_call>",
    '<invoke name="f">',
    "</invoke>",
    "<a>",
    "</a>",
    "<item>",
    "x",
    "\n",
    "<",
    ">",
]
PARTS += [f"{NS}{part}" for part in PARTS[1:]]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=25), st.sets(st.integers(0, 400), max_size=40))
def test_no_cut_changes_what_is_found_in_any_markup(parts: list[str], at: set[int]):
    text = "".join(parts)
    whole, found = split([text])
    assert split(cuts(text, at)) == (whole, found)
    assert NS not in whole.text
    known = whole.tool_calls()
    assert (known.calls, known.broken) == (
        [call for call in found if isinstance(call, ToolCall)],
        [call for call in found if isinstance(call, BrokenCall)],
    )
