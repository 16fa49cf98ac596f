"""Walks the runs of a check layer by layer over the same tokens and compares them with the reference.

Each run goes its own way: what enters a layer is what left the layer before it in the same run, so differences add up
as they do in use. In memory at a time: the hidden states of all runs for all tokens, and the weights and the cache of
one layer of one model; at the end the heads of all models.

Within a layer the free runs of the candidate go first and only their lists are kept. The reference follows chunk by
chunk and is compared with all of them while its scores and masses, as many as queries times blocks, are there. The
forced run, which reads the reference's lists, is the last.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from m3_convert.check_runs import CheckRuns
from m3_convert.comparable import check_choice, selection_rule
from m3_convert.comparison import LayerComparison, ReferenceRows, SelectionComparison
from m3_convert.divergence import Divergence, compare_logits, itself
from m3_convert.index_deviation import IndexDeviation, index_deviation
from m3_convert.selection import Floats, Lists, PositionBuckets, SelectionRule, score_rounding
from m3_convert.walk_state import Arrays, Snapshot, WalkState, comparison_arrays, restore_comparison
from m3_convert.walker import Advance, Visit, Walker, head_options, head_share, named_errors, read_share
from m3_convert.worst_queries import WorstQueries, WorstQuery
from m3_runtime.engine import Session

_REFERENCE, _CANDIDATE, _FORCED, _ISOLATED = "reference", "candidate", "forced", "isolated"
_LISTS = ("blocks",)
_TAPS = ("blocks", "scores", "mass")


@dataclass(frozen=True)
class CheckResult:
    """What the runs of a check gave."""

    rule: SelectionRule
    buckets: PositionBuckets
    selection: SelectionComparison | None  #: of the candidate; None in dense attention, which selects nothing
    isolated: SelectionComparison | None
    groups: Mapping[str, SelectionComparison]  #: by restored group
    reference: Divergence | None  #: the reference beside itself; None without logits
    candidate: Divergence | None
    forced: Divergence | None
    group_logits: Mapping[str, Divergence]
    deviations: Mapping[int, IndexDeviation]  #: by sparse layer
    worst: Sequence[WorstQuery]


def walk(
    runs: CheckRuns,
    ids: npt.NDArray[np.int32],
    state: WalkState | None = None,
    advance: Advance = lambda _: None,
) -> CheckResult:
    """Runs over `ids`, int32 [n], of two comparable models.

    state: where an earlier run of the same check left off, and where this one notes how far it is. advance: see
    `CheckRuns.stages`. Raises NothingTestedError if no query has a choice, InputError and NotFiniteError naming the
    model and what is wrong with its weights. The result depends neither on threads nor on where a run was interrupted.
    """
    check_choice(runs.hparams, len(ids))
    return _Walk(runs, ids, state or WalkState(), advance).result()


@dataclass
class _Run:
    """A run: its hidden states, and what it selects beside the reference.

    first_layer: where it leaves the way of the candidate, whose states and comparisons are its own before; None if it
    never was on it.
    """

    name: str
    walker: Walker
    first_layer: int | None = None
    compared: dict[int, LayerComparison] = field(default_factory=dict)  #: by layer

    def begins(self, layer: int) -> bool:
        """True if it goes through the layer on its own."""
        return self.first_layer is None or self.first_layer <= layer


class _Walk:
    def __init__(self, runs: CheckRuns, ids: npt.NDArray[np.int32], state: WalkState, advance: Advance) -> None:
        self._runs, self._ids, self._state, self._advance = runs, ids, state, advance
        h = runs.hparams
        self._h = h
        self._rule = selection_rule(h)
        self._buckets = PositionBuckets.over(self._rule, len(ids))
        self._n_blocks = -(-len(ids) // h.block_size)
        self._reference = _Run(_REFERENCE, Walker(runs.reference, ids, runs.reference_options, advance))
        self._candidate = _Run(_CANDIDATE, Walker(runs.candidate, ids, runs.candidate_options, advance))
        self._isolated = _Run(_ISOLATED, self._candidate.walker)
        self._forced = _Run(
            _FORCED, Walker(runs.candidate, ids, runs.forced_options, advance), first_layer=h.n_dense_layer
        )
        self._groups = [
            _Run(group.group, Walker(group, ids, runs.candidate_options, advance), first_layer=group.first_layer)
            for group in runs.groups
        ]
        self._deviations: dict[int, IndexDeviation] = {}
        self._worst = WorstQueries(h.block_size)

    # -------------------------------------------------------------------------------------------- layers

    def result(self) -> CheckResult:
        first = self._restore()
        for layer in range(first, self._h.n_layer):
            for run in self._following():
                if run.first_layer == layer > 0:
                    run.walker.states[:] = self._candidate.walker.states
            if layer < self._h.n_dense_layer:
                self._dense_layer(layer)
            else:
                self._sparse_layer(layer)
            if self._state.due():
                self._save(layer + 1)
        logits = self._logits() if self._runs.logits else {}
        return CheckResult(
            rule=self._rule,
            buckets=self._buckets,
            selection=self._comparison(self._candidate) if self._runs.candidate_options.selects else None,
            isolated=self._comparison(self._isolated) if self._runs.isolated else None,
            groups={run.name: self._comparison(run) for run in self._groups},
            reference=logits.get(_REFERENCE),
            candidate=logits.get(_CANDIDATE),
            forced=logits.get(_FORCED),
            group_logits={run.name: logits[run.name] for run in self._groups if run.name in logits},
            deviations=self._deviations,
            worst=list(self._worst),
        )

    def _following(self) -> list[_Run]:
        """The runs that begin as the candidate's."""
        return [*self._groups, *([self._forced] if self._runs.forced else [])]

    def _dense_layer(self, layer: int) -> None:
        for run in (self._candidate, *self._groups, self._reference):
            if run.begins(layer):
                run.walker.layer(layer, record=())

    def _sparse_layer(self, layer: int) -> None:
        q_norm, k_norm = (
            self._runs.reference.vector(f"blk.{layer}.indexer.{name}.weight") for name in ("q_norm", "k_norm")
        )
        self._deviations[layer] = index_deviation(self._runs.reference, self._runs.candidate, layer)
        rounding = score_rounding(q_norm, k_norm)
        lists: list[tuple[_Run, Lists]] = []
        if self._runs.candidate_options.selects:
            lists += self._candidate_layer(layer)
        else:
            self._candidate.walker.layer(layer, record=())
        for run in self._groups:
            if run.begins(layer):
                found = self._empty_lists()
                run.walker.layer(layer, record=_LISTS, visit=_keep(layer, found))
                lists.append((run, found))
        for run, _ in lists:
            run.compared[layer] = self._new_comparison(layer, rounding)
        read = self._empty_lists() if self._runs.forced else None
        self._reference_layer(layer, lists, read)
        if read is not None:
            self._forced.walker.read(layer, read)

    def _candidate_layer(self, layer: int) -> list[tuple[_Run, Lists]]:
        """The candidate's lists, and those of the isolated run, for which its weights are bound anyway."""
        walker, lists = self._candidate.walker, [(self._candidate, self._empty_lists())]
        with walker.bound(layer) as model:
            if self._runs.isolated:
                lists.append((self._isolated, self._empty_lists()))
                walker.probe(model, layer, self._reference.walker.states, _keep(layer, lists[1][1]))
            walker.through(model, layer, record=_LISTS, visit=_keep(layer, lists[0][1]))
        return lists

    def _reference_layer(self, layer: int, lists: list[tuple[_Run, Lists]], read: Lists | None) -> None:
        """read: gets the reference's lists."""

        def compare(rows: slice, session: Session) -> None:
            ours = session.selected_blocks(layer)
            if read is not None:
                read[rows] = ours
            if not lists:
                return
            positions = np.arange(rows.start, rows.stop)
            tested = self._rule.had_choice(positions)
            if not tested.any():
                return
            positions = positions[tested]
            # As many columns in every chunk: the order in which a row is summed depends on its length.
            scores = np.full((len(positions), self._h.n_index_head, self._n_blocks), -np.inf, np.float32)
            seen = session.block_scores(layer)[tested]
            scores[..., : seen.shape[-1]] = seen
            forced = self._rule.forced(positions, self._n_blocks)
            found = ReferenceRows(positions, ours[tested], scores, session.attention_mass(layer)[tested], forced)
            for run, theirs in lists:
                part = theirs[rows][tested]
                difference = run.compared[layer].add(found, part)
                if run is self._candidate:
                    self._worst.add(layer, found, part, difference)

        self._reference.walker.layer(layer, record=_TAPS, visit=compare)

    def _empty_lists(self) -> Lists:
        return np.empty((len(self._ids), self._h.n_index_head, self._h.top_k), np.int32)

    def _new_comparison(self, layer: int, rounding: float) -> LayerComparison:
        heads = self._h.n_index_head, self._h.n_head
        return LayerComparison.empty(layer, heads, self._buckets, rounding)

    def _comparison(self, run: _Run) -> SelectionComparison:
        layers = range(self._h.n_dense_layer, self._h.n_layer)
        found = [(run if run.begins(layer) else self._candidate).compared[layer] for layer in layers]
        return SelectionComparison(self._rule, self._buckets, found)

    # -------------------------------------------------------------------------------------------- logits

    def _logits(self) -> dict[str, Divergence]:
        runs, n = self._runs, len(self._ids)
        others = [self._candidate, *self._following()]
        found = {name: Divergence(n) for name in (_REFERENCE, *(run.name for run in others))}
        step = runs.head_rows(n)
        share = head_share(self._h)
        following = np.append(self._ids[1:], 0).astype(np.int64)
        with ExitStack() as stack:
            sessions = self._head_sessions(stack, step)
            for first in range(0, n, step):
                rows = slice(first, min(first + step, n))
                ours = self._head(sessions[_REFERENCE], self._reference, rows)
                found[_REFERENCE].put(first, itself(ours, following[rows]))
                self._advance((rows.stop - first) * share)
                for run in others:
                    logits = self._head(sessions[run.name], run, rows)
                    found[run.name].put(first, compare_logits(ours, logits, following[rows]))
                    self._advance((rows.stop - first) * share)
        return found

    def _head_sessions(self, stack: ExitStack, rows: int) -> dict[str, Session]:
        """Sessions of the head of each run, by its name."""
        runs, n = self._runs, len(self._ids)
        opened: dict[int, Session] = {}
        for side in runs.heads():
            per_byte = n * read_share(side) / side.layer_bytes(self._h.n_layer)
            with named_errors(side):
                model = stack.enter_context(side.bound(self._h.n_layer, partial(self._bound_bytes, per_byte)))
                options = head_options(self._h, rows, runs.candidate_options)
                opened[id(side)] = stack.enter_context(model.session(**options))
        candidate = opened[id(runs.candidate)]
        sessions = {_REFERENCE: opened[id(runs.reference)], _CANDIDATE: candidate, _FORCED: candidate}
        return sessions | {group.group: opened.get(id(group), candidate) for group in runs.groups}

    def _bound_bytes(self, per_byte: float, n_bytes: int) -> None:
        self._advance(n_bytes * per_byte)

    def _head(self, session: Session, run: _Run, rows: slice) -> Floats:
        # A run that never left the candidate's way has its states.
        walker = run.walker if run.begins(self._h.n_layer - 1) else self._candidate.walker
        session.rewind(0)
        with named_errors(walker.side):
            return session.forward([(0, walker.states[rows])], output="all")

    # -------------------------------------------------------------------------------------------- state

    def _runs_behind(self, layer: int) -> list[_Run]:
        """The runs that have hidden states of their own behind `layer` layers."""
        everyone = [self._reference, self._candidate, *self._following()]
        return [run for run in everyone if run.begins(layer - 1)]

    def _compared_runs(self) -> list[_Run]:
        return [self._candidate, self._isolated, *self._groups]

    def _save(self, layer: int) -> None:
        """After `layer` layers."""
        arrays: Arrays = {f"states.{run.name}": run.walker.states for run in self._runs_behind(layer)}
        roundings: dict[str, dict[int, float]] = {}
        for run in self._compared_runs():
            roundings[run.name] = {n: compared.agreement.rounding for n, compared in run.compared.items()}
            for n, compared in run.compared.items():
                arrays |= comparison_arrays(compared, f"{run.name}.{n}")
        about = {
            "roundings": roundings,
            "deviations": {n: [list(d.queries), d.keys] for n, d in self._deviations.items()},
            "worst": self._worst.to_json(),
        }
        self._state.save(Snapshot(layer, arrays, about))

    def _restore(self) -> int:
        """Takes over what an earlier run left, and returns how many layers that has done."""
        snapshot, self._state.snapshot = self._state.snapshot, None
        if snapshot is None:
            return 0
        for run in self._runs_behind(snapshot.layer):
            run.walker.states[...] = snapshot.arrays[f"states.{run.name}"]
        for run in self._compared_runs():
            for key, rounding in snapshot.about["roundings"][run.name].items():
                run.compared[int(key)] = self._new_comparison(int(key), rounding)
                restore_comparison(run.compared[int(key)], f"{run.name}.{key}", snapshot.arrays)
        for key, (queries, keys) in snapshot.about["deviations"].items():
            self._deviations[int(key)] = IndexDeviation(tuple(queries), keys)
        self._worst.restore(snapshot.about["worst"])
        return snapshot.layer


def _keep(layer: int, lists: Lists) -> Visit:
    """Puts the lists of each chunk into `lists`."""

    def keep(rows: slice, session: Session) -> None:
        lists[rows] = session.selected_blocks(layer)

    return keep
