"""Choosing the next token from logits.

The filters run in the order of transformers: repeat penalty, temperature, top-k, top-p, min-p, then one draw. What
OpenAI's interface has beside them (`Adjustment`) is done after the repeat penalty.
"""

import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from m3_runtime.errors import InputError, NotFiniteError

# Keys of llama.cpp's files, by the option that they set.
_KEYS = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repeat_penalty": "general.sampling.penalty_repeat",
    "repeat_last_n": "general.sampling.penalty_last_n",
}


@dataclass(frozen=True, kw_only=True)
class SamplerOptions:
    """What the draw is limited to. The defaults are MiniMax's for M3. Raises InputError for a value out of range."""

    temperature: float = 1.0  #: divides the logits; 0 takes the best token (the lowest id among equals)
    top_k: int = 40  #: keep the k best tokens; 0 keeps all
    top_p: float = 0.95  #: keep the best tokens that together have at least this probability; (0, 1], 1 keeps all
    min_p: float = 0.0  #: drop tokens below this share of the best one's probability; [0, 1], 0 keeps all
    repeat_penalty: float = 1.0  #: recent tokens: positive logits are divided by it, others multiplied; above 0
    repeat_last_n: int = 64  #: how many tokens are recent, prompt included; 0 none, -1 all

    def __post_init__(self) -> None:
        for known in fields(self):
            value = getattr(self, known.name)
            low, high, expected = _RANGES[known.name]
            number = isinstance(value, int) if known.type is int else isinstance(value, int | float)
            if not number or isinstance(value, bool) or not low <= value <= high:
                raise InputError(f"{known.name}: {value!r}, expected {expected}")

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> "SamplerOptions":
        """The defaults of a GGUF file (`general.sampling.*`), M3's where it has none."""
        options = cls()
        for name, key in _KEYS.items():
            if key in metadata:
                value: Any = metadata[key]
                if isinstance(value, float):
                    # The file stores float32: 0.95 comes back as 0.949999988.
                    value = float(str(np.float32(value)))
                try:
                    options = replace(options, **{name: value})
                except InputError as error:
                    raise InputError(f"{key}: {error}") from None
        return options


_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, 1000.0, "a number from 0 to 1000"),
    "top_k": (0, 2**31 - 1, "a whole number, 0 or more"),
    "top_p": (math.nextafter(0.0, 1.0), 1.0, "a number above 0, at most 1"),
    "min_p": (0.0, 1.0, "a number from 0 to 1"),
    "repeat_penalty": (1e-3, 1000.0, "a number from 0.001 to 1000"),
    "repeat_last_n": (-1, 2**31 - 1, "a whole number, -1 or more"),
}


@dataclass(frozen=True, kw_only=True)
class Adjustment:
    """What is added to logits before the filters (source: OpenAI's chat completions)."""

    presence_penalty: float = 0.0  #: taken from the logit of every token that the reply has already
    frequency_penalty: float = 0.0  #: the same, times the number of its occurrences in the reply
    bias: Mapping[int, float] = field(default_factory=dict)  #: added to the logit of an id


def new_seed() -> int:
    """A seed that nobody chose, small enough to type."""
    return secrets.randbits(32)


class Sampler:
    """Draws tokens. The same options, seed and logits give the same tokens on every machine."""

    def __init__(
        self,
        options: SamplerOptions,
        seed: int,
        banned: Collection[int] = (),
        adjustment: Adjustment | None = None,
    ) -> None:
        """seed: 0 or more. banned: ids that are never chosen; at least one other must remain."""
        if seed < 0:
            raise InputError(f"seed: {seed}, expected 0 or more")
        self.options = options
        self.seed = seed
        self._banned = np.array(sorted(banned), dtype=np.int64)
        self._adjustment = adjustment or Adjustment()
        self._random = np.random.Generator(np.random.PCG64(seed))

    def sample(
        self,
        logits: npt.NDArray[np.float32],
        history: Sequence[int] = (),
        *,
        n_prompt: int = 0,
        allowed: npt.NDArray[np.bool_] | None = None,
    ) -> int:
        """The next id.

        logits: float32 [n_vocab], not changed; history: the ids so far, for the penalties; n_prompt: how many of them
        are not the reply's own; allowed: bool [n_vocab], the ids that may be chosen.
        One random number is drawn for each call, none at temperature 0.
        Raises NotFiniteError if a logit is NaN or infinite, InputError if no id may be chosen.
        """
        finite = np.isfinite(logits)
        if not finite.all():
            bad = np.flatnonzero(~finite)
            raise NotFiniteError(
                f"logits: {len(bad)} of {len(logits)} are not finite, the first is id {bad[0]}: {logits[bad[0]]}"
            )
        scores = logits.astype(np.float64)
        self._penalize(scores, history)
        self._adjust(scores, history, n_prompt)
        scores[self._banned] = -np.inf
        if allowed is not None:
            scores[~allowed] = -np.inf
            if not (scores > -np.inf).any():
                raise InputError("no token is left that may follow")
        if self.options.temperature == 0:
            return int(np.argmax(scores))
        ids = self._best(scores)
        scores = scores[ids] / self.options.temperature
        weights = np.exp(scores - scores[0])
        weights = weights[: self._kept(weights)]
        total = np.cumsum(weights)
        return int(ids[min(np.searchsorted(total, self._random.random() * total[-1], side="right"), len(total) - 1)])

    def _penalize(self, scores: npt.NDArray[np.float64], history: Sequence[int]) -> None:
        """Source: CTRL (arXiv 1909.05858), with the sign rule of transformers."""
        last_n, penalty = self.options.repeat_last_n, self.options.repeat_penalty
        if penalty == 1 or last_n == 0 or not history:
            return
        recent = np.unique(np.asarray(history if last_n < 0 else history[-last_n:], dtype=np.int64))
        scores[recent] = np.where(scores[recent] > 0, scores[recent] / penalty, scores[recent] * penalty)

    def _adjust(self, scores: npt.NDArray[np.float64], history: Sequence[int], n_prompt: int) -> None:
        presence, frequency = self._adjustment.presence_penalty, self._adjustment.frequency_penalty
        if (presence or frequency) and len(history) > n_prompt:
            ids, counts = np.unique(np.asarray(history[n_prompt:], dtype=np.int64), return_counts=True)
            scores[ids] -= presence + frequency * counts
        for id, bias in self._adjustment.bias.items():
            scores[id] += bias

    def _best(self, scores: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """The top-k ids, best first, the lower id first among equals; banned ones are not among them."""
        allowed = np.flatnonzero(scores > -np.inf)
        k = self.options.top_k
        if 0 < k < len(allowed):
            cut = np.partition(scores[allowed], -k)[-k]
            allowed = allowed[scores[allowed] >= cut]
        order = np.argsort(-scores[allowed], kind="stable")
        return allowed[order][: k or None]

    def _kept(self, weights: npt.NDArray[np.float64]) -> int:
        """How many of the sorted weights top-p and min-p leave; at least 1."""
        n = len(weights)
        if self.options.top_p < 1:
            total = np.cumsum(weights)
            n = min(n, int(np.searchsorted(total, self.options.top_p * total[-1], side="left")) + 1)
        if self.options.min_p > 0:
            n = min(n, int(np.count_nonzero(weights >= self.options.min_p * weights[0])))
        return n
