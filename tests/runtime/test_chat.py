"""The conversation and its loop, on a session that follows a script."""

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fake_model import FakeSession, replies, tokenizer_metadata
from m3_runtime.chat import ChatFormat, ChatLoop, Conversation, PipeReader
from m3_runtime.errors import ContextError, ExitCode, InputError, NotFiniteError
from m3_runtime.generate import FinishReason, Generator
from m3_runtime.reply import Piece
from m3_runtime.sampler import Sampler, SamplerOptions
from m3_runtime.screen import Screen
from m3_runtime.template import ChatTemplate
from m3_runtime.text import ChatTokenizer
from make_checkpoint import CheckpointSpec, make_tokenizer

SPEC = CheckpointSpec()
TOKENIZER = ChatTokenizer(tokenizer_metadata(make_tokenizer(SPEC), SPEC.vocab))
TEMPLATE = ChatTemplate((Path(__file__).resolve().parents[1] / "chat_template.jinja").read_text(encoding="utf-8"))
END = "[e~["


class Chat:
    """A conversation with a scripted model."""

    def __init__(
        self,
        *answers: str,
        context: int = 1 << 20,
        thinking: str | None = None,
        system: str | None = None,
        max_tokens: int | None = None,
        template: ChatTemplate = TEMPLATE,
    ) -> None:
        self.session = FakeSession(SPEC.vocab, replies(*map(TOKENIZER.encode, answers)), context)
        sampler = Sampler(SamplerOptions(temperature=0), 0)
        self.format = ChatFormat(template, TOKENIZER, thinking)
        generator = Generator(self.session, context, TOKENIZER, sampler)
        self.conversation = Conversation(self.format, generator, system=system, max_tokens=max_tokens)

    def ask(self, text: str) -> str:
        list(self.conversation.ask(text))
        return self.conversation.answer.reply.text

    @property
    def held(self) -> str:
        return TOKENIZER.decode(self.session.held, control=True)


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


# ---------------------------------------------------------------------------------------------- the loop


class Script:
    """A reader that gives lines, or raises what stands in their place."""

    def __init__(self, interactive: bool, *lines: str | type[BaseException]) -> None:
        self.interactive = interactive
        self._lines = iter(lines)

    def read(self) -> str | None:
        line = next(self._lines, None)
        if isinstance(line, type):
            raise line
        return line


def loop(
    chat: Chat, *lines: str | type[BaseException], interactive: bool = True, clock: Callable[[], float] | None = None
) -> tuple[ExitCode, str, str]:
    """Exit code, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    steps = iter(range(0, 10**6, 10))
    result = ChatLoop(
        chat.conversation,
        Screen(out, err),
        Script(interactive, *lines),
        err,
        "m3.gguf: attention sparse (top 3 of blocks of 128)",
        clock or (lambda: float(next(steps))),
    ).run()
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
    for name in ("/help", "/new", "/stats", "/quit", "Ctrl-C", "Ctrl-D"):
        assert name in err


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
    assert code == ExitCode.OK


def test_through_a_pipe_a_refused_message_shows_in_the_exit_code():
    code, out, _ = loop(Chat(f"one{END}", f"two{END}", context=120), "a", "long " * 200, "/new", "b", interactive=False)
    assert (code, out) == (ExitCode.BAD_INPUT, "one\ntwo\n")


def test_a_cut_answer_says_why():
    assert "(cut after 2 tokens, the limit of -n)" in loop(Chat("one two three four", max_tokens=2), "a")[2]
    prompt = len(Chat("x").format.prompt([{"role": "user", "content": "a"}]).ids)
    context = prompt + 3
    _, _, err = loop(Chat("one two three four five six", context=context), "a")
    assert f"(context full: {context}/{context} tokens, the answer is cut. /new starts a new chat)" in err


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
    code = ChatLoop(chat.conversation, Slow(out, err), Script(True, "a", "b"), err, "").run()
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
    assert loop(at_once, "a", KeyboardInterrupt, "b", clock=times(0.0, 0.3))[1].count("three") == 1


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


def test_lines_of_a_pipe(monkeypatch: pytest.MonkeyPatch):
    data = "eins\r\nzw\u00f6i\n\nno break".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    reader = PipeReader()
    assert [reader.read() for _ in range(5)] == ["eins", "zw\u00f6i", "", "no break", None]


def test_a_line_of_a_pipe_that_is_no_utf8_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ok\nab\xffc\nok\n")))
    reader = PipeReader()
    assert reader.read() == "ok"
    with pytest.raises(InputError, match=r"^input, line 2: invalid UTF-8 at byte offset 2 \(byte 0xff\)"):
        reader.read()
    assert reader.read() == "ok"
