"""What a type does to a tensor: the squared error of its values, weighted by importance, as a share of their square.

With the mean square of what each column is multiplied with as its weight, that is the noise in what the tensor gives,
as a share of what it gives: sum w (x - q)^2 over sum w x^2. Experts count by how often the text reached them. Of large
tensors a sample of rows is looked at, always the same.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from m3_convert.decode import SourceReader, Values, read_values
from m3_convert.imatrix import ImportanceMatrix
from m3_convert.plan import PlannedTensor
from m3_convert.tensor_map import SourceMatrix
from m3_runtime.errors import NotFiniteError
from m3_runtime.quantize import TensorType, dequantize_rows, quantize_rows

SAMPLE_VALUES: Final = 1 << 20  #: of a tensor
SAMPLE_EXPERTS: Final = 16  #: of a tensor, at most
_PLACES: Final = 4  #: in a matrix, from which rows are taken


@dataclass(frozen=True)
class _Sample:
    """Rows of one matrix."""

    values: Values  #: float32 [n, columns]
    importance: Values | None  #: float32 [columns]
    share: float  #: how much it counts


def rounding_errors(
    tensor: PlannedTensor,
    types: Sequence[TensorType],
    importance: ImportanceMatrix | None,
    reader: SourceReader,
    threads: int = 0,
) -> dict[TensorType, float]:
    """The error of each type, 0 for one that holds all values; types that cannot hold them at all are left out.

    The type of `tensor` itself does not matter. Raises InputError and MachineError as the conversion would.
    """
    samples = list(_samples(tensor, importance, reader))
    power = sum(sample.share * _square(sample.values, sample.importance) for sample in samples)
    found = {}
    for type_ in types:
        try:
            error = sum(sample.share * _error(sample, type_, threads) for sample in samples)
        except NotFiniteError:
            continue
        found[type_] = error / power if power else 0.0
    return found


def _samples(tensor: PlannedTensor, importance: ImportanceMatrix | None, reader: SourceReader) -> Iterator[_Sample]:
    n = len(tensor.matrices)
    chosen = sorted({i * n // min(n, SAMPLE_EXPERTS) for i in range(min(n, SAMPLE_EXPERTS))})
    entry = importance.entries.get(tensor.name) if importance else None
    counts = entry.counts if entry is not None and len(entry.counts) == n > 1 else np.ones(n)
    if not counts[chosen].any():
        counts = np.ones(n)
    for index in chosen:
        if counts[index]:
            matrix = tensor.matrices[index]
            reader.fetch(matrix)
            weights = importance.for_matrix(tensor.name, index) if importance else None
            yield _Sample(_rows(matrix, SAMPLE_VALUES // len(chosen), reader), weights, float(counts[index]))


def _rows(matrix: SourceMatrix, n_values: int, reader: SourceReader) -> Values:
    wanted = max(1, n_values // matrix.columns)
    if wanted >= matrix.rows:
        return read_values(reader, matrix, 0, matrix.rows)
    places = min(_PLACES, wanted)
    firsts = [matrix.rows * place // places for place in range(places)]
    return np.concatenate([read_values(reader, matrix, first, wanted // places) for first in firsts])


def _error(sample: _Sample, type_: TensorType, threads: int) -> float:
    columns = sample.values.shape[1]
    importance = sample.importance
    if importance is None and type_.needs_importance:
        importance = np.ones(columns, np.float32)
    data = quantize_rows(type_, sample.values, threads, importance)
    return _square(dequantize_rows(type_, data, columns, threads) - sample.values, sample.importance)


def _square(values: Values, importance: Values | None) -> float:
    squares = np.square(values.astype(np.float64)).sum(axis=0)
    return float(squares.sum() if importance is None else squares @ importance.astype(np.float64))
