"""What m3-check-selection reports: a verdict in one sentence, a table with a row for each layer, or JSON.

The JSON (schema version 1). Positions are token positions from 0. Counts are lists: one for each query that had a
choice of blocks, index head and sparse layer. Overlap is the Jaccard index of two lists, 0 to 1; a tie counts as 1.

    schema      {"name": "m3-check-selection", "version": 1}
    program     version of this program
    verdict     {"text", "status": "reported" | "passed" | "fell short", "min_overlap": number or null,
                 "exit_code"}: passed and fell short only with --min-overlap
    reference   {"path", "kind": "gguf" | "checkpoint", "bytes": on disk, "types": {tensor group: {type: bytes}}}: a
                checkpoint is evaluated, and described, as the file that `m3-convert --type auto` makes of it
    candidate   the same
    model       {"layers", "dense_layers", "index_heads", "block_size", "top_k", "local_blocks"}
    text        {"name", "bytes", "sha256": of the whole text, "tokens": that were evaluated, "whole": true if these
                 are all of the text, "wanted": what --context asked for, or null}
    settings    {"attention": "sparse", "kv_type", "index_type", "isa", "threads": 0 for all cores}
    tested      {"queries": that had a choice, "first_position": of these, "lists"}
    overall     {"equal", "ties", "changed": these three add up to tested.lists, "blocks_lost", "overlap_mean",
                 "worst": {"layer", "head", "overlap_mean"}: the layer and head that --min-overlap judges,
                 "lowest": {"layer", "head", "overlap", "position": null if all lists agree}: the worst single list,
                 "first_changed": position or null}
    buckets     [{"first", "last", "queries"}]: ranges of positions, last included
    layers      [{"layer", "rounding": difference of block scores up to which a swap is a tie,
                  "heads": [{"head", "equal", "ties", "changed", "blocks_lost", "overlap_mean", "overlap_min",
                             "overlap_min_position", "first_changed": positions or null,
                             "histogram": {"changed": [by bucket], "overlap_mean": [by bucket]}}]}]
    memory      {"estimated_bytes", "peak_bytes": of the process, pages of mapped files included}
    seconds     wall time
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from m3_convert.layered_model import Kind
from m3_convert.progress import format_bytes
from m3_convert.selection import Agreement, LayerTally
from m3_convert.text_sample import TextSample
from m3_convert.walker import WalkOptions
from m3_runtime.command import one_line
from m3_runtime.engine import Hparams
from m3_runtime.errors import ExitCode

SCHEMA_VERSION = 1

_TABLE_WIDTH = 110


@dataclass(frozen=True)
class SideSummary:
    """One of the two models."""

    name: str
    kind: Kind
    n_bytes: int
    types: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class CheckReport:
    """All that is known when a check is done."""

    agreement: Agreement
    reference: SideSummary
    candidate: SideSummary
    hparams: Hparams
    sample: TextSample
    wanted_tokens: int | None  #: what --context asked for
    options: WalkOptions
    isa: str
    min_overlap: float | None
    program: str
    estimated_bytes: int
    peak_bytes: int
    seconds: float

    @property
    def fell_short(self) -> bool:
        """True if the worst layer and head has a mean overlap below the threshold."""
        return self.min_overlap is not None and self.agreement.worst.overlap < self.min_overlap

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.FELL_SHORT if self.fell_short else ExitCode.OK

    @property
    def shortfall(self) -> str:
        """One line for stderr; only if the check fell short."""
        worst = self.agreement.worst
        return (
            f"layer {worst.layer}, head {worst.head}: mean overlap {format_share(worst.overlap)} is below "
            f"--min-overlap {self.min_overlap:g}"
        )


def format_share(value: float) -> str:
    """Four decimals, rounded down: 1 stands for exactly 1 only, and a threshold that was missed never looks met."""
    return f"{int(value * 10000) / 10000:.4f}"


def format_percent(part: int, whole: int) -> str:
    """A share for people; 0% and 100% stand for exactly none and all."""
    if part in (0, whole):
        return "100%" if part else "0%"
    percent = 100 * part / whole
    if percent < 0.01:
        return "<0.01%"
    if percent > 99.99:
        return ">99.99%"
    return f"{percent:.2f}%"


def verdict(report: CheckReport) -> str:
    """The result in one sentence, two with a threshold."""
    a, heads = report.agreement, report.hparams.n_index_head
    where = (
        f"{a.lists:,} block lists ({len(a.layers)} layers x {heads} heads x {a.queries:,} queries that had a choice)"
    )
    ties = f"; {a.ties:,} differ by ties within float32 rounding" if a.ties else ""
    if not a.changed:
        text = f"Same selection: the candidate reads the reference's blocks in all {where}{ties}."
    else:
        text = (
            f"Selection changed: the candidate reads other blocks in {format_percent(a.changed, a.lists)} of {where}"
            f"{ties}; the worst is layer {a.worst.layer}, head {a.worst.head} with a mean overlap of "
            f"{format_share(a.worst.overlap)}."
        )
    if report.min_overlap is None:
        return text
    if report.fell_short:
        return f"{text} Fell short: {report.shortfall}."
    return f"{text} Passed: every layer and head has a mean overlap of at least {report.min_overlap:g}."


# ------------------------------------------------------------------------------------------------ text


class _Console(Console):
    """rich ends the process with 1 when the reader leaves, which here would mean that the check fell short."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def print_report(report: CheckReport, stream: TextIO) -> None:
    """The report for people."""
    console = _Console(file=stream)
    # In a narrow window lines wrap; rich would cut the numbers of the table off instead.
    console.width = max(console.width, _TABLE_WIDTH)
    _line(console, verdict(report), style="bold")
    _line(console, "")
    _line(console, f"reference  {_side(report.reference)}")
    _line(console, f"candidate  {_side(report.candidate)}")
    _line(console, f"text       {_text(report)}")
    h, o = report.hparams, report.options
    _line(
        console,
        f"evaluated  sparse attention, {h.top_k} blocks of {h.block_size} tokens; cache: K/V {o.kv_type.upper()}, "
        f"index keys {o.index_type.upper()}; {report.isa} kernels",
    )
    _line(console, "")
    console.print(_table(report.agreement))
    _line(
        console,
        "overlap: both read / either reads, mean of the lists; worst head: its mean; lowest: one list; lost: blocks "
        "that only the reference reads; first change: token position",
    )


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _side(side: SideSummary) -> str:
    groups: dict[str, list[str]] = {}
    for group, sizes in side.types.items():
        groups.setdefault(" and ".join(sizes), []).append(group)
    types = "; ".join(f"{', '.join(names)} {type_}" for type_, names in groups.items())
    kind = {"gguf": "GGUF", "checkpoint": "checkpoint"}[side.kind]
    return f"{one_line(side.name)} ({kind}, {format_bytes(side.n_bytes)}): {types}"


