"""Flips by margin, on score tables that were made by hand, with answers worked out by hand."""

import numpy as np
import pytest

from m3_convert.flip_margin import EDGES, Flips, FlipTally, bins, find_flips, near_tie_share
from m3_convert.selection import swapped_blocks

INF = np.inf


def flips(reference, candidate, scores, *, local=(), mass=None):
    """One query, one head, one query head: {lost block: (margin, mass)}."""
    ours, theirs = (np.array([[side]], np.int32) for side in (reference, candidate))
    table = np.array([[scores]], np.float32)
    forced = np.zeros((1, len(scores)), bool)
    forced[0, list(local)] = True
    shares = np.full((1, 1, len(reference)), 0.25, np.float32) if mass is None else np.array([mass], np.float32)
    found = find_flips(swapped_blocks(ours, theirs, len(scores)), table, forced, ours, shares)
    assert found.row.tolist() == found.head.tolist() == [0] * len(found.block)
    return {int(b): (m, w) for b, m, w in zip(found.block, found.margin.tolist(), found.mass.tolist(), strict=True)}


def test_no_flip():
    assert flips([0, 1], [1, 0], [4, 3, 2, 1]) == {}


def test_gap_to_the_block_that_was_read_instead_in_standard_deviations():
    # Blocks 0 to 3 count: 4, 2, 2, 0 have a mean of 2 and a standard deviation of sqrt(2).
    found = flips([0, 4], [3, 4], [4, 2, 2, 0, 99], local=[4])
    assert found == {0: (pytest.approx(4 / np.sqrt(2)), 0.25)}
    assert flips([0, 1, 4], [0, 2, 4], [4, 2, 2, 0, 99], local=[4]) == {1: (0, 0.25)}


def test_the_best_of_several_gained_blocks_counts():
    # 3, 2.5 lost for 2 and 1: gaps 1 and 0.5 to the better one
    scores = [3, 2.5, 2, 1, 1.5]
    spread = np.std(scores)
    found = flips([0, 1], [2, 3], scores)
    assert found[0][0] == pytest.approx(1 / spread) and found[1][0] == pytest.approx(0.5 / spread)


def test_without_a_gained_block_the_best_unread_one_counts():
    scores = [3, 2, 1.75, -INF]
    assert flips([0, 1], [0, -1], scores)[1][0] == pytest.approx(0.25 / np.std([3, 2, 1.75]))


def test_blocks_that_are_not_visible_do_not_count():
    seen = flips([0], [1], [3, 2, 1])[0][0]
    assert flips([0], [1], [3, 2, 1, -INF, -INF])[0][0] == seen == pytest.approx(1 / np.std([3, 2, 1]))


def test_a_lost_local_block_is_no_near_tie():
    assert flips([0, 2], [0, 1], [3, 2, -9], local=[2])[2][0] == INF


def test_equal_scores():
    assert flips([0], [1], [3, 3, 3])[0][0] == 0


def test_mass_is_the_mean_of_the_query_heads_of_the_list():
    found = flips([1, 3], [1, 2], [4, 3, 2, 1], mass=[[0.5, 0.5], [0.75, 0.25]])
    assert found[3][1] == 0.375


def test_scores_need_not_begin_at_zero():
    near = flips([0], [1], [3, 2.75, 1])[0][0]
    assert flips([0], [1], [1003, 1002.75, 1001])[0][0] == pytest.approx(near)
    assert flips([0], [1], [30, 27.5, 10])[0][0] == pytest.approx(near)  # nor have a scale


def test_bins():
    margins = np.array([0, 0.0099, 0.01, 0.02, 0.03, 0.0999, 0.1, 0.3, 0.99, 1, 50, INF])
    assert bins(margins).tolist() == [0, 0, 1, 1, 2, 2, 3, 4, 4, 5, 5, 5]
    assert len(EDGES) == 7


def flips_of(heads, margins, mass):
    n = np.arange(len(margins))
    return Flips(n, np.array(heads), n, np.array(margins), np.array(mass))


def test_tally():
    tally = FlipTally(2)
    tally.add(flips_of([0, 1, 1], [0.005, 0.005, 0.5], [0.1, 0.2, 0.25]))
    tally.add(flips_of([1], [0.005], [0.5]))
    assert tally.counts.tolist() == [[1, 0, 0, 0, 0, 0], [2, 0, 0, 0, 1, 0]]
    assert tally.mass.tolist() == [[0.1, 0, 0, 0, 0, 0], [0.2 + 0.5, 0, 0, 0, 0.25, 0]]
    assert near_tie_share(tally.counts) == 0.75
    assert near_tie_share(np.zeros((2, 6), int)) is None
    assert near_tie_share(np.array([0, 0, 3, 1, 0, 0])) == 0.75  # up to 0.1


def test_flips_of_many_lists_are_told_apart():
    """The same as one list at a time, in the order of queries, heads and blocks."""
    rng = np.random.default_rng(3)
    n, heads, top_k, n_blocks = 9, 2, 3, 8
    scores = rng.normal(size=(n, heads, n_blocks)).astype(np.float32)
    ours = np.sort(np.argsort(-scores)[..., :top_k]).astype(np.int32)
    theirs = np.sort(rng.permuted(np.tile(np.arange(n_blocks), (n, heads, 1)), axis=2)[..., :top_k]).astype(np.int32)
    mass = rng.random((n, 2 * heads, top_k)).astype(np.float32)
    forced = np.zeros((n, n_blocks), bool)
    found = find_flips(swapped_blocks(ours, theirs, n_blocks), scores, forced, ours, mass)
    each = []
    for row, head in np.ndindex(n, heads):
        part = slice(row, row + 1), slice(head, head + 1)
        pair = mass[row : row + 1, 2 * head : 2 * head + 2]
        swaps = swapped_blocks(ours[part], theirs[part], n_blocks)
        one = find_flips(swaps, scores[part], forced[row : row + 1], ours[part], pair)
        each += [(row, head, *item) for item in zip(one.block, one.margin, one.mass, strict=True)]
    assert each == list(zip(found.row, found.head, found.block, found.margin, found.mass, strict=True))
    assert len(each) > n
