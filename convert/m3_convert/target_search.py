"""Finds the types with which a file meets a target: a size that it may not exceed, or an overlap that it must reach.

1. The importance of the columns is collected over the text, unless it is given.
2. For each tensor, the error of each type that it could get (`rounding_error`).
3. A file with one type for all tensors is checked against the source, and in the same walk that file with one group of
   tensors at a time restored (`sensitivity`): what a unit of error in each tensor costs.
4. A knapsack chooses the types (`knapsack`), the file is made and checked. If a target is missed, the prediction is
   corrected by what was measured, and this step comes again, up to ROUNDS times.

Everything that was found is kept in a folder, so that an interrupted search goes on, and the next one over the same
text, for another target, begins where this one ends.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from m3_convert.cost_model import AIM, Calibration, CostModel, Types
from m3_convert.decode import SourceReader
from m3_convert.imatrix import ImportanceMatrix
from m3_convert.notation import exact
from m3_convert.plan import Plan
from m3_convert.precision import always_f32, is_index_projection
from m3_convert.recipe import Recipe
from m3_convert.recipe_text import FoundTensor, recipe_text
from m3_convert.rounding_error import rounding_errors
from m3_convert.sensitivity import Restorations, sensitivities
from m3_convert.trial import Trials, types_of
from m3_convert.trial_check import Checks, Outcome
from m3_convert.type_ladder import Ladder, flat, free_tensors, ladder, tensor_bytes
from m3_convert.walk_progress import walk_progress
from m3_convert.whole_file import write_whole
from m3_runtime.errors import InputError
from m3_runtime.quantities import format_bytes
from m3_runtime.quantize import TensorType

ROUNDS: Final = 4  #: files that are made and checked for an overlap, at most
WORTH: Final = 0.01  #: of the file: less is not worth another round once the target is met
_TRIES: Final = 40
_NOTHING: Final = 1e-6  #: of the blocks
_SAVE_SECONDS: Final = 60.0  #: between two saves of the errors


@dataclass(frozen=True)
class Target:
    """One of the two is given."""

    min_overlap: float | None = None  #: of every layer and index head, 0 to 1
    max_bytes: int | None = None  #: of the file

    def met(self, outcome: Outcome) -> bool:
        """For files that are not too large."""
        return self.min_overlap is None or outcome.worst.overlap >= self.min_overlap

    def __str__(self) -> str:
        if self.min_overlap is not None:
            return f"--target-overlap {exact(self.min_overlap)}"
        return f"--max-size {self.max_bytes}"


@dataclass(frozen=True)
class Candidate:
    """A file that was made and checked."""

    types: Types
    recipe: Recipe
    n_bytes: int
    outcome: Outcome


@dataclass(frozen=True)
class Found:
    """What a search gave. base: None if it is larger than the target allows, so that it was not made. exhausted: the
    largest types that there are were tried."""

    best: Candidate
    met: bool
    base: Candidate | None
    base_bytes: int
    rounds: Sequence[Candidate]  #: all that were checked, base too
    exhausted: bool = False


@dataclass
class Search:
    """base: the plan of the recipe that the search begins with. fixed: tensors that rules of the user decide. about:
    lines for the head of the recipe."""

    target: Target
    base: Plan
    fixed: frozenset[str]
    trials: Trials
    checks: Checks
    matrix: ImportanceMatrix
    threads: int
    about: Sequence[str]
    note: Callable[[str], None]
    rounds: list[Candidate] = field(default_factory=list)
    _judged: tuple[int, str] | None = None  #: harm of the layer and head that is worst in the base, and its name

    def run(self) -> Found:
        """Raises InputError if no file can be as small as the target, and what conversions and checks raise."""
        base_types = types_of(self.base)
        base_bytes = self._file_bytes(self._recipe(base_types))
        if self.target.max_bytes is not None:
            return self._smaller(self.target.max_bytes, base_types, base_bytes)
        return self._better(base_types, base_bytes)

    # -------------------------------------------------------------------------------------------- the two targets

    def _smaller(self, max_bytes: int, base_types: Types, base_bytes: int) -> Found:
        smallest = {name: types[0] for name, types in self.ladders.items()}
        least = self._file_bytes(self._recipe(base_types | smallest))
        if least > max_bytes:
            raise InputError(
                f"{self.target}: the smallest file that a search from {self.base.choice.name} can make has {least} "
                f"bytes ({format_bytes(least)})"
            )
        cost_model = self._cost_model(self._flat_below(max_bytes, base_types))
        fitting = self._candidate(base_types, "the recipe itself") if base_bytes <= max_bytes else None
        what = "the file that was found"
        allowed = max_bytes - (least - cost_model.n_bytes(smallest))
        while (types := cost_model.best_in(allowed)) is not None:
            excess = self._file_bytes(self._recipe(base_types | types, cost_model)) - max_bytes
            if excess <= 0:
                found = self._candidate(base_types | types, what, cost_model)
                break
            allowed -= excess  # the text of the recipe is part of the file
        else:
            found = self._candidate(base_types | smallest, what)  # there is no room for reasons
        best = min([found, *([fitting] if fitting else [])], key=lambda c: c.outcome.kld)
        return Found(best, True, fitting, base_bytes, self.rounds)

    def _better(self, base_types: Types, base_bytes: int) -> Found:
        base = self._candidate(base_types, "the recipe itself")
        if self.target.met(base.outcome):
            return Found(base, True, base, base_bytes, self.rounds)
        cost_model = self._cost_model(flat(self.ladders, self._bulk(base_types)))
        calibration = Calibration()
        calibration.learn(base.outcome.harm, cost_model.harm(base_types))
        best, top = base, base_types | {name: types[-1] for name, types in self.ladders.items()}
        assert self.target.min_overlap is not None
        worst = base.outcome.worst
        heads = len(base.outcome.overlaps[0])
        index = 1 + (worst.layer - base.outcome.first_layer) * heads + worst.head
        self._judged = index, f"layer {worst.layer}, head {worst.head}"
        lost = (1 - self.target.min_overlap) * AIM
        for n in range(ROUNDS):
            types, lost = self._raised(cost_model, base_types, lost, calibration)
            found = self._candidate(top if types is None else types, f"round {n + 1}", cost_model)
            best = self._preferred(best, found)
            if found.types == top:
                break
            calibration.learn(found.outcome.harm, cost_model.harm(found.types))
            if self.target.met(found.outcome):
                again = cost_model.smallest_above(base_types, calibration.predicted(max(lost, _NOTHING) ** 2)[1:])
                if again is None or cost_model.n_bytes(again) > cost_model.n_bytes(found.types) - WORTH * found.n_bytes:
                    break
        exhausted = any(c.types == top for c in self.rounds)
        return Found(best, self.target.met(best.outcome), base, base_bytes, self.rounds, exhausted)

    def _raised(
        self, cost_model: CostModel, base_types: Types, lost: float, calibration: Calibration
    ) -> tuple[Types | None, float]:
        """The fewest bytes with which as many blocks are predicted to be lost as `lost`, or less where that gives types
        that were tried, and what it became. None if the largest types are predicted to lose more."""
        for _ in range(_TRIES):
            types = cost_model.smallest_above(base_types, calibration.predicted(max(lost, _NOTHING) ** 2)[1:])
            if types is None:
                break
            if all(base_types | types != c.types for c in self.rounds):
                return base_types | types, lost
            if lost < _NOTHING:
                break
            lost *= AIM
        return None, lost

    def _preferred(self, a: Candidate, b: Candidate) -> Candidate:
        """The smaller one of two that meet the target; else the one that is nearer to it."""
        if self.target.met(a.outcome) and self.target.met(b.outcome):
            return min(a, b, key=lambda c: c.n_bytes)
        return max(a, b, key=lambda c: c.outcome.worst.overlap)

    # -------------------------------------------------------------------------------------------- what is measured

    @cached_property
    def ladders(self) -> dict[str, Ladder]:
        """Of the tensors whose type may be chosen."""
        free = free_tensors(self.base, self.fixed)
        if not free:
            raise InputError(f"{self.target}: rules decide the types of all tensors, there is nothing to search")
        family = {tensor.type for tensor in free}
        return {tensor.name: ladder(tensor, family, self.importance) for tensor in free}

    @cached_property
    def importance(self) -> ImportanceMatrix:
        """Fitted to these tensors, whatever their types."""
        free = free_tensors(self.base, self.fixed)
        shapes = {t.name: (len(t.matrices), t.shape[-1]) for t in free if t.name != "token_embd.weight"}
        fitted, coverage = self.matrix.fitted(shapes, {t.name for t in self.base.tensors})
        for text in coverage.notes():
            self.note(f"note: {text}")
        return fitted

    def _flat_below(self, max_bytes: int, base_types: Types) -> Types:
        """The largest type for all tensors with which the file is small enough, or the smallest of all."""
        rungs = sorted({t for types in self.ladders.values() for t in types}, key=lambda t: -self._size(t))
        for type_ in rungs:
            types = flat(self.ladders, type_)
            if self._is_rounded(types) and self._file_bytes(self._recipe(base_types | types)) <= max_bytes:
                return types
        return flat(self.ladders, rungs[-1])

    def _size(self, type_: TensorType) -> int:
        return sum(self.sizes[name][t] for name, t in flat(self.ladders, type_).items())

    def _is_rounded(self, types: Mapping[str, TensorType]) -> bool:
        """False if most tensors would keep the precision of the source: nothing could be measured."""
        kept = sum(types[name] is rungs[-1] for name, rungs in self.ladders.items())
        return kept * 2 <= len(self.ladders)

    def _bulk(self, types: Mapping[str, TensorType]) -> TensorType:
        """The type of most weights."""
        sizes: dict[TensorType, int] = {}
        for name, rungs in self.ladders.items():
            sizes[types[name]] = sizes.get(types[name], 0) + self.sizes[name][rungs[-1]]
        return max(sizes, key=lambda t: sizes[t])

    @cached_property
    def sizes(self) -> dict[str, dict[TensorType, int]]:
        """Bytes of each tensor with each type that it could have."""
        tensors = {t.name: t for t in self.base.tensors}
        return {
            name: {t: tensor_bytes(tensors[name], t) for t in dict.fromkeys((*types, tensors[name].type))}
            for name, types in self.ladders.items()
        }

    def _cost_model(self, types: Types) -> CostModel:
        """What errors cost, measured with `types`."""
        errors = self._errors()
        restorations = Restorations.of(self.ladders, self.checks.reference.hparams.n_layer)
        everywhere = types_of(self.base) | types
        known = self.checks.known(everywhere, list(restorations))
        if known is None:
            trial = self.trials.make(self._recipe(everywhere))
            known = self.checks.measure(trial, everywhere, list(restorations), "groups of tensors")
        restored = {name: outcome.harm for name, outcome in known.restored.items()}
        at = {name: errors[name][types[name]] for name in self.ladders}
        touched = {name: known.outcome.touched_by(name) for name in self.ladders}
        costs = sensitivities(restorations, at, known.outcome.harm, restored, touched)
        # Without types that cannot hold the values of a tensor.
        ladders = {name: tuple(t for t in types if t in errors[name]) for name, types in self.ladders.items()}
        return CostModel(ladders, self.sizes, errors, costs)

    def _errors(self) -> dict[str, dict[TensorType, float]]:
        path = self.checks.folder / "errors.json"
        try:
            stored = json.loads(path.read_text())
        except (OSError, ValueError):
            stored = {}
        found = {name: {TensorType[t]: e for t, e in values.items()} for name, values in stored.items()}
        tensors = {t.name: t for t in self.base.tensors}
        lacking = [name for name in self.ladders if not set(self.sizes[name]) <= set(found.get(name, ()))]
        if lacking:
            self.note(f"measuring the error of every type in {len(lacking)} tensors")
        last = time.monotonic()
        stages = [("errors", float(max(len(lacking), 1)))]
        reading = SourceReader(self.base.source.shards)
        with reading as reader, walk_progress(self.checks.name, stages, sys.stderr) as advance:
            for name in lacking:
                types = [t for t in self.sizes[name] if t not in found.get(name, ())]
                more = rounding_errors(tensors[name], types, self.importance, reader, self.threads)
                found[name] = {**found.get(name, {}), **more}
                advance(1)
                if time.monotonic() - last > _SAVE_SECONDS or name == lacking[-1]:
                    content = {n: {t.name: e for t, e in values.items()} for n, values in found.items()}
                    write_whole(path, json.dumps(content).encode())
                    last = time.monotonic()
        return found

    def _candidate(self, types: Types, what: str, cost_model: CostModel | None = None) -> Candidate:
        recipe = self._recipe(types, cost_model)
        known = self.checks.known(types)
        if known is None:
            known = self.checks.measure(self.trials.make(recipe), types, (), what)
        candidate = Candidate(types, recipe, self._file_bytes(recipe), known.outcome)
        self.rounds.append(candidate)
        return candidate

    # -------------------------------------------------------------------------------------------- the recipe

    def _file_bytes(self, recipe: Recipe) -> int:
        return self.trials.file(self.trials.plan(recipe)).n_bytes

    def _recipe(self, types: Types, cost_model: CostModel | None = None) -> Recipe:
        """cost_model: None if nothing was measured that its comments could say."""
        base = types_of(self.base)
        tensors = [
            FoundTensor(
                t.name,
                types[t.name],
                size := tensor_bytes(t, types[t.name]),
                size - t.n_bytes,
                base[t.name],
                t.name in self.fixed,
            )
            for t in self.base.tensors
            # Recipes leave these as they are.
            if always_f32(t.name) is None and not (is_index_projection(t.name) and t.type is TensorType.F32)
        ]
        return self.trials.recipe(recipe_text(self.about, tensors, lambda found: self._gain(found, cost_model)))

    def _gain(self, found: Sequence[FoundTensor], cost_model: CostModel | None) -> str:
        if cost_model is None:
            return ""
        change = np.sum(
            [
                cost_model.costs[t.name] * (cost_model.errors[t.name][t.type] - cost_model.errors[t.name][t.base])
                for t in found
                if t.name in cost_model.costs
            ],
            axis=0,
        )
        if not np.any(change):
            return ""
        text = f"changes the KL divergence by {change[0]:+.2g}"
        if self._judged is not None:
            index, name = self._judged
            share = change[index] / max(cost_model.harm(types_of(self.base))[index], 1e-300)
            text += f", and by {share:+.1%} the noise that {name} selects with"
        return text