def _text(report: CheckReport) -> str:
    sample = report.sample
    n, name = len(sample.ids), one_line(sample.text.name)
    found = f"{name}, {'all' if sample.whole else 'the first'} {n:,} tokens"
    if report.wanted_tokens is not None and n < report.wanted_tokens:
        found += f" (fewer than the {report.wanted_tokens:,} asked for)"
    return f"{found}; queries from position {report.agreement.rule.always_read:,} on had a choice"


def _table(agreement: Agreement) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("layer", "overlap", "worst head", "lowest", "equal", "ties", "changed", "lost", "first change"):
        table.add_column(name, justify="right", no_wrap=True)
    worst = agreement.worst.layer if agreement.changed else None
    for tally in agreement.layers:
        table.add_row(*_row(tally), style="bold" if tally.layer == worst else "")
    return table


def _row(tally: LayerTally) -> tuple[str, ...]:
    lists, head = tally.tested * tally.n_heads, tally.worst_head
    return (
        str(tally.layer),
        format_share(float(tally.overlap_sum.sum()) / lists),
        f"{head}: {format_share(float(tally.overlap_mean[head]))}",
        format_share(float(tally.overlap_min.min())),
        format_percent(int(tally.equal.sum()), lists),
        str(int(tally.ties.sum())),
        format_percent(int(tally.changed.sum()), lists),
        str(int(tally.blocks_lost.sum())),
        "-" if tally.first_change < 0 else str(tally.first_change),
    )


