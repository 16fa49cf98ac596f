"""Distances of next-token distributions, on logits with answers worked out by hand."""

import math

import numpy as np
import pytest

from m3_convert import divergence
from m3_convert.divergence import Divergence, compare_logits, itself


def logits(*rows):
    """float32 logits of these probabilities."""
    return np.log(np.array(rows, np.float64)).astype(np.float32)


def test_equal_logits_are_exactly_equal():
    rows = np.random.default_rng(1).normal(0, 10, (50, 333)).astype(np.float32)
    following = np.arange(50)
    found, own = compare_logits(rows, rows.copy(), following), itself(rows, following)
    assert (found.kld == 0).all() and found.top1.all()
    for name in ("kld", "top1", "loss"):
        np.testing.assert_array_equal(getattr(found, name), getattr(own, name), err_msg=name)


def test_known_divergence():
    p, q = logits([0.5, 0.25, 0.25]), logits([0.25, 0.25, 0.5])
    found = compare_logits(p, q, np.array([2]))
    assert found.kld[0] == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2), rel=1e-6)
    assert found.loss[0] == pytest.approx(math.log(2), rel=1e-6)
    assert found.top1.tolist() == [False]
    # It is that of the run from the reference, not the other way round.
    a, b = logits([0.9, 0.1]), logits([0.5, 0.5])
    forward = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    assert compare_logits(a, b, np.array([0])).kld[0] == pytest.approx(forward, rel=1e-5)


def test_a_constant_added_to_all_logits_changes_nothing():
    p = logits([0.5, 0.3, 0.2])
    assert compare_logits(p, p + np.float32(8), np.array([0])).kld[0] == pytest.approx(0, abs=1e-6)


def test_large_logits_do_not_overflow():
    p, q = (np.array([[a, -a]], np.float32) for a in (1e4, -1e4))
    found = compare_logits(p, q, np.array([0]))
    assert found.kld[0] == found.loss[0] == 2e4 and found.top1.tolist() == [False]


def test_slices_change_no_bit(monkeypatch):
    rng = np.random.default_rng(2)
    p, q = (rng.normal(0, 3, (40, 100)).astype(np.float32) for _ in range(2))
    following = rng.integers(0, 100, 40)
    whole = compare_logits(p, q, following)
    monkeypatch.setattr(divergence, "SLICE", 300)
    parts = [compare_logits(p[rows], q[rows], following[rows]) for rows in (slice(0, 7), slice(7, 40))]
    for name in ("kld", "top1", "loss"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(joined, getattr(whole, name), err_msg=name)
    assert (whole.kld > 0).all()


def test_summary():
    found = Divergence(5)
    found.put(0, divergence.Rows(np.array([0.0, 4, 1]), np.array([True, False, True]), np.log([2.0, 4, 8])))
    found.put(3, divergence.Rows(np.array([2.0, 3]), np.array([True, True]), np.array([math.log(16), 1e9])))
    assert found.kld_mean == 2 and found.kld_quantile(0.5) == 2 and (found.kld_max, found.kld_max_at) == (4, 1)
    assert found.kld_between(1, 3) == pytest.approx(7 / 3)
    assert found.top1_share == 0.8
    # The last position is followed by nothing: its loss does not count.
    assert found.perplexity == pytest.approx((2 * 4 * 8 * 16) ** 0.25)


def test_one_token_and_a_hopeless_model():
    found = Divergence(1)
    found.put(0, divergence.Rows(np.zeros(1), np.ones(1, bool), np.zeros(1)))
    assert found.perplexity == 1
    found = Divergence(2)
    found.put(0, divergence.Rows(np.zeros(2), np.ones(2, bool), np.array([1e5, 0])))
    assert math.isfinite(found.perplexity)
