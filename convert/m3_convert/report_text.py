"""The report of a check for people, on one screen, from the dict of its JSON report (report_json.py)."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TextIO

import numpy as np
from rich.console import Console
from rich.table import Table

from m3_convert.flip_margin import near_tie_share
from m3_convert.notation import decimal, percent, perplexity, share
from m3_convert.report_layer import LayerSummary, query_heads_of, worst_head
from m3_runtime.command import one_line
from m3_runtime.quantities import format_bytes

Json = Mapping[str, Any]

_WIDTH: Final = 120
_LAYERS: Final = 12  #: that are shown; of a model with more the worst


class _Console(Console):
    """rich ends the process with 1 when the reader leaves, which here would mean that the check fell short."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def print_report(report: Json, stream: TextIO) -> None:
    console = _Console(file=stream)
    # In a narrow window lines wrap; rich would cut the numbers of the tables off instead.
    console.width = max(console.width, _WIDTH)
    _line(console, report["verdict"]["text"], style="bold")
    for sentence in report["verdict"]["evidence"]:
        _line(console, sentence)
    _line(console, "")
    _line(console, f"reference  {_side(report['reference'])}")
    _line(console, f"candidate  {_side(report['candidate'])}")
    _line(console, f"text       {_text(report)}")
    _line(console, f"evaluated  {_settings(report)}")
    if report["overall"]["worst"] is not None:
        _line(console, "")
        _selection(console, report)
    if report["logits"] is not None:
        _line(console, "")
        console.print(_logits(report["logits"]))
    if report["attribution"] is not None:
        _line(console, "")
        _attribution(console, report["attribution"])


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


# ------------------------------------------------------------------------------------------------ what was compared


def _side(side: Json) -> str:
    groups: dict[str, list[str]] = {}
    for group, sizes in side["types"].items():
        groups.setdefault(" and ".join(sizes), []).append(group)
    types = "; ".join(f"{', '.join(names)} {type_}" for type_, names in groups.items())
    kind = {"gguf": "GGUF", "checkpoint": "checkpoint"}[side["kind"]]
    return f"{one_line(side['path'])} ({kind}, {format_bytes(side['bytes'])}): {types}"


def _text(report: Json) -> str:
    text = report["text"]
    n, wanted = text["tokens"], text["wanted"]
    found = f"{one_line(text['name'])}, {'all' if text['whole'] else 'the first'} {n:,} tokens"
    if wanted is not None and n < wanted:
        found += f" (fewer than the {wanted:,} asked for)"
    return f"{found}; queries from position {report['tested']['first_position']:,} on had a choice"


def _settings(report: Json) -> str:
    model, settings = report["model"], report["settings"]
    ours, theirs = (_caches(settings[side]) for side in ("reference", "candidate"))
    same = f"{ours}; " if ours == theirs else f"reference: {ours}; candidate: {theirs}; "
    return f"{model['top_k']} of the blocks of {model['block_size']} tokens; {same}{settings['isa']} kernels"


def _caches(settings: Json) -> str:
    return f"{settings['attention']}, K/V {settings['kv_type'].upper()}, index keys {settings['index_type'].upper()}"


# ------------------------------------------------------------------------------------------------ tables


def _selection(console: Console, report: Json) -> None:
    alone = {layer["layer"]: layer for layer in report["isolated"] or ()}
    table = _table(
        "layer",
        "overlap",
        "worst head",
        "lowest",
        *(["alone"] if alone else []),
        "changed",
        "ties",
        "lost",
        "near-ties",
        "mass lost",
        "query head",
        "first change",
    )
    layers, worst = report["layers"], report["overall"]["worst"]["layer"]
    shown = _worst_layers(layers)
    for layer in shown:
        style = "bold" if layer["layer"] == worst and report["overall"]["changed"] else ""
        table.add_row(*_layer(layer, alone.get(layer["layer"])), style=style)
    console.print(table)
    rest = [layer for layer in layers if layer not in shown]
    if rest:
        overlap = min(worst_head(layer)["overlap_mean"] for layer in rest)
        mass = max(head["mean"] for layer in rest for head in query_heads_of(layer))
        _line(
            console,
            f"{len(rest)} more layers: overlap of every head at least {share(overlap)}, mass lost of every query head "
            f"at most {percent(mass)}",
        )
    about = "; alone: worst head, fed with the reference's hidden states" if alone else ""
    _line(
        console,
        "overlap: both read / either reads; worst and query head: mean of one head; lowest: one list; lost: blocks "
        f"that only the reference reads; mass: of the reference's attention{about}",
    )


def _worst_layers(layers: Sequence[Json]) -> list[Json]:
    """In their order."""
    by_overlap = sorted(layers, key=lambda layer: worst_head(layer)["overlap_mean"])
    by_mass = sorted(layers, key=lambda layer: -LayerSummary.of(layer).loser["mean"])
    found = dict.fromkeys(layer["layer"] for pair in zip(by_overlap, by_mass, strict=True) for layer in pair)
    kept = list(found)[:_LAYERS]
    return [layer for layer in layers if layer["layer"] in kept]


def _layer(layer: Json, alone: Json | None) -> list[str]:
    heads, summary = layer["heads"], LayerSummary.of(layer)
    lists = sum(head["equal"] + head["ties"] + head["changed"] for head in heads)
    first = min((head["first_changed"] for head in heads if head["first_changed"] is not None), default=None)
    return [
        str(layer["layer"]),
        share(summary.overlap),
        f"{summary.worst['head']}: {share(summary.worst['overlap_mean'])}",
        share(summary.lowest["overlap_min"]),
        *([share(worst_head(alone)["overlap_mean"])] if alone else []),
        percent(sum(head["changed"] for head in heads) / lists),
        str(sum(head["ties"] for head in heads)),
        str(sum(head["blocks_lost"] for head in heads)),
        _near_ties(heads),
        percent(summary.mass_lost),
        f"{summary.loser['head']}: {percent(summary.loser['mean'])}",
        "-" if first is None else str(first),
    ]


def _near_ties(heads: Sequence[Json]) -> str:
    counts = np.sum([head["flips"]["counts"] for head in heads], axis=0)
    near = near_tie_share(counts)
    return "-" if near is None else percent(near)


def _logits(logits: Json) -> Table:
    table = _table("logits", "perplexity", "KL mean", "median", "99%", "max", "same top-1")
    table.add_row("reference", perplexity(logits["reference"]["perplexity"]))
    for name, key in (("candidate", "candidate"), ("with the reference's blocks", "forced")):
        run = logits[key]
        kld = (decimal(run["kld"][part]) for part in ("mean", "median", "p99", "max"))
        table.add_row(name, perplexity(run["perplexity"]), *kld, percent(run["top1"]))
    return table


def _attribution(console: Console, attribution: Json) -> None:
    table = _table("restored", "types", "size", "overlap", "worst head", "mass lost", "KL mean")
    groups = sorted(attribution["groups"], key=lambda group: -group["overlap_mean"])
    table.add_row("nothing", "", "", *_costs(attribution["baseline"]))
    for group in groups:
        more = group["reference_bytes"] - group["bytes"]
        size = f"{'+' if more >= 0 else '-'}{format_bytes(abs(more))}"
        table.add_row(group["group"], " and ".join(group["types"]), size, *_costs(group))
    console.print(table)
    if attribution["same"]:
        _line(console, f"the same on both sides: {', '.join(attribution['same'])}")


def _costs(run: Json) -> list[str]:
    return [share(run["overlap_mean"]), share(run["worst_overlap"]), percent(run["mass_lost"]), decimal(run["kld"])]
