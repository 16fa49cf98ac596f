"""Stop strings, log probabilities and tool calls of a reply, however it is cut; grammars of calls."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3_runtime.errors import InputError
from m3_runtime.request import Token
from m3_runtime.server.constraint import GrammarCompiler
from m3_runtime.server.reading import ChatForm, ChatReading, TextReading
from m3_runtime.server.stop_strings import StopFilter
from m3_runtime.server.tool_grammar import tool_grammar
from m3_runtime.text import ChatTokenizer, TokenType
from m3_runtime.tool_call import NAMESPACE, parse_tool_calls

TEXTS = st.text("abc", max_size=12)


@settings(max_examples=50, deadline=None)
@given(st.lists(TEXTS, max_size=5), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_a_text_ends_before_the_stop_string_that_is_complete_first(pieces, stops):
    whole = "".join(pieces)
    ends = [(at + len(stop), at, stop) for stop in stops if (at := whole.find(stop)) >= 0]
    expected = whole[: min(ends)[1]] if ends else whole
    stop_filter = StopFilter(stops)
    given_out = ""
    for piece in pieces:
        given_out += stop_filter.push(piece)
        assert expected.startswith(given_out)  # nothing has to be taken back
    assert given_out + stop_filter.finish() == expected
    assert stop_filter.hit == (min(ends)[2] if ends else None)


@pytest.fixture(scope="module")
def tokenizer(nano_gguf):
    from m3_runtime.engine import GGUF

    with GGUF(nano_gguf) as file:
        yield ChatTokenizer(file.metadata)


@pytest.fixture(scope="module")
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer) + 5)


def read(reading, ids):
    updates = []
    for id in ids:
        updates.append(reading.push(Token(id, -0.5)))
        if reading.stopped:
            break
    return [*updates, reading.finish()]


def test_characters_of_several_tokens_and_their_log_probabilities(tokenizer):
    text = "na\u00efve \u4e2d\u6587 \U0001f600!"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text.split())
    updates = read(TextReading(tokenizer, []), ids)
    assert "".join(update.text for update in updates) == text
    assert all("\ufffd" not in update.text for update in updates)
    assert [token.id for update in updates for token in update.logprobs] == ids
    cut = read(TextReading(tokenizer, ["\u6587"]), ids)
    assert "".join(update.text for update in cut) == "na\u00efve \u4e2d"


def test_a_chat_reply_of_all_parts(tokenizer):
    calls = "".join(
        f'{NAMESPACE}<invoke name="f">{NAMESPACE}<n>{n}{NAMESPACE}</n>{NAMESPACE}</invoke>\n' for n in (1, 2)
    )
    reply = f"<mm:think>Let me see.</mm:think>Yes.{NAMESPACE}<tool_call>\n{calls}{NAMESPACE}</tool_call>"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}}]
    ids = tokenizer.encode(reply)
    reading = ChatReading(tokenizer, ChatForm(tools=tools))
    updates = read(reading, ids)
    assert reading.reply.thinking == "Let me see." and reading.reply.text == "Yes."
    assert [call.arguments for call in reading.calls] == [{"n": 1}, {"n": 2}]
    assert sum(len(update.calls) for update in updates) == 2
    logprobs = [token.id for update in updates for token in update.logprobs]
    assert tokenizer.decode(logprobs) == "Yes."
    assert reading.thinking_tokens == len(tokenizer.encode("<mm:think>Let me see."))
    single = ChatReading(tokenizer, ChatForm(tools=tools, single_call=True))
    read(single, ids)
    assert single.stopped and len(single.calls) == 1 and not single.broken
    without = ChatReading(tokenizer, ChatForm(with_tools=False))
    read(without, ids)
    assert without.reply.text == "Yes." and not without.calls
    cut = ChatReading(tokenizer, ChatForm(tools=tools))
    read(cut, ids[:-12])
    assert len(cut.calls) == 1 and len(cut.broken) == 1 and "minimax" not in cut.broken[0].text


def test_a_closing_tag_without_an_opening_one(tokenizer):
    reading = ChatReading(tokenizer, ChatForm())
    updates = read(reading, tokenizer.encode("Hm.</mm:think>Yes."))
    assert [update.reclassified for update in updates if update.reclassified] == ["Hm."]
    assert (reading.reply.thinking, reading.reply.text) == ("Hm.", "Yes.")


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "kind": {"enum": ["short", "long", 3, None]},
        "when": {"type": "object", "properties": {"hour": {"type": "number"}}, "required": ["hour"]},
        "tags": {"type": "array", "items": {"type": "boolean"}},
        "free": {"anyOf": [{"type": "string"}, {"type": "object"}]},
    },
    "required": ["city", "days", "kind", "when", "tags"],
}


def markup(body: str, name: str = "f") -> str:
    text = f'@<tool_call>\n@<invoke name="{name}">{body}@</invoke>\n@</tool_call>'
    return text.replace("@", NAMESPACE)


def accepts(compiler: GrammarCompiler, grammar: str, text: str) -> bool:
    """Whether a reply may be this text, the end token behind it."""
    constraint = compiler.lark(grammar, prompt="</mm:think>", what="test")
    for id in [*compiler.tokenizer.encode(text), min(compiler.tokenizer.end_ids)]:
        if not constraint.allowed()[id]:
            return False
        if id not in compiler.tokenizer.end_ids:
            constraint.accept(id)
    return True


def test_the_grammar_of_calls(tokenizer, compiler):
    tools = [{"name": "f", "parameters": SCHEMA}, {"name": "g", "parameters": None}]
    grammar = tool_grammar(tools, tokenizer, parallel=True)
    good = (
        "@<city>New\nYork@</city>@<days>-12@</days>@<kind>long@</kind>@<when>@<hour>1.5@</hour>@</when>"
        "@<tags>@<item>true@</item>@<item>false@</item>@</tags>"
    )
    assert accepts(compiler, grammar, markup(good))
    (call,) = parse_tool_calls(markup(good), [{"name": "f", "parameters": SCHEMA}])
    assert call.arguments == {
        "city": "New\nYork",
        "days": -12,
        "kind": "long",
        "when": {"hour": 1.5},
        "tags": [True, False],
    }
    assert accepts(compiler, grammar, markup(good.replace("long", "null")))
    assert accepts(compiler, grammar, markup(good + "@<free>{}@</free>"))
    assert accepts(compiler, grammar, markup("", "g"))
    assert accepts(compiler, grammar, markup('@</invoke>\n@<invoke name="g">', "g"))
    one = tool_grammar(tools, tokenizer, parallel=False)
    assert accepts(compiler, one, markup(good)) and not accepts(
        compiler, one, markup('@</invoke>\n@<invoke name="g">', "g")
    )
    for bad in (
        good.replace("-12", "many"),
        good.replace("long", "middle"),
        good.replace("true", "yes"),
        good.replace("@<days>-12@</days>", ""),
        good + "@<other>1@</other>",
    ):
        assert not accepts(compiler, grammar, markup(bad))
    assert not accepts(compiler, grammar, markup("", "h")) and not accepts(compiler, grammar, "No.")
    with pytest.raises(InputError, match="'a>b' cannot be a tag"):
        tool_grammar([{"name": "f", "parameters": {"properties": {"a>b": {}}}}], tokenizer, parallel=True)


def test_thinking_before_a_form(tokenizer, compiler):
    think, unthink = tokenizer.token_id("<mm:think>"), tokenizer.token_id("</mm:think>")
    (end,) = tokenizer.end_ids

    def allowed(constraint) -> set[int]:
        return set(np.flatnonzero(constraint.allowed()).tolist())

    constraint = compiler.json({"const": 1}, prompt="]~b]ai\n")
    one = tokenizer.encode("1")
    assert allowed(constraint) == {think, unthink, *one}
    constraint.accept(think)
    assert end not in allowed(constraint) and len(allowed(constraint)) == len(tokenizer) + 5 - 1
    constraint.accept(one[0])
    assert not constraint.in_grammar
    constraint.accept(unthink)
    assert allowed(constraint) == set(one)
    constraint.accept(one[0])
    assert constraint.in_grammar and allowed(constraint) == {end}
    assert allowed(compiler.json({"const": 1}, prompt="]~b]ai\n<mm:think>")) >= {unthink, one[0]}
    assert allowed(compiler.json({"const": 1}, prompt="]~b]ai\n</mm:think>")) == set(one)


JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**9), 10**9),
        st.text(st.characters(codec="utf-8"), max_size=12),
        st.sampled_from(
            ["</mm:think>", "]<]minimax[>[<tool_call>", "[e~[", 'a"\\\n\t', "\u00e9\U0001f600", "[PAD4093]"]
        ),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(value=JSON, seed=st.integers(0, 2**32))
def test_a_form_of_one_value_gives_this_value(tokenizer, compiler, value, seed):
    """Whichever of the allowed tokens are taken: bytes of characters one by one, and never a named token."""
    constraint = compiler.json({"const": value}, prompt="</mm:think>")
    random = np.random.default_rng(seed)
    ids = []
    while True:
        id = int(random.choice(np.flatnonzero(constraint.allowed())))
        if id in tokenizer.end_ids:
            break
        ids.append(id)
        constraint.accept(id)
    assert all(tokenizer.token_type(id) is TokenType.NORMAL for id in ids)
    assert json.loads(tokenizer.decode(ids)) == value
