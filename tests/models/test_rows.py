"""The generated training data of m3-nano: rows are whole, canonical in tokens, and their answers are in them."""

import pickle
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest

from chats import AI_WEIGHT, OTHER_WEIGHT, ChatFormat, Chats, ai_weight
from documents import VALUE_WEIGHT, Filler
from exchanges import Exchanges, short_gloss
from facts import ExamPlan, Names, is_held_out, make_exam
from make_checkpoint import SPECIAL_TOKENS, TEXT
from rows import TEMPLATE, Data, Rows, Shares, held_out_rows
from stores import make_lists, make_store
from vocabulary import DOCUMENT, encode, encode_documents, mark, read_ids, train_tokenizer, unmark, write_ids

CTX = 512
DEFINITIONS = [["apple", "fruit with red skin"], ["stone", "a lump of mineral"], ["king", "a male sovereign"]]
KINDS = ("text", "recall", "facts", "copy", "store", "chat")


@pytest.fixture(scope="module")
def data() -> Data:
    text = TEXT.read_text(encoding="utf-8")
    tokenizer = train_tokenizer([text], 1024)
    middle = len(text) // 2
    stream = np.concatenate(list(encode_documents(tokenizer, [text[:middle], text[middle:]], 2)))
    return Data(tokenizer, Filler(tokenizer, stream), DEFINITIONS, ChatFormat(TEMPLATE.read_text(encoding="utf-8")))


@pytest.fixture
def rows(data: Data) -> Rows:
    return Rows(data, ctx=CTX, seed=1)


def decode(data: Data, ids) -> str:
    return data.tokenizer.decode(list(ids), skip_special_tokens=False)


def answer_texts(data: Data, row) -> list[str]:
    return [decode(data, row.ids[row.answer == k]).strip() for k in range(1, row.answer.max() + 1)]


def test_named_tokens_stand_in_the_releases_order_below_three_ids_without_token(data):
    assert [data.tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(960, 1021))
    assert data.tokenizer.get_vocab_size() == 1021


def test_every_digit_is_a_token(data):
    assert data.tokenizer.encode(" 1234 and 19").tokens[-2:] == ["1", "9"]
    assert not [token for token in data.tokenizer.get_vocab() if sum(map(str.isdigit, token)) > 1]


def test_a_text_too_short_for_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="at most"):
        train_tokenizer(["a b c"], 1024)


def test_marked_values_are_found_in_the_tokens(data):
    encoded = encode(data.tokenizer, f"The code of Tower 5 is {mark('1234')}, not {mark('maple')}.\n")
    values = [decode(data, encoded.ids[first:stop]) for first, stop in encoded.spans]
    assert values == ["1234", " maple"]
    assert decode(data, encoded.ids) == "The code of Tower 5 is 1234, not maple.\n"


def test_packed_ids_come_back(tmp_path: Path):
    ids = np.random.default_rng(1).integers(0, 4096, 5000).astype(np.uint16)
    write_ids(tmp_path / "ids.xz", ids)
    back = read_ids(tmp_path / "ids.xz")
    assert back.dtype == np.uint16
    assert np.array_equal(back, ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_full_and_its_tokens_are_those_of_its_text(data, rows, kind):
    equal = 0
    for _ in range(6):
        row = rows.row(kind)
        assert row.ids.shape == row.weight.shape == row.answer.shape == (CTX + 1,)
        assert (row.ids.dtype, row.weight.dtype, row.answer.dtype) == (np.int32, np.float32, np.int16)
        assert row.ids[0] == data.tokenizer.token_to_id(DOCUMENT)
        assert (row.weight > 0).all()
        equal += np.array_equal(encode(data.tokenizer, decode(data, row.ids)).ids, row.ids)
    assert equal >= 5  # the last token may be half of one of the whole text


@pytest.mark.parametrize("kind", ("recall", "facts", "copy", "store"))
def test_answers_repeat_what_was_stated(data, rows, kind):
    """The name that answers "who has the code 12?" stands in its statement, though not where the code does."""
    found = Counter()
    for _ in range(8):
        row = rows.row(kind)
        texts = answer_texts(data, row)
        assert len(texts) == len(row.fact_at) == len(row.asked_at)
        for text, fact, asked in zip(texts, row.fact_at, row.asked_at, strict=True):
            assert 0 < fact < asked
            assert row.answer[asked] > 0
            assert (row.weight[row.answer > 0] == VALUE_WEIGHT).all()
            stated = decode(data, row.ids[fact : fact + 40]).lstrip()
            found[stated.startswith(text)] += 1
            assert text in decode(data, row.ids[:asked])
    assert found[True] > 10 * found[False]


@pytest.mark.parametrize("make", (make_exam, make_lists, make_store))
def test_sources_of_an_exam_are_the_values_that_it_asks_for(make):
    for seed in range(30):
        plan = ExamPlan(facts=16, questions=8, alike=seed % 2 == 0, reverse=0)
        exam = make(Random(seed), plan)
        stated = [part.split("\ue001")[0] for line in exam.statements for part in line.split("\ue000")[1:]]
        assert exam.questions
        for question in exam.questions:
            asked = [part.split("\ue001")[0] for part in question.full.split("\ue000")[1:]]
            assert asked == [stated[source] for source in question.sources]
            assert question.short.count("\ue000") == len(asked)


def test_equal_seeds_give_equal_rows_and_others_do_not(data):
    one, same, other = (Rows(data, ctx=CTX, seed=seed).batch(4) for seed in (3, 3, 5))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not np.array_equal(one[0], other[0])


def test_a_pickled_stream_goes_on_where_it_was(rows):
    rows.row("recall")
    copy = pickle.loads(pickle.dumps(rows))
    assert np.array_equal(copy.row("chat").ids, rows.row("chat").ids)


def test_shares_decide_the_kinds(data):
    only = Shares(text=0, recall=0, facts=0, copy=1, store=0, chat=0)
    rows = Rows(data, ctx=CTX, seed=1, shares=only)
    assert {rows.row().kind for _ in range(3)} == {"copy"}


def test_the_evaluation_is_fixed_and_its_names_are_its_own(data):
    counts = {"text": 3, "recall": 3, "hard": 3}
    rows = held_out_rows(data, CTX, **counts)
    again = held_out_rows(data, CTX, **counts)
    assert Counter(row.kind for row in rows) == counts
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(rows, again, strict=True))
    for row in rows:
        assert len(row.asked_at) == (row.answer.max() if row.kind != "text" else 0)
        assert (row.fact_at < row.asked_at).all()
    random = Random(1)
    for alike in (False, True):
        assert all(map(is_held_out, Names(random, held_out=True).draw(40, alike=alike)))
        assert not any(map(is_held_out, Names(random).draw(40, alike=alike)))


