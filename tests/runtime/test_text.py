"""The tokenizer of a GGUF file equals the one of the checkpoint, and streams of ids decode like whole ones."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from fake_model import tokenizer_metadata
from m3_runtime.errors import InputError
from m3_runtime.text import ChatTokenizer, TokenStream, TokenType, byte_alphabet
from make_checkpoint import SPECIAL_TOKENS, CheckpointSpec, make_tokenizer

SPEC = CheckpointSpec()
SOURCE = make_tokenizer(SPEC)
BOTH = pytest.mark.parametrize("keep_json", [False, True], ids=["merges", "json"])

TEXTS = [
    "",
    " ",
    "  ",
    "a",
    " a",
    "a ",
    "   leading and trailing   ",
    "two  spaces   three    four",
    "line\nline",
    "\n",
    "\n\n\n\n",
    "a\n\n\nb",
    "\r\n\r\n",
    "a\r\nb\rc",
    "\t",
    "\t\tif x:\n\t\t\treturn y\n",
    " \t \n \t x",
    *("1234567"[:n] for n in range(1, 8)),
    "3.14159 1,000,000 2026-11-30 0x1F",
    "١٢٣٤ ४५६ ½ Ⅷ",
    "中文字符测试\uff0c没有空格。",
    "日本語のテキスト、カタカナ。",
    "한국어 텍스트 테스트",
    "ภาษาไทยไม่มีช่องว่าง",
    "النص العربي من اليمين",
    "שלום עולם",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪 ❤️ 🏳️‍🌈",
    "e\u0301 o\u0308 n\u0303 a\u0300\u0301\u0302",
    "\u0301 starts with a combining mark",
    "don't I'll we've you're it's I'm he'd",
    "DON'T I'LL WE'VE YOU'RE IT'S I'M HE'D",
    "Don'T i'Ll",
    "'s alone 'T 'rest",
    "camelCase PascalCase SCREAMING_SNAKE kebab-case",
    'def f(x: int) -> str:\n    return f"{x!r}"  # comment\n',
    "<div class='x'>&amp;</div>\n",
    "https://example.org/a/b?c=d&e=f#g",
    "path//to///file\n/\n//\n",
    "!!!???...///\n///",
    "a" * 5000,
    "A" * 3000 + "b",
    "中" * 2000,
    " " * 3000,
    "\n" * 3000,
    "no\u00a0break\u2003em\u3000ideographic\u200bzero\u2028line",
    "nul\x00in the middle",
    "\x00",
    "\x01\x02\x1b[2m\x7f\x80\x9f",
    "\ufeffwith a byte order mark",
    "replacement \ufffd\ufffd",
    "\U0010ffff\U0001f600\ue000",
    "Ġ is a letter, Ċ too, ĉ",
    "[PAD1023] [PAD1021]",
    "\u0130stanbul \u017fharp \u1e9e",
    *SPECIAL_TOKENS,
    "".join(SPECIAL_TOKENS),
    *(f"text {token} text{token}text\n{token}\n" for token in SPECIAL_TOKENS),
    "]~!b[]~b]system\nYou are.[e~[\n]~b]user\nhi[e~[\n]~b]ai\n<mm:think>hm</mm:think>yes[e~[\n",
    "[e~ [e~[[e~[ ]~b ]~b]] <mm:think <mm:think> </mm:think>>",
    ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[<a>1]<]minimax[>[</a>',
    "]<]mini]<]minimax[>[max[>[",
]


def glued_tokenizer() -> Tokenizer:
    """A source whose merges reach across words, so that every border of the pre-tokenizer shows in the ids."""
    source = Tokenizer.from_str(SOURCE.to_str())
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator([text for text in TEXTS if len(text) < 500] * 2, trainer)
    trained.pre_tokenizer = source.pre_tokenizer
    trained.add_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return trained


def tokenizer(keep_json: bool, **changes: Any) -> ChatTokenizer:
    return ChatTokenizer(tokenizer_metadata(SOURCE, SPEC.vocab, keep_json=keep_json) | changes)


@pytest.fixture(scope="module", params=[False, True], ids=["merges", "json"])
def rebuilt(request: pytest.FixtureRequest) -> ChatTokenizer:
    return tokenizer(request.param)


def ids_of(source: Tokenizer, text: str) -> list[int]:
    return list(source.encode(text, add_special_tokens=False).ids)


def test_equals_the_source_on_a_table(rebuilt: ChatTokenizer):
    for text in TEXTS:
        assert rebuilt.encode(text) == ids_of(SOURCE, text), text[:80]


@BOTH
def test_the_borders_of_words_are_those_of_the_source(keep_json: bool):
    source = glued_tokenizer()
    rebuilt = ChatTokenizer(tokenizer_metadata(source, source.get_vocab_size() + 3, keep_json=keep_json))
    for text in [*TEXTS, "".join(TEXTS)]:
        assert rebuilt.encode(text) == ids_of(source, text), text[:80]


def test_every_text_of_the_table_comes_back(rebuilt: ChatTokenizer):
    for text in TEXTS:
        assert rebuilt.decode(rebuilt.encode(text), control=True) == text


def test_equals_the_source_on_random_strings(rebuilt: ChatTokenizer):
    pick = random.Random(20261130)
    ranges = [(0x20, 0x7F), (0x20, 0x7F), (0, 0x20), (0xA0, 0x250), (0x300, 0x370), (0x600, 0x700), (0xE00, 0xE80)]
    ranges += [(0x2000, 0x2070), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF), (0xE000, 0x110000)]
    for _ in range(400):
        text = "".join(
            pick.choice(SPECIAL_TOKENS) if pick.random() < 0.03 else chr(pick.randrange(*pick.choice(ranges)))
            for _ in range(pick.randrange(1, 60))
        )
        assert rebuilt.encode(text) == ids_of(SOURCE, text), ascii(text)


def test_a_longer_text_equals_the_source(rebuilt: ChatTokenizer):
    text = "".join(TEXTS) * 3
    assert rebuilt.encode(text) == ids_of(SOURCE, text)


def test_nothing_is_added_in_front(rebuilt: ChatTokenizer):
    assert rebuilt.encode("") == []


@pytest.mark.parametrize(("text", "at"), [("\ud800", 0), ("ab\udfff", 2), ("\ude00\ud83d", 0)])
def test_a_lone_surrogate_is_refused(rebuilt: ChatTokenizer, text: str, at: int):
    with pytest.raises(InputError, match=f"character {at} is a lone surrogate"):
        rebuilt.encode(text)


@BOTH
def test_unused_ids_stand_for_nothing_and_are_never_produced(keep_json: bool):
    rebuilt = tokenizer(keep_json)
    assert rebuilt.unused_ids() == [1021, 1022, 1023]
    assert rebuilt.token_bytes(1022) == b""
    assert rebuilt.token_id("[PAD1022]") is None
    assert max(rebuilt.encode("[PAD1021][PAD1022][PAD1023]")) < 960


@BOTH
def test_types_and_ends(keep_json: bool):
    rebuilt = tokenizer(keep_json)
    think, end = rebuilt.token_id("<mm:think>"), rebuilt.token_id("[e~[")
    assert think is not None and end is not None
    assert rebuilt.token_type(think) == TokenType.USER_DEFINED
    assert rebuilt.token_type(end) == TokenType.CONTROL
    assert rebuilt.token_type(0) == TokenType.NORMAL
    assert rebuilt.end_ids == {end}
    assert rebuilt.template_variables() == {"bos_token": "]~!b[", "eos_token": "[e~[", "unk_token": "]!d~["}
    assert len(rebuilt) == 1024


def test_every_end_token_counts():
    """The end of turn by name in a file without eos_token_id, and each key that a file may have."""
    metadata = tokenizer_metadata(SOURCE, SPEC.vocab)
    end = metadata.pop("tokenizer.ggml.eos_token_id")
    assert ChatTokenizer(metadata).end_ids == {end}
    more = {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 2, "tokenizer.ggml.eom_token_id": 3}
    assert ChatTokenizer(metadata | more).end_ids == {1, 2, 3, end}
    assert ChatTokenizer(metadata | {"tokenizer.ggml.eos_token_ids": [7, 8]}).end_ids == {7, 8, end}


def test_holes_between_named_tokens_keep_their_ids():
    metadata = tokenizer_metadata(SOURCE, SPEC.vocab)
    hole = SPEC.first_special + 4
    metadata["tokenizer.ggml.tokens"][hole] = f"[PAD{hole}]"
    metadata["tokenizer.ggml.token_type"][hole] = 5
    rebuilt = ChatTokenizer(metadata)
    assert rebuilt.encode("]~b]user")[0] == SOURCE.token_to_id("]~b]")
    assert hole not in rebuilt.encode("<fim_pad>")


def test_merges_may_be_pairs():
    metadata = tokenizer_metadata(SOURCE, SPEC.vocab)
    metadata["tokenizer.ggml.merges"] = [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]]
    assert ChatTokenizer(metadata).encode("the whole text") == ids_of(SOURCE, "the whole text")


def test_truncation_and_padding_of_the_json_are_not_applied():
    source = Tokenizer.from_str(SOURCE.to_str())
    source.enable_truncation(max_length=3)
    source.enable_padding(length=50)
    rebuilt = tokenizer(True, **{"tokenizer.huggingface.json": source.to_str()})
    text = "a text of more than three tokens"
    assert rebuilt.encode(text) == ids_of(SOURCE, text)


def broken_json(change: dict[str, Any]) -> str:
    return json.dumps(json.loads(SOURCE.to_str()) | change)


def swapped(values: list[Any], i: int, value: Any) -> list[Any]:
    return [*values[:i], value, *values[i + 1 :]]


METADATA = tokenizer_metadata(SOURCE, SPEC.vocab)
TOKENS, TYPES, MERGES = (METADATA[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "merges"))
OTHER = make_tokenizer(CheckpointSpec(vocab=900))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.model", "llama", "tokenizer.ggml.model: expected 'gpt2', found 'llama'"),
        ("tokenizer.ggml.model", None, "tokenizer.ggml.model: expected 'gpt2', found no such key"),
        ("tokenizer.ggml.pre", "qwen2", "tokenizer.ggml.pre: expected 'minimax-m2', found 'qwen2'"),
        ("tokenizer.ggml.tokens", None, "tokenizer.ggml.tokens: expected a list, found no such key"),
        ("tokenizer.ggml.tokens", "abc", "tokenizer.ggml.tokens: expected a list, found str"),
        ("tokenizer.ggml.tokens", swapped(TOKENS, 7, 3), "entry 7 is int, expected a string"),
        ("tokenizer.ggml.tokens", swapped(TOKENS, 300, TOKENS[299]), "ids 299 and 300 are both"),
        ("tokenizer.ggml.tokens", swapped(TOKENS, 300, ""), "id 300 is empty"),
        ("tokenizer.ggml.tokens", swapped(TOKENS, 0, "qqqq"), "no token '!' for byte 0x21"),
        ("tokenizer.ggml.token_type", TYPES[:-1], "1023 entries, tokenizer.ggml.tokens has 1024"),
        ("tokenizer.ggml.token_type", swapped(TYPES, 5, 2), "entry 5 is 2, expected 1, 3, 4 or 5"),
        ("tokenizer.ggml.token_type", swapped(TYPES, 5, 1.5), "entry 5 is 1.5, expected 1, 3, 4 or 5"),
        ("tokenizer.ggml.merges", None, "tokenizer.ggml.merges: expected a list, found no such key"),
        ("tokenizer.ggml.merges", swapped(MERGES, 9, "abc"), "entry 9 is 'abc', expected two tokens"),
        ("tokenizer.ggml.merges", swapped(MERGES, 9, "a b c"), "entry 9 is 'a b c', expected two tokens"),
        ("tokenizer.ggml.merges", swapped(MERGES, 9, 5), "entry 9 is 5, expected two tokens"),
        ("tokenizer.ggml.merges", swapped(MERGES, 9, "q Z"), "entry 9 needs the token 'qZ'"),
        ("tokenizer.ggml.eos_token_id", 1024, "tokenizer.ggml.eos_token_id: 1024, expected an id from 0 to 1023"),
        ("tokenizer.ggml.eos_token_id", -1, "tokenizer.ggml.eos_token_id: -1"),
        ("tokenizer.ggml.eot_token_id", "x", "tokenizer.ggml.eot_token_id: 'x'"),
        ("tokenizer.ggml.eos_token_ids", [5, 4096], "tokenizer.ggml.eos_token_ids: 4096"),
        ("tokenizer.ggml.eos_token_ids", 5, "tokenizer.ggml.eos_token_ids: expected a list, found int"),
        ("tokenizer.huggingface.json", "{", "tokenizer.huggingface.json: "),
        ("tokenizer.huggingface.json", 5, "tokenizer.huggingface.json: expected a string, found int"),
        ("tokenizer.huggingface.json", OTHER.to_str(), r"id \d+ is '.*', tokenizer.ggml.tokens has '.*'"),
        ("tokenizer.huggingface.json", broken_json({"added_tokens": []}), "id 960 is None"),
    ],
)  # fmt: skip
def test_a_broken_tokenizer_is_named(key: str, value: object, message: str):
    metadata = METADATA | {key: value}
    if value is None:
        del metadata[key]
    with pytest.raises(InputError, match=message.replace("(", r"\(")) as caught:
        ChatTokenizer(metadata)
    assert "\n" not in str(caught.value)


def test_json_with_dropout_is_refused():
    data = json.loads(SOURCE.to_str())
    data["model"]["dropout"] = 0.5
    with pytest.raises(InputError, match=r"dropout 0\.5"):
        tokenizer(True, **{"tokenizer.huggingface.json": json.dumps(data)})


def test_json_with_more_tokens_than_the_list_is_refused():
    source = Tokenizer.from_str(SOURCE.to_str())
    source.add_tokens([f"<more{i}>" for i in range(4)])
    with pytest.raises(InputError, match="id 1021 is '<more0>'"):
        tokenizer(True, **{"tokenizer.huggingface.json": source.to_str()})
    metadata = tokenizer_metadata(SOURCE, 1021) | {"tokenizer.huggingface.json": source.to_str()}
    with pytest.raises(InputError, match=r"1025 tokens, tokenizer\.ggml\.tokens has 1021"):
        ChatTokenizer(metadata)


def test_the_byte_alphabet_is_the_one_of_the_library():
    assert sorted(byte_alphabet().values()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert byte_alphabet()[ord(" ")] == "Ġ"


REBUILT = tokenizer(False)
BYTE_IDS = [REBUILT.token_id(character) for _, character in sorted(byte_alphabet().items())]


@given(st.one_of(st.binary(max_size=24), st.text(max_size=10).map(lambda text: text.encode("utf-8")[:-1])))
def test_a_stream_of_bytes_decodes_like_the_whole(data: bytes):
    stream = TokenStream(REBUILT)
    pieces = [stream.push(BYTE_IDS[byte]) for byte in data]
    assert "".join(pieces) + stream.finish() == data.decode("utf-8", errors="replace")
    assert stream.finish() == ""


def test_a_character_cut_between_tokens_is_held_back():
    stream = TokenStream(REBUILT)
    assert [stream.push(BYTE_IDS[byte]) for byte in "é👍".encode()] == ["", "é", "", "", "", "👍"]


def test_a_cut_stream_ends_in_a_replacement_and_starts_anew():
    stream = TokenStream(REBUILT)
    assert stream.push(BYTE_IDS[0xE2]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.push(BYTE_IDS[0x41]) == "A"


def test_control_tokens_show_only_on_request():
    ids = REBUILT.encode("a]~b]b[e~[<mm:think>c</mm:think>")
    assert REBUILT.decode(ids) == "ab<mm:think>c</mm:think>"
    assert REBUILT.decode(ids, control=True) == "a]~b]b[e~[<mm:think>c</mm:think>"
    turn = REBUILT.token_id("]~b]")
    assert turn is not None
    stream = TokenStream(REBUILT, visible=[turn])
    assert "".join(map(stream.push, ids)) == "a]~b]b<mm:think>c</mm:think>"
