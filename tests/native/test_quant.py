"""Conversion between float32 and the storage types, bit for bit against the `gguf` package."""

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays
from hypothesis.strategies import floats

from m3_runtime.errors import InputError, NotFiniteError
from m3_runtime.quantize import TensorType, dequantize_rows, quantize_rows

BLOCK = 32
ROUNDED = (TensorType.Q4_0, TensorType.Q4_1, TensorType.Q5_0, TensorType.Q5_1, TensorType.Q8_0)
TYPES = (TensorType.F32, TensorType.F16, TensorType.BF16, *ROUNDED)
#: With importance they are searched; test_encode.py has the tests of that.
SEARCHED_WITH_IMPORTANCE = (TensorType.Q4_0, TensorType.Q4_1, TensorType.Q5_0, TensorType.Q5_1)


def oracle_quantize(type_, rows):
    with np.errstate(over="ignore"):  # 1 / scale of a block too small for it
        data = gguf.quants.quantize(rows, gguf.GGMLQuantizationType(int(type_)))
    return np.ascontiguousarray(data).view(np.uint8).reshape(len(rows), -1)


def oracle_dequantize(type_, data):
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType(int(type_)))


def assert_same_bytes(got, expected, rows):
    assert got.dtype == np.uint8
    assert got.shape == expected.shape
    if not np.array_equal(got, expected):
        row, byte = np.argwhere(got != expected)[0]
        raise AssertionError(
            f"row {row}, byte {byte}: {got[row, byte]:#x}, expected {expected[row, byte]:#x}; row {rows[row][:8]}"
        )


def assert_same_floats(got, expected):
    """Equal bits, and NaN where NaN is expected (whose payload no format promises)."""
    assert got.dtype == np.float32
    assert got.shape == expected.shape
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(got), nan)
    differ = (got.view(np.uint32) != np.ascontiguousarray(expected).view(np.uint32)) & ~nan
    if differ.any():
        at = tuple(np.argwhere(differ)[0])
        raise AssertionError(f"at {at}: {got[at].hex()}, expected {float(expected[at]).hex()}; {differ.sum()} differ")


def from_bits(bits):
    return np.ascontiguousarray(bits, dtype=np.uint32).view(np.float32)


def in_rows(values):
    """Values as rows of one block, the last one filled up with zeros."""
    values = np.ascontiguousarray(values, dtype=np.float32).ravel()
    return np.pad(values, (0, -len(values) % BLOCK)).reshape(-1, BLOCK)


@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
def test_random_rows_equal_gguf_in_both_directions(type_):
    random = np.random.default_rng(5)
    rows = random.standard_normal((203, 7 * BLOCK), dtype=np.float32)
    rows *= np.float32(2.0) ** random.integers(-24, 12, (203, 1)).astype(np.float32)
    data = quantize_rows(type_, rows)
    assert_same_bytes(data, oracle_quantize(type_, rows), rows)
    assert_same_floats(dequantize_rows(type_, data, 7 * BLOCK), oracle_dequantize(type_, data))


@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
def test_the_number_of_threads_changes_nothing(type_):
    # Types that only round take another thread for every 2^20 values.
    rows = np.tile(np.random.default_rng(6).standard_normal((37, 3 * BLOCK), dtype=np.float32), (900, 1))
    one = quantize_rows(type_, rows, threads=1)
    values = dequantize_rows(type_, one, 3 * BLOCK, threads=1)
    for threads in (2, 3, 8):
        assert np.array_equal(quantize_rows(type_, rows, threads=threads), one)
        assert np.array_equal(dequantize_rows(type_, one, 3 * BLOCK, threads=threads), values)


def test_every_f16_code():
    codes = np.arange(65536, dtype=np.uint16).reshape(-1, BLOCK)
    data = codes.view(np.uint8).reshape(len(codes), -1)
    values = dequantize_rows(TensorType.F16, data, BLOCK)
    assert_same_floats(values, oracle_dequantize(TensorType.F16, data))
    finite = np.isfinite(values).all(axis=1)
    assert np.array_equal(quantize_rows(TensorType.F16, values[finite]), data[finite])


def test_every_bf16_code():
    codes = np.arange(65536, dtype=np.uint16).reshape(-1, BLOCK)
    data = codes.view(np.uint8).reshape(len(codes), -1)
    values = dequantize_rows(TensorType.BF16, data, BLOCK)
    # A shift, so NaN payloads too are equal.
    assert np.array_equal(values.view(np.uint32), codes.astype(np.uint32) << 16)
    assert np.array_equal(oracle_dequantize(TensorType.BF16, data).view(np.uint32), values.view(np.uint32))
    finite = np.isfinite(values).all(axis=1)
    assert np.array_equal(quantize_rows(TensorType.BF16, values[finite]), data[finite])


