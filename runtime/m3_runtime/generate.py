"""Prompt ids to a stream of pieces: prefill with reuse of what the session already holds, sampling, stopping."""

import time
from collections import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from m3_runtime.errors import CancelledError, InputError
from m3_runtime.held_tokens import HeldTokens, Logits, Progress, Shift, TokenSession
from m3_runtime.reply import MARKUP, Piece, Reply, ReplySplitter
from m3_runtime.sampler import Sampler
from m3_runtime.text import ChatTokenizer, TokenStream


class FinishReason(Enum):
    """Why a reply ended."""

    STOP = "stop"  #: the model wrote an end token
    LENGTH = "length"  #: as many tokens as were asked for
    CONTEXT = "context"  #: the context is full
    INTERRUPTED = "interrupted"  #: Ctrl-C, or the session was cancelled


@dataclass
class Timings:
    """Counts and seconds of one reply."""

    reused_tokens: int = 0  #: of the prompt, still in the session from before
    prefill_tokens: int = 0  #: of the prompt, evaluated for this reply
    prefill_seconds: float = 0.0
    decode_evals: int = 0  #: single-token evaluations after the prompt, one less than the sampled tokens
    decode_seconds: float = 0.0  #: of them and of all sampling

    @property
    def prefill_rate(self) -> float | None:
        """Tokens per second, None if none were evaluated."""
        return self.prefill_tokens / self.prefill_seconds if self.prefill_tokens and self.prefill_seconds > 0 else None

    @property
    def decode_rate(self) -> float | None:
        return self.decode_evals / self.decode_seconds if self.decode_evals and self.decode_seconds > 0 else None


@dataclass(frozen=True)
class Prompt:
    """What a reply is asked for with."""

    ids: Sequence[int]
    thinking: bool = False  #: it ends inside the thinking, where the reply goes on
    new: int | None = None  #: tokens at its end that must not be dropped to make room, None: all


@dataclass
class Answer:
    """A reply under way; complete once `finish` is set."""

    reply: Reply = field(default_factory=Reply)
    ids: list[int] = field(default_factory=list)  #: sampled ids, the end token included
    finish: FinishReason | None = None
    timings: Timings = field(default_factory=Timings)


class Generator:
    """Answers prompts with one sequence of a session. The sequence belongs to the generator."""

    def __init__(
        self,
        session: TokenSession,
        context: int,
        tokenizer: ChatTokenizer,
        sampler: Sampler,
        seq: int = 0,
        *,
        shift: Shift | None = None,
    ) -> None:
        """context: tokens that the sequence can hold. shift: what to do when they are there; None stops."""
        self.held = HeldTokens(session, context, seq, shift)
        self._tokenizer = tokenizer
        self._sampler = sampler
        self._markup = [id for name in MARKUP if (id := tokenizer.token_id(name)) is not None]

    @property
    def used(self) -> int:
        """Tokens that the sequence holds."""
        return self.held.used

    @property
    def context(self) -> int:
        """Tokens that it can hold."""
        return self.held.context

    def check_fits(self, prompt: Prompt) -> None:
        """Raises ContextError with used and limit if a prompt cannot be evaluated, InputError if it is empty."""
        if not prompt.ids:
            raise InputError("the prompt has no tokens, expected at least one")
        self.held.check_fits(prompt.ids, _new(prompt))

    def read(self, prompt: Prompt, progress: Progress | None = None) -> Timings:
        """Evaluates a prompt ahead of what will follow it. Raises what `answer` raises, and KeyboardInterrupt."""
        timings = Timings()
        self.check_fits(prompt)
        self._prefill(prompt, timings, progress)
        return timings

    def answer(
        self,
        prompt: Prompt,
        answer: Answer,
        *,
        max_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> abc.Generator[Piece, None, None]:
        """Evaluates a prompt and yields the pieces of the reply, each once and whole characters only.

        What a full context does to prompt and reply is the policy's, see `HeldTokens`.

        prompt: the whole of it; a beginning that the session holds from before is not evaluated again. answer: filled
        while the pieces come, also when the caller stops early. max_tokens: at least 1; None: no limit but the context.
        progress: see `TokenSession.eval`, for the prompt only.

        Ctrl-C (KeyboardInterrupt) and `Session.cancel` during evaluation end the reply as INTERRUPTED.
        Raises what `check_fits` raises, before anything is evaluated, and NotFiniteError.
        """
        self.check_fits(prompt)
        splitter = ReplySplitter(thinking=prompt.thinking)
        stream = TokenStream(self._tokenizer, visible=self._markup)
        try:
            logits = self._prefill(prompt, answer.timings, progress)
            for text in self._decode(logits, answer, max_tokens, stream):
                for piece in splitter.push(text):
                    answer.reply.add(piece)
                    yield piece
        except (KeyboardInterrupt, CancelledError):
            answer.finish = FinishReason.INTERRUPTED
        for piece in (*splitter.push(stream.finish()), *splitter.finish()):
            answer.reply.add(piece)
            yield piece

    def _prefill(self, prompt: Prompt, timings: Timings, progress: Progress | None) -> Logits:
        start = time.perf_counter()
        logits, timings.reused_tokens = self.held.evaluate(prompt.ids, _new(prompt), progress)
        timings.prefill_seconds = time.perf_counter() - start
        timings.prefill_tokens = self.used - timings.reused_tokens
        return logits

    def _decode(self, logits: Logits, answer: Answer, max_tokens: int | None, stream: TokenStream) -> Iterator[str]:
        """Text of the sampled tokens. Time in which the caller works with a piece is not counted."""
        timings = answer.timings
        while True:
            start = time.perf_counter()
            id = self._sampler.sample(logits, self.held.ids)
            answer.ids.append(id)
            timings.decode_seconds += time.perf_counter() - start
            if id in self._tokenizer.end_ids:
                answer.finish = FinishReason.STOP
                return
            yield stream.push(id)
            if max_tokens is not None and len(answer.ids) >= max_tokens:
                answer.finish = FinishReason.LENGTH
                return
            if self.used >= self.context and not self.held.make_room():
                answer.finish = FinishReason.CONTEXT
                return
            start = time.perf_counter()
            logits = self.held.append(id)
            timings.decode_evals += 1
            timings.decode_seconds += time.perf_counter() - start


def _new(prompt: Prompt) -> int:
    return len(prompt.ids) if prompt.new is None else prompt.new
