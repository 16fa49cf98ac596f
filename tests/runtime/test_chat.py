"""A conversation, on a session that follows a script."""

import pytest

from m3_runtime.errors import ContextError, InputError, NotFiniteError
from m3_runtime.generate import FinishReason
from m3_runtime.held_tokens import Shift
from m3_runtime.template import ChatTemplate
from scripted_chat import END, TOKENIZER, Chat


def test_reasoning_of_every_turn_is_replayed_and_nothing_is_evaluated_twice():
    chat = Chat(f"I add.</mm:think>\n\n4{END}", f"Again.\n</mm:think>6{END}", f"</mm:think>8{END}", thinking="enabled")
    assert chat.ask("2+2?") == "\n\n4"
    assert chat.ask("3+3?") == "6"
    second = chat.conversation.answer.timings
    assert chat.ask("4+4?") == "8"
    third = chat.conversation.answer.timings
    assert "]~b]ai\n<mm:think>I add.</mm:think>\n\n4[e~[\n" in chat.held
    assert "]~b]ai\n<mm:think>Again.\n</mm:think>6[e~[\n" in chat.held
    # All but the end of the turn, the new question and the opening of the reply was there.
    for timings, question in ((second, "3+3?"), (third, "4+4?")):
        new = TOKENIZER.encode(f"[e~[\n]~b]user\n{question}[e~[\n]~b]ai\n<mm:think>")
        assert timings.prefill_tokens == len(new)


def test_what_the_session_holds_is_the_rendered_conversation():
    chat = Chat(f"one{END}", f"<mm:think>why</mm:think>two{END}", f"three{END}", system="Be brief.")
    for text in ("a", "b", "c"):
        chat.ask(text)
    prompt = chat.format.prompt(chat.conversation.messages[:-1])
    assert chat.session.held[: len(prompt.ids)] == list(prompt.ids)
    assert [message["role"] for message in chat.conversation.messages] == ["system", *["user", "assistant"] * 3]


def test_a_closing_tag_without_an_opening_one_is_reasoning_in_the_history():
    chat = Chat(f"plan</mm:think>answer{END}", thinking="disabled")
    chat.ask("q")
    assert chat.conversation.messages[-1] == {"role": "assistant", "content": "answer", "reasoning_content": "plan"}


def test_tool_calls_stay_in_the_history_as_they_are():
    call = "]<]minimax[>[<tool_call>]<]minimax[>[</tool_call>"
    chat = Chat(f"Look:{call}{END}", f"ok{END}")
    chat.ask("q")
    chat.ask("r")
    assert f"Look:{call}[e~[" in chat.held


def test_a_turn_that_does_not_fit_is_refused_and_changes_nothing():
    chat = Chat(f"yes{END}", f"again{END}", context=110)
    chat.ask("a")
    before = list(chat.conversation.messages)
    with pytest.raises(ContextError, match=r"context full: the prompt has \d{3} tokens, the context holds 110"):
        chat.ask("long " * 200)
    assert chat.conversation.messages == before
    assert chat.ask("b") == "again"


def test_an_answer_cut_by_the_context_is_kept():
    prompt = len(Chat("x").format.prompt([{"role": "user", "content": "a"}]).ids)
    chat = Chat("one two three four five six seven", context=prompt + 3)
    chat.ask("a")
    assert chat.conversation.answer.finish is FinishReason.CONTEXT
    assert chat.conversation.used == chat.conversation.context
    assert chat.conversation.messages[-1]["content"]


def test_an_interrupted_answer_is_kept_as_far_as_it_came():
    chat = Chat(f"one two three{END}", f"next{END}")
    pieces = chat.conversation.ask("a")
    first = next(pieces)
    pieces.close()
    assert chat.conversation.answer.finish is FinishReason.INTERRUPTED
    assert chat.conversation.messages[-1]["content"] == first.text
    assert chat.ask("b") == "next"


def test_a_message_whose_answer_never_started_is_not_kept():
    chat = Chat(f"one{END}")

    def interrupt() -> None:
        chat.session.before_eval = lambda: None
        raise KeyboardInterrupt

    chat.session.before_eval = interrupt
    chat.ask("a")
    assert chat.conversation.answer.finish is FinishReason.INTERRUPTED
    assert chat.conversation.messages == []
    assert chat.ask("b") == "one"


