"""The charts of the report, and how it writes numbers."""

from copy import deepcopy

import pytest

import sample_report
from m3_convert import chart, report_charts
from m3_convert.notation import decimal, percent, share, visible_token

# ------------------------------------------------------------------------------------------------ charts


def test_shades():
    report = sample_report.all_equal()
    (head, _), n = report["layers"][0]["heads"], len(report["buckets"])
    overlaps = [1.0, 0.9999, 0.9989, 0.9969, 0.9899, 0.9699, 0.8999][:n]
    head["histogram"]["overlap_mean"] = overlaps
    cells = report_charts.overlap_map(report).rows[0].cells
    assert [cell.shade for cell in cells] == [0, 1, 2, 3, 4, 5, 6]
    head["histogram"]["overlap_mean"] = [0.69] * n
    assert {cell.shade for cell in report_charts.overlap_map(report).rows[0].cells} == {7}
    masses = [0.0, 0.00005, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03]
    query_heads = [q for h in report["layers"][0]["heads"] for q in h["mass_lost"]["query_heads"]]
    for query_head, mass in zip(query_heads, masses, strict=True):
        query_head["mean"] = mass
    assert [cell.shade for cell in report_charts.mass_map(report).rows[0].cells] == list(range(8))


def test_axes():
    for value, place in ((0.0, 0), (0.9, 21), (0.99, 42), (0.999, 63), (0.9999, 84), (1.0, 100)):
        assert chart.overlap_place(value) == pytest.approx(place)
    assert 84 < chart.overlap_place(1 - 1e-12) < 100
    assert [tick.label for tick in chart.overlap_ticks()] == ["0", "0.9", "0.99", "0.999", "0.9999", "1"]
    for value, place in ((1.0, 100), (0.1, 79), (0.01, 58), (0.001, 37), (0.0001, 16), (0.0, 0)):
        assert chart.share_place(value) == pytest.approx(place)
    assert 0 < chart.share_place(1e-12) < 16
    assert [tick.label for tick in chart.share_ticks()] == ["0", "0.01%", "0.1%", "1%", "10%", "100%"]
    for axis in (chart.overlap_ticks(), chart.share_ticks()):
        assert [tick.at for tick in axis] == sorted(tick.at for tick in axis)
    assert chart.round_ticks(0.0213) == pytest.approx([0, 0.01, 0.02, 0.03])
    assert chart.round_ticks(7.9) == pytest.approx([0, 2, 4, 6, 8])
    assert chart.round_ticks(0.1) == pytest.approx([0, 0.025, 0.05, 0.075, 0.1])


def test_layer_chart_marks_what_a_mean_hides():
    report = sample_report.full()
    rows = report_charts.overlap_chart(report).rows
    for row, layer in zip(rows, report["layers"], strict=True):
        lowest, mean, worst = row.marks
        overlaps = [head["overlap_mean"] for head in layer["heads"]]
        assert (lowest.kind, mean.kind, worst.kind) == ("lowest", "mean", "worst")
        assert worst.at == chart.overlap_place(min(overlaps))
        assert mean.at == pytest.approx(chart.overlap_place(sum(overlaps) / len(overlaps)))
        assert row.note == f"{overlaps.index(min(overlaps))}: {share(min(overlaps))}"
    threshold = report_charts.overlap_chart(report).threshold
    assert threshold is not None and (threshold.at, threshold.label) == (pytest.approx(42), "0.99")
    assert report_charts.overlap_chart(sample_report.minimal()).threshold is None


def test_flips_by_margin():
    report = sample_report.full()
    flips = report["overall"]["flips"]
    found = report_charts.flips_chart(report)
    assert found is not None and found.band_rows == 3
    assert [row.label for row in found.rows][::5] == ["0 to 0.01", "1 and more"]
    assert [row.note for row in found.rows] == [str(n) for n in flips["counts"]]
    for row, n, mass in zip(found.rows, flips["counts"], flips["mass"], strict=True):
        assert [bar.text for bar in row.bars] == [
            percent(n / sum(flips["counts"])),
            percent(mass / sum(flips["mass"])),
        ]
    assert max(bar.end for row in found.rows for bar in row.bars) == pytest.approx(100)
    assert report_charts.flips_chart(sample_report.all_equal()) is None


