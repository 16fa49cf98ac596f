"""A check of a file that a search has made, as numbers that can be kept: selection and divergence beside the source.

Every check is a walk over the whole text (`check_walk`), with its own state, so that an interrupted one goes on. What
it found is a JSON file in the folder of the search, named by the types of the tensors.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from m3_convert.check_runs import CheckRuns
from m3_convert.check_walk import walk
from m3_convert.comparable import check_comparable
from m3_convert.comparison import SelectionComparison
from m3_convert.divergence import Divergence
from m3_convert.knapsack import Doubles
from m3_convert.layered_model import LayeredModel, open_layered, unchanged
from m3_convert.mixed_model import MixedModel
from m3_convert.selection import Cell
from m3_convert.sensitivity import Restoration
from m3_convert.tensor_map import layer_of
from m3_convert.walk_progress import walk_progress
from m3_convert.walk_state import WalkState
from m3_convert.walker import WalkOptions, check_memory
from m3_convert.whole_file import write_whole
from m3_runtime import memory
from m3_runtime.quantities import format_bytes
from m3_runtime.quantize import TensorType

FORMAT: Final = 2


@dataclass(frozen=True)
class Outcome:
    """What a run gave beside the reference."""

    kld: float  #: mean, in nats
    top1: float  #: share of positions with the same most likely token
    overlap_mean: float
    overlaps: tuple[tuple[float, ...], ...]  #: mean of each sparse layer and index head
    first_layer: int  #: the number of the first of these layers
    mass_lost: float  #: mean share of the attention
    worst_mass: float  #: of the layer and query head that lose most
    worst_mass_at: tuple[int, int]  #: these two

    @classmethod
    def of(cls, selection: SelectionComparison, logits: Divergence) -> Self:
        layers, worst = selection.agreement.layers, selection.worst_mass
        return cls(
            kld=logits.kld_mean,
            top1=logits.top1_share,
            overlap_mean=selection.agreement.overlap_mean,
            overlaps=tuple(tuple(map(float, layer.overlap_mean)) for layer in layers),
            first_layer=layers[0].layer,
            mass_lost=selection.mass_lost,
            worst_mass=worst.value,
            worst_mass_at=(worst.layer, worst.query_head),
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        tuples = {"overlaps": tuple(map(tuple, value["overlaps"])), "worst_mass_at": tuple(value["worst_mass_at"])}
        return cls(**{**value, **tuples})

    @property
    def worst(self) -> Cell:
        """The layer and index head with the lowest mean overlap, the first of several."""
        layer, head = np.unravel_index(int(np.argmin(self.overlaps)), np.shape(self.overlaps))
        return Cell(self.first_layer + int(layer), int(head), self.overlaps[layer][head])

    @property
    def harm(self) -> Doubles:
        """What adds up over tensors: the divergence, then (1 - overlap)^2 of each layer and head."""
        lost = 1 - np.array(self.overlaps).ravel()
        return np.concatenate([[self.kld], lost**2])

    def touched_by(self, tensor: str) -> npt.NDArray[np.bool_]:
        """Which of these harms an error in a tensor outside the indexer can do: a layer selects before its own
        attention and experts."""
        layers, heads = np.shape(self.overlaps)
        behind = np.arange(self.first_layer, self.first_layer + layers) > layer_of(tensor)
        return np.concatenate([[True], np.repeat(behind & (tensor != "output.weight"), heads)])


@dataclass(frozen=True)
class Measurement:
    """A check of one file."""

    outcome: Outcome
    restored: Mapping[str, Outcome] = field(default_factory=dict)  #: by run


@dataclass(frozen=True)
class Checks:
    """All checks of a search: the reference, the tokens, and the folder that keeps what was found. note: tells."""

    name: str  #: of the command, for progress
    reference: LayeredModel
    ids: npt.NDArray[np.int32]
    options: WalkOptions
    folder: Path
    note: Callable[[str], None]
    isa: str = "auto"

    def known(self, types: Mapping[str, TensorType], restorations: Sequence[Restoration] = ()) -> Measurement | None:
        """What an earlier check of a file with these types found, or None."""
        try:
            value = json.loads(self._path(types, restorations).read_text())
            restored = {name: Outcome.from_json(found) for name, found in value["restored"].items()}
            return Measurement(Outcome.from_json(value["outcome"]), restored)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def measure(
        self,
        trial: Path,
        types: Mapping[str, TensorType],
        restorations: Sequence[Restoration] = (),
        what: str = "check",
    ) -> Measurement:
        """Checks the file `trial`, whose tensors have `types`, and with each of `restorations`. what: for people.

        Raises what `check_walk.walk` does, and MachineError if memory is missing.
        """
        with ExitStack() as stack:
            candidate = stack.enter_context(open_layered(trial, isa=self.isa, threads=self.options.threads))
            check_comparable(self.reference, candidate)
            mixed = [
                stack.enter_context(MixedModel(candidate, self.reference, run.name, run.tensors))
                for run in restorations
            ]
            runs = CheckRuns(self.reference, candidate, self.options, self.options, groups=mixed)
            estimate, room = runs.memory(len(self.ids)), memory.session_room()
            size = format_bytes(memory.peak_resident_bytes() + estimate.total)
            self.note(f"{what}: {2 + runs.forced + len(restorations)} runs, about {size} of memory at the peak")
            check_memory(estimate, room, what, "a smaller --context takes less")
            # The folder's name says what the result depends on.
            state = WalkState(self.folder / f"{self._key(types, restorations)}.walk", note=self.note)
            state.load()
            stages = runs.stages(len(self.ids))
            done = sum(work for _, work in stages[: state.layer])
            progress = walk_progress(f"{self.name}: {what}", stages, sys.stderr, done)
            with progress as advance, unchanged(self.reference, candidate):
                result = walk(runs, self.ids, state, advance)
        assert result.selection is not None and result.candidate is not None
        outcome = Outcome.of(result.selection, result.candidate)
        restored = {name: Outcome.of(found, result.group_logits[name]) for name, found in result.groups.items()}
        value = {"outcome": asdict(outcome), "restored": {name: asdict(found) for name, found in restored.items()}}
        write_whole(self._path(types, restorations), json.dumps(value, indent=1).encode())
        state.remove()
        return Measurement(outcome, restored)

    def _path(self, types: Mapping[str, TensorType], restorations: Sequence[Restoration]) -> Path:
        return self.folder / f"{self._key(types, restorations)}.json"

    def _key(self, types: Mapping[str, TensorType], restorations: Sequence[Restoration]) -> str:
        content = [FORMAT, {name: type_.name for name, type_ in types.items()}]
        content.append({run.name: sorted(run.tensors) for run in restorations})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
