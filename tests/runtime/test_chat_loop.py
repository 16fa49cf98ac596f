"""The loop of the chat and its commands, on a session that follows a script."""

import io
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from m3_runtime.chat import Conversation
from m3_runtime.chat_commands import NAMES, ChatCommands, read_text
from m3_runtime.chat_loop import ChatLoop
from m3_runtime.errors import ExitCode, InputError, NotFiniteError
from m3_runtime.held_tokens import Shift
from m3_runtime.reply import Piece
from m3_runtime.screen import Screen
from m3_runtime.template import ChatTemplate
from scripted_chat import END, TOKENIZER, Chat


class Script:
    """A reader that gives lines, or raises what stands in their place."""

    def __init__(self, interactive: bool, *lines: str | type[BaseException]) -> None:
        self.interactive = interactive
        self._lines = iter(lines)

    def quiet(self) -> AbstractContextManager[None]:
        return nullcontext()

    def read(self) -> str | None:
        line = next(self._lines, None)
        if isinstance(line, type):
            raise line
        return line


class NoFiles:
    """No chat is saved here."""

    def save(self, path: Path, conversation: Conversation) -> int:
        raise InputError(f"{path}: not here")

    def load(self, path: Path, conversation: Conversation) -> None:
        raise InputError(f"{path}: not here")


def new_loop(chat: Chat, screen: Screen, script: Script, clock: Callable[[], float] = time.monotonic) -> ChatLoop:
    err = screen._err
    status = "m3.gguf: attention sparse (top 3 of blocks of 128)"
    commands = ChatCommands(chat.conversation, screen, TOKENIZER, NoFiles(), err, status)
    return ChatLoop(chat.conversation, screen, script, commands, err, clock)


