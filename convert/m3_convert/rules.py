"""Rules: which tensors of the file they match, and the type that they give them.

A pattern is a shell-style glob over the whole name of a GGUF tensor: `*` any characters, `?` one, `[3-9]` a range.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase, translate
from typing import Final

from m3_convert.layer_range import LayerRange
from m3_convert.tensor_map import TensorSpec, layer_of
from m3_runtime.errors import InputError
from m3_runtime.quantize import TensorType

MAX_PATTERN: Final = 1000  #: characters; names of tensors are far shorter, and the time for a pattern is not linear
_SHOWN: Final = 60  # characters of a rule that is no rule


@dataclass(frozen=True)
class ExpertRange:
    """Numbers of routed experts, both ends included.

    A GGUF tensor holds all experts of its layer and kind and has one type. A range can therefore only say that it means
    all of them; any other is refused, since part of it could not be honored.
    """

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


@dataclass(frozen=True)
class Rule:
    """Tensors whose name matches `pattern`, in `layers` if that is given, get `type`.

    `experts` limits the rule to tensors of stacked experts.
    """

    pattern: str
    type: TensorType
    layers: LayerRange | None = None
    experts: ExpertRange | None = None
    recipe: str = ""  #: name or path of the recipe that it stands in, for messages; empty for a --rule
    line: int = 0  #: its line there, counted from 1
    why: str = ""  #: what the recipe gives as the reason

    def __str__(self) -> str:
        return f"{self.pattern}={self.type.name}"

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"recipe {self.recipe}, line {self.line}" if self.recipe else f"rule '{self}'"

    @property
    def reason(self) -> str:
        """What --explain says when it decides."""
        if not self.recipe:
            return f"--rule '{self}'"
        layers = f", layers {self.layers}" if self.layers else ""
        experts = f", experts {self.experts}" if self.experts else ""
        why = f" ({self.why})" if self.why else ""
        return f"{self.label}: {self.pattern}{layers}{experts} = {self.type.name}{why}"

    def matches(self, specs: Sequence[TensorSpec]) -> frozenset[str]:
        """Names of the tensors that it matches. Raises InputError if there are none, or none in a part of `layers`;
        for `experts` that are not all experts of a tensor."""
        found = [spec for spec in specs if fnmatchcase(spec.name, self.pattern)]
        if self.experts:
            found = [spec for spec in found if spec.stacked]
            self._check_experts(found)
        if not found:
            what = "tensor of stacked experts" if self.experts else "tensor"
            raise InputError(f"{self.label}: no {what} of this model matches {self.pattern!r}")
        if self.layers:
            numbers = sorted({layer_of(spec.name) for spec in found} - {-1})
            try:
                chosen = self.layers.select(numbers)
            except InputError as error:
                raise InputError(f"{self.label}: no tensor of this model matches {self.pattern!r}: {error}") from None
            found = [spec for spec in found if layer_of(spec.name) in chosen]
        return frozenset(spec.name for spec in found)

    def _check_experts(self, specs: Sequence[TensorSpec]) -> None:
        for spec in specs:
            n = spec.shape[0]
            if self.experts != ExpertRange(0, n - 1):
                raise InputError(
                    f"{self.label}: experts {self.experts}: expected all of them, 0-{n - 1}: GGUF has one type for all "
                    f"experts of a tensor ({spec.name})"
                )


def check_pattern(pattern: str) -> None:
    """Raises InputError for a glob that cannot be used."""
    if len(pattern) > MAX_PATTERN:
        raise InputError(f"pattern: expected at most {MAX_PATTERN} characters, found {len(pattern)}")
    try:
        pattern.encode()
    except UnicodeEncodeError:
        raise InputError("pattern: expected UTF-8, found other bytes") from None
    try:
        re.compile(translate(pattern))
    except re.error as error:
        raise InputError(f"pattern {pattern!r}: {error}") from None


def parse_rule(text: str) -> Rule:
    """`PATTERN=TYPE`. Raises InputError if it is neither."""
    pattern, sign, type_name = text.rpartition("=")
    shown = repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
    if not sign or not pattern:
        raise InputError(f"--rule {shown}: expected PATTERN=TYPE")
    try:
        check_pattern(pattern)
        return Rule(pattern, TensorType.parse(type_name))
    except InputError as error:
        raise InputError(f"--rule {shown}: {error}") from None
