"""The bytes of every planned tensor as they stand in the file, made a few MiB at a time."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from m3_convert.decode import (
    Bytes,
    SourceLostError,
    SourceReader,
    Values,
    all_finite,
    decode,
    read_raw,
    read_scales,
    read_values,
)
from m3_convert.imatrix import ImportanceMatrix
from m3_convert.plan import PlannedTensor
from m3_convert.precision import INDEXER_ERROR
from m3_convert.shards import Shards
from m3_convert.tensor_map import SourceMatrix
from m3_runtime.errors import InputError, M3Error, MachineError
from m3_runtime.interrupts import hold_signals
from m3_runtime.native import default_threads
from m3_runtime.quantize import TensorType, quantize_rows, row_bytes

SLAB_ELEMENTS: Final = 1 << 20  #: elements that a thread has in work at a time: 4 MiB as float32
MAX_THREADS: Final = 32  #: bounds memory: one thread writes what all of them make, and more would wait for it

# Weights of a linear layer have magnitudes well below 1. FP8 scales read in the wrong way give values that are off by
# powers of two, so that no later check of the file could tell.
MAX_MEAN_MAGNITUDE: Final = 10.0

Bad = Callable[[Values], npt.NDArray[np.bool_]]


@dataclass(frozen=True)
class EncodedMatrix:
    """One matrix in its final form."""

    expert: int  #: which matrix of a stacked tensor, -1 for a tensor that is not stacked
    data: Bytes  #: uint8 [rows, bytes of a row]


class Encoder:
    """Makes the bytes of planned tensors from their sources. A context manager: it holds open files and threads.

    threads: that read, decode and quantize, 0 takes all cores; the bytes do not depend on it. importance: for types
    that search; a matrix that it does not know, an expert that its text never reached, is quantized as if all columns
    were equal. Memory in use is bounded by SLAB_ELEMENTS and the number of threads, whatever the size of a tensor.
    """

    def __init__(
        self, threads: int = 0, importance: ImportanceMatrix | None = None, shards: Shards | None = None
    ) -> None:
        self._importance = importance
        self._threads = min(threads or default_threads(), MAX_THREADS)
        self._reader = SourceReader(shards)
        self._pool = ThreadPoolExecutor(self._threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with hold_signals():
            self._pool.shutdown(cancel_futures=True)
            self._reader.close()

    def release(self, shard: Path) -> None:
        """Nothing will be asked for any more that needs this shard."""
        self._reader.release(shard)

    def slabs(self, tensor: PlannedTensor, index: int) -> Iterator[Bytes]:
        """The bytes of one matrix of a tensor in file order, uint8 [rows, bytes of a row], a slab of rows at a time.

        index: 0, or the expert of a stacked tensor. Raises SourceLostError for a shard that cannot be read any more,
        and InputError naming tensor, expert, row and count for: NaN or infinity in the source, FP8 values that BF16
        cannot hold exactly, values that the type cannot hold, index projections that it does not hold well enough, FP8
        matrices with implausible magnitudes.
        """
        matrix = tensor.matrices[index]
        weights = self._weights(tensor, index)
        step = self._slab_rows(matrix)
        work: deque[Future[_Slab]] = deque()
        magnitude = 0.0
        try:
            self._reader.fetch(matrix)
            for first in range(0, matrix.rows, step):
                n = min(step, matrix.rows - first)
                rows = _Rows(tensor.type, matrix, tensor.plus_one, tensor.bounded, first, n, weights)
                with hold_signals():
                    work.append(self._pool.submit(_encode_rows, self._reader, rows))
                # One slab more than there are threads, so that they have work while this one is written.
                if len(work) > self._threads:
                    slab = _result(work.popleft())
                    magnitude += slab.magnitude
                    yield slab.data
            while work:
                slab = _result(work.popleft())
                magnitude += slab.magnitude
                yield slab.data
        except _RefusedError as refused:
            raise self._explain(tensor, index, refused) from None
        except SourceLostError as error:
            raise SourceLostError(f"{_label(tensor, index)}: {error}") from error
        except MachineError:  # for want of room for a shard, for one
            raise
        except M3Error as error:
            raise InputError(f"{_label(tensor, index)}: {error}") from error
        mean = magnitude / (matrix.rows * matrix.columns)
        if mean > MAX_MEAN_MAGNITUDE:
            raise InputError(
                f"{_label(tensor, index)}: mean magnitude {mean:.4g}, expected at most {MAX_MEAN_MAGNITUDE:g} in FP8 "
                "weights: the scales are not powers of two stored as exponent + 127"
            )

    def _slab_rows(self, matrix: SourceMatrix) -> int:
        """Slabs of about the same size, as many for each thread, so that none has to wait for the last one alone."""
        limit = max(1, SLAB_ELEMENTS // matrix.columns)
        n_slabs = -(-matrix.rows // limit)
        n_slabs += -n_slabs % self._threads
        # Small matrices are not cut into more than they are worth.
        return max(-(-matrix.rows // n_slabs), limit // 8)

    def _weights(self, tensor: PlannedTensor, index: int) -> Values | None:
        known = self._importance.for_matrix(tensor.name, index) if self._importance else None
        if known is None and tensor.type.needs_importance:
            return np.ones(tensor.matrices[index].columns, np.float32)
        return known

    def matrices(self, tensor: PlannedTensor) -> Iterator[EncodedMatrix]:
        """The matrices of a tensor in file order, each whole in memory: one, or one for each expert.

        Raises InputError as `slabs` does.
        """
        for index, matrix in enumerate(tensor.matrices):
            data = np.empty((matrix.rows, row_bytes(tensor.type, matrix.columns)), np.uint8)
            row = 0
            for slab in self.slabs(tensor, index):
                data[row : row + len(slab)] = slab
                row += len(slab)
            yield EncodedMatrix(index if tensor.stacked else -1, data)

    def _explain(self, tensor: PlannedTensor, index: int, refused: "_RefusedError") -> InputError:
        """Reads the matrix once more from its start, so that the count covers all of it."""
        matrix = tensor.matrices[index]
        label = _label(tensor, index)
        if matrix.scale is not None:
            bad = read_scales(self._reader, matrix, 0, matrix.rows) == 255
            if bad.any():
                n, row = int(np.count_nonzero(bad)), int(bad.any(axis=-1).argmax())
                return InputError(f"{label}: {n} NaN scales in {matrix.scale.name}, the first in row {row}")
        count, place = 0, ""
        step = max(1, SLAB_ELEMENTS // matrix.columns)
        for first in range(0, matrix.rows, step):
            mask = refused.bad(read_values(self._reader, matrix, first, min(step, matrix.rows - first)))
            n = int(np.count_nonzero(mask))
            if n and not count:
                row, column = divmod(int(mask.argmax()), matrix.columns)
                place = f"row {first + row}, column {column}"
            count += n
        return InputError(f"{label}: {count} {refused.what}, the first in {place}{refused.advice}")


@dataclass(frozen=True)
class _Rows:
    """Rows of a matrix to be encoded."""

    type: TensorType
    matrix: SourceMatrix
    plus_one: bool
    bounded: bool
    first: int
    n: int
    importance: Values | None  #: float32 [columns]


@dataclass(frozen=True)
class _Slab:
    data: Bytes
    magnitude: float  #: sum of absolute values of an FP8 source, else 0


def _result(slab: Future[_Slab]) -> _Slab:
    """Waits for a slab, Ctrl-C or not: it takes a fraction of a second, and the lock of a future is not to be lost."""
    with hold_signals():
        return slab.result()


class _RefusedError(Exception):
    """Some values cannot be converted. `bad` marks them in decoded rows; `what` and `advice` go into the message."""

    def __init__(self, what: str, bad: Bad, advice: str = "") -> None:
        super().__init__(what)
        self.what, self.bad, self.advice = what, bad, advice


def _label(tensor: PlannedTensor, index: int) -> str:
    expert = f", expert {index}" if tensor.stacked else ""
    return f"{tensor.name}{expert} ({tensor.matrices[index].tensor.name})"


def _not_finite() -> _RefusedError:
    return _RefusedError("values are NaN or infinite", lambda v: ~np.isfinite(v))


def _encode_rows(reader: SourceReader, rows: _Rows) -> _Slab:
    dtype = rows.matrix.tensor.dtype
    if dtype == rows.type.name and not rows.plus_one:
        raw = read_raw(reader, rows.matrix, rows.first, rows.n)
        if not all_finite(dtype, raw):
            raise _not_finite()
        return _Slab(raw, 0.0)
    values = read_values(reader, rows.matrix, rows.first, rows.n)
    if not np.isfinite(values).all():
        raise _not_finite()
    magnitude = float(np.abs(values).sum(axis=-1).sum(dtype=np.float64)) if rows.matrix.is_fp8 else 0.0
    if rows.plus_one:
        values += np.float32(1)
    return _Slab(_encode_values(rows, values), magnitude)


def _encode_values(rows: _Rows, values: Values) -> Bytes:
    match rows.type:
        case TensorType.F32:
            return values.view(np.uint8)
        case TensorType.BF16 if rows.matrix.is_fp8:
            return _exact_bf16(values)
        case _:
            _check_overflow(rows.type, values)
    if rows.bounded and lost(rows.type, values).any():
        raise _RefusedError(
            f"index values are not within 2^-11 of themselves or 2^-18 of the largest in their row as {rows.type.name}",
            lambda v: lost(rows.type, v),
            "; F32 holds them, --allow-lossy-indexer takes them as they are",
        )
    return quantize_rows(rows.type, values, 1, rows.importance)


def lost(type_: TensorType, values: Values) -> npt.NDArray[np.bool_]:
    """Marks values that F16 or BF16 does not hold within INDEXER_ERROR; float32 [n_rows, columns], whole rows."""
    of_value, of_row = map(np.float32, INDEXER_ERROR)
    magnitude = np.abs(values)
    error = np.abs(decode(type_.name, quantize_rows(type_, values, 1)) - values)
    mask: npt.NDArray[np.bool_] = error > np.maximum(
        magnitude * of_value, magnitude.max(axis=-1, keepdims=True) * of_row
    )
    return mask


def _exact_bf16(values: Values) -> Bytes:
    """Four significant bits fit in BF16, but for values below its smallest."""
    halves = values.view(np.uint16).reshape(*values.shape, 2)
    if halves[..., 0].any():
        raise _RefusedError(
            "FP8 values are too small for BF16 to hold exactly",
            lambda v: v.view(np.uint32) & np.uint32(0xFFFF) != 0,
            "; F32 holds them",
        )
    high: npt.NDArray[np.uint16] = np.ascontiguousarray(halves[..., 1])
    return high.view(np.uint8)


def _check_overflow(type_: TensorType, values: Values) -> None:
    largest = np.float32(type_.largest)
    if max(values.max(), -values.min()) > largest:
        holds = "F32 holds" if type_ is TensorType.BF16 else "BF16 and F32 hold"
        raise _RefusedError(f"values overflow {type_.name}", lambda v: np.abs(v) > largest, f"; {holds} them")
