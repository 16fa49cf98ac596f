"""A conversation with a model, and the loop that holds it on a terminal or through a pipe."""

import contextlib
import sys
import time
from collections import abc
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol, TextIO

from m3_runtime.errors import ContextError, ExitCode, InputError
from m3_runtime.generate import Answer, FinishReason, Generator, Progress, Prompt
from m3_runtime.reply import Piece, opens_thinking
from m3_runtime.screen import PrefillProgress, Screen
from m3_runtime.template import ChatTemplate, Message
from m3_runtime.text import ChatTokenizer, invalid_utf8

HELP = """\
/help   this list
/new    forgets the conversation
/stats  context, speed, attention mode
/quit   leaves; so do Ctrl-D, and Ctrl-C twice
Ctrl-C stops an answer and keeps the chat. A space in front sends a message that starts with "/"."""


class ChatFormat:
    """Messages to prompts, with the template and the tokenizer of one file."""

    def __init__(self, template: ChatTemplate, tokenizer: ChatTokenizer, thinking: str | None = None) -> None:
        """thinking: `thinking_mode` of the template; None leaves it undefined.

        Raises InputError if a thinking mode is asked for and the template knows none.
        """
        self._template = template
        self._tokenizer = tokenizer
        self._variables: dict[str, object] = dict(tokenizer.template_variables())
        if thinking is not None:
            if "thinking_mode" not in template.variables:
                raise InputError("--thinking: the chat template of this file has no thinking_mode")
            self._variables["thinking_mode"] = thinking

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """The prompt that asks for the next message of the assistant."""
        text = self._template.render(messages, variables=self._variables)
        return Prompt(self._tokenizer.encode(text), opens_thinking(text))


class Conversation:
    """Messages so far, and the generator that answers them.

    Every turn renders the whole conversation with the template, reasoning of earlier turns included, and evaluates
    what differs from the ids that the session holds. A turn whose prompt does not fit in the context is refused and
    changes nothing; nothing is ever dropped from the history to make room.
    """

    def __init__(
        self, format: ChatFormat, generator: Generator, *, system: str | None = None, max_tokens: int | None = None
    ) -> None:
        """system: a message that opens every conversation. max_tokens: of one answer."""
        self._format = format
        self._generator = generator
        self._system = system
        self._max_tokens = max_tokens
        self.messages: list[Message] = []
        self.answer = Answer()  #: the last one
        self.reset()

    def reset(self) -> None:
        """Forgets all turns."""
        self.messages = first_messages(self._system)

    def ask(self, text: str, progress: Callable[[int], Progress] | None = None) -> abc.Generator[Piece, None, None]:
        """Sends a message and yields the pieces of the reply; `self.answer` grows with them.

        An answer that was stopped stays in the history as far as it came; if nothing came, the message is not kept
        either. progress: makes the prefill's callback from the number of tokens in the prompt.
        Raises ContextError (used and limit) or InputError before anything has changed.
        """
        user = {"role": "user", "content": text}
        answer = self.answer = Answer()
        try:
            prompt = self._format.prompt([*self.messages, user])
            shown = progress and progress(len(prompt.ids))
            yield from self._generator.answer(prompt, answer, max_tokens=self._max_tokens, progress=shown)
        except (GeneratorExit, KeyboardInterrupt):
            answer.finish = FinishReason.INTERRUPTED  # Ctrl-C while the prompt was made or a piece was shown
            raise
        finally:
            if answer.finish is not None and not is_empty(answer):
                self.messages += [
                    user,
                    {
                        "role": "assistant",
                        "content": answer.reply.content,
                        # Not stripped: the template must give back the very ids that the session holds.
                        "reasoning_content": answer.reply.thinking,
                    },
                ]

    @property
    def used(self) -> int:
        """Tokens that the session holds."""
        return self._generator.used

    @property
    def context(self) -> int:
        """Tokens that it can hold."""
        return self._generator.context


def first_messages(system: str | None) -> list[Message]:
    """How a conversation starts: with the system message if there is one."""
    return [] if system is None else [{"role": "system", "content": system}]


def is_empty(answer: Answer) -> bool:
    """Whether an answer was stopped before anything came."""
    reply = answer.reply
    return answer.finish is FinishReason.INTERRUPTED and not (reply.content or reply.thinking)


class Reader(Protocol):
    """Where messages come from."""

    interactive: bool

    def read(self) -> str | None:
        """The next message without its line break, None at the end. Raises InputError for invalid UTF-8."""


