"""The plan of a conversion: every tensor of the file with its type, offset, size, sources and the rule behind it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final

from gguf import LlamaFileType

from m3_convert.checkpoint import Checkpoint
from m3_convert.gguf_source import DEQUANTIZED, LOSSY_INDEXER, REQUANTIZED, GgufSource
from m3_convert.imatrix import Coverage, ImportanceMatrix
from m3_convert.norms import check_norms
from m3_convert.precision import (
    FLOAT_TYPES,
    FULL_DTYPES,
    Decision,
    TypeChoice,
    always_f32,
    decide,
    is_index_projection,
    origin,
    requantized,
    rounded,
    stored_as,
)
from m3_convert.tensor_map import MappedTensor, SourceMatrix, map_tensors
from m3_runtime.errors import InputError
from m3_runtime.quantize import TensorType, row_bytes

ALIGNMENT = 32  #: bytes; the default of GGUF, which needs no key

# Names of file types that are not "MOSTLY_" and the type: the purest where GGUF has several mixtures around one type.
_FILE_TYPE_NAMES: Final = {
    TensorType.F32: "ALL_F32",
    TensorType.Q3_K: "MOSTLY_Q3_K_S",
    TensorType.Q4_K: "MOSTLY_Q4_K_S",
    TensorType.Q5_K: "MOSTLY_Q5_K_S",
    TensorType.MXFP4: "MOSTLY_MXFP4_MOE",
}
#: general.file_type where no recipe says it, by what most of the weights are.
FILE_TYPES: Final = {
    type_: int(LlamaFileType[_FILE_TYPE_NAMES.get(type_, f"MOSTLY_{type_.name}")]) for type_ in TensorType
}


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the file. `shape` is outermost first (`ne` the other way round), `offset` from the data section."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    n_bytes: int
    matrices: tuple[SourceMatrix, ...]  #: one, or one for each expert
    plus_one: bool
    reason: str  #: the rule that decided the type
    note: str  #: not empty if the type is not the one the rule asked for
    bounded: bool = False  #: rounding may not go beyond INDEXER_ERROR
    origin: str = ""  #: type below Q8_0 that the values were rounded to, in the source or before; empty if none

    @property
    def ne(self) -> tuple[int, ...]:
        """The shape as GGUF writes it: contiguous axis first."""
        return self.shape[::-1]

    @property
    def stacked(self) -> bool:
        """True if it holds one matrix for each expert."""
        return len(self.shape) == 3

    @property
    def source_type(self) -> str:
        """Dtypes of the sources, "BF16" or "BF16+F8_E4M3"."""
        return "+".join(dict.fromkeys(m.tensor.dtype for m in self.matrices))

    @property
    def source(self) -> str:
        """Name of the source; of stacked experts one name with the range of numbers."""
        name = self.matrices[0].tensor.name
        return name.replace(".experts.0.", f".experts.0-{len(self.matrices) - 1}.") if self.stacked else name


@dataclass(frozen=True)
class Plan:
    """All tensors of the file in file order."""

    source: Checkpoint | GgufSource
    choice: TypeChoice
    tensors: tuple[PlannedTensor, ...]
    left_out: tuple[str, ...]  #: source tensors that are not converted (vision part)
    warnings: tuple[str, ...]
    importance: ImportanceMatrix | None = None  #: fitted to the tensors
    coverage: Coverage | None = None  #: of `importance`
    inputs: tuple[Path, ...] = ()  #: files beside the source that the plan was made from

    @property
    def data_bytes(self) -> int:
        """Size of the data section, padding included."""
        last = self.tensors[-1]
        return aligned(last.offset + last.n_bytes)

    @property
    def file_type(self) -> int:
        """general.file_type: that of the recipe or of --type, else of the type that most weights get, those that the
        default does not reach apart."""
        recipe = self.choice.recipe
        if recipe and recipe.file_type is not None:
            return recipe.file_type
        if not recipe and self.choice.default is not None:
            return FILE_TYPES[self.choice.default]
        sizes: Counter[TensorType] = Counter()
        for tensor in self.tensors:
            if always_f32(tensor.name) is None and not is_index_projection(tensor.name):
                sizes[tensor.type] += prod(tensor.shape)
        return FILE_TYPES[sizes.most_common(1)[0][0]]

    @property
    def lossy_indexer(self) -> bool:
        """True if index projections are rounded with nothing known of the loss, here or before."""
        return self.source_says(LOSSY_INDEXER) or any(
            self.rounds_index(t) or rounded(t.source_type) for t in self.tensors if is_index_projection(t.name)
        )

    def rounds_index(self, tensor: PlannedTensor) -> bool:
        """True if an index projection gets another type under `allow_lossy_indexer`."""
        return self.choice.allow_lossy_indexer and tensor.type.name not in ("F32", tensor.source_type)

    @property
    def rounded_twice(self) -> tuple[PlannedTensor, ...]:
        """Tensors whose values were below Q8_0 already and are rounded once more."""
        return tuple(t for t in self.tensors if requantized(t.source_type, t.origin, t.type))

    @property
    def requantized(self) -> bool:
        """True if tensors were rounded twice, here or before."""
        return self.source_says(REQUANTIZED) or bool(self.rounded_twice)

    @property
    def dequantized(self) -> dict[str, str]:
        """The type below Q8_0 that the values of a tensor had, of those that get a larger one, by name."""
        return {t.name: t.origin for t in self.tensors if t.origin and t.type.name in FULL_DTYPES}

    def source_says(self, key: str) -> bool:
        """True if the source is a GGUF file that says so of itself."""
        value = self.source.metadata.get(key) if isinstance(self.source, GgufSource) else None
        return value is not None and bool(value.value)

    @property
    def keeps_bytes(self) -> bool:
        """True if every tensor keeps the bytes of a GGUF file."""
        return isinstance(self.source, GgufSource) and all(t.source_type == t.type.name for t in self.tensors)

    def with_importance(self, matrix: ImportanceMatrix) -> "Plan":
        """The same plan with a matrix for its quantizers.

        Raises InputError if it was made for another model. Token embeddings are looked up, not multiplied: they have
        no importance.
        """
        shapes = {
            t.name: (len(t.matrices), t.shape[-1])
            for t in self.tensors
            if t.type not in FLOAT_TYPES and t.name != "token_embd.weight"
        }
        fitted, coverage = matrix.fitted(shapes, {t.name for t in self.tensors})
        return replace(self, importance=fitted, coverage=coverage)

    def check_importance(self) -> None:
        """Raises InputError if a tensor gets a type that cannot be written without importance that is not there."""
        known = self.importance.entries if self.importance else {}
        lacking = [t for t in self.tensors if t.type.needs_importance and t.name not in known]
        if lacking:
            names = list(dict.fromkeys(t.type.name for t in lacking))
            types, need = ", ".join(names), "needs" if len(names) == 1 else "need"
            count = f"{len(lacking)} tensors, the first" if len(lacking) > 1 else "for"
            if self.importance:
                raise InputError(
                    f"{self.importance.name}: {types} {need} importance, which it lacks ({count} {lacking[0].name})"
                )
            raise InputError(
                f"{types} {need} an importance matrix: make one with m3-imatrix and give it as --imatrix FILE "
                f"({count} {lacking[0].name})"
            )

    def tensor(self, name: str) -> PlannedTensor:
        """A tensor by its GGUF name. Raises InputError if the file has none of that name."""
        found = next((t for t in self.tensors if t.name == name), None)
        if found is None:
            raise InputError(f"{name}: no such tensor in the file (see --dry-run for all of them)")
        return found

    def as_json(self) -> dict[str, Any]:
        """The plan for scripts: shapes as `ne`, sizes in bytes, offsets in bytes from the start of the data section."""
        return {
            "source": str(self.source.path),
            "type": self.choice.name,
            "recipe_sha256": self.choice.recipe.sha256 if self.choice.recipe else None,
            "rules": [str(rule) for rule in self.choice.rules],
            "lossy_indexer": self.lossy_indexer,
            "requantized": self.requantized,
            "dequantized": self.dequantized,
            "tensors": [tensor_json(t) for t in self.tensors],
            "left_out": list(self.left_out),
            "warnings": list(self.warnings),
            "importance": self.coverage.as_json() if self.coverage else None,
            "data_bytes": self.data_bytes,
            "bytes_by_type": self.bytes_by_type(),
        }

    def bytes_by_type(self) -> dict[str, int]:
        """Bytes of tensor data by type name, largest first."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors:
            sizes[tensor.type.name] += tensor.n_bytes
        return dict(sizes.most_common())


