"""From what was measured to the types: what each choice costs, and which choices meet a target."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from m3_convert.knapsack import Choice, Choices, Doubles, fewest_bytes, least_harm
from m3_convert.type_ladder import Ladder
from m3_runtime.quantize import TensorType

Types = dict[str, TensorType]
Errors = Mapping[str, Mapping[TensorType, float]]
Sizes = Mapping[str, Mapping[TensorType, int]]

#: Of the blocks that a target allows to be lost so many are planned for, as another share is measured than predicted.
AIM = 0.97
LEAST_SLOPE = 0.3  #: of measured over predicted harm, in logarithms: less is noise


@dataclass(frozen=True)
class CostModel:
    """Sizes and harms of all choices. ladders: types by tensor. costs: harm of a unit of error by tensor, [harms]."""

    ladders: Mapping[str, Ladder]
    sizes: Sizes
    errors: Errors
    costs: Mapping[str, Doubles]

    def harm(self, types: Mapping[str, TensorType]) -> Doubles:
        """What the model of costs predicts, [harms]."""
        total: Doubles = np.sum([self.costs[name] * self.errors[name][types[name]] for name in self.ladders], axis=0)
        return total

    def n_bytes(self, types: Mapping[str, TensorType]) -> int:
        return sum(self.sizes[name][types[name]] for name in self.ladders)

    def best_in(self, max_bytes: int) -> Types | None:
        """The types with the least divergence in so many bytes; None if the smallest are larger."""
        chosen = least_harm(self._choices(slice(0, 1)), max_bytes)
        return None if chosen is None else {name: choice.type for name, choice in chosen.items()}

    def smallest_above(self, base: Mapping[str, TensorType], allowed: Doubles) -> Types | None:
        """The types with the fewest bytes, none smaller than in `base`, that harm each layer and head at most as
        allowed, [harms - 1]; None if the largest harm more."""
        harmed = np.flatnonzero([any(cost[1 + i] for cost in self.costs.values()) for i in range(len(allowed))])
        limits = np.maximum(allowed[harmed], 1e-300)
        raises = {
            name: tuple(t for t in types if self.sizes[name][t] >= self.sizes[name][base[name]]) or (base[name],)
            for name, types in self.ladders.items()
        }
        choices = self._choices(harmed + 1, raises)
        if not len(harmed):
            return dict(base)
        chosen = fewest_bytes(choices, limits.tolist())
        return None if chosen is None else {name: choice.type for name, choice in chosen.items()}

    def _choices(self, harms: slice | NDArray[np.int64], ladders: Mapping[str, Ladder] | None = None) -> Choices:
        return {
            name: [
                Choice(t, self.sizes[name][t], tuple((self.costs[name][harms] * self.errors[name][t]).tolist()))
                for t in types
            ]
            for name, types in (ladders or self.ladders).items()
        }


@dataclass
class Calibration:
    """How what was measured compares with what was predicted, [harms]: the last two checks."""

    points: list[tuple[Doubles, Doubles]] = field(default_factory=list)

    def learn(self, measured: Doubles, predicted: Doubles) -> None:
        """From a check. A harm of which nothing was predicted, or found, tells nothing."""
        known = (predicted > 0) & (measured > 0)
        point = np.where(known, measured, 1.0), np.where(known, predicted, 1.0)
        self.points = [*self.points[-1:], point]

    def predicted(self, wanted: float) -> Doubles:
        """What must be predicted so that `wanted`, above 0, will be measured.

        In proportion to the last check; by two, along the line through both in logarithms, where the harm grew more
        slowly than predicted: choices between nearly equal experts change with any change, however small.
        """
        measured, predicted = self.points[-1]
        slope = np.ones(len(measured))
        if len(self.points) > 1:
            before, before_predicted = self.points[0]
            with np.errstate(divide="ignore", invalid="ignore"):
                found = np.log(before / measured) / np.log(before_predicted / predicted)
            slope = np.clip(np.where(np.isfinite(found), found, 1.0), LEAST_SLOPE, 1.0)
        needed: Doubles = predicted * (wanted / measured) ** (1 / slope)
        return needed
