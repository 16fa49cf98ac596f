"""Agreement of block lists on score tables that were made by hand, with answers worked out by hand."""

from dataclasses import fields

import numpy as np
import pytest

from m3_convert.selection import (
    SCORE_ROUNDING,
    Agreement,
    Comparison,
    LayerTally,
    PositionBuckets,
    SelectionRule,
    block_masks,
    compare_lists,
    score_rounding,
)

INF = np.inf


def compare(reference, candidate, scores, *, local=(), rounding=0.25):
    """One query, one head: (kind, overlap, lost)."""
    scores = np.array([[scores]], np.float32)
    forced = np.zeros((1, scores.shape[-1]), bool)
    forced[0, list(local)] = True
    found = compare_lists(
        np.array([[reference]], np.int32), np.array([[candidate]], np.int32), scores, forced, rounding
    )
    kinds = {"equal": found.equal, "tie": found.tie, "changed": found.changed}
    (kind,) = (name for name, mask in kinds.items() if mask[0, 0])
    return kind, found.overlap[0, 0], found.lost[0, 0]


# ------------------------------------------------------------------------------------------------ one list


def test_equal_lists():
    assert compare([0, 2, 4], [0, 2, 4], [9, 1, 5, 2, 0], local=[4]) == ("equal", 1.0, 0)


def test_one_block_of_three_changed():
    # {0, 2, 4} and {0, 3, 4}: 2 read by both of 4 that either reads
    assert compare([0, 2, 4], [0, 3, 4], [9, 1, 5, 2, 0], local=[4]) == ("changed", 0.5, 1)


def test_nothing_in_common():
    assert compare([0, 1], [2, 3], [9, 8, 1, 0]) == ("changed", 0.0, 2)


def test_order_of_a_list_does_not_matter():
    assert compare([0, 2, 4], [4, 0, 2], [9, 1, 5, 2, 0]) == ("equal", 1.0, 0)


def test_padding_is_no_block():
    assert compare([0, 1, -1, -1], [0, 1, -1, -1], [1, 2]) == ("equal", 1.0, 0)
    assert compare([-1, -1], [-1, -1], [1, 2]) == ("equal", 1.0, 0)
    # {0, 1} and {0}: half of what either reads. Never a tie, whatever the scores: nothing took the block's place.
    assert compare([0, 1, -1], [0, -1, -1], [1, 1]) == ("changed", 0.5, 1)
    assert compare([0, -1, -1], [0, 1, -1], [1, 1]) == ("changed", 0.5, 0)


def test_padding_does_not_read_the_last_block():
    masks = block_masks(np.array([[[0, -1, -1]], [[2, -1, -1]]], np.int32), 3)
    assert masks.tolist() == [[[True, False, False]], [[False, False, True]]]


# ------------------------------------------------------------------------------------------------ ties


def test_exact_tie_across_the_cut():
    assert compare([0, 1, 4], [0, 2, 4], [9, 3, 3, 1, 0], local=[4]) == ("tie", 1.0, 0)


def test_tie_up_to_the_rounding_and_not_beyond():
    scores = [9, 3, 2.75, 1, 0]
    assert compare([0, 1, 4], [0, 2, 4], scores, rounding=0.25)[0] == "tie"
    assert compare([0, 1, 4], [0, 2, 4], scores, rounding=0.2499) == ("changed", 0.5, 1)


def test_several_tied_blocks_swapped_at_once():
    assert compare([0, 1, 2], [3, 4, 5], [3, 3, 3, 3, 3, 3], rounding=0) == ("tie", 1.0, 0)


def test_a_tie_beside_a_real_change_is_a_change():
    # 2 and 3 tie, but 0 was lost to 4 for no reason of rounding: all swapped blocks count
    assert compare([0, 1, 2], [1, 3, 4], [9, 8, 3, 3, 0]) == ("changed", 1 / 5, 2)


def test_each_near_the_cut_is_not_enough():
    # lost 3.2 and 3.0, gained 3.0 and 2.8: all within .25 of the cut at 3.0, yet rounding cannot put 2.8 over 3.2
    assert compare([0, 1], [2, 3], [3.2, 3.0, 3.0, 2.8], rounding=0.25)[0] == "changed"
    assert compare([0, 1], [2, 3], [3.2, 3.0, 3.0, 2.8], rounding=0.41)[0] == "tie"


