"""The tokens that one sequence of a session holds, and what happens when they fill the context."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from m3_runtime.errors import ContextError
from m3_runtime.interrupts import hold_signals

Progress: TypeAlias = Callable[[int, int], None]  #: called with steps done and steps in all
Logits: TypeAlias = npt.NDArray[np.float32]

#: Of the context, kept free for an answer by dropping more than would just fit.
_ANSWER_SHARE = 8


class TokenSession(Protocol):
    """The part of `m3_runtime.engine.Session` that generation uses."""

    def eval(self, ids: npt.NDArray[np.int32], seq: int = 0, *, progress: Progress | None = None) -> Logits: ...

    def length(self, seq: int = 0) -> int: ...

    def rewind(self, length: int, seq: int = 0) -> None: ...

    def drop(self, first_block: int, n_blocks: int, seq: int = 0) -> None: ...


@dataclass(frozen=True)
class Shift:
    """The policy of OnFull.SHIFT."""

    block_size: int
    pinned: int  #: tokens at the start that are never dropped, rounded up to whole blocks

    @property
    def pinned_tokens(self) -> int:
        return -(-self.pinned // self.block_size) * self.block_size


@dataclass
class HeldTokens:
    """The ids that a sequence holds, in step with the session, and those that were dropped from their middle.

    Positions in a prompt count the dropped tokens; positions in the sequence do not. With a Shift a prompt is held as
    its pinned tokens and what follows the dropped ones.
    """

    session: TokenSession
    context: int  #: tokens that the sequence can hold
    seq: int = 0
    shift: Shift | None = None
    on_drop: Callable[[list[int]], None] = lambda ids: None  #: told of the ids that were dropped, each once
    dropped: list[int] = field(default_factory=list)  #: ids that stood behind the pinned ones
    # Ids are noted before they are evaluated, so that an interruption at any point leaves a list whose first `used`
    # entries are right.
    _ids: list[int] = field(default_factory=list)

    @property
    def used(self) -> int:
        """Tokens that the sequence holds."""
        return self.session.length(self.seq)

    @property
    def ids(self) -> list[int]:
        """The tokens that the sequence holds."""
        del self._ids[self.used :]
        return self._ids

    @property
    def pinned(self) -> int:
        """Tokens at the start that are never dropped; 0 without a Shift."""
        return 0 if self.shift is None else min(self.shift.pinned_tokens, self.context)

    def common(self, prompt: Sequence[int]) -> int:
        """Tokens at the start of a prompt that need not be evaluated, dropped ones among them."""
        held, at = self.ids, self.pinned
        known = held if not self.dropped else [*held[:at], *self.dropped, *held[at:]]
        common = next((i for i, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b), None)
        common = min(len(known), len(prompt)) if common is None else common
        # What follows a dropped token stands where it stands only as long as the same tokens are dropped.
        return common if common >= at + len(self.dropped) else min(common, at)

    def keep(self, prompt: Sequence[int]) -> None:
        """Rewinds to what the sequence and the start of a prompt have in common."""
        common = self.common(prompt)
        if common < self.pinned + len(self.dropped):
            self.dropped = []
        self._rewind(common - len(self.dropped))

    def check_fits(self, prompt: Sequence[int], n_new: int) -> None:
        """Raises ContextError with used and limit if a prompt cannot be held. n_new: as for `evaluate`."""
        if self.shift is None:
            if len(prompt) > self.context:
                raise ContextError(
                    f"context full: the prompt has {len(prompt)} tokens, the context holds {self.context}"
                )
            return
        least = len(prompt) - self._droppable(len(prompt) - n_new)
        if least > self.context:
            raise ContextError(
                f"context full: the new part of the prompt has {n_new} tokens, {self.pinned} are pinned, "
                f"the context holds {self.context}"
            )

    def evaluate(self, prompt: Sequence[int], n_new: int, progress: Progress | None) -> tuple[Logits, int]:
        """Evaluates a prompt; returns the logits at its end and the number of its tokens that were held from before.

        The last token is always evaluated. n_new: tokens at its end that must not be dropped for want of room.
        """
        self.check_fits(prompt, n_new)
        # The last token's logits are what the reply starts from, so it is evaluated again.
        self.keep(prompt[:-1])
        self._make_room(prompt, n_new)
        at = self.pinned
        wanted = [*prompt[:at], *prompt[at + len(self.dropped) :]] if self.dropped else list(prompt)
        held = self.used
        return self._eval(wanted[held:], progress), held

    def append(self, id: int) -> Logits:
        """Evaluates one more token."""
        return self._eval([id], None)

    def make_room(self) -> bool:
        """Drops blocks so that an answer can go on in a full context; False if that is not to be."""
        n = 0 if self.shift is None else self._droppable(self.used)
        if not n or self.shift is None:
            return False
        blocks = -(-self.context // _ANSWER_SHARE) // self.shift.block_size
        self._drop_held(min(n, max(1, blocks) * self.shift.block_size))
        return True

    def set_shift(self, shift: Shift | None) -> None:
        """Changes the policy or what is pinned. What follows dropped tokens is forgotten, to be evaluated again."""
        if self.dropped:
            self._rewind(min(self.used, self.pinned))
            self.dropped = []
        self.shift = shift

    def reset(self, ids: Sequence[int]) -> None:
        """Notes what was loaded into the session, with nothing dropped."""
        self._ids = list(ids)
        self.dropped = []

    def resume_shifted(self, pinned: int, dropped: Sequence[int]) -> None:
        """After `reset`: says that tokens had been dropped behind the first `pinned` ones.

        If these are not the tokens that are pinned now, what follows them is forgotten, to be evaluated again.
        """
        if self.shift is not None and self.pinned == pinned:
            self.dropped = list(dropped)
        else:
            self._rewind(min(self.used, pinned))

    def _droppable(self, n_old: int) -> int:
        """Tokens in whole blocks between the pinned ones and position `n_old` of a prompt or a sequence."""
        assert self.shift is not None
        size = self.shift.block_size
        return max(0, n_old - self.pinned) // size * size

    def _make_room(self, prompt: Sequence[int], n_new: int) -> None:
        """Drops until the prompt fits, with room for an answer if that can be had."""
        if self.shift is None or len(prompt) - len(self.dropped) <= self.context:
            return
        size, droppable = self.shift.block_size, self._droppable(len(prompt) - n_new)
        wished = len(prompt) + self.context // _ANSWER_SHARE - self.context
        wanted = min(droppable, -(-wished // size) * size)
        more = wanted - len(self.dropped)
        at = self.pinned
        if self.used >= at + more:
            self._drop_held(more)
            return
        # The blocks are not all in the cache: what follows them is evaluated without them.
        self._rewind(min(self.used, at))
        gone = list(prompt[at + len(self.dropped) : at + wanted])
        self.dropped += gone
        self.on_drop(gone)

    def _drop_held(self, n: int) -> None:
        assert self.shift is not None
        at, size = self.pinned, self.shift.block_size
        with hold_signals():  # the list must not fall behind the session
            self.session.drop(at // size, n // size, self.seq)
            gone = self._ids[at : at + n]
            del self._ids[at : at + n]
            self.dropped += gone
        self.on_drop(gone)

    def _rewind(self, length: int) -> None:
        self.session.rewind(length, self.seq)
        del self._ids[length:]

    def _eval(self, ids: list[int], progress: Progress | None) -> Logits:
        del self._ids[self.used :]
        self._ids.extend(ids)
        return self.session.eval(np.array(ids, dtype=np.int32), self.seq, progress=progress)
