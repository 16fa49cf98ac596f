"""Recipes: TOML files of ordered rules that say which type each tensor gets.

    file_type = "Q4_K_M"    # optional: llama.cpp's name for the mixture, for general.file_type

    [[rule]]                # the first rule that matches a tensor decides
    tensors = "blk.*.ffn_down_exps.weight"
    layers = "first 1/8, last 1/8"    # optional, see parse_layers
    experts = "0-127"                 # optional, see ExpertRange
    type = "q6_k"
    why = "..."                       # optional: for --explain

    [default]               # the type of what no rule matches; "auto": the source's own precision
    type = "q6_k"
    why = "..."             # optional

Norms, router and its bias are F32 and index projections take no default (see `precision`).
"""

import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import gguf

from m3_convert.layer_range import parse_layers
from m3_convert.rules import ExpertRange, Rule, check_pattern
from m3_convert.stored_name import stored_name
from m3_runtime.errors import InputError
from m3_runtime.quantize import TensorType

AUTO: Final = "auto"
MAX_BYTES: Final = 1 << 20  #: of a recipe: it is copied into the file

_RULE_HEADER = re.compile(r"^[ \t]*\[\[[ \t]*rule[ \t]*\]\]", re.MULTILINE)
_DEFAULT_HEADER = re.compile(r"^[ \t]*\[[ \t]*default[ \t]*\]", re.MULTILINE)
_EXPERTS = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")
_RULE_KEYS = ("tensors", "layers", "experts", "type", "why")


@dataclass(frozen=True)
class Recipe:
    """A parsed recipe."""

    name: str  #: of the file, without its suffix
    text: str
    rules: tuple[Rule, ...]
    default: TensorType | None  #: None: the source's own precision
    default_reason: str  #: what --explain says where the default decides
    file_type: int | None  #: general.file_type, None if the recipe does not say

    @property
    def sha256(self) -> str:
        """Hash of the text as UTF-8, in hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def recipe_names() -> list[str]:
    """Names of the recipes that come with the program, in alphabetical order."""
    folder = files("m3_convert").joinpath("recipes")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def shipped_recipe(name: str) -> Recipe:
    """One of `recipe_names`."""
    content = files("m3_convert").joinpath("recipes", f"{name}.toml").read_bytes()
    return parse_recipe(content, name)


def read_recipe(path: Path) -> Recipe:
    """A recipe of the user. Raises InputError that names the file for one that cannot be read or understood."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: recipe cannot be read: {error.strerror}") from error
    if len(content) > MAX_BYTES:
        raise InputError(f"{path}: expected a recipe of at most {MAX_BYTES} bytes, found more")
    return parse_recipe(content, stored_name(path, "recipe").removesuffix(".toml"), str(path))


def parse_recipe(content: bytes, name: str, place: str = "") -> Recipe:
    """Raises InputError that names the recipe and the line for TOML or a key, type, pattern or range that is wrong.

    place: the path that messages give in place of the name.
    """
    place = place or name
    whole = label = f"recipe {place}"
    try:
        text = content.decode()
        values = tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise InputError(f"{label}: expected UTF-8, found byte {content[error.start]} at {error.start}") from error
    except (ValueError, RecursionError) as error:  # beyond TOMLDecodeError: numbers too long, tables in tables
        raise InputError(f"{label}: not TOML: {error}") from error
    _check_keys(values, ("file_type", "rule", "default"), label)
    tables = values.get("rule", [])
    lines = _lines(_RULE_HEADER, text)
    # tomllib gives no positions. Headers are counted instead, which holds as long as every rule has one.
    if not isinstance(tables, list) or len(tables) != len(lines):
        raise InputError(f"{label}: expected every rule as a [[rule]] table on a line of its own, and none in a string")
    rules = tuple(_parse_rule(table, place, line) for table, line in zip(tables, lines, strict=True))
    default, line = values.get("default"), next(iter(_lines(_DEFAULT_HEADER, text)), 0)
    if not isinstance(default, dict) or not line:
        raise InputError(f"{label}: [default] is missing: the type of what no rule matches")
    label = f"{label}, line {line}"
    _check_keys(default, ("type", "why"), label)
    type_ = _default_type(_string(default, "type", label), label)
    why = _optional(default, "why", label)
    reason = f"{label}: default = {AUTO if type_ is None else type_.name}{f' ({why})' if why else ''}"
    return Recipe(name, text, rules, type_, reason, _file_type(values, whole))


def _lines(header: re.Pattern[str], text: str) -> list[int]:
    return [text.count("\n", 0, match.end()) + 1 for match in header.finditer(text)]


def _parse_rule(table: Mapping[str, Any], recipe: str, line: int) -> Rule:
    label = f"recipe {recipe}, line {line}"
    if not isinstance(table, dict):
        raise InputError(f"{label}: expected a [[rule]] table")
    _check_keys(table, _RULE_KEYS, label)
    pattern, type_name = _string(table, "tensors", label), _string(table, "type", label)
    layers, experts, why = (_optional(table, key, label) for key in ("layers", "experts", "why"))
    try:
        check_pattern(pattern)
        return Rule(
            pattern=pattern,
            type=TensorType.parse(type_name),
            layers=parse_layers(layers) if layers else None,
            experts=_parse_experts(experts) if experts else None,
            recipe=recipe,
            line=line,
            why=why,
        )
    except InputError as error:
        raise InputError(f"{label}: {error}") from None


def _parse_experts(text: str) -> ExpertRange:
    match = _EXPERTS.fullmatch(text)
    if match is None:
        raise InputError(f'experts {text!r}: expected a range such as "0-127"')
    return ExpertRange(int(match[1]), int(match[2]))


def _default_type(text: str, label: str) -> TensorType | None:
    if text.lower() == AUTO:
        return None
    try:
        return TensorType.parse(text)
    except InputError as error:
        raise InputError(f"{label}: {error} or {AUTO}") from None


def _file_type(values: Mapping[str, Any], label: str) -> int | None:
    text = _optional(values, "file_type", label)
    if not text:
        return None
    found: gguf.LlamaFileType | None = next(
        (t for t in gguf.LlamaFileType if t.name in (f"MOSTLY_{text.upper()}", f"ALL_{text.upper()}")), None
    )
    if found is None:
        raise InputError(f"{label}: file_type {text!r}: expected one of llama.cpp's names such as Q4_K_M")
    return int(found)


def _check_keys(table: Mapping[str, Any], known: Iterable[str], label: str) -> None:
    for key in table:
        if key not in known:
            raise InputError(f"{label}: key {key!r} is not known, expected one of {', '.join(known)}")


def _string(table: Mapping[str, Any], key: str, label: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value:
        raise InputError(
            f"{label}: {key}: expected a string, found {value!r}" if key in table else f"{label}: {key} is missing"
        )
    return value


def _optional(table: Mapping[str, Any], key: str, label: str) -> str:
    """Empty if the key is not there."""
    return _string(table, key, label) if key in table else ""