def test_a_lost_local_block_is_never_a_tie():
    assert compare([0, 4], [0, 1], [9, 3, 3, 3, 3], local=[4])[0] == "changed"
    assert compare([0, 1], [0, 4], [9, 3, 3, 3, 3], local=[4])[0] == "changed"


def test_a_local_block_with_the_lowest_score_does_not_move_the_cut():
    # the local block 4 scores -50; the cut lies between 3 and 1, so losing 1 for 3 is real
    assert compare([0, 1, 4], [0, 3, 4], [9, 3, 2, 1, -50], local=[4]) == ("changed", 0.5, 1)


def test_a_block_that_is_not_visible_is_never_a_tie():
    assert compare([0, 1], [0, 2], [9, -1e30, -INF], rounding=1e30)[0] == "changed"


def test_rounding_covers_every_order_of_summation():
    """Scores of one query summed in float32 in many orders stay within the bound of each other."""
    rng = np.random.default_rng(5)
    q_norm, k_norm = (rng.normal(1, 0.3, 128).astype(np.float32) for _ in range(2))
    bound = score_rounding(q_norm, k_norm)
    worst = 0.0
    for _ in range(50):
        q, k = (rng.normal(size=128).astype(np.float32) for _ in range(2))
        q = q / np.sqrt(np.mean(q * q)) * q_norm
        k = np.abs(k / np.sqrt(np.mean(k * k))) * k_norm * np.sign(q)  # all products positive: the largest sums
        products = q * k
        sums = [np.add.accumulate(rng.permutation(products))[-1] for _ in range(20)]
        worst = max(worst, float(max(sums) - min(sums)))
        assert np.linalg.norm(q) * np.linalg.norm(k) <= bound / SCORE_ROUNDING
    assert 0 < worst <= bound


# ------------------------------------------------------------------------------------------------ which queries


@pytest.mark.parametrize(
    ("position", "choice"), [(0, False), (383, False), (384, True), (385, True), (511, True), (10**6, True)]
)
def test_had_choice(position, choice):
    rule = SelectionRule(top_k=3, block_size=128, local_blocks=1)
    assert rule.always_read == 384
    assert rule.had_choice(np.array([position])).tolist() == [choice]


def test_no_choice_if_all_blocks_are_local():
    rule = SelectionRule(top_k=3, block_size=16, local_blocks=3)
    assert not rule.chooses
    assert not rule.had_choice(np.arange(1000)).any()


def test_forced_blocks():
    rule = SelectionRule(top_k=4, block_size=16, local_blocks=2)
    assert rule.forced(np.array([0, 15, 16, 79]), 6).tolist() == [
        [True, False, False, False, False, False],
        [True, False, False, False, False, False],
        [True, True, False, False, False, False],
        [False, False, False, True, True, False],
    ]


def test_buckets_cover_the_tested_positions():
    rule = SelectionRule(top_k=3, block_size=16, local_blocks=1)
    for n_tokens in (49, 64, 65, 48 + 16 * 16, 48 + 16 * 16 + 1, 5000):
        buckets = PositionBuckets.over(rule, n_tokens)
        ranges = buckets.ranges()
        assert len(ranges) == len(buckets) <= 16
        assert [p for first, last in ranges for p in range(first, last + 1)] == list(range(48, n_tokens))
        index = buckets.index(np.arange(48, n_tokens))
        assert [index[first - 48] for first, _ in ranges] == [index[last - 48] for _, last in ranges]
        assert index.max() == len(buckets) - 1


# ------------------------------------------------------------------------------------------------ tallies

RULE = SelectionRule(top_k=2, block_size=16, local_blocks=1)


def tally_of(layer, overlaps, n_heads=2):
    """A tally of 100 queries at positions from 32 on; overlaps: {(query, head): overlap} of lists that lost a block."""
    start, n = 32, 100
    comparison = Comparison(
        np.ones((n, n_heads), bool), np.zeros((n, n_heads), bool), np.ones((n, n_heads)), np.zeros((n, n_heads), int)
    )
    for (query, head), overlap in overlaps.items():
        comparison.equal[query, head] = False
        comparison.overlap[query, head], comparison.lost[query, head] = overlap, 1
    tally = LayerTally(layer, n_heads, PositionBuckets.over(RULE, start + n), 0.0)
    tally.add(np.arange(start, start + n), comparison)
    return tally


def agreement_of(*tallies):
    return Agreement(RULE, tallies[0].buckets, tallies)


