"""What is asked of a scheduler, and what comes of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from m3_runtime.sampler import Sampler


class EndReason(Enum):
    """Why a request ended."""

    END_TOKEN = "end_token"
    MAX_TOKENS = "max_tokens"
    CONTEXT = "context"  #: the sequence is full
    LISTENER = "listener"  #: it wanted no more
    TIME = "time"  #: the time limit of the request
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class Token:
    """A token of the reply."""

    id: int
    logprob: float | None = None  #: natural logarithm of its probability by the model alone, where it was asked for
    top: tuple[tuple[int, float], ...] = ()  #: ids with the highest ones, best first


@dataclass(frozen=True)
class End:
    """How a request ended. Nothing comes after it."""

    reason: EndReason
    error: Exception | None
    prompt_tokens: int
    cached_tokens: int  #: of the prompt, not evaluated for this request
    generated_tokens: int  #: the end token included
    queue_seconds: float
    prefill_seconds: float  #: from the queue to the first token
    decode_seconds: float


class Listener(Protocol):
    """Who is told what comes, on the scheduler's thread: it must return soon."""

    def token(self, token: Token) -> bool:
        """A token of the reply, the end token not among them. True ends the request."""

    def finished(self, end: End) -> None: ...


class Constraint(Protocol):
    """What a reply may look like."""

    def allowed(self) -> npt.NDArray[np.bool_] | None:
        """Ids that may come next, bool [n_vocab]; None if all may. Raises InputError if it cannot tell."""

    def accept(self, id: int) -> None:
        """Notes what came."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for. A sampler, a constraint and a listener belong to one request."""

    ids: Sequence[int]  #: the prompt
    sampler: Sampler
    listener: Listener
    max_tokens: int | None = None  #: at least 1; None: no limit but the context
    end_ids: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    top_logprobs: int | None = None  #: 0 or more: tokens come with log probabilities; None: without
    seconds: float | None = None  #: time limit, the wait in the queue included
