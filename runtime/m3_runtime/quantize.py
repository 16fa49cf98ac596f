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
    Q4_0 = lib.M3_TYPE_Q4_0
    Q4_1 = lib.M3_TYPE_Q4_1
    Q5_0 = lib.M3_TYPE_Q5_0
    Q5_1 = lib.M3_TYPE_Q5_1
    Q8_0 = lib.M3_TYPE_Q8_0
    Q2_K = lib.M3_TYPE_Q2_K
    Q3_K = lib.M3_TYPE_Q3_K
    Q4_K = lib.M3_TYPE_Q4_K
    Q5_K = lib.M3_TYPE_Q5_K
    Q6_K = lib.M3_TYPE_Q6_K
    IQ2_XXS = lib.M3_TYPE_IQ2_XXS
    IQ2_XS = lib.M3_TYPE_IQ2_XS
    IQ3_XXS = lib.M3_TYPE_IQ3_XXS
    IQ1_S = lib.M3_TYPE_IQ1_S
    IQ4_NL = lib.M3_TYPE_IQ4_NL
    IQ3_S = lib.M3_TYPE_IQ3_S
    IQ2_S = lib.M3_TYPE_IQ2_S
    IQ4_XS = lib.M3_TYPE_IQ4_XS
    IQ1_M = lib.M3_TYPE_IQ1_M
    BF16 = lib.M3_TYPE_BF16
    MXFP4 = lib.M3_TYPE_MXFP4

    @property
    def block_size(self) -> int:
        """Elements of a block; a row must be a whole number of blocks."""
        return int(lib.m3_type_block_size(self))

    @property
    def needs_importance(self) -> bool:
        """True if `quantize_rows` refuses it without importance (IQ2_XXS, IQ2_XS, IQ1_S, IQ1_M)."""
        return bool(lib.m3_type_needs_importance(self))

    @property
    def largest(self) -> float:
        """Magnitudes above it have no finite value in the type; `quantize_rows` refuses them."""
        return float(lib.m3_type_largest(self))

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


def quantize_rows(
    tensor_type: TensorType,
    rows: NDArray[np.float32],
    threads: int = 0,
    importance: NDArray[np.float32] | None = None,
) -> NDArray[np.uint8]:
    """float32 [n_rows, n_per_row], C-contiguous -> uint8 [n_rows, row_bytes].

    threads: 0 takes all cores. importance: float32 [n_per_row], weights of the squared error of each column, finite
    and at least 0; None: all equal; used by the types that search. NotFiniteError for NaN, infinity, or a value that
    the type cannot hold; the message names row, column and count. InputError for importance that is no such array, or
    missing for a type that needs it; MachineError for a type that can only be read.
    """
    n_rows, n_per_row = rows.shape
    if rows.dtype != np.float32 or not rows.flags.c_contiguous:
        raise InputError(f"quantize_rows: {rows.dtype} rows, expected C-contiguous float32")
    if importance is not None and (
        importance.dtype != np.float32 or importance.shape != (n_per_row,) or not importance.flags.c_contiguous
    ):
        raise InputError(
            f"quantize_rows: importance is {importance.dtype} {list(importance.shape)}, expected C-contiguous float32 "
            f"[{n_per_row}]"
        )
    out = np.empty((n_rows, row_bytes(tensor_type, n_per_row)), np.uint8)
    _convert(lib.m3_quantize, tensor_type, rows, out, threads, importance)
    return out


def dequantize_rows(
    tensor_type: TensorType, data: NDArray[np.uint8], n_per_row: int, threads: int = 0
) -> NDArray[np.float32]:
    """uint8 [n_rows, row_bytes], C-contiguous -> float32 [n_rows, n_per_row], exact.

    threads: 0 takes all cores. InputError if sizes do not fit the type, or data is at an odd address (F32: not at a
    multiple of 4; MXFP4: any will do).
    """
    if data.dtype != np.uint8 or not data.flags.c_contiguous:
        raise InputError(f"dequantize_rows: {data.dtype} rows, expected C-contiguous uint8")
    out = np.empty((data.shape[0], n_per_row), np.float32)
    _convert(lib.m3_dequantize, tensor_type, out, data, threads, None)
    return out


def _convert(
    function: Callable[..., int],
    tensor_type: TensorType,
    values: NDArray[np.float32],
    data: NDArray[np.uint8],
    threads: int,
    importance: NDArray[np.float32] | None,
) -> None:
    rows = ffi.new("m3_row_set *")
    held = ffi.from_buffer("float[]", values), ffi.from_buffer(data)
    held_importance = ffi.NULL if importance is None else ffi.from_buffer("float[]", importance)
    rows.struct_size, rows.type = size_of("m3_row_set"), tensor_type
    rows.n_rows, rows.n_per_row = values.shape
    rows.values, rows.data = held
    rows.importance = held_importance
    rows.data_bytes, rows.n_threads = data.nbytes, threads
    call(function, rows)
