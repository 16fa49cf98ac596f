"""Sizes and times for people; sizes in options are tested with --split-max-size."""

from m3_runtime.quantities import format_bytes, format_seconds


def test_sizes_for_people():
    sizes = (0, 999, 1000, 5_640_000, 999_940_000, 999_960_000, 12_340_000_000, 852_900_000_000, 2.5e12)
    assert [format_bytes(n) for n in sizes] == [
        "0 bytes",
        "999 bytes",
        "1.0 kB",
        "5.6 MB",
        "999.9 MB",
        "1.0 GB",
        "12.3 GB",
        "852.9 GB",
        "2.5 TB",
    ]


def test_times_for_people():
    assert [format_seconds(s) for s in (4.24, 59.9, 125, 3725)] == ["4.2 s", "59.9 s", "2:05 min", "1:02:05 h"]
