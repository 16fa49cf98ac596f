"""The result of a check in words: what changed, what it costs, what it comes from, and whether it is good enough.

A mean hides one head that reads other blocks, so the verdict names the worst layer and head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from m3_convert.comparison import MassCell
from m3_convert.flip_margin import NEAR_TIE
from m3_convert.notation import beside, decimal, exact, percent, share
from m3_convert.selection import Cell
from m3_runtime.errors import ExitCode

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

_COSTS: Final[Mapping[Cost, str]] = {
    "near-ties": "The blocks that changed were near-ties, and hardly anything comes of it.",
    "selection": "The selection itself costs: attention is lost, or the output moves, because other blocks are read.",
    "weights": "The output changes, but little of that comes from the selection.",
}

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
#: A head stands out if it loses so many times the mean of all.
STANDS_OUT: Final = 4.0


#: What m3-check-selection asks for unless told otherwise; the README has the measurements. On m3-nano they lie between
#: the recipes from iq4_xs up, which keep within four fifths of them, and what does not meet both: index projections or
#: caches of 4 bits, dense attention, all weights or all experts in 4 bits, recipes of 3 bits and fewer. There is none
#: for the overlap: near-ties that cost nothing lower it as much as losses do.
DEFAULT_MASS_LOST: Final = 0.05
DEFAULT_KLD: Final = 0.05


@dataclass(frozen=True)
class Thresholds:
    """What must be met; None is not asked for."""

    min_overlap: float | None = None  #: of the mean overlap of each layer and index head
    max_mass_lost: float | None = None  #: of the mean mass lost of each layer and query head
    max_kld: float | None = None  #: of the mean KL divergence of the candidate

    @property
    def any(self) -> bool:
        return not (self.min_overlap is None and self.max_mass_lost is None and self.max_kld is None)


@dataclass(frozen=True)
class Selection:
    """How the candidate's lists differ from the reference's."""

    layers: int
    heads: int
    queries: int  #: that had a choice
    changed: int  #: lists
    ties: int
    overlap: float  #: mean of all lists
    worst: Cell
    mass_lost: float  #: mean of all query heads
    worst_mass: MassCell
    near_ties: float | None  #: share of the lost blocks

    @property
    def lists(self) -> int:
        return self.layers * self.heads * self.queries


@dataclass(frozen=True)
class Differences:
    """In what the candidate is not the reference."""

    index: float  #: largest deviation of an indexer's tensors in a layer and head; 0 if all values are equal
    index_at: tuple[int, int | None] | None  #: layer and head if all other values are equal; no head: the keys
    index_types: tuple[str, str]  #: of reference and candidate
    types: bool  #: other tensors have other types
    index_cache: tuple[str, str]  #: types of reference and candidate
    kv_cache: tuple[str, str]

    @property
    def any_index(self) -> bool:
        return self.index > 0 or self.index_cache[0] != self.index_cache[1]


@dataclass(frozen=True)
class Restored:
    """What a group of tensors gives back if it is restored from the reference, as shares of what was lost."""

    group: str
    agreement: float | None  #: None if nothing was lost
    kld: float | None


@dataclass(frozen=True)
class Findings:
    """All that the verdict is made from."""

    selection: Selection | None  #: None if the candidate reads every block
    differences: Differences
    kld: float | None  #: mean of the candidate; None if logits were not compared
    forced_kld: float | None  #: with the reference's lists
    isolated_overlap: float | None = None  #: mean of all lists
    restored: Sequence[Restored] = ()


@dataclass(frozen=True)
class Verdict:
    """The result. text: two sentences, three with thresholds. evidence: sentences that support it."""

    text: str
    evidence: Sequence[str]
    cause: Cause
    cost: Cost
    shortfalls: Sequence[tuple[str, str]]  #: name and words of each threshold that was missed
    judged: bool  #: there was a threshold

    @property
    def status(self) -> str:
        return "fell short" if self.shortfalls else "passed" if self.judged else "reported"

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.FELL_SHORT if self.shortfalls else ExitCode.OK

    @property
    def shortfall(self) -> str:
        """The thresholds that were missed, on one line."""
        return "; ".join(words for _, words in self.shortfalls)


def judge(findings: Findings, thresholds: Thresholds) -> Verdict:
    cause, cost = find_cause(findings), find_cost(findings)
    missed = _shortfalls(findings, thresholds)
    sentences = [_agreement(findings) + _because(findings, cause), _price(findings)]
    if missed:
        sentences.append(f"Fell short: {'; '.join(words for _, words in missed)}")
    elif thresholds.any:
        sentences.append(f"Passed: {_met(thresholds)}")
    text = " ".join(f"{sentence}." for sentence in sentences if sentence)
    evidence = [*filter(None, [_COSTS.get(cost)]), *_evidence(findings)]
    return Verdict(text, evidence, cause, cost, missed, thresholds.any)


# ------------------------------------------------------------------------------------------------ cause and cost


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
    if not _others_matter(f):
        return index
    part = _index_share(f)
    if part is None:
        return "index and weights"
    return index if part >= MAIN_SHARE else other if part <= 1 - MAIN_SHARE else "index and weights"


def _others_matter(f: Findings) -> bool:
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
    returned = next((r.agreement for r in f.restored if r.group == "index"), None)
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


# ------------------------------------------------------------------------------------------------ words


def _agreement(f: Findings) -> str:
    s = f.selection
    if s is None:
        return "Dense: the candidate reads every visible block, so that it loses none and chooses none"
    if not s.changed:
        return f"Same selection: the candidate reads the reference's blocks in all {s.lists:,} lists"
    return (
        f"Selection changed: other blocks in {percent(s.changed / s.lists)} of {s.lists:,} lists, most in layer "
        f"{s.worst.layer}, head {s.worst.head} (mean overlap {share(s.worst.overlap)})"
    )


def _because(f: Findings, cause: Cause) -> str:
    """Both causes if there are two, the main one first: one that answers for little is there all the same."""
    index, others = f"because of {_index_source(f.differences)}", f"because {_movers(f)} move the hidden states"
    both = f.differences.any_index and _others_matter(f)
    if cause in ("index", "index cache"):
        return f", above all {index}, less {others}" if both else f", {index}"
    if cause in ("weights", "K/V cache"):
        return f", above all {others}, less {index}" if both else f", {others}"
    return f", {index} and {others}" if cause == "index and weights" else ""


def _index_source(d: Differences) -> str:
    parts = [f"the index projections{_place(d)}"] if d.index > 0 else []
    if d.index_cache[0] != d.index_cache[1]:
        parts.append(f"the index keys in {d.index_cache[1].upper()}")
    return " and ".join(parts)


def _movers(f: Findings) -> str:
    """What the indexer sees through the hidden states."""
    d = f.differences
    kv = [f"K and V in {d.kv_cache[1].upper()}"] if d.kv_cache[0] != d.kv_cache[1] else []
    # Weights of the same type can have other values.
    weights = ["the other weights" + _above_all(f)] if d.types or not kv else []
    return " and ".join(weights + kv)


def _above_all(f: Findings) -> str:
    """The group of tensors that answers for most of it."""
    best = _best_restored(f)
    return (
        f", above all {_named(best.group)}," if best and best.group != "index" and (best.agreement or 0) >= MOST else ""
    )


def _named(group: str) -> str:
    """A group of tensors in a sentence."""
    return "the index projections" if group == "index" else f"the {group}"


def _best_restored(f: Findings) -> Restored | None:
    """The group that gives back most agreement, None if none gives back any."""
    helpful = [r for r in f.restored if r.agreement and r.agreement > 0]
    return max(helpful, key=lambda r: r.agreement or 0, default=None)


def _place(d: Differences) -> str:
    if d.index_at is None:
        return ""
    layer, head = d.index_at
    return f" (keys of layer {layer} alone)" if head is None else f" (those of layer {layer}, head {head} alone)"


def _price(f: Findings) -> str:
    s, parts = f.selection, []
    if s and s.worst_mass.value:
        m = s.worst_mass
        parts.append(f"{percent(m.value)} of the attention of query head {m.query_head} of layer {m.layer}")
    if f.kld == 0:
        return "; ".join(
            [*(f"It costs {part}" for part in parts), "the logits are equal" if parts else "The logits are equal"]
        )
    if f.kld is not None and f.forced_kld is not None:
        parts.append(
            f"a KL divergence of {decimal(f.kld)}, which is {decimal(f.forced_kld)} with the reference's blocks"
        )
    return f"It costs {' and '.join(parts)}" if parts else ""


def _evidence(f: Findings) -> list[str]:
    found, s = [], f.selection
    if s:
        ties = f"; {s.ties:,} differ by ties within float32 rounding" if s.ties else ""
        found.append(
            f"{s.lists:,} lists: {s.layers} layers x {s.heads} heads x {s.queries:,} queries that had a choice{ties}."
        )
        if s.worst_mass.value >= max(STANDS_OUT * s.mass_lost, SMALL_MASS):
            found.append(
                f"Means hide it: query head {s.worst_mass.query_head} of layer {s.worst_mass.layer} loses "
                f"{percent(s.worst_mass.value)} of its attention, all together {percent(s.mass_lost)}."
            )
        if s.near_ties is not None:
            found.append(
                f"{percent(s.near_ties)} of the lost blocks were near-ties: by less than {NEAR_TIE:g} standard "
                "deviations of the scores."
            )
    found.append(_index_words(f.differences))
    if f.isolated_overlap is not None and s:
        found.append(
            "Each layer alone, fed with the reference's hidden states, selects the same blocks."
            if f.isolated_overlap == 1
            else f"Each layer alone, fed with the reference's hidden states, has a mean overlap of "
            f"{share(f.isolated_overlap)}; all together {share(s.overlap)}."
        )
    best = _best_restored(f)
    if best:
        kld = "" if best.kld is None else f" and {percent(best.kld)} of the KL divergence"
        found.append(
            f"Restoring {_named(best.group)} gives back most: {percent(best.agreement)} of the agreement lost{kld}."
        )
    return found


def _index_words(d: Differences) -> str:
    if d.index == 0:
        return "The index projections are the reference's, value for value."
    ours, theirs = d.index_types
    types = theirs if ours == theirs else f"{theirs} for {ours}"
    return f"The index projections are {percent(d.index)} off ({types})."


def _shortfalls(f: Findings, t: Thresholds) -> list[tuple[str, str]]:
    found = []
    s = f.selection
    if s and t.min_overlap is not None and s.worst.overlap < t.min_overlap:
        where = f"layer {s.worst.layer}, head {s.worst.head}"
        words = f"{where}: mean overlap {share(s.worst.overlap)} is below --min-overlap {exact(t.min_overlap)}"
        found.append(("min_overlap", words))
    if s and t.max_mass_lost is not None and s.worst_mass.value > t.max_mass_lost:
        where = f"layer {s.worst_mass.layer}, query head {s.worst_mass.query_head}"
        lost = beside(s.worst_mass.value, t.max_mass_lost)
        words = f"{where}: mean attention lost {lost} is above --max-mass-lost {exact(t.max_mass_lost)}"
        found.append(("max_mass_lost", words))
    if t.max_kld is not None and f.kld is not None and f.kld > t.max_kld:
        words = f"KL divergence {beside(f.kld, t.max_kld)} is above --max-kld {exact(t.max_kld)}"
        found.append(("max_kld", words))
    return found


def _met(t: Thresholds) -> str:
    parts = []
    if t.min_overlap is not None:
        parts.append(f"every layer and head has a mean overlap of at least {exact(t.min_overlap)}")
    if t.max_mass_lost is not None:
        parts.append(f"every query head loses at most {exact(t.max_mass_lost)} of its attention")
    if t.max_kld is not None:
        parts.append(f"the KL divergence is at most {exact(t.max_kld)}")
    return ", ".join(parts)
