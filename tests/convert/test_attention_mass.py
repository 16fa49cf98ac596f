"""Attention lost, on tables that were made by hand, with answers worked out by hand."""

from dataclasses import fields

import numpy as np
import pytest

from m3_convert.attention_mass import MassTally, mass_lost
from m3_convert.selection import PositionBuckets, SelectionRule, block_masks

RULE = SelectionRule(top_k=2, block_size=16, local_blocks=1)


def lost_by(reference, candidate, mass, n_blocks=6):
    """One query. reference, candidate: a list for each index head. mass: [n_head, top_k]."""
    ours, theirs = (np.array([side], np.int32) for side in (reference, candidate))
    lost = block_masks(ours, n_blocks) & ~block_masks(theirs, n_blocks)
    return mass_lost(np.array([mass], np.float32), ours, lost)[0].tolist()


def test_nothing_is_lost_by_equal_lists():
    assert lost_by([[0, 2, 4]], [[4, 2, 0]], [[0.5, 0.25, 0.25], [0, 1, 0]]) == [0, 0]


def test_each_query_head_loses_what_it_gave_to_the_block():
    # block 2, the second of the list, is lost
    assert lost_by([[0, 2, 4]], [[0, 3, 4]], [[0.5, 0.25, 0.25], [0, 1, 0], [0.5, 0, 0.5]]) == [0.25, 1, 0]


def test_several_lost_blocks_add_up():
    assert lost_by([[0, 2, 4]], [[1, 3, 4]], [[0.5, 0.25, 0.25]]) == [0.75]
    assert lost_by([[0, 1, 2]], [[3, 4, 5]], [[0.5, 0.25, 0.25]]) == [1]


def test_query_heads_lose_by_the_list_of_their_index_head():
    mass = [[0.75, 0.25], [0.5, 0.5], [0.75, 0.25], [0.25, 0.75]]  # heads 0 and 1 read the first list
    assert lost_by([[0, 1], [0, 1]], [[0, 2], [1, 2]], mass) == [0.25, 0.5, 0.75, 0.25]


def test_padding_is_no_block():
    # -1 must not stand for the last block, nor for block 0
    assert lost_by([[0, -1]], [[0, 5]], [[1, 0]]) == [0]
    assert lost_by([[1, -1]], [[0, 1]], [[1, 0]]) == [0]
    assert lost_by([[0, 1]], [[0, -1]], [[0.25, 0.75]]) == [0.75]
    assert lost_by([[0, -1]], [[1, 5]], [[0.5, 0.25]]) == [0.5]


def test_gained_blocks_pay_nothing_back():
    assert lost_by([[0, 1]], [[0, 2]], [[0.25, 0.75]]) == [0.75]


def test_no_more_than_all_is_lost():
    third = np.float32(1 / 3) + np.float32(1e-7)
    assert lost_by([[0, 1, 2]], [[3, 4, 5]], [[third, third, third]]) == [1]


def losses(n=100, heads=4):
    found = np.random.default_rng(7).random((n, heads)) / 3
    return np.where(found < 0.2, 0, found)


@pytest.mark.parametrize("cut", [1, 16, 50, 99])
def test_chunks_add_up(cut):
    lost, positions = losses(), np.arange(32, 132)
    buckets = PositionBuckets.over(RULE, 132)
    once, split = MassTally(4, buckets), MassTally(4, buckets)
    once.add(positions, lost)
    for rows in (slice(0, cut), slice(cut, cut), slice(cut, 100)):
        split.add(positions[rows], lost[rows])
    for field in fields(MassTally):
        np.testing.assert_array_equal(getattr(once, field.name), getattr(split, field.name), err_msg=field.name)


def test_means_and_the_largest():
    lost = losses()
    lost[70, 2] = 0.9
    lost[:, 1] = 0
    tally = MassTally(4, PositionBuckets.over(RULE, 132))
    tally.add(np.arange(32, 132), lost)
    np.testing.assert_allclose(tally.mean, lost.mean(axis=0))
    assert (tally.largest[2], tally.largest_at[2]) == (0.9, 102)
    assert (tally.largest[1], tally.largest_at[1]) == (0, -1)
    np.testing.assert_allclose(tally.by_index_head(2), lost.reshape(100, 2, 2).mean(axis=(0, 2)))
    np.testing.assert_allclose(tally.bucket_mean(2)[0], lost[:16].reshape(16, 2, 2).mean(axis=(0, 2)))
    np.testing.assert_allclose(tally.bucket_mean(2)[-1], lost[96:].reshape(4, 2, 2).mean(axis=(0, 2)))