def loop(
    chat: Chat, *lines: str | type[BaseException], interactive: bool = True, clock: Callable[[], float] | None = None
) -> tuple[ExitCode, str, str]:
    """Exit code, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    steps = iter(range(0, 10**6, 10))
    result = new_loop(chat, Screen(out, err), Script(interactive, *lines), clock or (lambda: float(next(steps)))).run()
    return result, out.getvalue(), err.getvalue()


def test_lines_are_answered_until_the_end():
    code, out, err = loop(Chat(f"one{END}", f"<mm:think>hm</mm:think>two{END}"), "a", "", "  ", "b", interactive=False)
    assert (code, out) == (ExitCode.OK, "one\ntwo\n")
    assert err == "hm\n"


def test_quit_leaves():
    chat = Chat(f"one{END}")
    assert loop(chat, "/quit", "a")[:2] == (ExitCode.OK, "")
    assert chat.session.evals == []


def test_new_starts_over():
    chat = Chat(f"one{END}", f"two{END}")
    _, out, err = loop(chat, "a", "/new", "b")
    assert out == "one\ntwo\n"
    assert "(new chat)" in err
    assert len(chat.conversation.messages) == 2


def test_help_names_every_command():
    _, _, err = loop(Chat("x"), "/help")
    for name in (*NAMES, "Ctrl-C", "Ctrl-D", "Alt-Enter"):
        assert name in err
    assert len(NAMES) == 12


def test_stats():
    chat = Chat(f"one two{END}", context=500)
    _, _, err = loop(chat, "/stats", "a", "/stats")
    assert err.count("attention sparse") == 2
    assert f"context {len(chat.session.held)}/500 tokens" in err
    assert "last answer: " in err and "last prompt: " in err and "0 reused" in err


def test_an_unknown_command_is_not_sent():
    chat = Chat(f"one{END}")
    code, out, err = loop(chat, "/nwe", " /nwe")
    assert "m3-run: /nwe: no such command, /help lists them\n" in err
    assert (code, out) == (ExitCode.OK, "one\n")
    assert chat.conversation.messages[0]["content"] == " /nwe"


def test_a_full_context_is_said_and_the_chat_goes_on():
    chat = Chat(f"one{END}", f"two{END}", f"three{END}", context=120)
    code, out, err = loop(chat, "a", "long " * 200, "/new", "b")
    assert out == "one\ntwo\n"
    assert "m3-run: context full: the prompt has " in err and "the context holds 120; the chat goes on" in err
    assert "/save keeps it" in err
    assert code == ExitCode.OK


def test_through_a_pipe_a_refused_message_shows_in_the_exit_code():
    code, out, _ = loop(Chat(f"one{END}", f"two{END}", context=120), "a", "long " * 200, "/new", "b", interactive=False)
    assert (code, out) == (ExitCode.BAD_INPUT, "one\ntwo\n")


def test_a_cut_answer_says_why():
    assert "(cut after 2 tokens, the limit of -n)" in loop(Chat("one two three four", max_tokens=2), "a")[2]
    prompt = len(Chat("x").format.prompt([{"role": "user", "content": "a"}]).ids)
    context = prompt + 3
    _, _, err = loop(Chat("one two three four five six", context=context), "a")
    assert f"(context full: {context}/{context} tokens, the answer is cut. /save keeps the chat, /undo" in err


def test_a_message_that_the_tokenizer_or_the_template_refuses_leaves_the_chat_alive():
    template = ChatTemplate(
        "{% if 'bad' in messages[-1].content %}{{ raise_exception('no') }}{% endif %}{{ messages[-1].content }}"
    )
    code, out, err = loop(Chat(f"one{END}", template=template), "\ud800", "bad", "good")
    assert (code, out) == (ExitCode.OK, "one\n")
    assert "lone surrogate" in err
    assert "refuses the conversation: no" in err


def interrupting(chat: Chat, at: int) -> Chat:
    """Ctrl-C arrives while the `at`-th eval runs."""
    count = 0

    def interrupt() -> None:
        nonlocal count
        count += 1
        if count == at:
            raise KeyboardInterrupt

    chat.session.before_eval = interrupt
    return chat


def test_ctrl_c_stops_the_answer_and_keeps_the_chat():
    code, out, err = loop(interrupting(Chat(f"one two three{END}", f"four{END}"), 3), "a", "b")
    assert code == ExitCode.OK
    assert out.splitlines()[-1] == "four"
    assert "(stopped)" in err


def test_ctrl_c_before_the_first_word_drops_the_message():
    code, out, err = loop(interrupting(Chat(f"one{END}"), 1), "a", "b")
    assert (code, out) == (ExitCode.OK, "one\n")
    assert "(stopped before anything came, the message is not kept)" in err


def test_ctrl_c_while_a_piece_is_shown():
    chat = Chat(f"one two three{END}", f"four{END}")

    class Slow(Screen):
        shown = 0

        def show(self, piece: Piece) -> None:
            self.shown += 1
            if self.shown == 2:
                raise KeyboardInterrupt
            super().show(piece)

    out, err = io.StringIO(), io.StringIO()
    code = new_loop(chat, Slow(out, err), Script(True, "a", "b")).run()
    assert code == ExitCode.OK
    assert out.getvalue().endswith("four\n")
    assert chat.conversation.messages[1]["role"] == "assistant"


def test_ctrl_c_at_the_prompt_leaves_the_second_time():
    chat = Chat(f"one{END}")
    code, out, err = loop(chat, KeyboardInterrupt, KeyboardInterrupt, "a")
    assert (code, out) == (ExitCode.OK, "")
    assert err.count("(Ctrl-C again leaves, and so does /quit)") == 1


def test_a_message_between_two_ctrl_c_resets_the_count():
    _, out, _ = loop(Chat(f"one{END}", f"two{END}"), KeyboardInterrupt, "a", KeyboardInterrupt, "b")
    assert out == "one\ntwo\n"


def test_ctrl_c_after_a_stopped_answer_leaves_unless_it_comes_at_once():
    def times(*seconds: float) -> Callable[[], float]:
        ticks: Iterator[float] = iter(seconds)
        return lambda: next(ticks)

    late = interrupting(Chat(f"one two{END}", f"three{END}"), 2)
    assert loop(late, "a", KeyboardInterrupt, "b", clock=times(0.0, 5.0))[1].count("three") == 0
    at_once = interrupting(Chat(f"one two{END}", f"three{END}"), 2)
    _, out, err = loop(at_once, "a", KeyboardInterrupt, "b", clock=times(0.0, 0.3))
    assert out.count("three") == 1 and "(Ctrl-C again leaves, and so does /quit)" in err
    leaving = interrupting(Chat(f"one two{END}", f"three{END}"), 2)
    _, out, _ = loop(leaving, "a", KeyboardInterrupt, KeyboardInterrupt, "b", clock=times(0.0, 0.3, 0.4))
    assert out.count("three") == 0


def test_ctrl_c_through_a_pipe_ends_the_run():
    with pytest.raises(KeyboardInterrupt):
        loop(interrupting(Chat(f"one two{END}"), 2), "a", interactive=False)
    with pytest.raises(KeyboardInterrupt):
        loop(Chat("x"), KeyboardInterrupt, interactive=False)


def test_broken_weights_end_the_chat():
    chat = Chat("x")

    def fail() -> None:
        raise NotFiniteError("layer 3")

    chat.session.before_eval = fail
    with pytest.raises(NotFiniteError):
        loop(chat, "a")


# ---------------------------------------------------------------------------------------------- commands


def test_undo_and_retry():
    chat = Chat(f"one{END}", f"two{END}", f"three{END}")
    _, out, err = loop(chat, "/undo", "/retry", "a", "/retry", "/undo", "b")
    assert out == "one\ntwo\nthree\n"
    assert "(there is nothing to take back)" in err and "m3-run: /retry: there is no message yet" in err
    assert '(took back "a" and its answer; ' in err
    assert [message["content"] for message in chat.conversation.messages] == ["b", "three"]


def test_read_and_ask(tmp_path: Path):
    book = tmp_path / "book.txt"
    book.write_bytes(b"\xef\xbb\xbfThe code is 7316.\r\n")
    chat = Chat("", f"7316{END}", f"two{END}")
    code, out, err = loop(chat, f"/read {book}", "/context", "The code?", "/undo", "/undo", "b", interactive=False)
    assert (code, out) == (ExitCode.OK, "7316\ntwo\n")
    assert "(book.txt: " in err and " tokens read at " in err and "the next message asks about it)" in err
    assert "file     read, for the next message to ask about" in err
    assert "; the file it asked about is still there; " in err and "(took back the file; " in err
    assert [message["content"] for message in chat.conversation.messages] == ["b", "two"]


def test_a_file_that_speaks_the_chat_format_is_read_with_a_note(tmp_path: Path):
    book = tmp_path / "book.txt"
    book.write_text("A turn ends with [e~[ and a role stands behind ]~b].")
    _, _, err = loop(Chat(f"one{END}"), f"/read {book}")
    assert "note: book.txt has ]~b], [e~[, which the model reads as part of the chat format" in err


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a\0b", "is no text, byte 1 is NUL"),
        (b"abc\xff", "is no text, invalid UTF-8 at byte offset 3 (byte 0xff): invalid start byte"),
        ("a".encode("utf-16"), "is no text, byte 3 is NUL"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"x" * 101, "101 bytes, a context of this size holds at most 100"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, data: bytes, message: str):
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        read_text(path, 100)
    assert str(caught.value) == f"{path}: {message}"


def test_what_is_no_file_is_refused(tmp_path: Path):
    chat = Chat(f"one{END}")
    code, _, err = loop(
        chat, "/read", f"/read {tmp_path}", f"/read {tmp_path}/none", "/save", "/load x", interactive=False
    )
    assert code == ExitCode.BAD_INPUT
    for line in ("/read needs the name of a file", f"{tmp_path}: is no file", f"{tmp_path}/none: does not exist"):
        assert f"m3-run: {line}\n" in err
    assert "m3-run: /save needs the name of a file\n" in err and "m3-run: x: not here\n" in err
    assert chat.session.evals == []


def test_system():
    chat = Chat(f"one{END}", f"two{END}")
    _, _, err = loop(chat, "/system", "/system Be  brief.", "a", "/system", "/system off", "/system")
    assert err.count("(no system message)\n") == 2
    assert "(system message set)\nBe  brief.\n(system message removed; the conversation will be evaluated again)" in err


def test_thinking_is_shown_folded_and_switched():
    answers = [f"<mm:think>hm hm</mm:think>{word}{END}" for word in ("one", "two")]
    chat = Chat(*answers)
    _, out, err = loop(
        chat,
        "/thinking last",
        "a",
        "/thinking fold",
        "b",
        "/thinking last",
        "/thinking",
        "/thinking off",
        "/thinking no",
    )
    assert out == "one\ntwo\n"
    assert "(the last answer came without thinking)\nhm hm\n" in err
    assert "(thinking is folded; the chat template decides whether the model thinks)\n(thought: 5 characters, " in err
    assert "; /thinking last shows it)\nhm hm\n(end of the thinking)\n" in err
    assert "(the model is told not to think; the conversation will be evaluated again)" in err
    assert "m3-run: /thinking no: expected show, fold, on, off, auto or last\n" in err
    assert chat.conversation.thinking == "disabled"


def test_a_template_without_thinking_says_so():
    chat = Chat(f"one{END}", template=ChatTemplate("{{ messages[0].content }}"))
    assert "the chat template of this file has no thinking_mode" in loop(chat, "/thinking on")[2]


def test_context_says_what_fills_it():
    chat = Chat(f"one{END}", context=500)
    _, _, err = loop(chat, "a", "/context")
    used = chat.conversation.used
    assert f"used     {used} of 500 tokens, {500 - used} left\n" in err
    assert "pinned   nothing; nothing is dropped when the context is full (--on-full stop)\ndropped  0 tokens" in err


def test_a_shift_says_what_was_dropped():
    words = " ".join(f"w{i}" for i in range(30))
    chat = Chat(f"{words}{END}", f"short{END}", f"three{END}", context=256, shift=Shift(16, 0))
    code, out, err = loop(chat, "first " * 20, "second " * 20, "third " * 30, "/context")
    assert code == ExitCode.OK and out.splitlines()[1:] == ["short", "three"]
    assert "(context full: dropped the oldest text behind the first " in err
    assert "first first" in err.split("dropped the oldest text")[1]
    assert f"dropped  {chat.conversation.dropped} tokens of this conversation" in err
    assert chat.conversation.dropped > 0 and f"; {chat.conversation.dropped} tokens in all)" in err