class TerminalReader:
    """A person at a terminal, with line editing where Python has it."""

    interactive = True

    def __init__(self, out: TextIO, err: TextIO) -> None:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (gives input() its line editing)
        self._err = None if out.isatty() else err

    def read(self) -> str | None:
        try:
            if self._err is None:
                return input("> ")
            self._err.write("> ")
            self._err.flush()
            return input()
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise InputError(f"input: {invalid_utf8(error)}") from None


class PipeReader:
    """One message a line, from a file or a program."""

    interactive = False

    def __init__(self) -> None:
        self._line = 0

    def read(self) -> str | None:
        line = sys.stdin.buffer.readline()
        self._line += 1
        if not line:
            return None
        try:
            return line.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise InputError(f"input, line {self._line}: {invalid_utf8(error)}") from None


@dataclass
class ChatLoop:
    """Reads messages and shows answers until the reader ends, /quit, or Ctrl-C twice without a message between."""

    conversation: Conversation
    screen: Screen
    reader: Reader
    err: TextIO
    status: str  #: the run's status line, repeated by /stats
    clock: Callable[[], float] = time.monotonic

    def run(self) -> ExitCode:
        """OK; through a pipe BAD_INPUT if a message was refused, INTERRUPTED after Ctrl-C."""
        self._refused = False
        interrupts = 0
        stopped_at = -1.0
        while True:
            try:
                text = self.reader.read()
                interrupts = 0
                if text is None:
                    if self.reader.interactive:
                        self.screen.note("")
                    break
                if text.startswith("/"):
                    if not self._command(text.strip()):
                        break
                elif text.strip() and not self._turn(text):
                    interrupts = 1
                    stopped_at = self.clock()
            except KeyboardInterrupt:
                if not self.reader.interactive:
                    raise
                self.screen.end()
                self.screen.note("")
                if interrupts and self.clock() - stopped_at < 1.0:
                    continue  # the same impatient hand that stopped the answer
                interrupts += 1
                if interrupts > 1:
                    break
                self.screen.note("(Ctrl-C again leaves, and so does /quit)")
            except InputError as error:
                self._refuse(str(error))
        return ExitCode.BAD_INPUT if self._refused and not self.reader.interactive else ExitCode.OK

    def _refuse(self, why: str) -> None:
        self._refused = True
        self.screen.end()
        self.screen.note(f"m3-run: {why}")

    def _turn(self, text: str) -> bool:
        """False if Ctrl-C stopped the answer."""
        progress: PrefillProgress | None = None

        def new_progress(n_tokens: int) -> PrefillProgress:
            nonlocal progress
            progress = PrefillProgress(self.err, n_tokens)
            return progress

        try:
            with closing(self.conversation.ask(text, new_progress)) as pieces:
                for piece in pieces:
                    if progress:
                        progress.clear()
                        progress = None
                    self.screen.show(piece)
        except KeyboardInterrupt:
            self.conversation.answer.finish = FinishReason.INTERRUPTED
        except ContextError as error:
            self._refuse(f"{error}; the chat goes on without this message. /new starts a new one")
            return True
        finally:
            if progress:
                progress.clear()
            self.screen.end()
        return self._finish()

    def _finish(self) -> bool:
        answer, conversation = self.conversation.answer, self.conversation
        if answer.finish is FinishReason.LENGTH:
            self.screen.note(f"(cut after {len(answer.ids)} tokens, the limit of -n)")
        elif answer.finish is FinishReason.CONTEXT:
            self.screen.note(
                f"(context full: {conversation.used}/{conversation.context} tokens, the answer is cut. "
                "/new starts a new chat)"
            )
        elif answer.finish is FinishReason.INTERRUPTED:
            if not self.reader.interactive:
                raise KeyboardInterrupt
            self.screen.note(
                "(stopped before anything came, the message is not kept)" if is_empty(answer) else "(stopped)"
            )
            return False
        return True

    def _command(self, text: str) -> bool:
        """False to leave."""
        if text == "/quit":
            return False
        if text == "/new":
            self.conversation.reset()
            self.screen.note("(new chat)")
        elif text == "/stats":
            self.screen.note(self._stats())
        elif text == "/help":
            self.screen.note(HELP)
        else:
            self._refuse(f"{text.split()[0]}: no such command, /help lists them")
        return True

    def _stats(self) -> str:
        timings = self.conversation.answer.timings
        lines = [self.status, f"context {self.conversation.used}/{self.conversation.context} tokens"]
        if timings.prefill_rate is not None:
            lines.append(
                f"last prompt: {timings.prefill_tokens} tokens at {timings.prefill_rate:.1f} tok/s, "
                f"{timings.reused_tokens} reused"
            )
        if timings.decode_rate is not None:
            lines.append(f"last answer: {len(self.conversation.answer.ids)} tokens at {timings.decode_rate:.1f} tok/s")
        return "\n".join(lines)