def test_f16_rounding_at_and_beside_every_tie():
    values = np.arange(0x7BFF, dtype=np.uint16).view(np.float16).astype(np.float32)  # 0 to the value before 65504
    above = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (values + above) / np.float32(2)  # exact in float32
    around = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf))])
    rows = in_rows(np.concatenate([around, -around, [65519.996, -65519.996]]))
    assert_same_bytes(quantize_rows(TensorType.F16, rows), oracle_quantize(TensorType.F16, rows), rows)


def test_bf16_rounding_at_and_beside_every_tie():
    codes = np.arange(0x7F7F, dtype=np.uint32) << 16  # 0 to the value before the largest, subnormal ones included
    around = np.concatenate([from_bits(codes | low) for low in (0x7FFF, 0x8000, 0x8001, 0x0001, 0xFFFF)])
    rows = in_rows(np.concatenate([around, -around]))
    assert_same_bytes(quantize_rows(TensorType.BF16, rows), oracle_quantize(TensorType.BF16, rows), rows)


def test_bf16_ties_go_to_even():
    rows = in_rows(from_bits([0x3F808000, 0x3F818000, 0x3F808001, 0x3F817FFF]))  # 1 + 1/256, 1 + 3/256, ...
    codes = quantize_rows(TensorType.BF16, rows).view(np.uint16)[0, :4]
    assert codes.tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F81]


def block_of(*values):
    block = np.zeros(BLOCK, np.float32)
    block[: len(values)] = values
    return block


def test_q8_0_ties_go_away_from_zero():
    rows = np.array([block_of(127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999997, 126.5, -126.5, -127)])
    data = quantize_rows(TensorType.Q8_0, rows)
    assert data[0, :2].view(np.float16)[0] == 1
    assert data[0, 2:13].view(np.int8).tolist() == [127, 1, 2, 3, -1, -2, -3, 0, 127, -127, -127]
    assert_same_bytes(data, oracle_quantize(TensorType.Q8_0, rows), rows)


def test_q8_0_edge_blocks_equal_gguf():
    tiny = np.float32(2.0**-149)
    blocks = [
        block_of(),
        block_of(-0.0, 0.0),
        np.full(BLOCK, -0.0, np.float32),
        block_of(1.0),
        block_of(-1.0),
        np.full(BLOCK, -3.25, np.float32),
        block_of(8321039.0, -8321039.0, 5.0),  # scale 65519.99: rounds to the largest float16
        block_of(8321039.5, 1.0),
        block_of(8300000.0, 2.0**-20),
        block_of(127 * 2.0**-14, 2.0**-14),  # the smallest normal scale
        block_of(127 * 2.0**-15, 2.0**-15),  # a subnormal scale
        block_of(127 * 2.0**-24, 2.0**-24),  # the smallest subnormal scale
        block_of(127 * 2.0**-25, 2.0**-25),  # a tie to zero: the scale is lost, the numbers stay
        block_of(127 * 2.0**-26, 2.0**-26),
        block_of(1e-30, -1e-31, 5e-32),
        block_of(1e-36, tiny, -tiny, 1e-37),  # 1 / scale is still finite
        *(block_of(127 * s, 0.5 * s, 1.5 * s, 63.5 * s, -0.5 * s) for s in (0.1, 0.3, 0.7, 1 / 3, 1e-3, 11.1)),
    ]
    rows = np.array(blocks, np.float32)
    data = quantize_rows(TensorType.Q8_0, rows)
    assert_same_bytes(data, oracle_quantize(TensorType.Q8_0, rows), rows)
    assert_same_floats(dequantize_rows(TensorType.Q8_0, data, BLOCK), oracle_dequantize(TensorType.Q8_0, data))


@pytest.mark.parametrize("type_", ROUNDED, ids=lambda t: t.name)
@pytest.mark.parametrize("value", [1e-39, 2.0**-130, 2.0**-140, 2.0**-149], ids=str)
def test_blocks_too_small_for_an_inverse_scale_become_zero(type_, value):
    # 1 / scale is infinite in float32, and what the gguf package then stores is not defined.
    rows = np.array([block_of(value, -value, 0.0), block_of(1.0)], np.float32)
    values = dequantize_rows(type_, quantize_rows(type_, rows), BLOCK)
    assert (values[0] == 0).all()
    assert values[1, 0] == pytest.approx(1, rel=1e-3)


