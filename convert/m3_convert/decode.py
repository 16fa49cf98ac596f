"""Reading of source tensors, row by row, and their values as float32.

MXFP8 is that of the OCP Microscaling specification 1.0: an E4M3 code (bias 7, no infinity, 0x7f and 0xff are NaN) times
2^(byte - 127), one E8M0 byte (255 is NaN) for 32 columns. Although the tensor is called `_scale_inv`, it multiplies.
"""

import os
import threading
from collections.abc import Sequence
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from m3_convert.checkpoint import SourceTensor
from m3_convert.shards import LocalShards, Shards
from m3_convert.tensor_map import SCALE_BLOCK, SourceMatrix
from m3_runtime.errors import InputError
from m3_runtime.quantize import TensorType, dequantize_rows, row_bytes

Bytes = npt.NDArray[np.uint8]
Values = npt.NDArray[np.float32]

# Integer of the same width, and the bits from which a float with its sign cleared is infinite or NaN.
_INFINITE: Final = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000)}


def _e4m3_values() -> Values:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(1.0 * mantissa, -9))
    magnitude[[0x7F, 0xFF]] = np.nan
    values: Values = np.where(codes & 0x80, -magnitude, magnitude).astype(np.float32)
    return values


def _e8m0_values() -> Values:
    values = np.ldexp(1.0, np.arange(256) - 127)
    values[255] = np.nan
    return values.astype(np.float32)


E4M3_VALUES: Final = _e4m3_values()  #: float32 [256], by code
E8M0_VALUES: Final = _e8m0_values()  #: float32 [256], by byte


class SourceLostError(InputError):
    """A shard that was there when the conversion was planned cannot be read any more."""