def test_an_error_keeps_the_message_out():
    chat = Chat(f"one{END}")

    def fail() -> None:
        raise NotFiniteError("layer 3")

    chat.session.before_eval = fail
    with pytest.raises(NotFiniteError):
        chat.ask("a")
    assert chat.conversation.messages == []


def test_reset_forgets_all_but_the_system_message():
    chat = Chat(f"one{END}", f"two{END}", system="S.")
    chat.ask("a")
    chat.conversation.reset()
    assert chat.conversation.messages == [{"role": "system", "content": "S."}]
    chat.ask("b")
    assert "one" not in chat.held and "S." in chat.held


def test_a_template_without_thinking_modes_is_not_asked_for_one():
    with pytest.raises(InputError, match=r"^--thinking: the chat template of this file has no thinking_mode$"):
        Chat("x", thinking="enabled", template=ChatTemplate("{{ messages[0].content }}"))


@pytest.mark.parametrize("mode", ["enabled", "disabled", "adaptive", None])
def test_thinking_modes(mode: str | None):
    prompt = Chat("x", thinking=mode).format.prompt([{"role": "user", "content": "a"}])
    text = TOKENIZER.decode(prompt.ids, control=True)
    opening = {"enabled": "<mm:think>", "disabled": "</mm:think>"}.get(mode or "", "")
    assert text.endswith(f"]~b]ai\n{opening}")
    assert prompt.thinking is (mode == "enabled")
    assert f"Thinking mode: {mode or 'adaptive'}." in text


# ---------------------------------------------------------------------------------------------- taking back


def test_undo_takes_the_last_turn_back_and_the_session_with_it():
    chat = Chat(f"one{END}", f"two{END}", f"three{END}")
    chat.ask("a")
    after_first = list(chat.conversation.messages)
    chat.ask("b")
    assert chat.conversation.undo() == "b"
    assert chat.conversation.messages == after_first
    assert chat.held.endswith("]~b]user\n")
    assert "two" not in chat.held and "one" in chat.held
    assert chat.ask("c") == "three"
    assert chat.conversation.answer.timings.prefill_tokens == len(TOKENIZER.encode("c[e~[\n]~b]ai\n"))
    assert (chat.conversation.undo(), chat.conversation.undo(), chat.conversation.undo()) == ("c", "a", None)


def test_retry_answers_the_same_message_anew():
    chat = Chat(f"one{END}", f"two{END}", f"three{END}")
    with pytest.raises(InputError, match=r"^/retry: there is no message yet$"):
        list(chat.conversation.retry())
    chat.ask("a")
    chat.ask("b")
    list(chat.conversation.retry())
    assert chat.conversation.answer.reply.text == "three"
    assert chat.conversation.answer.timings.prefill_tokens == 1
    assert [message["content"] for message in chat.conversation.messages] == ["a", "one", "b", "three"]


def test_the_earlier_answer_comes_back_if_nothing_came_of_the_new_one():
    chat = Chat(f"one{END}", f"two{END}")
    chat.ask("a")
    before = list(chat.conversation.messages)

    def interrupt() -> None:
        chat.session.before_eval = lambda: None
        raise KeyboardInterrupt

    chat.session.before_eval = interrupt
    list(chat.conversation.retry())
    assert chat.conversation.messages == before


# ---------------------------------------------------------------------------------------------- a document


READ = ""  # stands for the reading of a document, after which nothing is asked for
BOOK = "The tower has a code. It is 7316. " * 10


def test_a_document_is_evaluated_once_and_stands_in_front_of_the_next_message():
    chat = Chat(f"one{END}", READ, f"7316{END}", f"three{END}")
    chat.ask("a")
    n, timings = chat.conversation.read("book.txt", BOOK)
    assert timings.prefill_tokens >= n - 2 and timings.reused_tokens > 0
    assert n == pytest.approx(len(TOKENIZER.encode(BOOK + "\n\n")), abs=2)
    assert chat.ask("The code?") == "7316"
    assert chat.conversation.answer.timings.prefill_tokens < 20
    assert chat.conversation.messages[2]["content"] == f"{BOOK}\n\nThe code?"
    # Taken back, the document is there for another question.
    assert chat.conversation.undo() == "The code?"
    assert chat.ask("And what else?") == "three"
    assert chat.conversation.answer.timings.prefill_tokens < 20
    assert chat.conversation.messages[2]["content"] == f"{BOOK}\n\nAnd what else?"


