"""The loop that holds a chat on a terminal or through a pipe."""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TextIO

from m3_runtime.chat import Conversation, is_empty
from m3_runtime.chat_commands import ChatCommands, Next
from m3_runtime.errors import ContextError, ExitCode, InputError
from m3_runtime.generate import FinishReason
from m3_runtime.line_reader import Reader
from m3_runtime.screen import PrefillProgress, Screen


@dataclass
class ChatLoop:
    """Reads messages and shows answers until the reader ends, /quit, or Ctrl-C twice without a message between."""

    conversation: Conversation
    screen: Screen
    reader: Reader
    commands: ChatCommands
    err: TextIO
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
                retry = False
                if text.startswith("/"):
                    try:
                        with self.reader.quiet():
                            following = self.commands.run(text)
                    finally:
                        self._say_dropped()
                    if following is Next.LEAVE:
                        break
                    retry = following is Next.RETRY
                    if not retry:
                        continue
                if (retry or text.strip()) and not self._turn(None if retry else text):
                    interrupts = 1
                    stopped_at = self.clock()
            except KeyboardInterrupt:
                if not self.reader.interactive:
                    raise
                self.screen.end()
                self.screen.note("")
                if not (interrupts and self.clock() - stopped_at < 1.0):  # the impatient hand that stopped the answer
                    interrupts += 1
                if interrupts > 1:
                    break
                self.screen.note("(Ctrl-C again leaves, and so does /quit)")
                stopped_at = -1.0
            except InputError as error:
                self._refuse(str(error))
        return ExitCode.BAD_INPUT if self._refused and not self.reader.interactive else ExitCode.OK

    def _refuse(self, why: str) -> None:
        self._refused = True
        self.screen.end()
        self.screen.note(f"m3-run: {why}")

    def _turn(self, text: str | None) -> bool:
        """Answers a message, None: the last one again. False if Ctrl-C stopped the answer."""
        progress: PrefillProgress | None = None

        def new_progress(n_tokens: int) -> PrefillProgress:
            nonlocal progress
            progress = PrefillProgress(self.err, n_tokens)
            return progress

        conversation = self.conversation
        answering = conversation.retry(new_progress) if text is None else conversation.ask(text, new_progress)
        try:
            with self.reader.quiet(), closing(answering) as pieces:
                for piece in pieces:
                    if progress:
                        progress.clear()
                        progress = None
                        self._say_dropped()
                    self.screen.show(piece)
        except KeyboardInterrupt:
            conversation.answer.finish = FinishReason.INTERRUPTED
        except ContextError as error:
            self._refuse(
                f"{error}; the chat goes on without this message. /save keeps it, /undo takes the last turn back, "
                "/new starts a new one"
            )
            return True
        finally:
            if progress:
                progress.clear()
            self.screen.end()
            self._say_dropped()
        return self._finish()

    def _say_dropped(self) -> None:
        for text in self.conversation.take_dropped():
            self.screen.note(
                f"(context full: dropped the oldest text behind the first {self.conversation.pinned} tokens: "
                f"{_ends(text)}; {self.conversation.dropped} tokens in all)"
            )

    def _finish(self) -> bool:
        answer, conversation = self.conversation.answer, self.conversation
        if answer.finish is FinishReason.LENGTH:
            self.screen.note(f"(cut after {len(answer.ids)} tokens, the limit of -n)")
        elif answer.finish is FinishReason.CONTEXT:
            self.screen.note(
                f"(context full: {conversation.used}/{conversation.context} tokens, the answer is cut. "
                "/save keeps the chat, /undo takes the turn back, /new starts a new one)"
            )
        elif answer.finish is FinishReason.INTERRUPTED:
            if not self.reader.interactive:
                raise KeyboardInterrupt
            self.screen.note(
                "(stopped before anything came, the message is not kept)" if is_empty(answer) else "(stopped)"
            )
            return False
        return True


def _ends(text: str) -> str:
    """A text by its beginning and its end."""
    folded = " ".join(text.split())
    return f'"{folded}"' if len(folded) <= 80 else f'"{folded[:38]} ... {folded[-38:]}"'
