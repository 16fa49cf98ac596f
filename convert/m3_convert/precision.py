"""Which type each tensor of the GGUF file gets.

1. Norms, the router and its bias are always F32: they choose experts and blocks, and cost little.
2. The rules of the user in the order given (`--rule 'PATTERN=TYPE'`).
3. The rules of the recipe in their order.
4. The index projections are F32: they choose the blocks that are read. Those of a GGUF file stay as they are under
   `auto`, which only divides and joins: another type would not make their values what they were, but hide it.
5. The default of the recipe, or `--type`, where `auto` keeps the precision of the source tensor by tensor.

The first that matches a tensor decides. A rule that makes index projections F16 or BF16 is honored where the values
survive (see `INDEXER_ERROR`); any other type for them needs `allow_lossy_indexer`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from m3_convert.checkpoint import listed
from m3_convert.recipe import AUTO, Recipe, read_recipe, recipe_names, shipped_recipe
from m3_convert.rules import Rule, parse_rule
from m3_convert.tensor_map import FP8, MappedTensor
from m3_runtime.errors import InputError
from m3_runtime.quantize import TensorType

# Pattern and what it covers; also the reason that messages give.
ALWAYS_F32 = (
    ("*norm.weight", "norms"),
    ("*.ffn_gate_inp.weight", "the router"),
    ("*.exp_probs_b.bias", "the router's bias"),
)
INDEX_PROJECTIONS: Final = "*.indexer.[qk]_proj.weight"

#: How far index projections in F16 or BF16 may be from the source: by this part of the value, or by the second part of
#: the largest magnitude in its row. The first is F16's rounding: nothing is lost from a BF16 or MXFP8 source above
#: 2^-14. The second lets values below that pass, which F16 holds to 2^-25, in rows that reach 2^-7.
INDEXER_ERROR: Final = (2.0**-11, 2.0**-18)
HALF_TYPES: Final = (TensorType.F16, TensorType.BF16)
FLOAT_TYPES: Final = (TensorType.F32, *HALF_TYPES)  #: no blocks: importance changes nothing

#: Source dtypes that hold a model as it was published, or nearly: what is made from them was rounded once.
FULL_DTYPES: Final = ("F32", "BF16", "F16", FP8, "Q8_0")

# What takes the place of a type whose block does not divide the rows: a type of blocks of 32 with more bits per weight
# (where there is one, the one with the same grid: Q4_1 for Q4_K, Q5_1 for Q5_K, IQ4_NL for IQ4_XS), then F16.
FALLBACKS: Final = {
    **dict.fromkeys((TensorType.IQ1_S, TensorType.IQ1_M), TensorType.IQ4_NL),
    **dict.fromkeys((TensorType.IQ2_XXS, TensorType.IQ2_XS, TensorType.IQ2_S, TensorType.Q2_K), TensorType.IQ4_NL),
    **dict.fromkeys((TensorType.IQ3_XXS, TensorType.IQ3_S, TensorType.Q3_K), TensorType.IQ4_NL),
    TensorType.IQ4_XS: TensorType.IQ4_NL,
    TensorType.Q4_K: TensorType.Q4_1,
    TensorType.Q5_K: TensorType.Q5_1,
    TensorType.Q6_K: TensorType.Q8_0,
}


@dataclass(frozen=True)
class TypeChoice:
    """What the user asked for."""

    default: TensorType | None = None  #: without a recipe; None: the source's own precision
    recipe: Recipe | None = None
    rules: tuple[Rule, ...] = ()  #: before those of the recipe
    strict: bool = False  #: a type whose block does not divide the rows is an error
    allow_lossy_indexer: bool = False
    allow_requantize: bool = False  #: values that were below Q8_0 may get another type than F32

    @property
    def name(self) -> str:
        """Name of the recipe or of the type, "auto" for the source's own precision."""
        if self.recipe:
            return self.recipe.name
        return AUTO if self.default is None else self.default.name


@dataclass(frozen=True)
class Decision:
    """The type of one tensor and why."""

    type: TensorType
    reason: str  #: the rule that decided, for people
    note: str = ""  #: set where the type is not the one that the rule asked for
    bounded: bool = False  #: the values must survive within INDEXER_ERROR