def test_all_equal_is_exactly_one():
    agreement = agreement_of(tally_of(3, {}), tally_of(4, {}))
    assert (agreement.lists, agreement.equal, agreement.ties, agreement.changed) == (400, 400, 0, 0)
    assert agreement.overlap_mean == 1.0 and agreement.worst.overlap == 1.0
    assert agreement.lowest[0].overlap == 1.0 and agreement.lowest[1] == -1
    assert [tally.first_change for tally in agreement.layers] == [-1, -1]


def test_one_changed_list_in_one_head_is_found():
    agreement = agreement_of(*(tally_of(i, {(70, 2): 0.5} if i == 7 else {}, n_heads=4) for i in range(3, 60)))
    assert agreement.overlap_mean > 0.99997  # which the mean hides
    assert (agreement.worst.layer, agreement.worst.head, agreement.worst.overlap) == (7, 2, 0.995)
    lowest, position = agreement.lowest
    assert (lowest.layer, lowest.head, lowest.overlap, position) == (7, 2, 0.5, 32 + 70)
    assert agreement.changed == 1 and agreement.blocks_lost == 1
    assert agreement.layers[4].first_change == 102


def test_one_head_that_always_reads_other_blocks_is_found():
    wrong = {(query, 3): 1 / 3 for query in range(100)}
    agreement = agreement_of(*(tally_of(i, wrong if i == 20 else {}, n_heads=4) for i in range(3, 60)))
    assert agreement.overlap_mean > 0.997
    assert (agreement.worst.layer, agreement.worst.head) == (20, 3)
    assert agreement.worst.overlap == pytest.approx(1 / 3)
    assert agreement.layers[17].changed.tolist() == [0, 0, 0, 100]


def test_positions_of_the_first_change_and_the_lowest_overlap():
    tally = tally_of(1, {(10, 0): 0.8, (40, 0): 0.2, (41, 0): 0.2, (5, 1): 0.9})
    assert tally.first_changed.tolist() == [42, 37] and tally.first_change == 37
    assert tally.overlap_min.tolist() == [0.2, 0.9] and tally.overlap_min_at.tolist() == [72, 37]
    assert tally.worst_head == 0
    np.testing.assert_allclose(tally.overlap_mean, [(97 + 0.8 + 0.4) / 100, 0.999])


def test_histogram_by_position():
    tally = tally_of(1, {(0, 0): 0.5, (15, 0): 0.5, (16, 0): 0.25, (99, 1): 0.0})
    assert tally.bucket_tested.tolist() == [16] * 6 + [4]
    assert tally.bucket_changed.T.tolist() == [[2, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1]]
    assert tally.bucket_overlap_sum.T.tolist() == [[15, 15.25, 16, 16, 16, 16, 4], [16] * 6 + [3]]
    assert tally.bucket_overlap_min.T.tolist() == [[0.5, 0.25, 1, 1, 1, 1, 1], [1] * 6 + [0]]


@pytest.mark.parametrize("cut", [1, 16, 50, 99])
def test_chunks_add_up(cut):
    rng = np.random.default_rng(cut)
    overlap = rng.choice([0.2, 1 / 3, 0.5, 1.0], (100, 2))
    tie = (overlap == 1) & (rng.random((100, 2)) < 0.5)
    whole = Comparison((overlap == 1) & ~tie, tie, overlap, (overlap < 1) * 2)
    parts = [
        Comparison(whole.equal[rows], whole.tie[rows], whole.overlap[rows], whole.lost[rows])
        for rows in (slice(0, cut), slice(cut, cut), slice(cut, 100))
    ]
    buckets = PositionBuckets.over(RULE, 132)
    once, split = LayerTally(0, 2, buckets, 0.0), LayerTally(0, 2, buckets, 0.0)
    once.add(np.arange(32, 132), whole)
    for part, positions in zip(parts, np.split(np.arange(32, 132), [cut, cut]), strict=True):
        split.add(positions, part)
    assert once.tested == split.tested == 100
    np.testing.assert_array_equal(once.equal + once.ties + once.changed, 100)
    for field in fields(LayerTally):  # sums of thirds too: no bit depends on the chunks
        np.testing.assert_array_equal(getattr(once, field.name), getattr(split, field.name), err_msg=field.name)
    np.testing.assert_allclose(once.overlap_sum, overlap.sum(axis=0))