def test_a_document_can_be_taken_back():
    chat = Chat(f"one{END}", READ, f"two{END}")
    chat.ask("a")
    used = chat.conversation.used
    chat.conversation.read("book.txt", BOOK)
    assert chat.conversation.undo() == BOOK
    assert chat.conversation.used <= used + 10
    assert chat.ask("b") == "two"
    assert chat.conversation.messages[2]["content"] == "b"


def test_two_documents_stand_one_after_the_other():
    chat = Chat(f"one{END}")
    chat.conversation.read("a.txt", "First.")
    chat.conversation.read("b.txt", "Second.")
    chat.ask("q")
    assert chat.conversation.messages[0]["content"] == "First.\n\nSecond.\n\nq"


def test_a_document_that_leaves_no_room_for_a_question_is_refused_with_the_numbers():
    chat = Chat(f"one{END}", context=200)
    before = chat.conversation.used
    with pytest.raises(
        ContextError,
        match=r"^book\.txt: \d+ tokens, \d+ stand before it and a question needs 64; the context holds 200$",
    ):
        chat.conversation.read("book.txt", BOOK)
    assert (chat.conversation.used, chat.conversation.document) == (before, "")


def test_a_document_whose_reading_was_stopped_is_not_there():
    chat = Chat(f"one{END}")

    def interrupt() -> None:
        raise KeyboardInterrupt

    chat.session.before_eval = interrupt
    with pytest.raises(KeyboardInterrupt):
        chat.conversation.read("book.txt", BOOK)
    assert chat.conversation.document == ""


def test_a_shift_makes_room_for_a_document_and_keeps_it_for_the_question():
    chat = Chat(f"one{END}", f"two{END}", READ, f"three{END}", f"four{END}", context=400, shift=Shift(16, 0))
    for _ in range(2):
        chat.ask("word " * 50)
    chat.conversation.read("book.txt", BOOK)
    dropped = chat.conversation.dropped
    assert dropped > 0 and "word" in chat.conversation.take_dropped()[0]
    assert chat.ask("The code?") == "three"
    assert BOOK in chat.held and chat.conversation.answer.timings.prefill_tokens < 20
    with pytest.raises(ContextError, match=r"^long\.txt: \d+ tokens, \d+ are pinned and a question needs 64; "):
        chat.conversation.read("long.txt", BOOK * 3)


# ---------------------------------------------------------------------------------------------- settings, state


def test_another_system_message_holds_for_the_whole_conversation():
    chat = Chat(f"one{END}", f"two{END}", system="Old.")
    chat.ask("a")
    chat.conversation.system = "New."
    chat.ask("b")
    assert "New." in chat.held and "Old." not in chat.held and "one" in chat.held
    chat.conversation.system = None
    assert chat.conversation.messages[0]["role"] == "user"


def test_thinking_can_be_switched():
    chat = Chat(f"one{END}", f"two{END}")
    chat.ask("a")
    chat.conversation.thinking = "disabled"
    chat.ask("b")
    assert "Thinking mode: disabled." in chat.held


def test_a_conversation_is_made_again_from_its_state():
    chat = Chat(f"<mm:think>hm</mm:think>one{END}", system="S.", thinking="adaptive")
    chat.ask("a")
    chat.conversation.read("b.txt", "Text.")
    state = chat.conversation.state()
    other = Chat(f"two{END}")
    other.conversation.restore(state)
    assert other.conversation.state() == state
    assert other.conversation.messages == chat.conversation.messages
    assert other.format.prompt(other.conversation.messages) == chat.format.prompt(chat.conversation.messages)


@pytest.mark.parametrize(
    "change",
    [
        {"turns": [{"text": 1}]},
        {"turns": [{"text": "a", "other": "b"}]},
        {"turns": "a"},
        {"turns": [1]},
        {"system": 3},
        {"thinking": "often"},
        {"document": None},
    ],
)
def test_what_is_no_conversation_is_refused_and_changes_nothing(change: dict[str, object]):
    chat = Chat(f"one{END}")
    chat.ask("a")
    before = chat.conversation.state()
    with pytest.raises(InputError, match=r"^the file holds a session, but no conversation of m3-run$"):
        chat.conversation.restore(before | change)
    assert chat.conversation.state() == before