# ------------------------------------------------------------------------------------------------ JSON


def report_json(report: CheckReport) -> dict[str, Any]:
    """The report for scripts; the schema stands at the top of this file."""
    a, h = report.agreement, report.hparams
    lowest, position = a.lowest
    changes = [layer.first_change for layer in a.layers if layer.first_change >= 0]
    status = "reported" if report.min_overlap is None else "fell short" if report.fell_short else "passed"
    return {
        "schema": {"name": "m3-check-selection", "version": SCHEMA_VERSION},
        "program": report.program,
        "verdict": {
            "text": verdict(report),
            "status": status,
            "min_overlap": report.min_overlap,
            "exit_code": int(report.exit_code),
        },
        "reference": _side_json(report.reference),
        "candidate": _side_json(report.candidate),
        "model": {
            "layers": h.n_layer,
            "dense_layers": h.n_dense_layer,
            "index_heads": h.n_index_head,
            "block_size": h.block_size,
            "top_k": h.top_k,
            "local_blocks": h.local_blocks,
        },
        "text": {
            "name": report.sample.text.name,
            "bytes": report.sample.text.n_bytes,
            "sha256": report.sample.text.sha256,
            "tokens": len(report.sample.ids),
            "whole": report.sample.whole,
            "wanted": report.wanted_tokens,
        },
        "settings": {
            "attention": "sparse",
            "kv_type": report.options.kv_type,
            "index_type": report.options.index_type,
            "isa": report.isa,
            "threads": report.options.threads,
        },
        "tested": {"queries": a.queries, "first_position": a.rule.always_read, "lists": a.lists},
        "overall": {
            "equal": a.equal,
            "ties": a.ties,
            "changed": a.changed,
            "blocks_lost": a.blocks_lost,
            "overlap_mean": a.overlap_mean,
            "worst": {"layer": a.worst.layer, "head": a.worst.head, "overlap_mean": a.worst.overlap},
            "lowest": {
                "layer": lowest.layer,
                "head": lowest.head,
                "overlap": lowest.overlap,
                "position": _position(position),
            },
            "first_changed": min(changes, default=None),
        },
        "buckets": [
            {"first": first, "last": last, "queries": int(queries)}
            for (first, last), queries in zip(a.buckets.ranges(), a.layers[0].bucket_tested, strict=True)
        ],
        "layers": [_layer_json(tally) for tally in a.layers],
        "memory": {"estimated_bytes": report.estimated_bytes, "peak_bytes": report.peak_bytes},
        "seconds": round(report.seconds, 3),
    }


def _side_json(side: SideSummary) -> dict[str, Any]:
    types = {group: dict(sizes) for group, sizes in side.types.items()}
    return {"path": side.name, "kind": side.kind, "bytes": side.n_bytes, "types": types}


def _layer_json(tally: LayerTally) -> dict[str, Any]:
    bucket_means = tally.bucket_overlap_sum / tally.bucket_tested
    return {
        "layer": tally.layer,
        "rounding": tally.rounding,
        "heads": [
            {
                "head": head,
                "equal": int(tally.equal[head]),
                "ties": int(tally.ties[head]),
                "changed": int(tally.changed[head]),
                "blocks_lost": int(tally.blocks_lost[head]),
                "overlap_mean": float(tally.overlap_mean[head]),
                "overlap_min": float(tally.overlap_min[head]),
                "overlap_min_position": _position(int(tally.overlap_min_at[head])),
                "first_changed": _position(int(tally.first_changed[head])),
                "histogram": {
                    "changed": [int(n) for n in tally.bucket_changed[head]],
                    "overlap_mean": [float(x) for x in bucket_means[head]],
                },
            }
            for head in range(tally.n_heads)
        ],
    }


def _position(position: int) -> int | None:
    return position if position >= 0 else None