def test_4_and_5_bit_edge_blocks_equal_gguf():
    tiny = np.float32(2.0**-149)
    random = np.random.default_rng(3)
    steps = np.arange(-16, 16) / np.float32(2)
    blocks = [
        block_of(),
        np.full(BLOCK, -0.0, np.float32),
        np.full(BLOCK, 3.25, np.float32),
        np.full(BLOCK, -3.25, np.float32),
        block_of(1.0),
        block_of(-1.0),
        block_of(2.0, -2.0, 1.0),  # the first of equal magnitudes sets the sign of the scale
        block_of(-2.0, 2.0, 1.0),
        steps,  # every number, and the ties between them
        -steps,
        steps + np.float32(8),
        np.nextafter(steps, np.float32(99)),
        np.nextafter(steps, np.float32(-99)),
        np.linspace(-7.5, 7.5, BLOCK, dtype=np.float32),
        np.linspace(0, 15, BLOCK, dtype=np.float32),
        np.linspace(0, 15.5, BLOCK, dtype=np.float32),
        np.linspace(0, 31, BLOCK, dtype=np.float32),
        block_of(65519.996, -65519.996, 5.0),
        block_of(-65519.996, 1.0),
        block_of(8 * 2.0**-24, 2.0**-24),  # the smallest subnormal scale of Q4_0
        block_of(8 * 2.0**-25, 2.0**-25),  # a tie to zero
        block_of(16 * 2.0**-24, 2.0**-24),
        block_of(1e-30, -1e-31, 5e-32),
        block_of(1e-36, tiny, -tiny, 1e-37),
        *(random.standard_normal(BLOCK) * s + m for s in (1e-6, 1.0, 1e3) for m in (-2.0, 0.0, 3.0, 1e3)),
    ]
    rows = np.array(blocks, np.float32)
    for type_ in ROUNDED:
        data = quantize_rows(type_, rows)
        assert_same_bytes(data, oracle_quantize(type_, rows), rows)
        assert_same_floats(dequantize_rows(type_, data, BLOCK), oracle_dequantize(type_, data))


@pytest.mark.parametrize("type_", ROUNDED, ids=lambda t: t.name)
@settings(max_examples=150, deadline=None)
@given(rows=arrays(np.float32, (3, BLOCK), elements=floats(-65504, 65504, width=32)))
def test_any_values_are_written_as_gguf_writes_them(type_, rows):
    rows += np.float32(0)  # no -0.0: which of two zeros is the least is not defined in numpy
    # Blocks whose scale has no inverse have a test above; the scale is at least 1/127 of the range.
    ranged = type_ in (TensorType.Q4_1, TensorType.Q5_1)
    extent = rows.max(axis=1) - rows.min(axis=1) if ranged else np.abs(rows).max(axis=1)
    rows[extent < 2.0**-118] = 0
    assert_same_bytes(quantize_rows(type_, rows), oracle_quantize(type_, rows), rows)


def test_importance_changes_nothing_where_there_is_only_rounding():
    rows = np.random.default_rng(9).standard_normal((4, 2 * BLOCK), dtype=np.float32)
    importance = np.arange(2 * BLOCK, dtype=np.float32)
    for type_ in TYPES:
        same = np.array_equal(quantize_rows(type_, rows, importance=importance), quantize_rows(type_, rows))
        assert same == (type_ not in SEARCHED_WITH_IMPORTANCE)


@pytest.mark.parametrize(
    ("importance", "message"),
    [
        (np.ones(BLOCK, np.float64), r"float64 \[32\], expected C-contiguous float32 \[32\]"),
        (np.ones(BLOCK + 1, np.float32), r"float32 \[33\], expected .* \[32\]"),
        (np.ones((2, BLOCK), np.float32), r"float32 \[2, 32\]"),
        (np.ones(2 * BLOCK, np.float32)[::2], "C-contiguous"),
        (block_of(0, 1, np.nan), "column 2 is nan"),
        (block_of(0, 1, 1, np.inf), "column 3 is inf"),
        (block_of(-1e-30), "column 0 is -1e-30"),
    ],
    ids=["float64", "too long", "of each row", "strided", "nan", "inf", "negative"],
)
def test_importance_out_of_its_range_is_refused(importance, message):
    with pytest.raises(InputError, match=message) as error:
        quantize_rows(TensorType.Q4_0, np.ones((2, BLOCK), np.float32), importance=importance)
    assert "\n" not in str(error.value)


def test_types_that_are_useless_without_importance_are_refused_without():
    needing = {t for t in TensorType if t.needs_importance}
    assert needing == {TensorType.IQ2_XXS, TensorType.IQ2_XS, TensorType.IQ1_S, TensorType.IQ1_M}
    for type_ in needing:
        with pytest.raises(InputError, match=f"{type_.name} needs importance"):
            quantize_rows(type_, np.ones((1, 256), np.float32))


