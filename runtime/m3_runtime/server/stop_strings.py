"""Stop strings: where a text ends, without a part of one coming out before it is known to be none."""

from collections.abc import Sequence


class StopFilter:
    """Passes on a text up to the first stop string in it."""

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: none of them empty."""
        self._stops = stops
        self._held = ""
        self.hit: str | None = None  #: the stop string that ended the text

    def push(self, text: str) -> str:
        """What is certain to come before any stop string. Nothing after one was hit."""
        if self.hit is not None:
            return ""
        self._held += text
        # The one that is complete first; of several that end there, the longest, which begins first.
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            _, at, self.hit = min(ends)
            ready, self._held = self._held[:at], ""
            return ready
        held = max((n for stop in self._stops for n in range(1, len(stop)) if self._held.endswith(stop[:n])), default=0)
        ready, self._held = self._held[: len(self._held) - held], self._held[len(self._held) - held :]
        return ready

    def finish(self) -> str:
        """What was held back: the text ended inside of what looked like a stop string."""
        ready, self._held = self._held, ""
        return ready
