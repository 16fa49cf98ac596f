"""Which sequence of a session holds which tokens: where a prompt can go on from what was evaluated before."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt


class PagedSession(Protocol):
    """The part of `m3_runtime.engine.Session` that this module uses."""

    def length(self, seq: int = 0) -> int: ...

    def rewind(self, length: int, seq: int = 0) -> None: ...

    def fork(self, src: int, dst: int) -> None: ...

    def pages(self) -> tuple[int, int]: ...


@dataclass(eq=False)
class Slot:
    """A sequence of the session."""

    seq: int
    ids: "array[int]" = field(default_factory=lambda: array("i"))  #: what it holds
    running: bool = False  #: a request is at work on it
    may_share: bool = False  #: another sequence may hold its last page too
    used: int = 0  #: when it was last given back, in releases


@dataclass(frozen=True)
class Match:
    """A beginning that a sequence holds already."""

    slot: Slot
    length: int

    @property
    def is_whole(self) -> bool:
        """Whether it is all that the sequence holds, and no request works on it."""
        return not self.slot.running and len(self.slot.ids) == self.length


class PrefixCache:
    """The sequences of a session. Those that no request works on keep their tokens until the room is needed.

    Not for several threads at once.
    """

    def __init__(self, session: PagedSession, sequences: int, block_size: int) -> None:
        """sequences: of the session, all of them empty."""
        self._session = session
        self._block = block_size
        self._slots = [Slot(seq) for seq in range(sequences)]
        self._releases = 0
        self.evictions = 0  #: sequences that were dropped to make room

    @property
    def free_pages(self) -> int:
        used, total = self._session.pages()
        return total - used

    @property
    def cached_tokens(self) -> int:
        """Tokens in sequences that no request works on."""
        return sum(len(slot.ids) for slot in self._slots if not slot.running)

    def match(self, ids: "array[int]") -> Match | None:
        """The longest beginning of `ids`, not all of it, that a sequence holds. Its last token is always evaluated:
        from its logits the reply starts."""
        wanted = np.frombuffer(ids, np.int32)[:-1]
        matches = [Match(slot, common_prefix(np.frombuffer(slot.ids, np.int32), wanted)) for slot in self._slots]
        best = max(matches, key=lambda match: (match.length, match.is_whole))
        return best if best.length else None

    def take(self, match: Match | None) -> Slot | None:
        """A sequence that holds what `match` says and nothing else, for a request; None if requests have them all.

        The one of the match is taken itself where little is lost by it; else it is forked, so that it stays for others.
        """
        idle = [slot for slot in self._slots if not slot.running]
        if not idle:
            return None
        slot = min(idle, key=lambda slot: (len(slot.ids) > 0, slot.used))  # an empty one, or unused for longest
        if match is not None and not match.slot.running:
            mostly = 2 * match.length >= len(match.slot.ids)
            if match.is_whole or (mostly and len(slot.ids)):
                slot = match.slot
        if match is None or slot is not match.slot:
            self.evictions += len(slot.ids) > 0
            self._rewind(slot, 0)
        if match is not None:
            if slot is not match.slot:
                self._session.fork(match.slot.seq, slot.seq)
                slot.ids = match.slot.ids[:]
                match.slot.may_share = True
            self._rewind(slot, match.length)
        slot.running = True
        return slot

    def append(self, slot: Slot, ids: Sequence[int]) -> None:
        """Notes ids that were evaluated."""
        slot.ids.extend(ids)
        slot.may_share = False

    def release(self, slot: Slot) -> None:
        """The request is done; the tokens stay as long as there is room."""
        self._releases += 1
        slot.running, slot.used = False, self._releases

    def drop(self, slot: Slot) -> None:
        """Gives back a sequence and its pages."""
        self._rewind(slot, 0)
        self.release(slot)

    def drop_idle(self) -> None:
        """Forgets every sequence that no request works on."""
        for slot in self._slots:
            if not slot.running:
                self._rewind(slot, 0)

    def pages_for(self, slot: Slot, n: int) -> int:
        """Pages that n more tokens may take: full blocks, and a copy of a last page that another sequence holds too."""
        length = len(slot.ids)
        fresh = -(-(length + n) // self._block) - -(-length // self._block)
        return fresh + (slot.may_share and length % self._block > 0)

    def make_room(self, n_pages: int) -> bool:
        """Drops idle sequences, the one unused for longest first, until n pages are free. False if they are not."""
        while self.free_pages < n_pages:
            idle = [slot for slot in self._slots if not slot.running and len(slot.ids)]
            if not idle:
                return False
            self._rewind(min(idle, key=lambda slot: slot.used), 0)
            self.evictions += 1
        return True

    def _rewind(self, slot: Slot, length: int) -> None:
        self._session.rewind(length, slot.seq)
        del slot.ids[length:]
        slot.may_share = length > 0


def common_prefix(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """How many ids two lists begin with alike."""
    n = min(len(a), len(b))
    if not n or a[0] != b[0]:
        return 0
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
