"""What a rounding error costs, tensor by tensor, from few runs.

A model is measured in which every free tensor has been rounded, then again with some of them restored: all tensors of
one kind (the down projections of the experts, say) in one run, all of one band of layers in another. A tensor is taken
to cost its error times a factor of its kind times one of its band; the factors are those that give back what the runs
gave back. So kinds plus bands runs stand for all tensors, however many layers there are.

Several harms are measured at once, each on its own: the KL divergence, and for each layer and index head the square of
1 - overlap. Both add up over tensors: noise that comes from many places adds up in its square, a divergence grows with
the square of the noise, and the number of blocks that change with the noise itself (blocks near the cut are spread
evenly). How far that holds on m3-nano stands in the README.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from m3_convert.knapsack import Doubles
from m3_convert.tensor_map import layer_of

MAX_BANDS: Final = 6

_ROUNDS: Final = 50  #: of the fit, which settles in a few
#: What two runs may differ by without a cause, as a share of the harm measured: which of two nearly equal experts or
#: blocks is chosen changes with any change.
_NOISE: Final = 0.01
#: A factor is at least this share of what it would be if all were alike: nothing is free because its run was lucky.
_LEAST: Final = 0.05


@dataclass(frozen=True)
class Restoration:
    """A run with some tensors restored."""

    name: str
    tensors: frozenset[str]


def kind_of(tensor: str) -> str:
    """The name with `*` for the number of the layer, which is also the pattern for all tensors of the kind."""
    layer = layer_of(tensor)
    return tensor if layer < 0 else "blk.*." + tensor.split(".", 2)[2]


@dataclass(frozen=True)
class Restorations:
    """The runs for a set of tensors: `kinds`, then `bands` of layers (none for a single band)."""

    kinds: Sequence[Restoration]
    bands: Sequence[Restoration]

    @classmethod
    def of(cls, tensors: Iterable[str], n_layer: int) -> "Restorations":
        names = list(tensors)
        kinds: dict[str, list[str]] = {}
        for name in names:
            kinds.setdefault(kind_of(name), []).append(name)
        n = min(MAX_BANDS, n_layer)
        edges = [n_layer * i // n for i in range(n + 1)]
        bands = []
        for first, end in pairwise(edges):
            inside = frozenset(name for name in names if first <= layer_of(name) < end)
            if inside:
                bands.append(Restoration(f"layers {first}-{end - 1}", inside))
        return cls(
            [Restoration(kind, frozenset(found)) for kind, found in kinds.items()], bands if len(bands) > 1 else []
        )

    def __iter__(self) -> Iterator[Restoration]:
        return iter((*self.kinds, *self.bands))


def sensitivities(
    runs: Restorations,
    errors: Mapping[str, float],
    harm: Doubles,
    restored: Mapping[str, Doubles],
    touched: Mapping[str, NDArray[np.bool_]],
) -> dict[str, Doubles]:
    """Harm of a unit of error in each tensor, [harms], at least 0.

    errors: of each tensor in the model that was measured. harm: of that model, [harms]. restored: harm that was left
    in each run, by name of the run. touched: the harms that a tensor can do, bool [harms]: none to what is before it.
    """
    kind = {name: i for i, run in enumerate(runs.kinds) for name in run.tensors}
    band = {name: i for i, run in enumerate(runs.bands) for name in run.tensors}
    # The last band: tensors outside all of them.
    exposed = np.zeros((len(runs.kinds), len(runs.bands) + 1, len(harm)))
    for name, row in kind.items():
        exposed[row, band.get(name, -1)] += errors[name] * touched[name]
    by_kind = np.array([harm - restored[run.name] for run in runs.kinds])
    by_band = np.array([harm - restored[run.name] for run in runs.bands]).reshape(len(runs.bands), len(harm))
    u, v = _factors(exposed, by_kind, by_band, _NOISE * np.maximum(harm, 1e-12))
    return {name: u[row] * v[band.get(name, -1)] * touched[name] for name, row in kind.items()}


def _factors(exposed: Doubles, by_kind: Doubles, by_band: Doubles, noise: Doubles) -> tuple[Doubles, Doubles]:
    """Factors of kinds [kinds, harms] and bands [bands + 1, harms], the last 1, so that exposed * u * v sums up to what
    the runs gave back; each is drawn to the mean of all as far as its run is lost in noise."""
    mean = np.maximum(by_kind.sum(axis=0), 0) / np.maximum(exposed.sum(axis=(0, 1)), 1e-300)
    n_band = len(by_band)
    u = np.broadcast_to(mean, by_kind.shape).copy()
    v = np.ones((n_band + 1, len(noise)))
    # Restoring kind by kind and band by band need not give back the same in all.
    inside = exposed[:, :n_band].any(axis=(1, 2))
    scale = np.maximum(by_kind[inside].sum(axis=0), 0) / np.where((total := by_band.sum(axis=0)) > 0, total, np.inf)
    by_band = by_band * np.where(scale > 0, scale, 1)
    for _ in range(_ROUNDS):
        u = _drawn(by_kind, (exposed * v).sum(axis=1), mean, noise)
        v[:n_band] = _drawn(by_band, (exposed * u[:, None]).sum(axis=0)[:n_band], np.ones(len(noise)), noise)
    return u, v


def _drawn(given: Doubles, exposed: Doubles, prior: Doubles, noise: Doubles) -> Doubles:
    """The factor with given = factor * exposed, [n, harms], known up to `noise`, beside `prior`, known up to itself."""
    spread = prior**2
    factor = (given * exposed * spread + prior * noise**2) / (exposed**2 * spread + noise**2)
    drawn: Doubles = np.maximum(factor, _LEAST * prior)
    return drawn
