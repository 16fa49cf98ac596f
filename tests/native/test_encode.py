"""Quantizers that search: errors, edge cases, importance, and the bytes that they wrote when they were made."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays
from hypothesis.strategies import floats, sampled_from

from golden.make_encoded import CASES, PATH
from m3_runtime.quantize import TensorType, dequantize_rows, quantize_rows
from native.blocks import oracle_dequantize
from native.plain_rounding import AFFINE, OFFSET, SINGLE, SYMMETRIC, plainly_rounded
from native.test_quant import assert_same_bytes, assert_same_floats

SEARCHED = (*AFFINE, *SYMMETRIC, *SINGLE, *OFFSET, TensorType.MXFP4)
ONLY_WITH_IMPORTANCE = (TensorType.Q4_0, TensorType.Q4_1, TensorType.Q5_0, TensorType.Q5_1)

# Relative squared error of Gaussian rows, without importance: a little above what the search reaches.
GAUSSIAN_ERROR = {
    TensorType.Q2_K: 0.071,
    TensorType.Q3_K: 0.0216,
    TensorType.Q4_K: 0.0051,
    TensorType.Q5_K: 0.00124,
    TensorType.Q6_K: 0.00029,
    TensorType.IQ4_XS: 0.0057,
    TensorType.IQ4_NL: 0.0057,
    TensorType.MXFP4: 0.0129,
    TensorType.Q4_0: 0.0069,
    TensorType.Q5_0: 0.0017,
    TensorType.Q4_1: 0.0049,
    TensorType.Q5_1: 0.00118,
}

searching = pytest.mark.parametrize("type_", SEARCHED, ids=lambda t: t.name)
N = 512


def block_errors(type_, values, rows, importance=None):
    """Weighted squared error of each block, and what it is relative to."""
    w = np.ones(rows.shape[1]) if importance is None else importance.astype(np.float64)
    x = rows.astype(np.float64)
    shape = (-1, type_.block_size)
    squares = (w * (values.astype(np.float64) - x) ** 2).reshape(shape).sum(axis=1)
    return squares, (w * x**2).reshape(shape).sum(axis=1)


def encoded(type_, rows, importance=None):
    """The values that come back. Legacy types search only with importance: equal ones stand for none here."""
    if importance is None and type_ in ONLY_WITH_IMPORTANCE:
        importance = np.ones(rows.shape[1], np.float32)
    data = quantize_rows(type_, rows, importance=importance)
    values = dequantize_rows(type_, data, rows.shape[1])
    assert_same_floats(values, oracle_dequantize(type_, data))
    assert np.isfinite(values).all()
    return values


def assert_not_worse_than_rounding(type_, rows, importance=None):
    values = encoded(type_, rows, importance)
    error, size = block_errors(type_, values, rows, importance)
    plain, _ = block_errors(type_, plainly_rounded(type_, rows), rows, importance)
    # Sums are taken in float32, and what is below a float16's last place (the least one, times a code) is the same.
    tiny = 1e-6 * size + 256 * 2.0**-48 * (1 if importance is None else float(importance.max()))
    worse = error > plain * (1 + 1e-5) + tiny
    assert not worse.any(), f"block {worse.argmax()}: {error[worse][0]:.6g}, rounding gives {plain[worse][0]:.6g}"


def weights(n, random):
    w = random.exponential(size=n).astype(np.float32)
    w[random.integers(0, n, n // 40)] *= 100
    return w


@searching
def test_gaussian_rows_come_back_within_the_error_of_the_type(type_):
    rows = np.random.default_rng(1).standard_normal((64, N), dtype=np.float32) * np.float32(0.02)
    error, size = block_errors(type_, encoded(type_, rows), rows)
    assert error.sum() / size.sum() < GAUSSIAN_ERROR[type_]


@searching
@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
def test_no_block_is_worse_than_rounded(type_, weighted):
    random = np.random.default_rng(2)
    rows = random.standard_t(3, (40, N)).astype(np.float32)
    rows *= np.float32(2.0) ** random.integers(-12, 8, (40, 1)).astype(np.float32)
    rows[::4] += np.abs(rows[::4]).max(axis=1, keepdims=True)  # all above zero
    rows[1::4] = np.abs(rows[1::4])
    assert_not_worse_than_rounding(type_, rows, weights(N, random) if weighted else None)


@searching
@settings(max_examples=25, deadline=None)
@given(
    data=arrays(np.float32, (1, 256), elements=floats(-65504, 65504, width=32)), scale=sampled_from([1.0, 1e-4, 1e-8])
)
def test_no_values_are_worse_than_rounded(type_, data, scale):
    assert_not_worse_than_rounding(type_, data * np.float32(scale))


def edge_rows():
    random = np.random.default_rng(3)
    normal = random.standard_normal((1, N), dtype=np.float32)
    hot = normal * np.float32(0.01)
    hot[:, 64:96] *= 1000
    outlier = normal.copy()
    outlier[0, 77] = 3000
    largest = np.where(normal > 0, np.float32(65519.99), np.float32(-65519.99))
    rows = {
        "zero": np.zeros((1, N)),
        "negative zero": np.full((1, N), -0.0),
        "all equal": np.full((1, N), 0.37),
        "all equal below zero": np.full((1, N), -0.37),
        "all near one": 1 + 0.01 * normal,
        "all near minus one": -1 + 0.01 * normal,
        "subnormal": normal * 1e-40,
        "below float16": normal * 1e-9,
        "float16's last places": normal * 2.0**-23,
        "largest": largest,
        "largest, one sign": np.full((1, N), 65519.99),
        "one value": np.eye(1, N, 130),
        "one value below zero": -np.eye(1, N, 130),
        "outlier": outlier,
        "hot group": hot,
    }
    return {name: np.ascontiguousarray(r, np.float32) for name, r in rows.items()}


EDGES = edge_rows()


@searching
@pytest.mark.parametrize("name", EDGES)
def test_edge_rows(type_, name):
    rows = EDGES[name]
    assert_not_worse_than_rounding(type_, rows)
    assert_not_worse_than_rounding(type_, rows, weights(N, np.random.default_rng(4)))


@searching
def test_zeros_come_back_as_zeros(type_):
    for name in ("zero", "negative zero"):
        assert not encoded(type_, EDGES[name]).any()
    for name in ("one value", "one value below zero"):
        values = encoded(type_, EDGES[name])
        assert abs(values[0, 130]) == pytest.approx(1, rel=2e-3)
        other_blocks = np.delete(values.reshape(-1, 32), 130 // 32, axis=0)
        if type_.block_size == 32:
            assert not other_blocks.any()


def test_mxfp4_holds_magnitudes_from_subnormal_to_the_largest():
    for magnitude in (2.0**-128, 2.0**-126, 1e-30, 1.0, 1e30, 3.4e38):
        rows = np.zeros((1, 32), np.float32)
        rows[0, :4] = np.array([1, -1, 0.5, 0.25]) * magnitude
        values = encoded(TensorType.MXFP4, rows)
        if 1e-30 <= magnitude <= 1e30:  # gguf's rounding overflows outside
            assert_not_worse_than_rounding(TensorType.MXFP4, rows)
        assert values[0, 0] == pytest.approx(magnitude, rel=0.26)


@searching
def test_the_weighted_columns_gain(type_):
    random = np.random.default_rng(5)
    rows = random.standard_normal((32, N), dtype=np.float32)
    heavy = np.arange(N) % 16 == 3
    importance = np.where(heavy, np.float32(50), np.float32(1))
    with_, without = (
        ((encoded(type_, rows, w).astype(np.float64) - rows) ** 2)[:, heavy].sum() for w in (importance, None)
    )
    assert with_ < (0.97 if type_ is TensorType.MXFP4 else 0.6) * without


@searching
def test_importance_of_no_block_at_all_is_equal_importance(type_):
    random = np.random.default_rng(6)
    rows = random.standard_normal((8, N), dtype=np.float32)
    ones = quantize_rows(type_, rows, importance=np.ones(N, np.float32))
    assert_same_bytes(quantize_rows(type_, rows, importance=np.zeros(N, np.float32)), ones, rows)
    # The second half of the columns without importance: its blocks are those of equal importance.
    importance = np.where(np.arange(N) < 256, np.float32(1e-30), np.float32(0))
    assert_same_bytes(quantize_rows(type_, rows, importance=importance), ones, rows)


@searching
def test_importance_counts_by_its_ratios(type_):
    random = np.random.default_rng(7)
    rows = random.standard_normal((8, N), dtype=np.float32)
    importance = weights(N, random)
    for factor in (2.0**-100, 2.0**100):
        assert_same_bytes(
            quantize_rows(type_, rows, importance=importance * np.float32(factor)),
            quantize_rows(type_, rows, importance=importance),
            rows,
        )
    # A group, and a block of 32, in which nothing counts: its values are still told.
    importance[32:64] = 0
    importance[300:] *= np.float32(1e-20)
    values = encoded(type_, rows, importance)
    assert np.corrcoef(values[:, 32:64].ravel(), rows[:, 32:64].ravel())[0, 1] > 0.9


@searching
def test_blocks_do_not_depend_on_where_they_stand(type_):
    random = np.random.default_rng(8)
    n, importance = type_.block_size, weights(13 * type_.block_size, random)
    rows = random.standard_normal((5, 13 * n), dtype=np.float32)
    together = quantize_rows(type_, rows, threads=1, importance=importance)
    for threads in (2, 5):
        assert_same_bytes(quantize_rows(type_, rows, threads=threads, importance=importance), together, rows)
    alone = [
        quantize_rows(
            type_, np.ascontiguousarray(rows[:, k : k + n]), importance=np.ascontiguousarray(importance[k : k + n])
        )
        for k in range(0, 13 * n, n)
    ]
    assert_same_bytes(np.concatenate(alone, axis=1), together, rows)


@pytest.mark.parametrize("case", CASES)
def test_golden_bytes(case):
    with np.load(PATH) as stored:
        rows, importance, expected = stored["rows"], stored["importance"], stored[case]
    name, _, weighted = case.partition(" ")
    data = quantize_rows(TensorType[name], rows, importance=importance if weighted else None)
    assert_same_bytes(data, expected, rows)
