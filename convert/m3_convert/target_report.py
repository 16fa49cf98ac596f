"""What a search reports.

schema    {"name": "m3-convert-target", "version": 1}
target    {"min_overlap": number or null, "max_bytes": number or null}
met       true or false
file      path of the file, null if none was written; recipe: likewise
bytes     of the file
recipe_sha256
base      {"name", "bytes", "outcome": null if it was not checked, because it is too large}
outcome   {"kld": nats, "top1": share of positions with the same most likely token, "overlap_mean",
           "worst": {"layer", "head", "overlap"}, "mass_lost": mean, "worst_mass": of the query head that loses most,
           "worst_mass_at": {"layer", "query_head"}}: beside the source
rounds    [{"bytes", "outcome"}]: all files that were made and checked
types     {type: number of tensors}
seconds   wall time of this run
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TextIO

from rich.console import Console
from rich.table import Table

from m3_convert.notation import decimal, exact, percent, share
from m3_convert.output_path import recipe_path
from m3_convert.target_search import Candidate, Found, Target
from m3_convert.trial_check import Outcome
from m3_runtime.quantities import format_bytes, format_seconds

Json = dict[str, Any]

SCHEMA_VERSION: Final = 1
_WIDTH: Final = 120
_LEGEND: Final = (
    "worst head, query head: the layer/head with the lowest mean overlap, and the one that loses most of the "
    "reference's attention"
)


def target_json(target: Target, found: Found, base: str, out: Path | None, seconds: float) -> Json:
    """out: the file, if it was written."""
    best = found.best
    return {
        "schema": {"name": "m3-convert-target", "version": SCHEMA_VERSION},
        "target": {"min_overlap": target.min_overlap, "max_bytes": target.max_bytes},
        "met": found.met,
        "file": str(out) if out else None,
        "recipe": str(recipe_path(out)) if out else None,
        "recipe_sha256": best.recipe.sha256,
        "bytes": best.n_bytes,
        "base": {
            "name": base,
            "bytes": found.base_bytes,
            "outcome": _outcome(found.base.outcome) if found.base else None,
        },
        "outcome": _outcome(best.outcome),
        "rounds": [{"bytes": c.n_bytes, "outcome": _outcome(c.outcome)} for c in found.rounds],
        "types": _types(best),
        "seconds": round(seconds, 3),
    }


def print_found(report: Mapping[str, Any], stream: TextIO) -> None:
    """The report for people."""
    console = Console(file=stream)
    console.width = max(console.width, _WIDTH)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for name in ("size", "overlap", "worst head", "query head", "KL", "same top-1"):
        table.add_column(name, justify="right", no_wrap=True)
    base = report["base"]
    table.add_row(base["name"], format_bytes(base["bytes"]), *_cells(base["outcome"]))
    table.add_row("found", format_bytes(report["bytes"]), *_cells(report["outcome"]))
    console.print(table)
    target = report["target"]
    if target["max_bytes"] is not None:
        goal = f"{report['bytes']} of {target['max_bytes']} bytes"
    else:
        goal = f"worst head {share(report['outcome']['worst']['overlap'])}, {exact(target['min_overlap'])} asked for"
    console.print(_LEGEND, markup=False, highlight=False, soft_wrap=True)
    where = f"{report['file']} and {report['recipe']}" if report["file"] else "nothing was written"
    console.print(
        f"{where}: {goal}; {len(report['rounds'])} files checked, {format_seconds(report['seconds'])}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _cells(outcome: Mapping[str, Any] | None) -> list[str]:
    if outcome is None:
        return ["too large", "", "", "", ""]
    worst, mass_at = outcome["worst"], outcome["worst_mass_at"]
    return [
        share(outcome["overlap_mean"]),
        f"{worst['layer']}/{worst['head']}: {share(worst['overlap'])}",
        f"{mass_at['layer']}/{mass_at['query_head']}: {percent(outcome['worst_mass'])}",
        decimal(outcome["kld"]),
        percent(outcome["top1"]),
    ]


def _outcome(outcome: Outcome) -> Json:
    worst = outcome.worst
    return {
        "kld": outcome.kld,
        "top1": outcome.top1,
        "overlap_mean": outcome.overlap_mean,
        "worst": {"layer": worst.layer, "head": worst.head, "overlap": worst.overlap},
        "mass_lost": outcome.mass_lost,
        "worst_mass": outcome.worst_mass,
        "worst_mass_at": dict(zip(("layer", "query_head"), outcome.worst_mass_at, strict=True)),
    }


def _types(candidate: Candidate) -> dict[str, int]:
    """Number of tensors by type."""
    return dict(Counter(type_.name for type_ in candidate.types.values()).most_common())
