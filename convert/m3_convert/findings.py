"""What a check found, as its verdict needs it: how lists and logits differ, and in what the models do."""

from collections.abc import Sequence
from dataclasses import dataclass

from m3_convert.comparison import MassCell
from m3_convert.selection import Cell


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
