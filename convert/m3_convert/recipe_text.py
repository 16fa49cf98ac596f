"""The text of a recipe that gives tensors the types that were found for them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from m3_convert.sensitivity import kind_of
from m3_convert.tensor_map import layer_of
from m3_runtime.quantities import format_bytes
from m3_runtime.quantize import TensorType

_WIDTH: Final = 116


@dataclass(frozen=True)
class FoundTensor:
    """A tensor with the type that it gets. n_bytes, more_bytes: with that type, and more than in the base."""

    name: str
    type: TensorType
    n_bytes: int
    more_bytes: int
    base: TensorType  #: its type in the recipe that the search began with
    fixed: bool = False  #: by a rule of the user


Gain = Callable[[Sequence[FoundTensor]], str]  #: what the measurement says of some tensors, for a comment


def recipe_text(about: Sequence[str], tensors: Sequence[FoundTensor], gain: Gain) -> str:
    """TOML as `recipe.parse_recipe` reads it: rules for every tensor of `tensors`, each with what it costs and gains.

    about: lines of comment for the head.
    """
    kinds: dict[str, list[FoundTensor]] = {}
    for tensor in tensors:
        kinds.setdefault(kind_of(tensor.name), []).append(tensor)
    parts = ["\n".join(f"# {line}" for line in about)]
    for kind, members in kinds.items():
        parts += _rules(kind, members, gain)
    sizes: Counter[TensorType] = Counter()
    for tensor in tensors:
        sizes[tensor.type] += tensor.n_bytes
    default = sizes.most_common(1)[0][0] if sizes else TensorType.Q8_0
    parts.append(f'[default]\ntype = "{default.name.lower()}"\nwhy = "no tensor of this model is left to it"')
    return "\n\n".join(parts) + "\n"


def layers_text(layers: Sequence[int]) -> str:
    """Ascending numbers as `layer_range.parse_layers` reads them: "3-10, 12"."""
    spans = []
    for _, run in groupby(enumerate(layers), lambda pair: pair[1] - pair[0]):
        numbers = [layer for _, layer in run]
        spans.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ", ".join(spans)


def _rules(kind: str, members: Sequence[FoundTensor], gain: Gain) -> list[str]:
    """One rule for each type of a kind; the last, that of most layers, says no layers."""
    by_type: dict[TensorType, list[FoundTensor]] = {}
    for tensor in members:
        by_type.setdefault(tensor.type, []).append(tensor)
    ordered = sorted(by_type.items(), key=lambda item: (len(item[1]), item[0].name))
    return [_rule(kind, type_, found, gain, last=i == len(ordered) - 1) for i, (type_, found) in enumerate(ordered)]


def _rule(kind: str, type_: TensorType, found: Sequence[FoundTensor], gain: Gain, *, last: bool) -> str:
    lines = [f"# {_cost(found)}", "[[rule]]", f'tensors = "{kind}"']
    if not last:
        lines.append(f'layers = "{layers_text(sorted(layer_of(t.name) for t in found))}"')
    lines.append(f'type = "{type_.name.lower()}"')
    if all(t.fixed for t in found):
        lines.append('why = "asked for with --rule"')
    elif note := gain(found):
        lines.append(f'why = "{note}"')
    return "\n".join(lines)


def _cost(found: Sequence[FoundTensor]) -> str:
    size, more = sum(t.n_bytes for t in found), sum(t.more_bytes for t in found)
    bases = ", ".join(dict.fromkeys(t.base.name for t in found))
    if not more:
        return f"{format_bytes(size)}, as {bases} was before"
    return f"{format_bytes(size)}, {format_bytes(abs(more))} {'more' if more > 0 else 'less'} than with {bases} before"
