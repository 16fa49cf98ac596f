"""The charts of a check, from the dict of its JSON report."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from m3_convert import chart
from m3_convert.chart import (
    Bar,
    BarChart,
    BarRow,
    Cell,
    HeatMap,
    HeatRow,
    Mark,
    RangeChart,
    RangeRow,
    Step,
    StepChart,
    Tick,
)
from m3_convert.flip_margin import NEAR_TIE
from m3_convert.notation import count, decimal, exact, more_bytes, percent, share
from m3_convert.report_layer import LayerSummary, query_heads_of, worst_head

Json = Mapping[str, Any]

#: Edges of the shades of an overlap, each a lower bound; exactly 1 comes before them.
OVERLAP_EDGES: Final = (0.999, 0.997, 0.99, 0.97, 0.9, 0.7)
#: The same for a share of attention, upper bounds; exactly 0 comes before them.
MASS_EDGES: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03)
_KLD_HEIGHT: Final = 180.0
_X_LABELS: Final = 4  #: a phone has room for so many positions


def compares_lists(report: Json) -> bool:
    """False if the candidate reads every visible block, so that it has no lists."""
    return report["overall"]["worst"] is not None


# ------------------------------------------------------------------------------------------------ agreement


def overlap_map(report: Json) -> HeatMap:
    """Overlap by layer and position; each cell is the head that agrees least there."""
    buckets = report["buckets"]
    rows = [
        HeatRow(str(layer["layer"]), [_overlap_cell(layer, n, bucket) for n, bucket in enumerate(buckets)])
        for layer in report["layers"]
    ]
    worst = report["overall"]["worst"]
    label = (
        f"Heat map of the overlap, {len(rows)} layers by {len(buckets)} ranges of positions. The lowest mean of a head "
        f"is {share(worst['overlap_mean'])}, in layer {worst['layer']}, head {worst['head']}."
    )
    legend = ["1", *(f"≥ {edge:g}" for edge in OVERLAP_EDGES), f"< {OVERLAP_EDGES[-1]:g}"]
    return HeatMap(label, "position", rows, _position_ticks(buckets), legend)


def _overlap_cell(layer: Json, n: int, bucket: Json) -> Cell:
    head = min(layer["heads"], key=lambda h: h["histogram"]["overlap_mean"][n])
    found = head["histogram"]
    overlap = found["overlap_mean"][n]
    shade = 0 if overlap >= 1 else 1 + sum(overlap < edge for edge in OVERLAP_EDGES)
    return Cell(
        shade,
        f"Layer {layer['layer']}, positions {_range(bucket)}, head {head['head']}: overlap {share(overlap)}, lowest "
        f"list {share(found['overlap_min'][n])}, attention lost {percent(found['mass_lost'][n])}",
    )


def _range(bucket: Json) -> str:
    return f"{count(bucket['first'])} to {count(bucket['last'])}"


def _position_ticks(buckets: Sequence[Json]) -> list[Tick]:
    """Labels for the first positions of a few buckets, and the end."""
    n = len(buckets)
    step = -(-n // _X_LABELS)
    ticks = [Tick(100 * k / n, count(buckets[k]["first"])) for k in range(0, n, step) if k == 0 or n - k > step]
    return [*ticks, Tick(100.0, count(buckets[-1]["last"] + 1))]


def overlap_chart(report: Json) -> RangeChart:
    """For each layer the mean overlap of its heads, its worst head, and its lowest list."""
    rows = [_overlap_row(layer) for layer in report["layers"]]
    worst = report["overall"]["worst"]
    label = (
        f"Chart of the overlap of {len(rows)} layers: mean of all heads, worst head, lowest list. The worst is head "
        f"{worst['head']} of layer {worst['layer']} with {share(worst['overlap_mean'])}."
    )
    wanted = report["thresholds"]["min_overlap"]
    threshold = None if wanted is None else Tick(chart.overlap_place(wanted), exact(wanted))
    return RangeChart(label, "overlap", chart.overlap_ticks(), rows, threshold)


def _overlap_row(layer: Json) -> RangeRow:
    summary, name = LayerSummary.of(layer), f"Layer {layer['layer']}"
    worst, lowest = summary.worst, summary.lowest
    at = "" if lowest["overlap_min_position"] is None else f" at position {count(lowest['overlap_min_position'])}"
    return RangeRow(
        str(layer["layer"]),
        f"{worst['head']}: {share(worst['overlap_mean'])}",
        [
            _overlap_mark("lowest", lowest["overlap_min"], f"{name}, head {lowest['head']}: lowest list{at}"),
            _overlap_mark("mean", summary.overlap, f"{name}, all heads: mean"),
            _overlap_mark("worst", worst["overlap_mean"], f"{name}, head {worst['head']}: mean of the worst head"),
        ],
    )


def _overlap_mark(kind: chart.MarkKind, overlap: float, title: str) -> Mark:
    return Mark(chart.overlap_place(overlap), kind, f"{title} {share(overlap)}")


# ------------------------------------------------------------------------------------------------ attention


def mass_map(report: Json) -> HeatMap:
    """Mean attention lost by layer and query head; lines part the query heads of different index heads."""
    layers = report["layers"]
    rows = [
        HeatRow(str(layer["layer"]), [_mass_cell(layer, head) for head in query_heads_of(layer)]) for layer in layers
    ]
    groups = [len(head["mass_lost"]["query_heads"]) for head in layers[0]["heads"]]
    starts = [sum(groups[:n]) for n in range(len(groups))]
    places = [100 * start / sum(groups) for start in starts]
    ticks = [Tick(at, f"head {head['head']}") for at, head in zip(places, layers[0]["heads"], strict=True)]
    step = -(-len(ticks) // _X_LABELS)
    label = f"Heat map of the attention lost, {len(rows)} layers by {sum(groups)} query heads. {_worst_mass(report)}"
    legend = ["0", *(f"< {100 * edge:g}%" for edge in MASS_EDGES), f"≥ {100 * MASS_EDGES[-1]:g}%"]
    return HeatMap(label, "", rows, ticks[::step], legend, places[1:])


def _worst_mass(report: Json) -> str:
    worst = report["overall"]["mass_lost"]["worst"]
    return (
        f"The most is lost by query head {worst['query_head']} of layer {worst['layer']}: {percent(worst['mean'])} on "
        "average."
    )


def _mass_cell(layer: Json, head: Json) -> Cell:
    mean = head["mean"]
    shade = 0 if mean <= 0 else 1 + sum(mean >= edge for edge in MASS_EDGES)
    return Cell(
        shade, f"Layer {layer['layer']}, query head {head['head']}: {percent(mean)}, at most {percent(head['max'])}"
    )


def mass_chart(report: Json) -> RangeChart:
    """For each layer the mean attention lost of its query heads, its worst query head, and the most of one query."""
    rows = [_mass_row(layer) for layer in report["layers"]]
    wanted = report["thresholds"]["max_mass_lost"]
    threshold = None if wanted is None else Tick(chart.share_place(wanted), f"{100 * wanted:g}%")
    label = (
        f"Chart of the attention lost in {len(rows)} layers: mean of all query heads, worst query head, most of one "
        f"query. {_worst_mass(report)}"
    )
    return RangeChart(label, "lost", chart.share_ticks(), rows, threshold)


def _mass_row(layer: Json) -> RangeRow:
    summary, name = LayerSummary.of(layer), f"Layer {layer['layer']}"
    worst, most = summary.loser, summary.most
    return RangeRow(
        str(layer["layer"]),
        f"{worst['head']}: {percent(worst['mean'])}",
        [
            _mass_mark("lowest", most["max"], f"{name}, query head {most['head']}: most of one query"),
            _mass_mark("mean", summary.mass_lost, f"{name}, all query heads: mean"),
            _mass_mark("worst", worst["mean"], f"{name}, query head {worst['head']}: mean of the worst"),
        ],
    )


def _mass_mark(kind: chart.MarkKind, mass: float, title: str) -> Mark:
    return Mark(chart.share_place(mass), kind, f"{title} {percent(mass)}")


def flips_chart(report: Json) -> BarChart | None:
    """Blocks lost by the margin of their scores: how many, and what attention went with them. None without any."""
    flips = report["overall"]["flips"]
    counts, masses = flips["counts"], flips["mass"]
    if not sum(counts):
        return None
    shares = [n / sum(counts) for n in counts], [mass / (sum(masses) or 1) for mass in masses]
    scale = 100 / max(*shares[0], *shares[1])
    rows = []
    for n, (part, mass) in enumerate(zip(*shares, strict=True)):
        name = _margin(flips["edges"][n], flips["edges"][n + 1])
        bars = [
            Bar(
                "first",
                0,
                part * scale,
                f"{percent(part)}",
                f"Margin {name}: {count(counts[n])} flips, {percent(part)}",
            ),
            Bar("second", 0, mass * scale, percent(mass), f"Margin {name}: {percent(mass)} of the attention lost"),
        ]
        rows.append(BarRow(name, count(counts[n]), bars))
    near = sum(edge is not None and edge <= NEAR_TIE for edge in flips["edges"][1:])
    label = f"Chart of {count(sum(counts))} flips by margin: {percent(flips['near_ties'])} of them are near-ties."
    return BarChart(label, rows, band_rows=near, band_label=f"near-ties, below {NEAR_TIE:g}")


def _margin(low: float, high: float | None) -> str:
    return f"{low:g} and more" if high is None else f"{low:g} to {high:g}"


# ------------------------------------------------------------------------------------------------ output and cause


def kld_chart(report: Json) -> StepChart | None:
    """KL divergence by position, as it is and with the reference's blocks. None if nothing moved."""
    buckets = report["logits"]["buckets"]
    highest: float = max((bucket[key] for bucket in buckets for key in ("candidate_kld", "forced_kld")), default=0)
    if highest <= 0:
        return None
    ticks = chart.round_ticks(highest)
    first: int = buckets[0]["first"]
    end: int = buckets[-1]["last"] + 1

    def x(position: int) -> float:
        return 100 * (position - first) / (end - first)

    def y(value: float) -> float:
        return round(_KLD_HEIGHT * (1 - max(value, 0) / ticks[-1]), 2)

    steps = [
        Step(
            x(bucket["first"]),
            x(bucket["last"] + 1),
            y(bucket["candidate_kld"]),
            y(bucket["forced_kld"]),
            f"Positions {_range(bucket)}: candidate {decimal(bucket['candidate_kld'])}, with the reference's blocks "
            f"{decimal(bucket['forced_kld'])}",
        )
        for bucket in buckets
    ]
    choice = report["tested"]["first_position"]
    border = Tick(x(choice), "first choice") if first < choice < end else None
    label = (
        f"Chart of the KL divergence over {len(buckets)} ranges of positions, highest {decimal(highest)}: the "
        "candidate as it is, and with the reference's blocks."
    )
    x_ticks = [Tick(x(int(at)), count(int(at))) for at in (first + (end - first) * k / 4 for k in range(5))]
    return StepChart(label, _KLD_HEIGHT, steps, x_ticks, [Tick(y(t), f"{t:.7g}") for t in ticks], border)