def tensor_json(tensor: PlannedTensor) -> dict[str, Any]:
    """One tensor for scripts."""
    return {
        "name": tensor.name,
        "ne": list(tensor.ne),
        "source": tensor.source,
        "sources": len(tensor.matrices),
        "source_type": tensor.source_type,
        "origin": tensor.origin or None,
        "type": tensor.type.name,
        "plus_one": tensor.plus_one,
        "offset": tensor.offset,
        "bytes": tensor.n_bytes,
        "rule": tensor.reason,
        "note": tensor.note,
    }


def aligned(n: int) -> int:
    """`n` bytes rounded up to the alignment of GGUF."""
    return -(-n // ALIGNMENT) * ALIGNMENT


def plan_conversion(source: Checkpoint | GgufSource, choice: TypeChoice | None = None) -> Plan:
    """Decides type, offset and size of every tensor of the file. Reads the norms of a checkpoint, no other data.

    choice: None keeps the source's own precision. Raises InputError for tensors that are missing, extra or mis-shaped,
    FP8 without scale and the reverse, rules that cannot be honored (see `decide`), and norms that already hold 1 + w.
    """
    choice = choice or TypeChoice()
    if isinstance(source, GgufSource):
        mapped, left_out = list(source.mapped), list[str]()
    else:
        mapped, left_out = map_tensors(source)
    tensors, notes = plan_tensors(mapped, choice, from_gguf=isinstance(source, GgufSource))
    if isinstance(source, Checkpoint):
        check_norms(mapped, source.shards)
    plan = Plan(source, choice, tensors, tuple(left_out), (*source.warnings, *notes))
    return replace(plan, warnings=(*plan.warnings, *_loss_notes(plan)))


def _loss_notes(plan: Plan) -> Iterator[str]:
    """What --allow options do not change, and losses that they allow or that the source has already."""
    index = [t for t in plan.tensors if is_index_projection(t.name)]
    if plan.choice.allow_lossy_indexer and not any(plan.rounds_index(t) for t in index):
        yield "--allow-lossy-indexer changes nothing: no rule gives the index projections another type than F32"
    twice = plan.rounded_twice
    if plan.choice.allow_requantize and not twice:
        yield "--allow-requantize changes nothing: no tensor below Q8_0 gets another type"
    if twice:
        first = f"{twice[0].name}: {stored_as(twice[0].source_type, twice[0].origin)} -> {twice[0].type.name}"
        yield f"{len(twice)} tensors that were below Q8_0 are rounded once more ({first}): the file says {REQUANTIZED}"
    larger = [t for t in plan.tensors if t.name in plan.dequantized]
    if larger:
        yield (
            f"{len(larger)} tensors hold values of types below Q8_0 ({larger[0].name}: "
            f"{stored_as(larger[0].type.name, larger[0].origin)}): the file says so ({DEQUANTIZED})"
        )
    lossy = [t for t in index if rounded(t.source_type)]
    other = "the file may read other blocks than the checkpoint; m3-check-selection tells"
    if lossy:
        yield (
            f"{len(lossy)} index projections of the source are rounded already ({lossy[0].name}: "
            f"{lossy[0].source_type}): {other}"
        )
    elif plan.source_says(LOSSY_INDEXER):
        yield f"index projections of the source were rounded before ({LOSSY_INDEXER}): {other}"


def plan_tensors(
    mapped: Sequence[MappedTensor], choice: TypeChoice, *, from_gguf: bool = False
) -> tuple[tuple[PlannedTensor, ...], list[str]]:
    """Type, offset and size of tensors, which need not exist as data, and notes on rules that decide nothing.

    Raises InputError as `decide` does.
    """
    decisions, notes = decide(mapped, choice, from_gguf=from_gguf)
    return place_tensors(mapped, decisions), notes


def place_tensors(mapped: Sequence[MappedTensor], decisions: Sequence[Decision]) -> tuple[PlannedTensor, ...]:
    """The tensors with these types, one behind the other."""
    tensors = []
    offset = 0
    for source, decision in zip(mapped, decisions, strict=True):
        shape = source.spec.shape
        n_bytes = prod(shape[:-1]) * row_bytes(decision.type, shape[-1])
        tensors.append(
            PlannedTensor(
                name=source.spec.name,
                shape=shape,
                type=decision.type,
                offset=offset,
                n_bytes=n_bytes,
                matrices=source.matrices,
                plus_one=source.spec.plus_one,
                reason=decision.reason,
                note=decision.note,
                bounded=decision.bounded,
                origin=origin(source),
            )
        )
        offset = aligned(offset + n_bytes)
    return tuple(tensors)
