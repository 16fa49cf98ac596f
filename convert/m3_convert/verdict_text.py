"""The findings of a check in sentences. A mean hides one head that reads other blocks, so they name the worst one."""

from collections.abc import Mapping
from typing import Final

from m3_convert.findings import Differences, Findings, Restored
from m3_convert.flip_margin import NEAR_TIE
from m3_convert.notation import decimal, percent, share
from m3_convert.tensor_group import INDEX
from m3_convert.verdict_cause import MOST, SMALL_MASS, Cause, Cost, others_matter

_COSTS: Final[Mapping[Cost, str]] = {
    "near-ties": "The blocks that changed were near-ties, and hardly anything comes of it.",
    "selection": "The selection itself costs: attention is lost, or the output moves, because other blocks are read.",
    "weights": "The output changes, but little of that comes from the selection.",
}

#: A head stands out if it loses so many times the mean of all.
STANDS_OUT: Final = 4.0


def agreement(f: Findings) -> str:
    """What changed, without the full stop."""
    s = f.selection
    if s is None:
        return "Dense: the candidate reads every visible block, so that it loses none and chooses none"
    if not s.changed:
        return f"Same selection: the candidate reads the reference's blocks in all {s.lists:,} lists"
    return (
        f"Selection changed: other blocks in {percent(s.changed / s.lists)} of {s.lists:,} lists, most in layer "
        f"{s.worst.layer}, head {s.worst.head} (mean overlap {share(s.worst.overlap)})"
    )


def because(f: Findings, cause: Cause) -> str:
    """What that comes from. Both causes if there are two, the main one first: one that answers for little is there all
    the same."""
    index, others = f"because of {_index_source(f.differences)}", f"because {_movers(f)} move the hidden states"
    both = f.differences.any_index and others_matter(f)
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
        f", above all {_named(best.group)}," if best and best.group != INDEX and (best.agreement or 0) >= MOST else ""
    )


def _named(group: str) -> str:
    """A group of tensors in a sentence."""
    return "the index projections" if group == INDEX else f"the {group}"


def _best_restored(f: Findings) -> Restored | None:
    """The group that gives back most agreement, None if none gives back any."""
    helpful = [r for r in f.restored if r.agreement and r.agreement > 0]
    return max(helpful, key=lambda r: r.agreement or 0, default=None)


def _place(d: Differences) -> str:
    if d.index_at is None:
        return ""
    layer, head = d.index_at
    return f" (keys of layer {layer} alone)" if head is None else f" (those of layer {layer}, head {head} alone)"


def price(f: Findings) -> str:
    """What that costs; empty if nothing was measured that would tell."""
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


def evidence(f: Findings, cost: Cost) -> list[str]:
    """Sentences that support the verdict."""
    found, s = [], f.selection
    if cost in _COSTS:
        found.append(_COSTS[cost])
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