def isolated_chart(report: Json) -> RangeChart:
    """For each layer its worst head: in the whole candidate, and fed with the reference's hidden state."""
    free = {layer["layer"]: layer for layer in report["layers"]}
    rows = []
    for layer in report["isolated"]:
        number = layer["layer"]
        alone, whole = worst_head(layer), worst_head(free[number])
        marks = [
            _overlap_mark("worst", whole["overlap_mean"], f"Layer {number}, head {whole['head']}, whole candidate:"),
            _overlap_mark("isolated", alone["overlap_mean"], f"Layer {number}, head {alone['head']}, layer alone:"),
        ]
        rows.append(RangeRow(str(number), f"{alone['head']}: {share(alone['overlap_mean'])}", marks))
    label = f"Chart of the worst head's overlap in {len(rows)} layers: the whole candidate, and each layer alone."
    return RangeChart(label, "overlap", chart.overlap_ticks(), rows)


def attribution_chart(report: Json) -> BarChart | None:
    """What restoring each group of tensors returns, as a share of what is lost; the most helpful first."""
    found = report["attribution"]["groups"]
    groups = [(group, group["returned"]["overlap"], group["returned"]["kld"]) for group in found]
    values: list[float] = [value for _, *pair in groups for value in pair if value is not None]
    if not values:
        return None
    low, high = min(0.0, *values), max(0.01, *values)

    def place(value: float) -> float:
        return 100 * (value - low) / (high - low)

    def bar(kind: chart.BarKind, value: float | None, what: str, group: str) -> list[Bar]:
        if value is None:
            return []
        ends = sorted((place(0), place(value)))
        return [
            Bar(kind, ends[0], ends[1], percent(value), f"{group} restored: {percent(value)} of the {what} returned")
        ]

    groups.sort(key=lambda entry: -(entry[1] or 0))
    rows = [
        BarRow(
            group["group"],
            more_bytes(group["reference_bytes"] - group["bytes"]),
            [
                *bar("first", agreement, "agreement lost", group["group"]),
                *bar("second", kld, "KL divergence", group["group"]),
            ],
        )
        for group, agreement, kld in groups
    ]
    label = (
        f"Chart of what restoring each of {len(rows)} groups of tensors returns; the most comes from {rows[0].label}."
    )
    return BarChart(label, rows, zero=place(0))


# ------------------------------------------------------------------------------------------------ blocks of one query


def block_strip(report: Json, query: Json) -> list[tuple[float, float, str, str]]:
    """The blocks that a query reads, along those it sees: (left and width in percent, row, title).

    The row is "both", "lost" (only the reference) or "gained" (only the candidate).
    """
    n_blocks = query["position"] // report["model"]["block_size"] + 1
    ours = {block for block in query["reference_blocks"] if block >= 0}
    theirs = {block for block in query["candidate_blocks"] if block >= 0}
    names = {"both": "read by both", "lost": "only the reference reads it", "gained": "only the candidate reads it"}
    strip = []
    for block in sorted(ours | theirs):
        row = "both" if block in ours & theirs else "lost" if block in ours else "gained"
        strip.append((100 * block / n_blocks, 100 / n_blocks, row, f"Block {block}: {names[row]}"))
    return strip
