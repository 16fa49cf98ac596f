"""Importance matrices: for each column of a weight matrix, the mean square of what it is multiplied with.

The file is llama.cpp's: a GGUF of general.type "imatrix" with, for each weight NAME, the tensors NAME.in_sum2 (sums of
squares, ne = [n_in, n_matrix]) and NAME.counts (input rows, ne = [1, n_matrix]), both F32; n_matrix is the number of
experts of a stacked weight, else 1. A GGUF drops trailing dimensions of 1. Its older format, .dat, has one count for a
whole weight and is read too.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter

from m3_convert.disk_room import DISK_FAULTS
from m3_convert.imatrix_dat import is_gguf, read_dat
from m3_convert.output_path import part_path
from m3_convert.whole_file import whole_file
from m3_runtime.errors import InputError, MachineError
from m3_runtime.gguf_reader import GGUF, Tensor
from m3_runtime.quantize import TensorType, type_name

Floats: TypeAlias = npt.NDArray[np.float32]
Shape: TypeAlias = tuple[int, int]  #: matrices of a weight, columns of each

_SUMS, _COUNTS = ".in_sum2", ".counts"
_DATASETS, _CHUNK_COUNT, _CHUNK_SIZE = "imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size"


@dataclass(frozen=True)
class Entry:
    """What is known of one weight. counts: one for each matrix, or a single one for all."""

    sums: Floats  #: [n_matrix, n_in] sums of squares, finite, at least 0
    counts: Floats  #: [n_matrix] or [1] input rows, whole numbers up to 2^24 and rounded above; 0: never reached


@dataclass(frozen=True)
class Coverage:
    """How an importance matrix fits the weights of a model."""

    weights: int  #: asked for
    without: tuple[str, ...] = ()  #: those of which nothing is known
    #: Experts that the text never reached, by weight; these fall back alone.
    unreached: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()  #: entries that belong to no weight that was asked for

    @property
    def unreached_matrices(self) -> int:
        return sum(len(experts) for experts in self.unreached.values())

    def notes(self) -> list[str]:
        """One line for each kind of gap, for people."""
        found = []
        if self.without:
            found.append(f"no importance for {_listed(self.without)} of {self.weights} tensors")
        if self.unreached:
            name, experts = next(iter(self.unreached.items()))
            found.append(
                f"{self.unreached_matrices} expert matrices in {len(self.unreached)} tensors were never reached by the "
                f"text of the importance matrix (the first: {name}, expert {experts[0]}); they alone get equal weights"
            )
        if self.unused:
            found.append(f"{_listed(self.unused)} entries of the importance matrix belong to no quantized tensor")
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "tensors": self.weights,
            "without": list(self.without),
            "unreached": {name: list(experts) for name, experts in self.unreached.items()},
            "unreached_matrices": self.unreached_matrices,
            "unused": list(self.unused),
        }


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} (the first: {names[0]})"


@dataclass(frozen=True)
class ImportanceMatrix:
    """Importance of the weights of a model, all in memory: 4 bytes for each column of each matrix."""

    name: str  #: of the file, for messages
    entries: Mapping[str, Entry]  #: by GGUF name of the weight
    datasets: tuple[str, ...]  #: texts that were read
    chunk_count: int
    chunk_size: int  #: tokens of a chunk, 0 if unknown (.dat)
    legacy: bool = False  #: read from a .dat file
    sha256: str = ""  #: of the file that it was read from, hexadecimal

    @classmethod
    def load(cls, path: Path) -> "ImportanceMatrix":
        """Reads a GGUF or .dat file.

        Raises InputError, naming file and tensor, for a file that is neither, another kind of GGUF, sums without counts
        and the reverse, wrong shapes and types, and values that are NaN, infinite or negative.
        """
        if not is_gguf(path):
            matrix = _from_dat(path)
        else:
            with GGUF(path) as gguf:
                matrix = _from_gguf(gguf, str(path))
        with path.open("rb") as file:
            return replace(matrix, sha256=hashlib.file_digest(file, "sha256").hexdigest())

    def for_matrix(self, tensor: str, expert: int = -1) -> Floats | None:
        """Mean square of each input column of a weight, float32 [n_in], C-contiguous; `expert` of a stacked one.

        None if there is nothing known of this matrix, because the text never reached it or the file lacks it. Stacked
        weights of a .dat file are one row until they are `fitted`.
        """
        entry = self.entries.get(tensor)
        if entry is None:
            return None
        index = max(expert, 0)
        count = float(entry.counts[index if len(entry.counts) > 1 else 0])
        if count == 0:
            return None
        mean: Floats = (entry.sums[index].astype(np.float64) / count).astype(np.float32)
        return mean

    def fitted(self, shapes: Mapping[str, Shape], others: Collection[str] = ()) -> tuple["ImportanceMatrix", Coverage]:
        """The same for the weights of a model, with the shapes they have there, and what is missing.

        shapes: of every weight that importance is wanted for, by GGUF name. others: names of weights that take none,
        such as the router, whose entries are nothing to speak of. An expert counts as never reached if its
        count is 0, or, where a weight has one count for all its experts, if its sums are all 0 or all 1 times the
        count, which is what writers of .dat files put there. Raises InputError for an entry of another shape than the
        weight, and if no entry belongs to any weight.
        """
        entries, without, unreached = {}, [], {}
        for name, shape in shapes.items():
            entry = self.entries.get(name)
            if entry is None:
                without.append(name)
                continue
            entry = self._fit(name, entry, shape)
            lacking = tuple(int(i) for i in np.flatnonzero(entry.counts == 0))
            if len(lacking) == shape[0]:
                without.append(name)
                continue
            entries[name] = entry
            if lacking:
                unreached[name] = lacking
        unused = tuple(name for name in self.entries if name not in shapes)
        if shapes and len(unused) == len(self.entries):
            raise InputError(
                f"{self.name}: none of its {len(unused)} entries belongs to a tensor of the model (the first: "
                f"{unused[0]}): it was made for another one"
            )
        unused = tuple(name for name in unused if name not in others)
        return replace(self, entries=entries), Coverage(len(shapes), tuple(without), unreached, unused)

    def _fit(self, name: str, entry: Entry, shape: Shape) -> Entry:
        n_matrix, n_in = shape
        shared = len(entry.counts) == 1
        fits = entry.sums.size == n_matrix * n_in if shared else entry.sums.shape == (n_matrix, n_in)
        if not fits:
            found = "x".join(map(str, reversed(entry.sums.shape)))
            raise InputError(f"{self.name}: {name}: sums of shape {found}, expected {n_in}x{n_matrix}")
        if not shared or n_matrix == 1:
            return entry
        sums = entry.sums.reshape(n_matrix, n_in)
        filler = (sums == 0).all(axis=1) | (sums == entry.counts[0]).all(axis=1)
        empty = np.float32(0)
        return Entry(np.where(filler[:, None], empty, sums), np.where(filler, empty, entry.counts[0]))

    def save(self, path: Path) -> int:
        """Writes the GGUF file, which appears whole or not at all; returns its size in bytes.

        The bytes depend on the content only. Raises InputError for sums that float32 cannot hold and a file that cannot
        be written, MachineError if the disk is full or fails.
        """
        for name, entry in self.entries.items():
            _check_values(f"{self.name}: {name}", entry)
        try:
            with whole_file(path) as part:
                self._write(part)
                return part.stat().st_size
        except OSError as error:
            # NumPy says of a short write only that it was one.
            full = error.errno is None or error.errno in DISK_FAULTS
            kind = MachineError if full else InputError
            why = error.strerror or f"the disk is full: {error}"
            raise kind(f"{part_path(path)}: cannot be written: {why}; nothing was kept") from error

    def _write(self, path: Path) -> None:
        writer = GGUFWriter(path, "")
        try:
            writer.kv_data[0].pop("general.architecture", None)  # the writer's own key; these files have none
            writer.add_type("imatrix")
            writer.add_array(_DATASETS, list(self.datasets))
            writer.add_uint32(_CHUNK_COUNT, self.chunk_count)
            writer.add_uint32(_CHUNK_SIZE, self.chunk_size)
            for name in sorted(self.entries):
                entry = self.entries[name]
                single = len(entry.sums) == 1
                writer.add_tensor(name + _SUMS, entry.sums[0] if single else entry.sums)
                writer.add_tensor(name + _COUNTS, entry.counts if len(entry.counts) == 1 else entry.counts[:, None])
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def _from_dat(path: Path) -> ImportanceMatrix:
    content = read_dat(path)
    entries = {}
    for name, (calls, sums) in content.entries.items():
        if calls < 1:
            raise InputError(f"{path}: {name}: a count of {calls}, expected at least 1")
        entries[name] = Entry(sums[None], np.array([calls], np.float32))
        _check_values(f"{path}: {name}", entries[name])
    datasets = (content.dataset,) if content.dataset else ()
    return ImportanceMatrix(str(path), entries, datasets, content.chunk_count, 0, legacy=True)


def _from_gguf(gguf: GGUF, name: str) -> ImportanceMatrix:
    metadata = gguf.metadata
    kind = metadata.get("general.type")
    if kind != "imatrix":
        raise InputError(f"{name}: general.type is {kind!r}, expected 'imatrix'")
    datasets = metadata.get(_DATASETS)
    numbers = [metadata.get(key) for key in (_CHUNK_COUNT, _CHUNK_SIZE)]
    if not isinstance(datasets, list):
        raise InputError(f"{name}: {_DATASETS} is {datasets!r}, expected a list of names")
    for key, number in zip((_CHUNK_COUNT, _CHUNK_SIZE), numbers, strict=True):
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**32:
            raise InputError(f"{name}: {key} is {number!r}, expected a number")
    tensors = {t.name: t for t in gguf.tensors}
    weights = {tensor.removesuffix(end): None for tensor in tensors for end in (_SUMS, _COUNTS) if tensor.endswith(end)}
    if not weights:
        raise InputError(f"{name}: has no tensor that ends in '{_SUMS}'")
    entries = {weight: _entry(gguf, name, tensors, weight) for weight in weights}
    chunk_count, chunk_size = (int(str(n)) for n in numbers)
    return ImportanceMatrix(name, entries, tuple(map(str, datasets)), chunk_count, chunk_size)


def _entry(gguf: GGUF, name: str, tensors: Mapping[str, Tensor], weight: str) -> Entry:
    for end, other in ((_SUMS, _COUNTS), (_COUNTS, _SUMS)):
        if weight + end not in tensors:
            raise InputError(f"{name}: {weight}{other} has no {weight}{end} beside it")
    sums, counts = tensors[weight + _SUMS], tensors[weight + _COUNTS]
    n_in, n_matrix = _dimensions(sums, name)
    one, n_counts = _dimensions(counts, name)
    # Trailing dimensions of 1 are dropped, leading ones are not.
    if one != 1 or n_counts not in (1, n_matrix):
        raise InputError(f"{name}: {counts.name} has shape {one}x{n_counts}, expected 1x{n_matrix}")
    entry = Entry(_floats(gguf, sums).reshape(n_matrix, n_in), _floats(gguf, counts))
    _check_values(f"{name}: {weight}", entry)
    return entry


def _dimensions(tensor: Tensor, name: str) -> tuple[int, int]:
    if tensor.type != TensorType.F32:
        raise InputError(f"{name}: {tensor.name} is {type_name(tensor.type)}, expected F32")
    ne = (*tensor.ne, 1, 1, 1)
    if ne[2:4] != (1, 1):
        raise InputError(f"{name}: {tensor.name} has shape {'x'.join(map(str, tensor.ne))}, expected two dimensions")
    return ne[0], ne[1]


def _floats(gguf: GGUF, tensor: Tensor) -> Floats:
    return np.frombuffer(gguf.tensor_data(tensor.name), "<f4").astype(np.float32)


def _check_values(label: str, entry: Entry) -> None:
    for what, values in (("sums", entry.sums), ("counts", entry.counts[:, None])):
        bad = ~(np.isfinite(values) & (values >= 0))
        if bad.any():
            matrix, column = (int(i) for i in np.argwhere(bad)[0])
            raise InputError(
                f"{label}: {int(np.count_nonzero(bad))} {what} are NaN, infinite or negative, the first "
                f"{values[matrix, column]} in matrix {matrix}, column {column}"
            )
    strange = (entry.counts > 0) & (entry.counts < 1)
    if strange.any():
        raise InputError(f"{label}: a count of {entry.counts[strange][0]}, expected 0 or at least 1")
    if len(entry.counts) == len(entry.sums):
        orphans = np.flatnonzero((entry.counts == 0) & entry.sums.any(axis=1))
        if len(orphans):
            raise InputError(f"{label}: matrix {orphans[0]} has sums above 0 and a count of 0")
