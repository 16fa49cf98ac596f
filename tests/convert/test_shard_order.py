"""When a shard is needed first and last, and what of it is there at a time."""

from pathlib import Path

import pytest

from m3_convert.shard_order import ReleasePoints, ShardOrder

A, B, C, D = (Path(name) for name in "abcd")
SIZES = {A: 1, B: 10, C: 100, D: 1000}

# a is needed at both ends, b and c by one matrix.
ORDER = ShardOrder(((5, (A,)), (9, (B,)), (12, (B, C)), (20, (C,)), (31, (D,)), (40, (A,))))


def test_order_and_ends() -> None:
    assert ORDER.shards == (A, B, C, D)
    assert ORDER.ends == {A: 40, B: 12, C: 20, D: 31}


@pytest.mark.parametrize(
    ("done", "shards"), [(0, (A, B, C, D)), (9, (B, C, D, A)), (12, (C, D, A)), (39, (A,)), (40, ())]
)
def test_what_is_left(done: int, shards: tuple[Path, ...]) -> None:
    """A matrix that is on the disk needs nothing any more; one that is not whole is read from its start."""
    assert ORDER.after(done).shards == shards


@pytest.mark.parametrize(
    ("order", "ahead", "peak"),
    [
        (ORDER, False, 1001),  # a, d
        (ORDER, True, 1111),  # a, b and c for one matrix, and d ahead
        (ORDER.after(20), False, 1000),  # d, then a
        (ORDER.after(20), True, 1001),
        (ORDER.after(31), True, 1),
        (ORDER.after(40), True, 0),
    ],
)
def test_what_is_there_at_a_time(order: ShardOrder, ahead: bool, peak: int) -> None:
    assert order.peak(SIZES.__getitem__, ahead=ahead) == peak


def test_shards_that_do_not_count() -> None:
    """One that is in the cache is not the one that is downloaded ahead."""
    sizes = {**SIZES, C: 0}
    assert ORDER.peak(sizes.__getitem__, ahead=True) == 1 + 10 + 1000


@pytest.mark.parametrize("eager", [True, False])
def test_releases(eager: bool) -> None:
    released: list[Path] = []
    points = ReleasePoints(ORDER, released.append, eager=eager)
    assert not points.due(11) and points.due(12) is eager
    points.recorded(11)
    assert released == []
    points.recorded(25)
    assert released == [B, C] and not points.due(30)
    points.recorded(40)
    assert released == [B, C, D, A] and not points.due(40)
