"""Encoders of the codebook types: what they write is valid, and as near to the values as the format lets it be."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays
from hypothesis.strategies import floats

from m3_runtime.quantize import TensorType, dequantize_rows, quantize_rows
from native.blocks import oracle_dequantize, random_blocks
from native.plain_rounding import CODEBOOK as TYPES
from native.plain_rounding import EVEN_SIGNS, GROUP, IQ1, IQ3, RUN, codebook
from native.test_quant import assert_same_floats

SUPERBLOCK = 256
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "encoded_iq.npz"
LARGEST = 65519.99
every_type = pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)

# Relative squared error of normal values, somewhat above what is measured.
NOISE = dict(zip(TYPES, (0.034, 0.019, 0.11, 0.085, 0.065, 0.22, 0.19), strict=True))


def encode(type_, rows, importance=None, threads=0):
    if importance is None and type_.needs_importance:
        importance = np.ones(rows.shape[1], np.float32)
    return quantize_rows(type_, rows, threads, importance)


def decode(type_, data, n):
    values = dequantize_rows(type_, data, n)
    assert_same_floats(values, oracle_dequantize(type_, data))
    return values


def recode(type_, rows, importance=None):
    return decode(type_, encode(type_, rows, importance), rows.shape[1])


def weighted_error(rows, values, importance):
    return (importance * (values.astype(np.float64) - rows) ** 2).sum(axis=-1)


def chi_square(n, seed=1):
    return np.random.default_rng(seed).chisquare(1, n).astype(np.float32)


def samples(random, n_rows, n):
    """Normal, Laplace and normal with exceptions, rows of each."""
    normal = random.standard_normal((n_rows, n))
    exceptional = random.standard_normal((n_rows, n)) * np.where(random.random((n_rows, n)) < 0.02, 15, 1)
    return np.concatenate([normal, random.laplace(size=(n_rows, n)), exceptional]).astype(np.float32)


@every_type
def test_normal_values_keep_the_precision_of_the_type(type_):
    rows = np.random.default_rng(1).standard_normal((8, 2 * SUPERBLOCK), dtype=np.float32)
    error = ((recode(type_, rows) - rows) ** 2).sum() / (rows**2).sum()
    assert error < NOISE[type_]


@every_type
def test_values_that_the_type_holds_exactly_come_back_almost_so(type_):
    # Scale and codes of such blocks are found among all others, up to local optima.
    random = np.random.default_rng(type_)
    blocks = random_blocks(type_, 40, random, scale=0.01)
    rows = oracle_dequantize(type_, blocks)
    error = ((recode(type_, rows) - rows) ** 2).sum(axis=1) / (rows**2).sum(axis=1)
    assert np.median(error) < 0.3 * NOISE[type_]


def scales_of(type_, data):
    """float64 [rows, groups]: what the levels of each group are multiplied with, from the bytes."""
    one = {TensorType.IQ3_XXS: 0.25, TensorType.IQ3_S: 1, TensorType.IQ1_S: 1, TensorType.IQ1_M: 1}.get(type_, 0.125)
    if type_ is TensorType.IQ1_M:
        packed = data[:, 48:56].copy().view(np.uint16).astype(np.int64)
        d = (packed >> 12 << np.arange(4) * 4).sum(axis=1).astype(np.uint16).view(np.float16)
        k = (packed[:, :, None] >> np.arange(4) * 3 & 7).reshape(len(data), 16)
    else:
        d = data[:, :2].copy().view(np.float16)[:, 0]
        if type_ in (TensorType.IQ2_XXS, TensorType.IQ3_XXS):
            words = data[:, 2:66] if type_ is TensorType.IQ2_XXS else data[:, 66:98]
            words = words.copy().view(np.uint32)
            k = (words[:, 1::2] if type_ is TensorType.IQ2_XXS else words) >> 28
        elif type_ is TensorType.IQ1_S:
            k = data[:, 34:50].copy().view(np.uint16) >> 12 & 7
        else:
            start, stop = {TensorType.IQ3_S: (106, 110)}.get(type_, (data.shape[1] - 8, data.shape[1]))
            k = (data[:, start:stop, None] >> np.array([0, 4]) & 15).reshape(len(data), -1)
    return d.astype(np.float64)[:, None] * one * (2.0 * k + 1)


def least_run_errors(type_, x, w, s, even):
    """The least weighted error of runs x [n, 8], w [8], scales s [n], over every entry and every choice of signs."""
    levels = codebook(type_)

    def cost(a, weight):  # [n, entries]
        return (weight * (a[:, None] - s[:, None, None] * levels) ** 2).sum(-1)

    if type_ in IQ1:
        both = [cost(x - s[:, None] * delta, w) for delta in (0.125, -0.125)]
        return np.stack([c.min(axis=1) for c in both], axis=1)  # [n, delta]
    run = RUN[type_]
    best = np.full(len(x), np.inf)
    for flipped in [None, *range(8)]:
        a = np.abs(x)
        odd = ((x < 0).sum(axis=1) % 2).astype(bool)
        if flipped is not None:
            if not even:
                break
            a[:, flipped] *= -1
        total = sum(cost(a[:, i : i + run], w[i : i + run]).min(axis=1) for i in range(0, 8, run))
        allowed = odd if flipped is not None else ~odd if even else np.ones(len(x), bool)
        best = np.where(allowed, np.minimum(best, total), best)
    return best


@every_type
def test_codes_are_the_best_of_the_whole_codebook_at_the_scales_stored(type_):
    """Against plain exhaustive search: every entry with every shift, or with every sign that can be wrong."""
    importance = chi_square(SUPERBLOCK) + np.float32(0.01)
    rows = samples(np.random.default_rng(3), 2, SUPERBLOCK)
    data = encode(type_, rows, importance)
    values = decode(type_, data, SUPERBLOCK)
    scales = np.repeat(scales_of(type_, data), GROUP[type_] // 8, axis=1)
    got = (importance * (values.astype(np.float64) - rows) ** 2).reshape(len(rows), 32, 8).sum(-1)
    best = np.stack(
        [
            least_run_errors(
                type_,
                rows[:, 8 * r : 8 * r + 8].astype(np.float64),
                importance[8 * r : 8 * r + 8].astype(np.float64),
                scales[:, r],
                type_ in EVEN_SIGNS,
            )
            for r in range(32)
        ],
        axis=1,
    )
    if type_ is TensorType.IQ1_S:  # four runs share the shift
        best, got = best.reshape(len(rows), 8, 4, 2).sum(2).min(-1), got.reshape(len(rows), 8, 4).sum(-1)
    elif type_ is TensorType.IQ1_M:
        best = best.min(-1)
    assert (got >= best * (1 - 1e-4)).all(), "the reference is not exhaustive"
    # The float16 scale is adjusted to the codes in the end; the element with the wrong sign is chosen beforehand.
    assert got.sum() <= best.sum() * (1.02 if type_ in EVEN_SIGNS else 1.0005)
    assert np.median(got / best) < 1 + 1e-4


@pytest.mark.parametrize("type_", EVEN_SIGNS, ids=lambda t: t.name)
def test_of_an_odd_number_of_negative_values_the_cheapest_gets_the_wrong_sign(type_):
    rows = np.ones((1, SUPERBLOCK), np.float32)
    rows[0, ::8] = -1
    rows[0, 3::8] = 0.25
    importance = np.ones(SUPERBLOCK, np.float32)
    values = recode(type_, rows, importance).reshape(-1, 8)
    assert (np.sign(values) == [-1, 1, 1, -1, 1, 1, 1, 1]).all()
    importance[3::8] = 100
    importance[6::8] = 0.01
    values = recode(type_, rows, importance).reshape(-1, 8)
    assert (np.sign(values) == [-1, 1, 1, 1, 1, 1, -1, 1]).all()


@every_type
def test_scales_are_near_the_best_of_all(type_):
    """Blocks of one group repeated: every scale of a fine net is tried with exhaustive search."""
    random = np.random.default_rng(11)
    size = GROUP[type_]
    got = best = 0.0
    for _ in range(3):
        x = random.standard_normal(size).astype(np.float32)
        w = random.chisquare(1, size).astype(np.float32) + np.float32(0.01)
        rows, importance = np.tile(x, SUPERBLOCK // size)[None], np.tile(w, SUPERBLOCK // size)
        got += weighted_error(rows, recode(type_, rows, importance), importance)[0]
        least = np.inf
        rms = np.sqrt((w * x**2).sum() / w.sum())
        for s in rms / np.sqrt((codebook(type_) ** 2).mean()) * np.geomspace(0.5, 2, 120):
            runs = [
                least_run_errors(
                    type_,
                    x[None, i : i + 8].astype(np.float64),
                    w[i : i + 8].astype(np.float64),
                    np.array([s]),
                    type_ in EVEN_SIGNS,
                )
                for i in range(0, size, 8)
            ]
            total = np.sum(runs, axis=0).min() if type_ is TensorType.IQ1_S else sum(r.min() for r in runs)
            least = min(least, total)
        best += least * (SUPERBLOCK // size)
    assert got <= 1.1 * best


@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
def test_importance_lowers_the_error_that_it_weighs(type_):
    rows = samples(np.random.default_rng(4), 3, 2 * SUPERBLOCK)
    importance = chi_square(2 * SUPERBLOCK)
    with_it = weighted_error(rows, recode(type_, rows, importance), importance).sum()
    without = weighted_error(rows, recode(type_, rows), importance).sum()
    assert with_it < 0.95 * without


@pytest.mark.parametrize("type_", (*IQ3, TensorType.IQ2_S), ids=lambda t: t.name)
def test_no_importance_is_equal_importance(type_):
    rows = samples(np.random.default_rng(5), 2, SUPERBLOCK)
    plain = quantize_rows(type_, rows)
    for weight in (1, 1e-30, 3e38, 0):
        assert np.array_equal(quantize_rows(type_, rows, importance=np.full(SUPERBLOCK, weight, np.float32)), plain)


@every_type
def test_the_scale_of_the_importance_changes_nothing(type_):
    rows = samples(np.random.default_rng(6), 2, SUPERBLOCK)
    importance = chi_square(SUPERBLOCK)
    data = encode(type_, rows, importance)
    for factor in (2.0**-60, 2.0**60):
        assert np.array_equal(encode(type_, rows, importance * np.float32(factor)), data)


@every_type
def test_a_power_of_two_changes_the_scale_alone(type_):
    rows = samples(np.random.default_rng(7), 2, SUPERBLOCK)
    values = recode(type_, rows)
    for factor in (np.float32(2.0**-4), np.float32(2.0**8)):
        assert np.array_equal(recode(type_, rows * factor), values * factor)


@every_type
def test_columns_without_importance_do_not_count(type_):
    rows = np.random.default_rng(8).standard_normal((3, SUPERBLOCK), dtype=np.float32)
    importance = np.ones(SUPERBLOCK, np.float32)
    importance[: SUPERBLOCK // 2] = 0
    values = recode(type_, rows, importance)
    half = slice(SUPERBLOCK // 2, None)
    assert (((values - rows) ** 2)[:, half].sum(axis=1) < NOISE[type_] * 1.3 * (rows[:, half] ** 2).sum(axis=1)).all()
    # Those that do not count keep their signs and sizes all the same.
    assert (np.abs(values - rows)[:, : SUPERBLOCK // 2]).max() < 4
    assert ((values * rows)[:, : SUPERBLOCK // 2].sum(axis=1) > 0).all()


@every_type
def test_one_column_with_importance(type_):
    rows = np.random.default_rng(9).standard_normal((3, SUPERBLOCK), dtype=np.float32)
    importance = np.zeros(SUPERBLOCK, np.float32)
    importance[77] = 1e-20
    assert recode(type_, rows, importance)[:, 77] == pytest.approx(rows[:, 77], rel=0.02)


@every_type
def test_zeros(type_):
    rows = np.zeros((2, 2 * SUPERBLOCK), np.float32)
    rows[1] = -0.0
    rows[1, 300] = 1.0
    values = recode(type_, rows)
    assert (values[0] == 0).all()
    assert (values[1, :SUPERBLOCK] == 0).all()
    assert 0.3 < values[1, 300] < 1.2
    assert ((values[1] - rows[1]) ** 2).sum() < 0.6
    rows[1, 300] = 1e-40
    assert (recode(type_, rows) == 0).all()


@every_type
@pytest.mark.parametrize("value", [1.0, -1.0, 0.013, -3e4, 2.0**-14], ids=str)
def test_equal_values(type_, value):
    rows = np.full((1, SUPERBLOCK), value, np.float32)
    values = recode(type_, rows)
    assert values == pytest.approx(
        rows, rel=0.001 if abs(value) > 0.001 else 0.04
    )  # the scale may be a subnormal float16


@every_type
@pytest.mark.parametrize("value", [LARGEST, 6e-8, 3e-8, 2.0**-24, 2.0**-27, 1e-9, 1e-40, 2.0**-149], ids=str)
def test_extreme_values_stay_finite_and_no_worse_than_zeros(type_, value):
    random = np.random.default_rng(12)
    rows = (value * random.uniform(-1, 1, (3, SUPERBLOCK))).astype(np.float32)
    rows[1] = np.where(random.random(SUPERBLOCK) < 0.5, value, -value)
    rows[2, 1:] = 0
    rows[2, 0] = -value
    values = recode(type_, rows, chi_square(SUPERBLOCK)).astype(np.float64)
    assert np.isfinite(values).all()
    error = weighted_error(rows, values, chi_square(SUPERBLOCK))
    assert (error <= weighted_error(rows, 0 * values, chi_square(SUPERBLOCK)) * (1 + 1e-6)).all()
    if value > 1:
        assert (error[:2] < 0.5 * weighted_error(rows, 0 * values, chi_square(SUPERBLOCK))[:2]).all()


@every_type
def test_any_values(type_):
    importance = chi_square(SUPERBLOCK, 13)

    @settings(max_examples=60, deadline=None)
    @given(rows=arrays(np.float32, (1, SUPERBLOCK), elements=floats(-65504, 65504, width=32)))
    def check(rows):
        values = recode(type_, rows, importance)
        assert np.isfinite(values).all()
        assert weighted_error(rows, values, importance) <= weighted_error(rows, 0 * values, importance) * (1 + 1e-5)

    check()


@every_type
def test_the_number_of_threads_changes_nothing(type_):
    rows = samples(np.random.default_rng(14), 5, SUPERBLOCK)
    importance = chi_square(SUPERBLOCK)
    one = encode(type_, rows, importance, threads=1)
    for threads in (2, 3, 8):
        assert np.array_equal(encode(type_, rows, importance, threads), one)


@every_type
def test_rows_and_blocks_do_not_influence_each_other(type_):
    rows = samples(np.random.default_rng(15), 2, 3 * SUPERBLOCK)
    importance = chi_square(3 * SUPERBLOCK)
    data = encode(type_, rows, importance)
    assert np.array_equal(np.concatenate([encode(type_, row[None], importance) for row in rows]), data)
    parts = [
        encode(type_, np.ascontiguousarray(rows[:, i : i + SUPERBLOCK]), importance[i : i + SUPERBLOCK].copy())
        for i in range(0, 3 * SUPERBLOCK, SUPERBLOCK)
    ]
    assert np.array_equal(np.concatenate(parts, axis=1), data)


@every_type
def test_golden_bytes(type_):
    with np.load(GOLDEN) as golden:
        rows, importance = golden["rows"], golden["importance"]
        assert np.array_equal(quantize_rows(type_, rows, importance=importance), golden[type_.name])
        if not type_.needs_importance:
            assert np.array_equal(quantize_rows(type_, rows), golden[f"{type_.name}_plain"])