def choose(type_name: str | None = None, recipe: Path | None = None, rules: Sequence[str] = ()) -> TypeChoice:
    """From the options --type, --recipe and --rule. A type that is also the name of a shipped recipe is the recipe.

    Raises InputError for an unknown type, a recipe or rule that is wrong, and both a type and a recipe.
    """
    parsed = tuple(parse_rule(text) for text in rules)
    if recipe is not None:
        if type_name is not None:
            raise InputError(f"--type {type_name} and --recipe {recipe}: expected one of the two")
        return TypeChoice(recipe=read_recipe(recipe), rules=parsed)
    name = (type_name or AUTO).lower()
    if name == AUTO:
        return TypeChoice(rules=parsed)
    if name in recipe_names():
        return TypeChoice(recipe=shipped_recipe(name), rules=parsed)
    try:
        return TypeChoice(TensorType.parse(name), rules=parsed)
    except InputError:
        types = [t.name.lower() for t in TensorType if t.name.lower() not in recipe_names()]
        raise InputError(
            f"--type: '{type_name}' is not known, expected {AUTO}, a recipe ({', '.join(recipe_names())}) or a type "
            f"({', '.join(types)})"
        ) from None


def source_precision(dtypes: Sequence[str]) -> TensorType:
    """The smallest type that holds values of all these source dtypes exactly.

    BF16 for BF16 and MXFP8, F32 for any mix of others; each type of GGUF for itself.
    """
    if all(dtype in ("BF16", FP8) for dtype in dtypes):
        return TensorType.BF16
    return TensorType[dtypes[0]] if len(dtypes) == 1 else TensorType.F32


def always_f32(name: str) -> str | None:
    """What keeps a tensor at F32 whatever the rules say ("norms", "the router"), or None."""
    return next((reason for pattern, reason in ALWAYS_F32 if fnmatchcase(name, pattern)), None)


def is_index_projection(name: str) -> bool:
    """True for the weights that make index queries and keys."""
    return fnmatchcase(name, INDEX_PROJECTIONS)


def rounded(dtype: str) -> bool:
    """True for the types of GGUF whose blocks share a scale."""
    return dtype == "Q8_0" or dtype not in FULL_DTYPES


def origin(tensor: MappedTensor) -> str:
    """The type below Q8_0 that the values were rounded to: the tensor's own, or the one that it had before by what its
    file says. Empty if there is none."""
    return next((dtype for dtype in tensor.source_dtypes if dtype not in FULL_DTYPES), tensor.declared_origin)


def requantized(source_type: str, origin_: str, type_: TensorType) -> bool:
    """True if values with such an `origin` would be rounded once more."""
    return bool(origin_) and type_.name not in (source_type, "F32")


def decide(
    tensors: Sequence[MappedTensor], choice: TypeChoice, *, from_gguf: bool = False
) -> tuple[list[Decision], list[str]]:
    """The type of every tensor, in order, and notes on rules that decide nothing.

    A type whose block does not divide the rows gives the next one of FALLBACKS that does, or F16, with a note. Raises
    InputError for that under `strict`, for a rule that matches no tensor, one that would make an always-F32 tensor
    something else, one that would round index projections without leave, and values that were below Q8_0 that would get
    another type than F32 without `allow_requantize`. from_gguf: the tensors are those of a GGUF file.
    """
    specs = [tensor.spec for tensor in tensors]
    recipe_rules = choice.recipe.rules if choice.recipe else ()
    matched = [(rule, rule.matches(specs)) for rule in (*choice.rules, *recipe_rules)]
    for rule, names in matched:
        _check_fixed(rule, [spec.name for spec in specs if spec.name in names])
    keep_index = from_gguf and choice.name == AUTO
    decisions = [_decide(tensor, choice, matched, keep_index) for tensor in tensors]
    if choice.strict:
        notes = [f"{t.spec.name}: {d.note}" for t, d in zip(tensors, decisions, strict=True) if d.note]
        if notes:
            raise InputError(f"--strict: {len(notes)} tensors would fall back: {listed(notes, 2)}")
    if not choice.allow_requantize:
        _check_requantized(tensors, decisions)
    n = len(choice.rules)
    # Apart: that --rule takes tensors from the recipe is what it is for.
    return decisions, [*_shadowed(matched[:n]), *_shadowed(matched[n:])]


