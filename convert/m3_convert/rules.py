"""Which type each tensor of the GGUF file gets: ordered rules, the first that matches decides.

1. Norms, the router, its bias and the indexer are always F32: they choose experts and blocks, and cost little.
2. The rules of the user in the order given (`--rule 'PATTERN=TYPE'`).
3. The default: `--type`, where `auto` keeps the precision of the source tensor by tensor.

PATTERN is a shell-style glob over the whole tensor name: `*` any characters, `?` one, `[3-9]` a range.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase, translate

from m3_convert.checkpoint import listed
from m3_convert.tensor_map import FP8, MappedTensor
from m3_runtime.errors import InputError
from m3_runtime.quantize import TensorType

# Pattern and what it covers; also the reason that messages give.
ALWAYS_F32 = (
    ("*.indexer.*", "the indexer"),
    ("*norm.weight", "norms"),
    ("*.ffn_gate_inp.weight", "the router"),
    ("*.exp_probs_b.bias", "the router's bias"),
)
AUTO = "auto"


@dataclass(frozen=True)
class Rule:
    """Tensors whose name matches `pattern` get `type`."""

    pattern: str
    type: TensorType

    def __str__(self) -> str:
        return f"{self.pattern}={self.type.name}"

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)


@dataclass(frozen=True)
class Decision:
    """The type of one tensor and why."""

    type: TensorType
    reason: str  #: the rule that decided, for people
    note: str = ""  #: set where the type is not the one that the rule asked for


def parse_default_type(text: str) -> TensorType | None:
    """The value of --type: None stands for `auto`. Raises InputError for an unknown one."""
    if text.lower() == AUTO:
        return None
    try:
        return TensorType.parse(text)
    except InputError as error:
        raise InputError(f"--type: {error} or {AUTO}") from None


def parse_rule(text: str) -> Rule:
    """`PATTERN=TYPE`. Raises InputError if it is neither."""
    pattern, sign, type_name = text.rpartition("=")
    if not sign or not pattern:
        raise InputError(f"--rule {text!r}: expected PATTERN=TYPE")
    try:
        re.compile(translate(pattern))
        return Rule(pattern, TensorType.parse(type_name))
    except (InputError, re.error) as error:
        raise InputError(f"--rule {text!r}: {error}") from None


def source_precision(dtypes: Sequence[str]) -> TensorType:
    """The smallest type that holds values of all these source dtypes exactly.

    BF16 for BF16 and MXFP8, F16 for F16, F32 for F32 and for any mix of BF16 and F16.
    """
    if all(dtype in ("BF16", FP8) for dtype in dtypes):
        return TensorType.BF16
    if all(dtype == "F16" for dtype in dtypes):
        return TensorType.F16
    return TensorType.F32


def decide(tensors: Sequence[MappedTensor], default: TensorType | None, rules: Sequence[Rule]) -> list[Decision]:
    """The type of every tensor, in order. default: None keeps the source's precision.

    A type whose block does not divide the rows gives F16, with a note. Raises InputError for a rule that matches no
    tensor, and for one that would make an always-F32 tensor something else.
    """
    for rule in rules:
        _check_rule(rule, tensors)
    return [_decide(tensor, default, rules) for tensor in tensors]


def shadowed(tensors: Sequence[MappedTensor], rules: Sequence[Rule]) -> list[str]:
    """One warning for each rule that decides nothing, because earlier ones decide all that it matches."""
    warnings = []
    for i, rule in enumerate(rules):
        names = [t.spec.name for t in tensors if rule.matches(t.spec.name) and always_f32(t.spec.name) is None]
        if names and all(any(earlier.matches(name) for earlier in rules[:i]) for name in names):
            warnings.append(f"rule '{rule}' decides nothing: earlier rules decide all that it matches")
    return warnings


def always_f32(name: str) -> str | None:
    """What keeps a tensor at F32 whatever the rules say ("norms", "the router"), or None."""
    return next((reason for pattern, reason in ALWAYS_F32 if fnmatchcase(name, pattern)), None)


def _check_rule(rule: Rule, tensors: Sequence[MappedTensor]) -> None:
    names = [t.spec.name for t in tensors if rule.matches(t.spec.name)]
    if not names:
        raise InputError(f"rule '{rule}': no tensor of this model matches {rule.pattern!r}")
    fixed = [f"{name} ({always_f32(name)})" for name in names if always_f32(name)]
    if fixed and rule.type is not TensorType.F32:
        raise InputError(f"rule '{rule}': matches tensors that are always F32: {listed(fixed)}")


def _decide(tensor: MappedTensor, default: TensorType | None, rules: Sequence[Rule]) -> Decision:
    name = tensor.spec.name
    reason = always_f32(name)
    if reason:
        return Decision(TensorType.F32, f"the fixed rule for {reason}")
    rule = next((r for r in rules if r.matches(name)), None)
    if rule:
        wanted, reason = rule.type, f"--rule '{rule}'"
    elif default is None:
        wanted, reason = source_precision(tensor.source_dtypes), f"--type {AUTO}: the source's own precision"
    else:
        wanted, reason = default, f"--type {default.name.lower()}"
    columns = tensor.spec.shape[-1]
    if columns % wanted.block_size:
        note = f"F16 instead of {wanted.name}: rows of {columns} are not a multiple of {wanted.block_size}"
        return Decision(TensorType.F16, reason, note)
    return Decision(wanted, reason)
