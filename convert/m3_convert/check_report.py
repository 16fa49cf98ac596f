"""All that is known when a check is done, and what its verdict is made from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from m3_convert.check_runs import CheckRuns
from m3_convert.check_walk import CheckResult
from m3_convert.findings import Differences, Findings, Restored, Selection
from m3_convert.flip_margin import near_tie_share
from m3_convert.index_deviation import IndexDeviation
from m3_convert.layered_model import Kind, LayeredModel
from m3_convert.mixed_model import MixedModel
from m3_convert.tensor_group import INDEX, tensor_group
from m3_convert.text_sample import TextSample
from m3_convert.token_text import TokenText
from m3_convert.verdict import Thresholds, Verdict, judge
from m3_convert.walker import WalkOptions
from m3_runtime.engine import Hparams
from m3_runtime.quantize import type_name


@dataclass(frozen=True)
class SideSummary:
    """One of the two models."""

    name: str
    kind: Kind
    n_bytes: int  #: on disk
    types: Mapping[str, Mapping[str, int]]  #: bytes by type in each tensor group
    sha256: str
    hash_of: str  #: the files that it is the hash of


@dataclass(frozen=True)
class GroupSummary:
    """A group of tensors that was restored from the reference."""

    group: str
    types: Mapping[str, int]  #: of the candidate
    n_bytes: int  #: of the candidate
    reference_bytes: int

    @classmethod
    def of(cls, model: MixedModel) -> "GroupSummary":
        theirs, ours = model.group_bytes
        return cls(model.group, model.candidate.types()[model.group], theirs, ours)


@dataclass(frozen=True)
class CheckReport:
    """A finished check."""

    result: CheckResult
    reference: SideSummary
    candidate: SideSummary
    differences: Differences
    groups: Sequence[GroupSummary] | None  #: None without attribution
    same_groups: Sequence[str]  #: groups that have the same bytes on both sides, which were not restored
    hparams: Hparams
    sample: TextSample
    text: TokenText
    wanted_tokens: int | None  #: what --context asked for
    reference_options: WalkOptions
    candidate_options: WalkOptions
    isa: str
    thresholds: Thresholds
    program: str
    versions: Mapping[str, str]  #: of what else computed
    estimated_bytes: int
    peak_bytes: int
    seconds: float

    @cached_property
    def verdict(self) -> Verdict:
        return judge(self.findings, self.thresholds)

    @property
    def findings(self) -> Findings:
        r = self.result
        return Findings(
            selection=self._selection(),
            differences=self.differences,
            kld=r.candidate.kld_mean if r.candidate else None,
            forced_kld=r.forced.kld_mean if r.forced else None,
            isolated_overlap=r.isolated.agreement.overlap_mean if r.isolated else None,
            restored=[self._restored(name) for name in r.groups],
        )

    def _selection(self) -> Selection | None:
        s = self.result.selection
        if s is None:
            return None
        a = s.agreement
        return Selection(
            layers=len(a.layers),
            heads=self.hparams.n_index_head,
            queries=a.queries,
            changed=a.changed,
            ties=a.ties,
            overlap=a.overlap_mean,
            worst=a.worst,
            mass_lost=s.mass_lost,
            worst_mass=s.worst_mass,
            near_ties=near_tie_share(s.flip_counts),
        )

    def _restored(self, group: str) -> Restored:
        r = self.result
        overlap = None
        if r.selection:
            overlap = _returned(1 - r.selection.agreement.overlap_mean, 1 - r.groups[group].agreement.overlap_mean)
        logits = r.group_logits.get(group)
        kld = _returned(r.candidate.kld_mean, logits.kld_mean) if r.candidate and logits else None
        return Restored(group, overlap, kld)


def _returned(lost: float, still_lost: float) -> float | None:
    return 1 - still_lost / lost if lost else None


def differences(runs: CheckRuns, deviations: Mapping[int, IndexDeviation]) -> Differences:
    """In what a candidate is not the reference."""
    found = [
        (value, layer, head)
        for layer, deviation in deviations.items()
        for value, head in (*zip(deviation.queries, range(len(deviation.queries)), strict=True), (deviation.keys, None))
        if value
    ]
    (ours, our_index), (theirs, their_index) = (_types(side) for side in (runs.reference, runs.candidate))
    return Differences(
        index=max((value for value, _, _ in found), default=0.0),
        index_at=found[0][1:] if len(found) == 1 else None,
        index_types=(our_index, their_index),
        types=ours != theirs,
        index_cache=(runs.reference_options.index_type, runs.candidate_options.index_type),
        kv_cache=(runs.reference_options.kv_type, runs.candidate_options.kv_type),
    )


def _types(side: LayeredModel) -> tuple[dict[str, int], str]:
    """Types of the tensors outside the indexer, and those of its projections in words."""
    tensors = side.model.gguf.tensors
    index = [t for t in tensors if tensor_group(t.name) == INDEX]
    projections = dict.fromkeys(type_name(t.type) for t in index if "proj" in t.name)
    return {t.name: t.type for t in tensors if t not in index}, " and ".join(projections)
