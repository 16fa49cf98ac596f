"""The report of a check as one HTML page, made from the dict of its JSON report (schema version 2) alone.

The page holds everything it shows: no script, no font, image or style sheet from elsewhere; its Content-Security-Policy
forbids them to whatever text is in it.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from m3_convert import notation, report_charts
from m3_convert.disk_room import DISK_FAULTS
from m3_convert.whole_file import whole_file
from m3_runtime.errors import InputError, MachineError
from m3_runtime.quantities import format_bytes, format_seconds

Json = Mapping[str, Any]

_STATUS = {"passed": "Passed", "fell short": "Fell short", "reported": "Reported, no threshold set"}
_SENTENCE_END = re.compile(r"(?<=[.]) (?=[A-Z])")


def write_page(report: Json, path: Path) -> None:
    """Writes the page to a file, UTF-8; an earlier file of that name is replaced when the new one is whole.

    Raises InputError if the file cannot be written, MachineError if the disk is full or fails.
    """
    text = render_page(report)
    try:
        with whole_file(path) as part:
            part.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        kind = MachineError if error.errno in DISK_FAULTS else InputError
        raise kind(f"{path}: the report cannot be written: {error.strerror}; nothing was kept") from error


def render_page(report: Json) -> str:
    """The page. Every string of the report is text to it, whatever it holds."""
    verdict = report["verdict"]
    lead, *rest = _SENTENCE_END.split(verdict["text"], maxsplit=1)
    template = _environment().get_template("page.html.jinja")
    return template.render(
        report=report,
        lead=lead,
        rest=rest,
        evidence=verdict["evidence"],
        status=_STATUS[verdict["status"]],
        failed=verdict["failed"],
        sections=_sections(report),
        figures=_figures(report),
        strips=[report_charts.block_strip(report, query) for query in report["worst"]],
        groups=list(dict.fromkeys((*report["reference"]["types"], *report["candidate"]["types"]))),
    )


def _sections(report: Json) -> list[tuple[str, str]]:
    """Ids and names of the sections that this report has."""
    lists = report_charts.compares_lists(report)
    sections = {
        "numbers": ("Key numbers", True),
        "agreement": ("Blocks read", True),
        "cost": ("Cost", lists),
        "output": ("Output", report["logits"]),
        "origin": ("Origin", (lists and report["isolated"]) or report["attribution"]),
        "queries": ("Worst queries", report["worst"]),
        "files": ("Files", True),
        "run": ("Measurement", True),
        "not-tested": ("Not tested", report["not_tested"]),
    }
    return [(name, title) for name, (title, there) in sections.items() if there]


def _figures(report: Json) -> dict[str, Any]:
    """The charts by name, None for one that has nothing to show."""
    lists = report_charts.compares_lists(report)
    return {
        "overlap_map": report_charts.overlap_map(report) if lists else None,
        "overlap_chart": report_charts.overlap_chart(report) if lists else None,
        "mass_map": report_charts.mass_map(report) if lists else None,
        "mass_chart": report_charts.mass_chart(report) if lists else None,
        "flips_chart": report_charts.flips_chart(report) if lists else None,
        "kld_chart": report_charts.kld_chart(report) if report["logits"] else None,
        "isolated_chart": report_charts.isolated_chart(report) if report["isolated"] and lists else None,
        "attribution_chart": report_charts.attribution_chart(report) if report["attribution"] else None,
    }


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("m3_convert"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_fit,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        share=notation.share,
        percent=notation.percent,
        points=notation.points,
        decimal=notation.decimal,
        exact=notation.exact,
        perplexity=notation.perplexity,
        count=notation.count,
        bytes=format_bytes,
        duration=format_seconds,
        curly=notation.curly,
        visible_token=notation.visible_token,
        deviation=_deviation,
        place=_place,
        px=_pixels,
    )
    return environment


def _fit(value: Any) -> Any:
    return notation.fit_for_html(value) if type(value) is str else value


def _deviation(layer: Json, head: int) -> float | None:
    """How far the tensors are off that score the blocks for an index head; None for infinitely far."""
    found = (layer["queries"][head], layer["keys"])
    return None if None in found else max(found)


def _place(percent: float) -> str:
    """A place along the horizontal axis, as SVG has it."""
    return f"{round(percent, 2):g}%"


def _pixels(value: float) -> str:
    return f"{round(value, 1):g}"
