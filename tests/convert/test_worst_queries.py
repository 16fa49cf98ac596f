"""The queries that lose most: which are kept, and what is kept of them."""

import json

import numpy as np
import pytest

from m3_convert.comparison import LayerComparison, ReferenceRows
from m3_convert.selection import PositionBuckets, SelectionRule
from m3_convert.worst_queries import WORST, WorstQueries

RULE = SelectionRule(top_k=2, block_size=16, local_blocks=1)
N, HEADS, N_HEAD = 400, 2, 4


def table(seed, n=N):
    """What a reference did at queries from 32 on, and the lists of a candidate, which are other ones at times."""
    rng = np.random.default_rng(seed)
    positions = np.arange(32, 32 + n)
    own, n_blocks = positions // 16, (32 + n) // 16 + 1
    scores = rng.normal(size=(n, HEADS, n_blocks)).astype(np.float32)
    scores[np.arange(n_blocks) > own[:, None, None] + np.zeros((1, HEADS, 1))] = -np.inf

    def lists(table):
        others = np.where(np.arange(n_blocks) == own[:, None, None], -np.inf, table).argmax(axis=2)
        return np.sort(np.stack([others, np.repeat(own[:, None], HEADS, 1)], 2)).astype(np.int32)

    mass = rng.random((n, N_HEAD, 2)).astype(np.float32)
    mass /= mass.sum(axis=2, keepdims=True)
    noisy = scores + rng.normal(0, 0.2, scores.shape)
    return ReferenceRows(positions, lists(scores), scores, mass, RULE.forced(positions, n_blocks)), lists(noisy)


def part(rows, which):
    arrays = (rows.positions, rows.lists, rows.scores, rows.mass, rows.forced)
    return ReferenceRows(*(array[which] for array in arrays))


def collect(tables, cuts=()):
    """All differences as (rank, layer, head, block of the query), and the worst of them."""
    worst, all_ = WorstQueries(16), []
    for layer, (rows, lists) in enumerate(tables):
        buckets = PositionBuckets.over(RULE, 32 + len(rows.positions))
        comparison = LayerComparison.empty(layer, (HEADS, N_HEAD), buckets, 0.0)
        for which in np.split(np.arange(len(rows.positions)), cuts):
            chunk = part(rows, which)
            difference = comparison.add(chunk, lists[which])
            worst.add(layer, chunk, lists[which], difference)
            loss = difference.mass_lost.reshape(len(which), HEADS, -1).max(axis=2)
            all_ += [
                ((-loss[i, h], layer, h, chunk.positions[i]), (layer, h, chunk.positions[i] // 16))
                for i, h in np.argwhere(loss > 0)
            ]
    return sorted(all_), worst


def test_the_worst_of_each_layer_head_and_block():
    all_, worst = collect([table(1), table(2)])
    expected, taken = [], set()
    for rank, key in all_:
        if key not in taken:
            expected.append(rank)
            taken.add(key)
    assert len(taken) > WORST and len(all_) > len(taken)
    assert [query.rank for query in worst] == expected[:WORST]
    for query in worst:
        assert len(query.lost) == len(query.gained) == 1
        assert query.lost[0].block in query.reference_blocks and query.gained[0].block in query.candidate_blocks
        assert query.lost[0].score > query.gained[0].score
        assert query.query_head // 2 == query.head


@pytest.mark.parametrize("cuts", [[1], [200], [16, 17, 300], range(8, N, 8)])
def test_chunks_do_not_matter(cuts):
    tables = [table(1), table(2)]
    assert collect(tables, cuts)[1].to_json() == collect(tables)[1].to_json()


def test_equal_losses_are_in_order(monkeypatch):
    rows, lists = table(4)
    rows.mass[:] = 0.5
    first = [(q.layer, q.head, q.position) for q in collect([(rows, lists)])[1]]
    assert first == sorted(first)
    assert [(q.layer, q.head, q.position) for q in collect([(rows, lists)], range(8, N, 8))[1]] == first


def test_nothing_lost_is_nothing_worst():
    rows, _ = table(3)
    assert list(collect([(rows, rows.lists)])[1]) == []


def test_saved_and_restored():
    worst = collect([table(1)])[1]
    again = WorstQueries(16)
    again.restore(json.loads(json.dumps(worst.to_json())))
    assert list(again) == list(worst)