def test_too_little_held_out_text_is_refused(data):
    with pytest.raises(ValueError, match=r"held-out text: .* expected at least"):
        held_out_rows(data, CTX, text=1000)


def test_only_what_the_assistant_writes_has_weight(data):
    messages = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi.", "reasoning_content": "A greeting."},
        {"role": "user", "content": "Bye."},
    ]
    ids = encode(data.tokenizer, data.format.render(messages, thinking="enabled")).ids
    weight = ai_weight(data.tokenizer, ids)
    assert decode(data, ids[weight == np.float32(AI_WEIGHT)]) == "<mm:think>A greeting.</mm:think>Hi.[e~["
    assert (weight[weight != np.float32(AI_WEIGHT)] == np.float32(OTHER_WEIGHT)).all()


def test_a_prompt_is_the_beginning_of_the_chat_that_training_sees(data):
    """m3-run asks with the template's generation prompt; what follows must be what the model has learned to write."""
    from m3_runtime.template import ChatTemplate

    question = [{"role": "user", "content": "What is 2+2?"}]
    reply = {"role": "assistant", "content": "4.", "reasoning_content": "2 + 2 = 4"}
    template = ChatTemplate(data.format.source)
    for mode in (None, "enabled", "adaptive"):
        variables = {} if mode is None else {"thinking_mode": mode}
        prompt = template.render(question, variables=variables)
        assert data.format.render([*question, reply], thinking=mode).startswith(prompt)
    del reply["reasoning_content"]
    prompt = template.render(question, variables={"thinking_mode": "disabled"})
    assert data.format.render([*question, reply], thinking="disabled").startswith(prompt)


def test_thinking_follows_the_mode(data):
    chats = Chats(data.format, DEFINITIONS, Random(2))
    seen = Counter()
    for _ in range(300):
        text = chats.draw(800, lambda characters: "some text")
        mode = next(mode for mode in ("adaptive", "enabled", "disabled") if f"Thinking mode: {mode}." in text)
        replies = text.split("]~b]ai\n")[1:]
        thinks = [reply.startswith("<mm:think>") for reply in replies]
        assert all(thinks) or mode != "enabled"
        assert not any(thinks) or mode != "disabled"
        seen[mode, any(thinks)] += 1
    assert set(seen) == {("enabled", True), ("disabled", False), ("adaptive", True), ("adaptive", False)}


def test_small_questions_have_right_answers():
    exchanges = Exchanges(Random(3), DEFINITIONS)
    sums = 0
    for _ in range(3000):
        exchange = exchanges.draw()
        assert exchange.user
        assert exchange.answer
        assert unmark(exchange.answer) == exchange.answer
        for word, sign in (("plus", "+"), ("minus", "-"), ("times", "*")):
            if f" {word} " in exchange.answer:
                left, right = exchange.answer.rstrip(".").split(" is ")
                assert eval(left.replace(word, sign)) == int(right)
                sums += 1
    assert sums > 300


def test_glosses_are_shortened():
    assert short_gloss("a male sovereign; ruler of a kingdom") == "a male sovereign"
    assert short_gloss("the star (a sun) of a system") == "the star of a system"
    assert short_gloss("male; a man") == "male; a man"
