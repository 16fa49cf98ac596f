"""How far the indexer's tensors of a candidate are from the reference's: in one layer, head by head."""

from dataclasses import dataclass

import numpy as np

from m3_convert.layered_model import LayeredModel
from m3_convert.selection import Floats


@dataclass(frozen=True)
class IndexDeviation:
    """Root mean square of the differences over that of the reference's values; 0 means that all values are equal."""

    queries: tuple[
        float, ...
    ]  #: by index head: of its rows of the query projection, or of the query norm if that is more
    keys: float  #: of the key projection or the key norm, which the heads share

    @property
    def largest(self) -> float:
        return max(*self.queries, self.keys)


def index_deviation(reference: LayeredModel, candidate: LayeredModel, layer: int) -> IndexDeviation:
    """Of a sparse layer."""

    def pair(name: str) -> tuple[Floats, Floats]:
        tensor = f"blk.{layer}.indexer.{name}.weight"
        return reference.values(tensor), candidate.values(tensor)

    heads = reference.hparams.n_index_head
    ours, theirs = pair("q_proj")
    norm = _relative(*pair("q_norm"))
    by_head = zip(np.split(ours, heads), np.split(theirs, heads), strict=True)
    queries = tuple(max(norm, _relative(a, b)) for a, b in by_head)
    return IndexDeviation(queries, max(_relative(*pair("k_proj")), _relative(*pair("k_norm"))))


def _relative(ours: Floats, theirs: Floats) -> float:
    # One row at a time: the whole in double precision is not needed.
    difference = sum(float(np.sum((a.astype(np.float64) - b) ** 2)) for a, b in zip(ours, theirs, strict=True))
    size = sum(float(np.sum(a.astype(np.float64) ** 2)) for a in ours)
    if size == 0:
        return 0.0 if difference == 0 else float("inf")
    return float(np.sqrt(difference / size))
