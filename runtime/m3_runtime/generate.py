"""Prompt ids to a stream of pieces: prefill with reuse of what the session already holds, sampling, stopping."""

import time
from collections import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from m3_runtime.errors import CancelledError, ContextError, InputError
from m3_runtime.reply import MARKUP, Piece, Reply, ReplySplitter
from m3_runtime.sampler import Sampler
from m3_runtime.text import ChatTokenizer, TokenStream

Progress = Callable[[int, int], None]  #: called with steps done and steps in all


class TokenSession(Protocol):
    """The part of `m3_runtime.engine.Session` that generation uses."""

    def eval(
        self, ids: npt.NDArray[np.int32], seq: int = 0, *, progress: Progress | None = None
    ) -> npt.NDArray[np.float32]: ...

    def length(self, seq: int = 0) -> int: ...

    def rewind(self, length: int, seq: int = 0) -> None: ...


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
        self, session: TokenSession, context: int, tokenizer: ChatTokenizer, sampler: Sampler, seq: int = 0
    ) -> None:
        """context: tokens that the sequence can hold."""
        self.context = context
        self._session = session
        self._tokenizer = tokenizer
        self._sampler = sampler
        self._seq = seq
        # What the sequence holds. Ids are noted before they are evaluated, so that an interruption at any point
        # leaves a list whose first `length` entries are right.
        self._held: list[int] = []
        self._markup = [id for name in MARKUP if (id := tokenizer.token_id(name)) is not None]

    @property
    def used(self) -> int:
        """Tokens that the sequence holds."""
        return self._session.length(self._seq)

    def check_fits(self, prompt: Prompt) -> None:
        """Raises ContextError with used and limit if a prompt cannot be evaluated, InputError if it is empty."""
        if not prompt.ids:
            raise InputError("the prompt has no tokens, expected at least one")
        if len(prompt.ids) > self.context:
            raise ContextError(
                f"context full: the prompt has {len(prompt.ids)} tokens, the context holds {self.context}"
            )

    def answer(
        self,
        prompt: Prompt,
        answer: Answer,
        *,
        max_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> abc.Generator[Piece, None, None]:
        """Evaluates a prompt and yields the pieces of the reply, each once and whole characters only.

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
            logits = self._prefill(prompt.ids, answer.timings, progress)
            for text in self._decode(logits, answer, max_tokens, stream):
                for piece in splitter.push(text):
                    answer.reply.add(piece)
                    yield piece
        except (KeyboardInterrupt, CancelledError):
            answer.finish = FinishReason.INTERRUPTED
        for piece in (*splitter.push(stream.finish()), *splitter.finish()):
            answer.reply.add(piece)
            yield piece

    def _prefill(self, ids: Sequence[int], timings: Timings, progress: Progress | None) -> npt.NDArray[np.float32]:
        del self._held[self.used :]
        common = 0
        # The last id is always evaluated: its logits are what the reply starts from.
        for held, wanted in zip(self._held, ids[:-1], strict=False):
            if held != wanted:
                break
            common += 1
        self._session.rewind(common, self._seq)
        del self._held[common:]
        timings.reused_tokens = common
        rest = list(ids[common:])
        start = time.perf_counter()
        logits = self._eval(rest, progress)
        timings.prefill_seconds = time.perf_counter() - start
        timings.prefill_tokens = len(rest)
        return logits

    def _decode(
        self, logits: npt.NDArray[np.float32], answer: Answer, max_tokens: int | None, stream: TokenStream
    ) -> Iterator[str]:
        """Text of the sampled tokens. Time in which the caller works with a piece is not counted."""
        timings = answer.timings
        while True:
            start = time.perf_counter()
            id = self._sampler.sample(logits, self._held)
            answer.ids.append(id)
            timings.decode_seconds += time.perf_counter() - start
            if id in self._tokenizer.end_ids:
                answer.finish = FinishReason.STOP
                return
            yield stream.push(id)
            if max_tokens is not None and len(answer.ids) >= max_tokens:
                answer.finish = FinishReason.LENGTH
                return
            if self.used >= self.context:
                answer.finish = FinishReason.CONTEXT
                return
            start = time.perf_counter()
            logits = self._eval([id])
            timings.decode_evals += 1
            timings.decode_seconds += time.perf_counter() - start

    def _eval(self, ids: list[int], progress: Progress | None = None) -> npt.NDArray[np.float32]:
        self._held.extend(ids)
        return self._session.eval(np.array(ids, dtype=np.int32), self._seq, progress=progress)
