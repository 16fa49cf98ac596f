"""A layer of a report in one row of a table or a chart: its means, and the heads that they hide."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]


@dataclass(frozen=True)
class LayerSummary:
    """A layer with lists, from its part of the JSON report. Of several heads that are equally bad the first."""

    overlap: float  #: mean of all heads
    worst: Json  #: the index head with the lowest mean overlap
    lowest: Json  #: the index head with the lowest single list
    mass_lost: float  #: mean of all query heads
    loser: Json  #: the query head that loses most in the mean
    most: Json  #: the query head with the query that loses most

    @classmethod
    def of(cls, layer: Json) -> "LayerSummary":
        heads, query_heads = layer["heads"], query_heads_of(layer)
        return cls(
            overlap=sum(head["overlap_mean"] for head in heads) / len(heads),
            worst=worst_head(layer),
            lowest=min(heads, key=lambda head: head["overlap_min"]),
            mass_lost=sum(head["mean"] for head in query_heads) / len(query_heads),
            loser=max(query_heads, key=lambda head: head["mean"]),
            most=max(query_heads, key=lambda head: head["max"]),
        )


def worst_head(layer: Json) -> Json:
    """The index head with the lowest mean overlap; of the isolated run, too."""
    head: Json = min(layer["heads"], key=lambda head: head["overlap_mean"])
    return head


def query_heads_of(layer: Json) -> list[Json]:
    return [query_head for head in layer["heads"] for query_head in head["mass_lost"]["query_heads"]]
