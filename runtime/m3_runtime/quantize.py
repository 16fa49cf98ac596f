"""Rows of float32 to the storage types of GGUF and back, by the engine."""

from collections.abc import Callable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from m3_runtime.errors import InputError
from m3_runtime.native import call, ffi, lib, size_of, text


class TensorType(IntEnum):
    """Types that the engine reads and writes, by their GGUF number."""

    F32 = lib.M3_TYPE_F32
    F16 = lib.M3_TYPE_F16
    Q8_0 = lib.M3_TYPE_Q8_0
    BF16 = lib.M3_TYPE_BF16

    @property
    def block_size(self) -> int:
        """Elements of a block; a row must be a whole number of blocks."""
        return int(lib.m3_type_block_size(self))

    @classmethod
    def parse(cls, name: str) -> "TensorType":
        """The type of a name such as "q8_0", in upper or lower case; InputError for another."""
        try:
            return cls[name.upper()]
        except KeyError:
            known = ", ".join(t.name.lower() for t in cls)
            raise InputError(f"type '{name}' is not known, expected one of {known}") from None


def type_name(number: int) -> str:
    """Name of a GGUF type number, or "type N" for one that the engine does not know."""
    name = lib.m3_type_name(number)
    return f"type {number}" if name == ffi.NULL else text(name)


def row_bytes(tensor_type: int, n: int) -> int:
    """Bytes of one row of `n` elements; InputError if the type's block does not divide it."""
    size = int(lib.m3_row_bytes(tensor_type, n))
    if size < 0:
        raise InputError(f"rows of {n} elements cannot be {type_name(tensor_type)}")
    return size


def quantize_rows(tensor_type: TensorType, rows: NDArray[np.float32], threads: int = 0) -> NDArray[np.uint8]:
    """float32 [n_rows, n_per_row], C-contiguous -> uint8 [n_rows, row_bytes].

    threads: 0 takes all cores. NotFiniteError for NaN, infinity, or a value that the type cannot hold; the message
    names row, column and count.
    """
    n_rows, n_per_row = rows.shape
    if rows.dtype != np.float32 or not rows.flags.c_contiguous:
        raise InputError(f"quantize_rows: {rows.dtype} rows, expected C-contiguous float32")
    out = np.empty((n_rows, row_bytes(tensor_type, n_per_row)), np.uint8)
    _convert(lib.m3_quantize, tensor_type, rows, out, threads)
    return out


def dequantize_rows(
    tensor_type: TensorType, data: NDArray[np.uint8], n_per_row: int, threads: int = 0
) -> NDArray[np.float32]:
    """uint8 [n_rows, row_bytes], C-contiguous -> float32 [n_rows, n_per_row], exact."""
    if data.dtype != np.uint8 or not data.flags.c_contiguous:
        raise InputError(f"dequantize_rows: {data.dtype} rows, expected C-contiguous uint8")
    out = np.empty((data.shape[0], n_per_row), np.float32)
    _convert(lib.m3_dequantize, tensor_type, out, data, threads)
    return out


def _convert(
    function: Callable[..., int],
    tensor_type: TensorType,
    values: NDArray[np.float32],
    data: NDArray[np.uint8],
    threads: int,
) -> None:
    rows = ffi.new("m3_row_set *")
    held = ffi.from_buffer("float[]", values), ffi.from_buffer(data)
    rows.struct_size, rows.type = size_of("m3_row_set"), tensor_type
    rows.n_rows, rows.n_per_row = values.shape
    rows.values, rows.data = held
    rows.data_bytes, rows.n_threads = data.nbytes, threads
    call(function, rows)
