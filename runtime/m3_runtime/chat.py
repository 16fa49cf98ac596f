"""A conversation with a model: its turns, and what a session holds of them."""

from collections import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any

from m3_runtime.errors import ContextError, InputError
from m3_runtime.generate import Answer, FinishReason, Generator, Prompt, Timings
from m3_runtime.held_tokens import Progress
from m3_runtime.reply import Piece, opens_thinking
from m3_runtime.template import ChatTemplate, Message
from m3_runtime.text import ChatTokenizer

THINKING_MODES = ("enabled", "disabled", "adaptive")

#: Tokens that a document must leave for a question and its answer.
QUESTION_ROOM = 64

# Two messages that start with different tokens: what their prompts share is what stands in front of a message.
_PROBES = ("a", "The")


class ChatFormat:
    """Messages to prompts, with the template and the tokenizer of one file."""

    def __init__(self, template: ChatTemplate, tokenizer: ChatTokenizer, thinking: str | None = None) -> None:
        """thinking: `thinking_mode` of the template; None leaves it undefined.

        Raises InputError if a thinking mode is asked for and the template knows none.
        """
        self._template = template
        self._tokenizer = tokenizer
        self._variables: dict[str, object] = dict(tokenizer.template_variables())
        self._thinking: str | None = None
        if thinking is not None:
            self.thinking = thinking

    @property
    def thinking(self) -> str | None:
        """`thinking_mode` of the template."""
        return self._thinking

    @thinking.setter
    def thinking(self, mode: str | None) -> None:
        if mode is None:
            self._variables.pop("thinking_mode", None)
        elif "thinking_mode" not in self._template.variables:
            raise InputError("--thinking: the chat template of this file has no thinking_mode")
        else:
            self._variables["thinking_mode"] = mode
        self._thinking = mode

    def prompt(self, messages: Sequence[Message]) -> Prompt:
        """The prompt that asks for the next message of the assistant."""
        text = self._template.render(messages, variables=self._variables)
        return Prompt(self._tokenizer.encode(text), opens_thinking(text))

    def up_to_message(self, messages: Sequence[Message], start: str = "") -> list[int]:
        """Ids of a prompt up to where the next message of the user stands or, with its `start`, goes on.

        A last token that what follows could change is not among them.
        """
        prompts = [self.prompt([*messages, {"role": "user", "content": start + probe}]).ids for probe in _PROBES]
        return [id for id, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*prompts, strict=False))]

    def text(self, ids: Sequence[int]) -> str:
        """What ids stand for, with the names of control tokens."""
        return self._tokenizer.decode(ids, control=True)


@dataclass(frozen=True)
class Turn:
    """A message and its answer."""

    text: str
    document: str = ""  #: of /read; stands in front of the message
    content: str = ""  #: the answer, tool calls in their markup included
    thinking: str = ""  #: not stripped: the template must give back the very ids that the session holds

    @property
    def message(self) -> str:
        """What the user says in this turn."""
        return f"{self.document}\n\n{self.text}" if self.document else self.text

    def messages(self) -> list[Message]:
        return [
            {"role": "user", "content": self.message},
            {"role": "assistant", "content": self.content, "reasoning_content": self.thinking},
        ]