def _check_requantized(tensors: Sequence[MappedTensor], decisions: Sequence[Decision]) -> None:
    twice = [
        f"{t.spec.name} ({stored_as(t.source_dtypes[0], origin(t))} -> {d.type.name})"
        for t, d in zip(tensors, decisions, strict=True)
        if requantized(t.source_dtypes[0], origin(t), d.type)
    ]
    if twice:
        raise InputError(
            f"{len(twice)} tensors of the source are below Q8_0 already: {listed(twice, 2)}: rounded twice they would "
            "lose more; take the checkpoint, or give --allow-requantize"
        )


def stored_as(source_type: str, origin_: str) -> str:
    """How messages name the type of a tensor: "Q4_K", or "F32 of Q4_K" where an `origin` is known."""
    return source_type if origin_ in ("", source_type) else f"{source_type} of {origin_}"


def _shadowed(matched: Sequence[tuple[Rule, frozenset[str]]]) -> list[str]:
    """One warning for each rule that decides nothing, because earlier ones decide all that it matches."""
    warnings, taken = [], set[str]()
    for rule, names in matched:
        open_names = {name for name in names if always_f32(name) is None}
        if open_names and open_names <= taken:
            warnings.append(f"{rule.label} decides nothing: earlier rules decide all that it matches")
        taken |= open_names
    return warnings


def _check_fixed(rule: Rule, names: Sequence[str]) -> None:
    fixed = [f"{name} ({always_f32(name)})" for name in names if always_f32(name)]
    if fixed and rule.type is not TensorType.F32:
        raise InputError(f"{rule.label}: matches tensors that are always F32: {listed(fixed)}")


def _decide(
    tensor: MappedTensor, choice: TypeChoice, matched: Sequence[tuple[Rule, frozenset[str]]], keep_index: bool
) -> Decision:
    name = tensor.spec.name
    fixed = always_f32(name)
    if fixed:
        return Decision(TensorType.F32, f"the fixed rule for {fixed}")
    rule = next((rule for rule, names in matched if name in names), None)
    if is_index_projection(name):
        if rule is None:
            if keep_index:
                return Decision(source_precision(tensor.source_dtypes), _default(choice)[1])
            return Decision(TensorType.F32, "the default for index projections")
        if rule.type not in FLOAT_TYPES and not choice.allow_lossy_indexer:
            raise InputError(
                f"{rule.label}: would make {name} {rule.type.name}: index projections choose the blocks that are read, "
                "and below F16 and BF16 need --allow-lossy-indexer"
            )
        bounded = rule.type in HALF_TYPES and not choice.allow_lossy_indexer
        return _fitted(tensor, rule.type, rule.reason, bounded)
    if rule is not None:
        return _fitted(tensor, rule.type, rule.reason)
    wanted, reason = _default(choice)
    return _fitted(tensor, source_precision(tensor.source_dtypes) if wanted is None else wanted, reason)


def _default(choice: TypeChoice) -> tuple[TensorType | None, str]:
    if choice.recipe:
        return choice.recipe.default, choice.recipe.default_reason
    if choice.default is None:
        return None, f"--type {AUTO}: the source's own precision"
    return choice.default, f"--type {choice.default.name.lower()}"


def _fitted(tensor: MappedTensor, wanted: TensorType, reason: str, bounded: bool = False) -> Decision:
    columns = tensor.spec.shape[-1]
    type_ = wanted
    while columns % type_.block_size:
        type_ = FALLBACKS.get(type_, TensorType.F16)
    if type_ is wanted:
        return Decision(type_, reason, bounded=bounded)
    note = f"{type_.name} instead of {wanted.name}: rows of {columns} are not a multiple of {wanted.block_size}"
    return Decision(type_, reason, note)