class SourceReader:
    """Reads byte ranges of shards, from any thread. A context manager: it keeps each shard open until it is left."""

    def __init__(self, shards: Shards | None = None) -> None:
        self._shards = shards or LocalShards()
        self._files: dict[Path, int] = {}
        self._peeked: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the shards."""
        while self._files:
            os.close(self._files.popitem()[1])

    def fetch(self, matrix: SourceMatrix) -> None:
        """Gets the shards of a matrix here, if they are not; to be called before it is read. May take long."""
        for tensor in matrix.sources:
            if tensor.shard in self._files:
                continue
            try:
                self._open(tensor.shard, self._shards.fetch(tensor.shard))
            except OSError as error:
                raise SourceLostError(f"{tensor.shard}: cannot be read: {error.strerror}") from error

    def peek(self, matrices: Sequence[SourceMatrix]) -> None:
        """Gets small matrices here, not their shards where these would have to be fetched; they can then be read."""
        self._peeked.update(self._shards.peek([tensor for matrix in matrices for tensor in matrix.sources]))
        for matrix in matrices:
            if any(tensor.name not in self._peeked for tensor in matrix.sources):
                self.fetch(matrix)

    def release(self, shard: Path) -> None:
        """Closes a shard that nothing will be read from any more, and lets go of it."""
        with self._lock:
            if shard in self._files:
                os.close(self._files.pop(shard))
        self._shards.release(shard)

    def read(self, tensor: SourceTensor, start: int, out: Bytes) -> None:
        """Fills `out` with the bytes of a tensor from byte `start` of it. Raises SourceLostError if they are not there.

        pread into memory of the caller and not a mapping, so that what was read does not count as memory in use; the
        page cache is told to drop it, since nothing is read twice.
        """
        view = out.reshape(-1).data
        if tensor.name in self._peeked:
            view[:] = self._peeked[tensor.name][start : start + len(view)]
            return
        position = tensor.offset + start
        try:
            file = self._open(tensor.shard, tensor.shard)
            while view:
                n = os.preadv(file, [view], position)
                if n == 0:
                    raise SourceLostError(
                        f"{tensor.shard}: ends at byte {position}, inside {tensor.name}: it has changed"
                    )
                view = view[n:]
                position += n
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file, tensor.offset + start, out.size, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise SourceLostError(f"{tensor.shard}: cannot be read: {error.strerror}") from error

    def _open(self, shard: Path, path: Path) -> int:
        with self._lock:
            if shard not in self._files:
                self._files[shard] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._files[shard]


def read_raw(reader: SourceReader, matrix: SourceMatrix, first_row: int, n_rows: int) -> Bytes:
    """Stored bytes of some rows in the order of the file, uint8 [n_rows, bytes of a row]; without the scales."""
    row = matrix.tensor.n_bytes // matrix.rows
    if not matrix.row_order:
        raw = np.empty((n_rows, row), np.uint8)
        reader.read(matrix.tensor, first_row * row, raw)
    else:
        # Rows change places within a head only, so that little is read beside what is asked for.
        wanted = np.array(matrix.row_order[first_row : first_row + n_rows])
        first, end = int(wanted.min()), int(wanted.max()) + 1
        around = np.empty((end - first, row), np.uint8)
        reader.read(matrix.tensor, first * row, around)
        raw = around[wanted - first]
    if not matrix.column_order:
        return raw
    item = matrix.tensor.n_bytes // prod(matrix.tensor.shape)
    columns = raw.reshape(n_rows, -1, item)[:, np.array(matrix.column_order)]
    return np.ascontiguousarray(columns).reshape(n_rows, -1)


def read_values(reader: SourceReader, matrix: SourceMatrix, first_row: int, n_rows: int) -> Values:
    """Values of some rows, exact, float32 [n_rows, columns]; may hold NaN and infinity, as the source does."""
    raw = read_raw(reader, matrix, first_row, n_rows)
    if matrix.scale is None:
        return decode(matrix.tensor.dtype, raw)
    return decode_mxfp8(raw, read_scales(reader, matrix, first_row, n_rows))


def read_scales(reader: SourceReader, matrix: SourceMatrix, first_row: int, n_rows: int) -> Bytes:
    """Scale bytes of some rows of an MXFP8 matrix, uint8 [n_rows, columns / 32]."""
    if matrix.scale is None:
        raise ValueError(f"{matrix.tensor.name} has no scales")
    row = matrix.columns // SCALE_BLOCK
    scales = np.empty((n_rows, row), np.uint8)
    reader.read(matrix.scale, first_row * row, scales)
    return scales


def decode(dtype: str, raw: Bytes) -> Values:
    """Little-endian bytes [n_rows, row bytes] as float32 [n_rows, columns], exact. dtype: a name of TensorType."""
    if dtype == "F32":
        return raw.view("<f4").astype(np.float32, copy=False)
    if dtype == "F16":
        return raw.view("<f2").astype(np.float32)
    if dtype == "BF16":
        bits: npt.NDArray[np.uint32] = np.left_shift(raw.view("<u2"), 16, dtype=np.uint32)
        return bits.view(np.float32)
    type_ = TensorType[dtype]
    block = type_.block_size
    return dequantize_rows(type_, raw, raw.shape[-1] // row_bytes(type_, block) * block, 1)


def decode_mxfp8(codes: Bytes, scales: Bytes) -> Values:
    """E4M3 codes [n_rows, columns] times E8M0 scales [n_rows, columns / 32] as float32 [n_rows, columns], exact.

    NaN for NaN codes and scales, infinity where the product is beyond float32 (scale bytes 246 and up).
    """
    values = np.take(E4M3_VALUES, codes)
    tiles = values.reshape(codes.shape[0], -1, SCALE_BLOCK)
    with np.errstate(over="ignore", invalid="ignore"):
        tiles *= E8M0_VALUES[scales][..., None]
    return values


def all_finite(dtype: str, raw: Bytes) -> bool:
    """False if the bytes [n_rows, row bytes] hold a NaN or an infinity. dtype: a name of TensorType."""
    if dtype not in _INFINITE:  # scales of blocks may be neither
        return bool(np.isfinite(decode(dtype, raw)).all())
    integer, infinite = _INFINITE[dtype]
    bits = raw.view(integer)
    sign = 1 << (8 * bits.itemsize - 1)
    return bool(np.bitwise_and(bits, sign - 1).max(initial=0) < infinite)