class Conversation:
    """Turns so far, and the generator that answers them.

    Every turn renders the whole conversation with the template, reasoning of earlier turns included, and evaluates
    what differs from the ids that the session holds. A turn whose prompt does not fit in the context is refused and
    changes nothing. The turns are kept whole, also where the generator drops tokens of them to make room.
    """

    def __init__(
        self,
        format: ChatFormat,
        generator: Generator,
        *,
        system: str | None = None,
        max_tokens: int | None = None,
        keep: int = 0,
    ) -> None:
        """system: a message that opens every conversation. max_tokens: of one answer. keep: tokens at the start that
        are pinned, at least; the system message is in any case."""
        self._format = format
        self._generator = generator
        self._system = system
        self._max_tokens = max_tokens
        self._keep = keep
        self._undropped: list[list[int]] = []
        self.turns: list[Turn] = []
        self.document = ""  #: read, and put in front of the next message
        self.answer = Answer()  #: the last one
        generator.held.on_drop = self._undropped.append
        self._pin()

    @property
    def messages(self) -> list[Message]:
        """Of all turns, the system message first."""
        return first_messages(self._system) + [message for turn in self.turns for message in turn.messages()]

    @property
    def used(self) -> int:
        """Tokens that the session holds."""
        return self._generator.used

    @property
    def context(self) -> int:
        """Tokens that it can hold."""
        return self._generator.context

    @property
    def pinned(self) -> int | None:
        """Tokens at the start that are never dropped; None if nothing is."""
        held = self._generator.held
        return None if held.shift is None else held.pinned

    @property
    def dropped(self) -> int:
        """Tokens of the conversation that the session does not hold any more."""
        return len(self._generator.held.dropped)

    def take_dropped(self) -> list[str]:
        """Texts that were dropped since the last call, oldest first."""
        texts = [self._format.text(ids) for ids in self._undropped]
        self._undropped.clear()
        return texts

    # ---------------------------------------------------------------------------------------------- turns

    def ask(self, text: str, progress: Callable[[int], Progress] | None = None) -> abc.Generator[Piece, None, None]:
        """Sends a message and yields the pieces of the reply; `self.answer` grows with them.

        An answer that was stopped stays in the history as far as it came; if nothing came, the message is not kept
        either. progress: makes the prefill's callback from the number of tokens to evaluate.
        Raises ContextError (used and limit) or InputError before anything has changed.
        """
        return self._ask(Turn(text, self.document), progress)

    def retry(self, progress: Callable[[int], Progress] | None = None) -> abc.Generator[Piece, None, None]:
        """Answers the last message again. The earlier answer comes back if nothing came of the new one.

        Raises InputError if there is no message, and what `ask` raises.
        """
        if not self.turns:
            raise InputError("/retry: there is no message yet")
        last, document = self.turns.pop(), self.document
        n = len(self.turns)
        try:
            yield from self._ask(Turn(last.text, last.document), progress)
        finally:
            if len(self.turns) == n:
                self.turns.append(last)
            self.document = document

    def undo(self) -> str | None:
        """Takes back a document that no question followed, else the last turn; what was said, None if nothing was.

        The document of a turn that is taken back is there again for another question.
        """
        if self.document:
            taken, self.document = self.document, ""
        elif self.turns:
            turn = self.turns.pop()
            taken, self.document = turn.text, turn.document
        else:
            return None
        self._rewind()
        return taken

    def reset(self) -> None:
        """Forgets all turns."""
        self.turns, self.document, self.answer = [], "", Answer()
        self._rewind()

    def read(self, name: str, text: str, progress: Callable[[int], Progress] | None = None) -> tuple[int, Timings]:
        """Evaluates a document, which the next message will ask about; the number of its tokens.

        Raises ContextError with the numbers if it leaves no room for a question, before anything has changed, and
        KeyboardInterrupt.
        """
        document = f"{self.document}\n\n{text}" if self.document else text
        before = len(self._format.up_to_message(self.messages))
        ids = self._format.up_to_message(self.messages, f"{document}\n\n")
        n = len(ids) - before
        pinned = self.pinned
        needed = (len(ids) if pinned is None else pinned + n) + QUESTION_ROOM
        if needed > self.context:
            held = f"{before} stand before it" if pinned is None else f"{pinned} are pinned"
            raise ContextError(
                f"{name}: {n} tokens, {held} and a question needs {QUESTION_ROOM}; the context holds {self.context}"
            )
        prompt = Prompt(ids, new=n)
        timings = self._generator.read(prompt, progress and progress(self._n_to_evaluate(prompt)))
        self.document = document
        return n, timings

    @property
    def system(self) -> str | None:
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        self._system = text
        self._rewind()
        self._pin()

    @property
    def thinking(self) -> str | None:
        """`thinking_mode` of the template; None leaves it to the template."""
        return self._format.thinking

    @thinking.setter
    def thinking(self, mode: str | None) -> None:
        self._format.thinking = mode
        self._rewind()
        self._pin()

    # ---------------------------------------------------------------------------------------------- on disk

    def state(self) -> dict[str, Any]:
        """JSON values from which `restore` makes the conversation again."""
        return {
            "system": self._system,
            "thinking": self._format.thinking,
            "document": self.document,
            "turns": [asdict(turn) for turn in self.turns],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over a conversation that `state` gave. Raises InputError, with nothing changed, if it is none."""
        turns = self.check_state(state)
        self._format.thinking = state["thinking"]
        self._system, self.turns, self.document = state["system"], turns, state["document"]
        self.answer = Answer()
        self._pin()

    @staticmethod
    def check_state(state: Mapping[str, Any]) -> list[Turn]:
        """The turns of a state. Raises InputError if it is none."""
        try:
            turns = [Turn(**{name: _string(value) for name, value in turn.items()}) for turn in state["turns"]]
            _string(state["document"])
            if state["system"] is not None:
                _string(state["system"])
            if state["thinking"] not in (None, *THINKING_MODES):
                raise ValueError
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InputError("the file holds a session, but no conversation of m3-run") from None
        return turns

    # ---------------------------------------------------------------------------------------------- the work

    def _ask(self, turn: Turn, progress: Callable[[int], Progress] | None) -> abc.Generator[Piece, None, None]:
        answer = self.answer = Answer()
        try:
            prompt = self._format.prompt([*self.messages, {"role": "user", "content": turn.message}])
            if self._generator.held.shift is not None:
                before = len(self._format.up_to_message(self.messages))
                prompt = replace(prompt, new=len(prompt.ids) - before)
            self._generator.check_fits(prompt)
            shown = progress and progress(self._n_to_evaluate(prompt))
            yield from self._generator.answer(prompt, answer, max_tokens=self._max_tokens, progress=shown)
        except (GeneratorExit, KeyboardInterrupt):
            answer.finish = FinishReason.INTERRUPTED  # Ctrl-C while the prompt was made or a piece was shown
            raise
        finally:
            if answer.finish is not None and not is_empty(answer):
                self.turns.append(replace(turn, content=answer.reply.content, thinking=answer.reply.thinking))
                self.document = ""

    def _n_to_evaluate(self, prompt: Prompt) -> int:
        return len(prompt.ids) - self._generator.held.common(prompt.ids[:-1])

    def _rewind(self) -> None:
        """Makes the session hold no more than the turns, up to where the next message begins."""
        start = f"{self.document}\n\n" if self.document else ""
        self._generator.held.keep(self._format.up_to_message(self.messages, start))

    def _pin(self) -> None:
        held = self._generator.held
        if held.shift is not None:
            n = len(self._format.up_to_message(first_messages(self._system)))
            held.set_shift(replace(held.shift, pinned=max(n, self._keep)))


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def first_messages(system: str | None) -> list[Message]:
    """How a conversation starts: with the system message if there is one."""
    return [] if system is None else [{"role": "system", "content": system}]


def is_empty(answer: Answer) -> bool:
    """Whether an answer was stopped before anything came."""
    reply = answer.reply
    return answer.finish is FinishReason.INTERRUPTED and not (reply.content or reply.thinking)
