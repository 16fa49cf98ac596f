"""A reply is split into thinking, text and tool calls however its stream is cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m3_runtime.reply import NAMESPACE, Kind, Piece, Reply, ReplySplitter, opens_thinking

NS = NAMESPACE
CALL = f'{NS}<tool_call>\n{NS}<invoke name="f">{NS}<a>1{NS}</a>{NS}</invoke>\n{NS}</tool_call>'
BARE_CALL = f'{NS}<invoke name="f">{NS}</invoke>'
TWO_CALLS = (
    f'{NS}<tool_call>\n{NS}<invoke name="f">{NS}<a>1{NS}</a>{NS}</invoke>\n'
    f'{NS}<invoke name="g">{NS}<b>{NS}<item>{NS}<c>x{NS}</c>{NS}</item>{NS}</b>{NS}</invoke>\n{NS}</tool_call>'
)

# reply, starts as thinking, then: text, thinking, tools
CASES = {
    "both tags": ("<mm:think>why</mm:think>because", False, "because", "why", ""),
    "prompt opened it": ("why</mm:think>because", True, "because", "why", ""),
    "prompt opened it and so does the model": ("<mm:think>why</mm:think>because", True, "because", "why", ""),
    "bare closing tag first": ("</mm:think>because", False, "because", "", ""),
    "closing tag only": ("why</mm:think>because", False, "because", "why", ""),
    "no tags": ("because", False, "because", "", ""),
    "never closed": ("<mm:think>why", False, "", "why", ""),
    "never closed, opened by the prompt": ("why", True, "", "why", ""),
    "empty thinking": ("<mm:think></mm:think>because", False, "because", "", ""),
    "closed twice": ("<mm:think>why</mm:think>be</mm:think>cause", False, "because", "why", ""),
    "thinks twice": ("<mm:think>a</mm:think>b<mm:think>c</mm:think>d", False, "bd", "ac", ""),
    "newlines are kept": ("<mm:think>\nwhy\n</mm:think>\n\nbecause\n", False, "\n\nbecause\n", "\nwhy\n", ""),
    "tool call": (f"text{CALL}", False, "text", "", CALL),
    "two calls, nested": (f"<mm:think>hm</mm:think>{TWO_CALLS}", False, "", "hm", TWO_CALLS),
    "text after a call": (f"a{CALL}b", False, "ab", "", CALL),
    "call inside the thinking": (f"<mm:think>hm{CALL}after", False, "after", "hm", CALL),
    "call inside the thinking, closed late": (f"<mm:think>hm{CALL}af</mm:think>ter", False, "after", "hm", CALL),
    "closing tag after a call": (f"{CALL}</mm:think>answer", False, "answer", "", CALL),
    "call never closed": (f"a{NS}<tool_call>{NS}<invoke", False, "a", "", f"{NS}<tool_call>{NS}<invoke"),
    "namespace alone": (f"a{NS}b", False, "ab", "", NS),
    "namespace at the end": (f"a{NS}", False, "a", "", NS),
    "namespace twice": (f"a{NS}{CALL}b", False, "ab", "", NS + CALL),
    "cut in the opening tag": (f"a{NS}<tool", False, "a", "", f"{NS}<tool"),
    "no opening tag around it": (f"a{BARE_CALL}b", False, "ab", "", BARE_CALL),
    "closing tag of a call alone": (f"a{NS}</tool_call>b", False, "ab", "", f"{NS}</tool_call>"),
    "namespace alone in the thinking": (f"<mm:think>a{NS}b</mm:think>c", False, "c", "ab", NS),
    "think tags inside a call": (
        f"{NS}<tool_call><mm:think>x</mm:think>{NS}</tool_call>",
        False,
        "",
        "",
        f"{NS}<tool_call><mm:think>x</mm:think>{NS}</tool_call>",
    ),
    "nearly tags": ("a <mm:think b </mm:thin> ]<]mini <", False, "a <mm:think b </mm:thin> ]<]mini <", "", ""),
    "tag after a false start": ("<mm:<mm:think>a</mm:</mm:think>b", False, "<mm:b", "a</mm:", ""),
    "empty": ("", False, "", "", ""),
}  # fmt: skip


def split(pieces: list[str], thinking: bool) -> tuple[Reply, list[Piece]]:
    splitter, reply, given_out = ReplySplitter(thinking=thinking), Reply(), []
    for text in pieces:
        given_out += splitter.push(text)
    given_out += splitter.finish()
    for piece in given_out:
        reply.add(piece)
    return reply, given_out


def cuts(text: str, at: set[int]) -> list[str]:
    borders = [0, *sorted(at), len(text)]
    return [text[a:b] for a, b in pairwise(borders)]


@pytest.mark.parametrize("name", CASES)
def test_whole_letter_by_letter_and_at_every_cut(name: str):
    text, thinking, *expected = CASES[name]
    ways = [[text], list(text), *(cuts(text, {at}) for at in range(1, len(text)))]
    for pieces in ways:
        reply, _ = split(pieces, thinking)
        assert [reply.text, reply.thinking, reply.tools] == expected, pieces
        assert NS not in reply.text


@given(st.sampled_from(sorted(CASES)), st.sets(st.integers(0, 200)))
def test_any_cuts(name: str, at: set[int]):
    text, thinking, *expected = CASES[name]
    reply, _ = split(cuts(text, {i for i in at if i < len(text)}), thinking)
    assert [reply.text, reply.thinking, reply.tools] == expected


PARTS = ["<mm:think>", "</mm:think>", NS, "<tool_call>", "</tool_call>", "a", "<", "]", "/mm:", "\n"]


@given(st.lists(st.sampled_from(PARTS), max_size=12), st.booleans(), st.sets(st.integers(0, 120)))
def test_no_cut_changes_the_result_and_no_tag_leaks(parts: list[str], thinking: bool, at: set[int]):
    text = "".join(parts)
    whole, _ = split([text], thinking)
    reply, _ = split(cuts(text, {i for i in at if i < len(text)}), thinking)
    assert reply == whole
    shown = whole.text + whole.thinking
    if text.count("<mm:think>") + text.count("</mm:think>") + text.count(NS) == sum(
        parts.count(tag) for tag in ("<mm:think>", "</mm:think>", NS)
    ):  # the tags are whole parts, none came about by joining "<" and others
        for tag in ("<mm:think>", "</mm:think>"):
            assert shown.count(tag) == 0
        assert NS not in shown


def test_text_comes_as_soon_as_it_is_certain():
    splitter = ReplySplitter()
    assert list(splitter.push("Hello <")) == [Piece(Kind.TEXT, "Hello ")]
    assert list(splitter.push("mm:th")) == []
    assert list(splitter.push("umb>")) == [Piece(Kind.TEXT, "<mm:thumb>")]
    assert list(splitter.push("<mm:think>why")) == [Piece(Kind.THINKING, "why")]


def test_thinking_without_an_opening_tag_is_announced_once():
    _, pieces = split(["pl", "an</mm:think>", "answer</mm:think>!"], False)
    assert [piece.kind for piece in pieces].count(Kind.RECLASSIFY) == 1
    assert pieces[:3] == [Piece(Kind.TEXT, "pl"), Piece(Kind.TEXT, "an"), Piece(Kind.RECLASSIFY, "")]


def test_the_content_for_the_history_keeps_text_and_calls_in_order():
    reply, _ = split([f"<mm:think>x</mm:think>a{CALL}b"], False)
    assert reply.content == f"a{CALL}b"


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [("]~b]ai\n<mm:think>", True), ("]~b]ai\n<mm:think>\n", True), ("]~b]ai\n</mm:think>", False), ("]~b]ai\n", False)],
)
def test_whether_a_prompt_opens_the_thinking(prompt: str, opened: bool):
    assert opens_thinking(prompt) is opened
