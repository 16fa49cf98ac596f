"""The verdict of a check: whether it is good enough, and one line that says what changed, what it costs and why.

Its cause is found in verdict_cause.py, its sentences are made in verdict_text.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from m3_convert import verdict_text
from m3_convert.findings import Findings
from m3_convert.notation import beside, exact, share
from m3_convert.verdict_cause import Cause, Cost, find_cause, find_cost
from m3_runtime.errors import ExitCode

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
    """The verdict on a check. What is not known (None in `findings`) misses no threshold."""
    cause, cost = find_cause(findings), find_cost(findings)
    missed = _shortfalls(findings, thresholds)
    sentences = [verdict_text.agreement(findings) + verdict_text.because(findings, cause), verdict_text.price(findings)]
    if missed:
        sentences.append(f"Fell short: {'; '.join(words for _, words in missed)}")
    elif thresholds.any:
        sentences.append(f"Passed: {_met(thresholds)}")
    text = " ".join(f"{sentence}." for sentence in sentences if sentence)
    evidence = verdict_text.evidence(findings, cost)
    return Verdict(text, evidence, cause, cost, missed, thresholds.any)


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
