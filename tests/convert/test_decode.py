"""Source values against the definitions of their formats, code by code."""

import math
import os
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from m3_convert.checkpoint import SourceTensor
from m3_convert.decode import SourceReader, all_finite, decode, decode_mxfp8
from m3_runtime.errors import InputError


def e4m3(code: int) -> Fraction | None:
    """OCP 8-bit floating point, E4M3: 1 sign, 4 exponent bits with bias 7, 3 mantissa bits; None is NaN."""
    sign = -1 if code >> 7 else 1
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return None
    if exponent == 0:
        return sign * Fraction(mantissa, 8) * Fraction(1, 2**6)
    return sign * (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


def float32(value: Fraction | None) -> float:
    """The float32 that equals `value`; infinity beyond its range. A code times a scale is never between."""
    if value is None:
        return math.nan
    try:
        result = struct.unpack("<f", struct.pack("<f", float(value)))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    assert Fraction(result) == value
    return float(result)


def test_every_e4m3_code_under_every_scale_byte() -> None:
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    values = decode_mxfp8(codes, scales)
    by_code = [e4m3(code) for code in range(256)]
    expected = np.empty((256, 256), np.float32)
    for byte in range(255):
        scale = Fraction(2) ** (byte - 127)
        expected[byte] = [float32(None if value is None else value * scale) for value in by_code]
    expected[255] = np.nan
    np.testing.assert_array_equal(values, expected)
    zeros = values[:255, [0, 128]]
    assert not np.signbit(zeros[:, 0]).any() and np.signbit(zeros[:, 1]).all()


def test_scale_bytes_are_exponents_of_32_columns() -> None:
    """A scale of 127 is 1 and one of 120 is 1/128; it covers 32 columns and no other."""
    codes = np.full((2, 64), 0x38, np.uint8)  # 1.0
    values = decode_mxfp8(codes, np.array([[127, 120], [128, 127]], np.uint8))
    assert values[0, :32].tolist() == [1.0] * 32
    assert values[0, 32:].tolist() == [1 / 128] * 32
    assert values[1, :32].tolist() == [2.0] * 32
    assert values[1, 32:].tolist() == [1.0] * 32


def test_shared_vectors_of_mxfp8() -> None:
    path = Path(os.environ.get("M3_SHARED", Path(__file__).parents[3] / "shared")) / "oracle/mxfp8_vectors.npz"
    if not path.exists():
        pytest.skip("no shared oracle folder")
    vectors = np.load(path)
    codes = np.tile(vectors["e4m3"], (16, 1))
    values = decode_mxfp8(codes, np.repeat(vectors["scale_byte"][:, None], 8, axis=1))
    np.testing.assert_array_equal(values, vectors["w"])


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_16_bit_value(dtype: str) -> None:
    bits = np.arange(65536, dtype="<u2")
    values = decode(dtype, bits.view(np.uint8).reshape(1, -1))[0]
    if dtype == "BF16":
        expected = [struct.unpack("<f", struct.pack("<HH", 0, b))[0] for b in range(65536)]
    else:
        expected = [struct.unpack("<e", struct.pack("<H", b))[0] for b in range(65536)]
    np.testing.assert_array_equal(values, np.array(expected, np.float32))
    finite = np.array([math.isfinite(v) for v in expected])
    for code in (0, 1, 0x7BFF, 0x7C00, 0x7F7F, 0x7F80, 0x7F81, 0x7FFF, 0x8000, 0xFBFF, 0xFC00, 0xFF7F, 0xFF80, 0xFFFF):
        assert all_finite(dtype, bits[code : code + 1].view(np.uint8)) == finite[code]
    assert all_finite(dtype, bits[finite].view(np.uint8))


def test_float32_is_taken_as_it_stands() -> None:
    values = np.array([[1.5, -0.0, 1e-45, 3e38]], np.float32)
    decoded = decode("F32", values.view(np.uint8))
    assert decoded.tobytes() == values.tobytes()
    assert all_finite("F32", values.view(np.uint8))
    for bad in (np.nan, np.inf, -np.inf):
        assert not all_finite("F32", np.array([1, bad], np.float32).view(np.uint8))


def test_a_shard_that_shrank_since_it_was_opened(tmp_path: Path) -> None:
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(bytes(100))
    tensor = SourceTensor("w", "F32", (2, 10), shard, 40, 80)
    with SourceReader() as reader, pytest.raises(InputError, match="ends at byte 100, inside w"):
        reader.read(tensor, 0, np.empty(80, np.uint8))
