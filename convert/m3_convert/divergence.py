"""What comes out: how far the next-token distributions of a run are from the reference's."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from m3_convert.selection import Doubles, Floats, Ints, Mask

SLICE: Final = 1 << 18  #: logits that are worked on at once, or those of a row if that is more
SLICE_BYTES: Final = 64  #: that each of them takes on the way


@dataclass(frozen=True)
class Rows:
    """Some positions compared, arrays [n]."""

    kld: Doubles  #: KL divergence of the run's distribution from the reference's, in nats, at least 0
    top1: Mask  #: the most likely token is the same; the lower id of equal ones
    loss: Doubles  #: -log of the run's probability of the token that follows, in nats


def compare_logits(reference: Floats, run: Floats, following: Ints) -> Rows:
    """Compares the logits of the same positions, float32 [n, n_vocab]; following: int [n], ids of the next tokens.

    KL(p || q) = sum p (log p - log q), with p of the reference. Equal logits give exactly 0.
    """
    kld = np.empty(len(run))
    loss = np.empty(len(run))
    for rows in _slices(run):
        log_p, p = _softmax(reference[rows])
        log_q, _ = _softmax(run[rows])
        loss[rows] = _losses(log_q, following[rows])
        kld[rows] = np.maximum((p * (log_p - log_q)).sum(axis=1), 0)
    return Rows(kld, reference.argmax(axis=1) == run.argmax(axis=1), loss)


def itself(reference: Floats, following: Ints) -> Rows:
    """What `compare_logits` gives for the reference's own logits."""
    loss = np.empty(len(reference))
    for rows in _slices(reference):
        loss[rows] = _losses(_softmax(reference[rows])[0], following[rows])
    return Rows(np.zeros(len(loss)), np.ones(len(loss), np.bool_), loss)


def _slices(logits: Floats) -> Iterator[slice]:
    n, n_vocab = logits.shape
    step = max(1, SLICE // n_vocab)
    return (slice(first, first + step) for first in range(0, n, step))


def _losses(log_q: Doubles, following: Ints) -> Doubles:
    return -np.take_along_axis(log_q, following[:, None], axis=1)[:, 0]


def _softmax(logits: Floats) -> tuple[Doubles, Doubles]:
    """Logarithms of the probabilities, and these."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    p = np.exp(shifted)
    total = p.sum(axis=1, keepdims=True)
    shifted -= np.log(total)
    p /= total
    return shifted, p


class Divergence:
    """A run's distributions at all positions of a text beside the reference's; see `Rows`."""

    def __init__(self, n: int) -> None:
        self.kld: Doubles = np.full(n, np.nan)
        self.top1: NDArray[np.bool_] = np.zeros(n, np.bool_)
        self.loss: Doubles = np.full(n, np.nan)  #: the last position has none: nothing follows it

    def put(self, first: int, rows: Rows) -> None:
        """Rows from position `first` on."""
        end = first + len(rows.kld)
        self.kld[first:end], self.top1[first:end], self.loss[first:end] = rows.kld, rows.top1, rows.loss

    @property
    def kld_mean(self) -> float:
        return float(self.kld.mean())

    def kld_quantile(self, share: float) -> float:
        """The divergence that this share of the positions does not exceed."""
        return float(np.quantile(self.kld, share))

    @property
    def kld_max(self) -> float:
        return float(self.kld.max())

    @property
    def kld_max_at(self) -> int:
        """Its position, the first of several."""
        return int(self.kld.argmax())

    @property
    def top1_share(self) -> float:
        return int(self.top1.sum()) / len(self.top1)

    @property
    def log_perplexity(self) -> float:
        """Mean loss of the tokens that follow; of one token alone 0."""
        return float(self.loss[:-1].mean()) if len(self.loss) > 1 else 0.0

    @property
    def perplexity(self) -> float:
        """Of broken models it would be more than a float holds."""
        return math.exp(min(self.log_perplexity, 700.0))

    def kld_between(self, first: int, last: int) -> float:
        """Mean divergence of the positions `first` to `last`, both included."""
        return float(self.kld[first : last + 1].mean())