def test_every_q8_0_scale_with_every_number():
    scales = np.arange(65536, dtype=np.uint16)
    numbers = np.resize(np.arange(-128, 128, dtype=np.int8), (len(scales), BLOCK))
    data = np.concatenate([scales.view(np.uint8).reshape(-1, 2), numbers.view(np.uint8)], axis=1)
    with np.errstate(invalid="ignore"):  # infinite scale times zero
        expected = oracle_dequantize(TensorType.Q8_0, data)
    assert_same_floats(dequantize_rows(TensorType.Q8_0, data, BLOCK), expected)


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        *((type_, value) for type_ in TYPES for value in (np.nan, np.inf, -np.inf)),
        (TensorType.F16, 65520.0),
        (TensorType.F16, -1e30),
        (TensorType.BF16, 3.4e38),  # finite, but nearer to 2^128 than to the largest bfloat16
        (TensorType.Q4_0, 524160.0),  # scale 65520
        (TensorType.Q4_1, -65520.0),
        (TensorType.Q5_0, 1048320.0),
        (TensorType.Q5_1, 65520.0),
        (TensorType.Q8_0, 8321040.0),
        (TensorType.Q8_0, -1e38),
    ],
    ids=lambda value: value.name if isinstance(value, TensorType) else str(value),
)
def test_values_that_a_type_cannot_hold_are_refused(type_, value):
    rows = np.ones((5, 2 * BLOCK), np.float32)
    rows[3, 41] = rows[4, 7] = value
    with pytest.raises(NotFiniteError) as error:
        quantize_rows(type_, rows)
    message = str(error.value)
    assert "\n" not in message
    assert "row 3" in message and "column 41" in message and "2 values" in message
    assert type_.name in message


@pytest.mark.parametrize(
    ("type_", "largest"),
    [
        (TensorType.F16, 65519.996),
        (TensorType.BF16, float(from_bits([0x7F7F7FFF])[0])),
        (TensorType.Q4_0, 524159.96),
        (TensorType.Q4_1, 65519.996),
        (TensorType.Q5_0, 1048319.9),
        (TensorType.Q5_1, 65519.996),
        (TensorType.Q8_0, 8321039.5),
    ],
    ids=lambda value: value.name if isinstance(value, TensorType) else "",
)
def test_the_largest_values_that_fit_stay_finite(type_, largest):
    rows = np.zeros((1, BLOCK), np.float32)
    rows[0, :2] = largest, -largest
    values = dequantize_rows(type_, quantize_rows(type_, rows), BLOCK)
    assert np.isfinite(values).all()
    assert values[0, 0] == pytest.approx(largest, rel=0.01)
    # Of the 4 and 5 bit types one side has a number more, or both stand on a grid that starts at the least value.
    assert values[0, 1] == pytest.approx(-largest, rel=0.15)


@pytest.mark.parametrize("type_", TensorType, ids=lambda t: t.name)
def test_refused_is_what_is_above_the_largest(type_):
    largest = np.float32(type_.largest)
    rows = np.zeros((1, type_.block_size), np.float32)
    importance = np.ones(type_.block_size, np.float32)
    rows[0, 0] = largest
    assert np.isfinite(dequantize_rows(type_, quantize_rows(type_, rows, 1, importance), type_.block_size)).all()
    if largest < np.finfo(np.float32).max:
        rows[0, 0] = np.nextafter(largest, np.float32(np.inf))
        with pytest.raises(NotFiniteError, match=type_.name):
            quantize_rows(type_, rows, 1, importance)


def test_rows_that_the_block_does_not_divide_are_refused():
    with pytest.raises(InputError, match=r"33.*Q8_0"):
        quantize_rows(TensorType.Q8_0, np.zeros((2, 33), np.float32))
    with pytest.raises(InputError):
        dequantize_rows(TensorType.Q8_0, np.zeros((2, 34), np.uint8), 33)


@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
def test_data_of_the_wrong_size_is_refused(type_):
    data = quantize_rows(type_, np.zeros((2, BLOCK), np.float32))
    with pytest.raises(InputError):
        dequantize_rows(type_, data[:, :-1].copy(), BLOCK)
    with pytest.raises(InputError):
        dequantize_rows(type_, data, 2 * BLOCK)


@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
def test_no_rows(type_):
    data = quantize_rows(type_, np.zeros((0, BLOCK), np.float32))
    assert data.shape[0] == 0
    assert dequantize_rows(type_, data, BLOCK).shape == (0, BLOCK)