def test_attribution():
    found = report_charts.attribution_chart(sample_report.full())
    assert found is not None
    assert [row.label for row in found.rows][:2] == ["experts", "attention"]
    assert [bar.text for bar in found.rows[0].bars] == ["58.0%", "52.2%"]
    worse = found.rows[-1]
    assert worse.label == "head" and [bar.text for bar in worse.bars] == ["\u22121.00%", "\u22120.90%"]
    assert all(bar.start < bar.end == pytest.approx(found.zero) for bar in worse.bars)
    report = sample_report.full()
    for group in report["attribution"]["groups"]:
        group["returned"]["kld"] = None
    without = report_charts.attribution_chart(report)
    assert without is not None and {len(row.bars) for row in without.rows} == {1}
    assert report_charts.attribution_chart(sample_report.all_equal()) is None
    raised = deepcopy(sample_report.full())
    raised["attribution"]["groups"][0].update(bytes=9000, reference_bytes=1000)
    assert "\u22128.0 kB" in {row.note for row in report_charts.attribution_chart(raised).rows}


def test_divergence_by_position():
    report = sample_report.full()
    found = report_charts.kld_chart(report)
    assert found is not None and found.border is not None
    first = report["tested"]["first_position"]
    assert found.border.at == pytest.approx(100 * first / report["text"]["tokens"])
    top = float(found.y_ticks[-1].label)
    for step, bucket in zip(found.steps, report["logits"]["buckets"], strict=True):
        assert step.first == pytest.approx(found.height * (1 - bucket["candidate_kld"] / top), abs=0.01)
        assert step.second == pytest.approx(found.height * (1 - bucket["forced_kld"] / top), abs=0.01)
    assert (found.steps[0].start, found.steps[-1].end) == (0, 100)
    assert report_charts.kld_chart(sample_report.all_equal()) is None


def test_block_strip():
    report = sample_report.full()
    query = {"position": 1000, "reference_blocks": [0, 3, 7, -1], "candidate_blocks": [0, 5, 7]}
    strip = report_charts.block_strip(report, query)
    assert [(left, row) for left, _, row, _ in strip] == [(0, "both"), (37.5, "lost"), (62.5, "gained"), (87.5, "both")]
    assert {width for _, width, _, _ in strip} == {12.5}


# ------------------------------------------------------------------------------------------------ notation


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (share, 1.0, "1.0000"),
        (share, 0.99999999, "0.9999"),
        (share, 0.57, "0.5700"),
        (share, 0.98239, "0.9823"),
        (share, 0.0, "0.0000"),
        (percent, 0, "0%"),
        (percent, 1.0, "100%"),
        (percent, 0.00001, "<0.01%"),
        (percent, 0.99999, ">99.99%"),
        (percent, 0.0123, "1.23%"),
        (percent, 0.58, "58.0%"),
        (percent, -0.004, "\u22120.40%"),
        (decimal, 0.0, "0"),
        (decimal, 0.018312, "0.0183"),
        (decimal, -0.00242, "\u22120.00242"),
        (decimal, 41.66, "41.7"),
        (decimal, 1234.5, "1,234"),
        (decimal, 1e-9, "<0.000001"),
        (decimal, float("inf"), "∞"),
        (decimal, None, "\u2013"),
    ],
)
def test_notation(write, value, text):
    assert write(value) == text


def test_a_token_is_always_visible():
    assert [visible_token(t) for t in ("", " ", "\n\t", " a\n")] == ["∅", "␣", "⏎⇥", " a\n"]
