"""What changed a selection, and what that is paid with: from the findings of a check to one word for each."""

from typing import Final, Literal

from m3_convert.findings import Findings
from m3_convert.tensor_group import INDEX

Cause = Literal[
    "equal",  # nothing differs, neither lists nor logits
    "none",  # no list changed
    "dense",  # the candidate reads every block
    "index",  # the candidate's indexer tensors
    "index cache",  # the type of its index keys
    "weights",  # its other tensors, which move the hidden states that the indexer sees
    "K/V cache",  # the type of its keys and values, which does the same
    "index and weights",  # several of these, and nothing measured tells them apart
]
Cost = Literal[
    "none",  # nothing was lost
    "near-ties",  # blocks whose scores were nearly equal, and nothing comes of it
    "selection",  # other blocks cost attention or change what comes out
    "weights",  # what comes out changes, but not by the selection
    "small",  # none of these
]

#: Share of the mean loss that one of two causes must answer for to be named alone.
MAIN_SHARE: Final = 0.75
#: Share of the KL divergence below which what is not the selection does not count.
NEGLIGIBLE: Final = 0.01
#: The same for one of many groups of tensors to be named.
MOST: Final = 0.5
#: Mean mass lost by a query head, and KL divergence, below which a change of the selection counts as without cost.
SMALL_MASS: Final = 0.005
SMALL_KLD: Final = 0.001
#: Mean mass lost by a query head from which on the selection is said to cost, whatever comes out of this text.
LARGE_MASS: Final = 0.05


def find_cause(f: Findings) -> Cause:
    """What changed the lists."""
    if f.selection is None:
        return "dense"
    d = f.differences
    if not f.selection.changed:
        return "equal" if f.kld == 0 and not (f.selection.ties or d.any_index) else "none"
    index: Cause = "index" if d.index > 0 else "index cache"
    kv = d.kv_cache[0] != d.kv_cache[1]
    other: Cause = "K/V cache" if kv and not d.types else "weights"
    if not d.any_index:
        return other
    if not others_matter(f):
        return index
    part = _index_share(f)
    if part is None:
        return "index and weights"
    return index if part >= MAIN_SHARE else other if part <= 1 - MAIN_SHARE else "index and weights"


def others_matter(f: Findings) -> bool:
    """True if what is not the indexer changes what comes out."""
    # With the reference's lists all other differences, and only these, show in the logits. Kernels of other types round
    # another way, which shows too.
    if f.kld is not None and f.forced_kld is not None:
        return f.forced_kld > NEGLIGIBLE * f.kld
    d = f.differences
    return d.types or d.kv_cache[0] != d.kv_cache[1]


def _index_share(f: Findings) -> float | None:
    """Share of the loss of overlap that the indexer answers for, None if nothing measured tells."""
    lost = 1 - f.selection.overlap if f.selection else 0.0
    if lost <= 0:
        return None
    returned = next((r.agreement for r in f.restored if r.group == INDEX), None)
    if returned is not None:
        return returned
    return None if f.isolated_overlap is None else (1 - f.isolated_overlap) / lost


def find_cost(f: Findings) -> Cost:
    """What the change is paid with."""
    kld, forced = f.kld or 0.0, f.forced_kld or 0.0
    by_selection = kld - forced
    s = f.selection
    mass = s.worst_mass.value if s else 0.0
    if mass == 0 and kld == 0:
        return "none"
    if mass >= LARGE_MASS or (by_selection >= SMALL_KLD and by_selection >= forced):
        return "selection"
    if kld >= SMALL_KLD and forced > by_selection:
        return "weights"
    if s and mass < SMALL_MASS and (s.near_ties or 0) >= MAIN_SHARE:
        return "near-ties"
    return "small"
