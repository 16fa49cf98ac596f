"""The command m3-check-selection."""

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer

from m3_convert.check import NAME, Check, note, run_check
from m3_convert.notation import exact
from m3_convert.output_path import check_output
from m3_convert.report_json import report_json
from m3_convert.report_text import print_report
from m3_convert.tensor_group import GROUPS
from m3_convert.text_sample import DEFAULT_CONTEXT
from m3_convert.verdict import DEFAULT_KLD, DEFAULT_MASS_LOST, Thresholds
from m3_convert.walker import WalkOptions
from m3_runtime.choices import ATTENTIONS, CACHE_TYPES, chosen
from m3_runtime.command import abandon_stdout, guarded, new_app, run
from m3_runtime.errors import InputError
from m3_runtime.options import Device, IndexType, Isa, KvType, Threads, Version, one_of
from m3_runtime.quantities import format_bytes, format_seconds

_HTML: Final = b"<!doctype html"

app = new_app()


@app.command(
    help="Compares which blocks the sparse attention of two models reads over the same text, what attention that costs "
    "and what comes out. A query that sees no more than top_k blocks reads them all and tests nothing; the others are "
    "compared layer by layer and head by head. The candidate runs twice: as it is, and with the reference's blocks, "
    "which tells the damage of the selection from all other.",
    epilog="Exit codes: 0 done; 1 a threshold is missed; 2 the models, the text or the arguments are wrong; 3 nothing "
    "was tested, no query had a choice of blocks; 4 memory or disk is missing; 70 a bug; 130 interrupted.",
)
@guarded
def check_command(
    reference: Annotated[
        Path,
        typer.Argument(metavar="REFERENCE", help="Checkpoint folder, GGUF file, or Hub id."),
    ],
    candidate: Annotated[
        Path,
        typer.Argument(
            metavar="CANDIDATE", help="The same model in another form: checkpoint folder, GGUF file, or Hub id."
        ),
    ],
    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="Text to read, UTF-8; - is standard input. Without it a text that ships with m3-gguf.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", metavar="N", min=1, help=f"Tokens of the text to use, {DEFAULT_CONTEXT} by default."),
    ] = None,
    min_overlap: Annotated[
        float | None,
        typer.Option(
            "--min-overlap",
            metavar="X",
            help="Exit with 1 unless every layer and index head has a mean overlap of at least X, 0 to 1: the worst "
            "of them is judged, not the mean of all. The overlap of a query is the number of blocks that both models "
            "read over the number that either reads; ties within float32 rounding count as 1.",
        ),
    ] = None,
    max_mass_lost: Annotated[
        float | None,
        typer.Option(
            "--max-mass-lost",
            metavar="X",
            help="Exit with 1 if a query head of any layer loses more than X of its attention in the mean, 0 to 1: "
            f"what the reference gives to blocks that the candidate does not read. {DEFAULT_MASS_LOST:g} by default; 1 "
            "allows all.",
        ),
    ] = None,
    max_kld: Annotated[
        float | None,
        typer.Option(
            "--max-kld",
            metavar="X",
            help="Exit with 1 if the mean KL divergence of the candidate's next-token distributions is above X nats, "
            f"{DEFAULT_KLD:g} by default.",
        ),
    ] = None,
    no_thresholds: Annotated[
        bool,
        typer.Option("--no-thresholds", help="Without the defaults: what is not asked for is reported and not judged."),
    ] = False,
    isolate: Annotated[
        bool,
        typer.Option(
            "--isolate",
            help="Also feed each layer of the candidate with the reference's hidden states: what its own tensors do. "
            "One more run.",
        ),
    ] = False,
    attribute: Annotated[
        bool,
        typer.Option(
            "--attribute",
            help="Also restore one group of the candidate's tensors at a time from the reference: what each gives "
            "back. One more run for each group.",
        ),
    ] = False,
    group: Annotated[
        list[str] | None,
        typer.Option("--group", metavar="NAME", help=f"Only these with --attribute (repeat it): {', '.join(GROUPS)}."),
    ] = None,
    selection_only: Annotated[
        bool,
        typer.Option(
            "--selection-only",
            help="Leave out logits and the run with the reference's blocks: two runs in place of three.",
        ),
    ] = False,
    kv_type: KvType = "f16",
    index_type: IndexType = "f32",
    candidate_kv_type: Annotated[
        str | None,
        typer.Option(
            "--candidate-kv-type",
            metavar="TYPE",
            callback=one_of(CACHE_TYPES),
            help="The candidate's alone: --kv-type is that of both.",
        ),
    ] = None,
    candidate_index_type: Annotated[
        str | None,
        typer.Option(
            "--candidate-index-type",
            metavar="TYPE",
            callback=one_of(CACHE_TYPES),
            help="The candidate's alone: --index-type is that of both.",
        ),
    ] = None,
    candidate_attention: Annotated[
        str,
        typer.Option(
            "--candidate-attention",
            metavar="|".join(ATTENTIONS),
            callback=one_of(ATTENTIONS),
            help="dense: the candidate reads every visible block.",
        ),
    ] = "sparse",
    report: Annotated[
        Path | None, typer.Option("--report", metavar="OUT.html", help="Write the report as a page, too.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="DIR",
            help="Where the state of a check in progress is kept, so that the same command goes on after an "
            "interruption. Default: m3-gguf/check in $XDG_CACHE_HOME or ~/.cache.",
        ),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start anew, whatever an interrupted run of the same check left.")
    ] = False,
    device: Device = "cpu",
    isa: Isa = "auto",
    threads: Threads = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON, with the numbers by head.")
    ] = False,
    version: Version = False,
) -> int:
    judges, selects = not no_thresholds, candidate_attention != "dense"
    check = Check(
        reference=reference,
        candidate=candidate,
        text=text,
        context=context,
        reference_options=WalkOptions(kv_type, index_type, threads),
        candidate_options=WalkOptions(
            candidate_kv_type or kv_type, candidate_index_type or index_type, threads, candidate_attention
        ),
        thresholds=Thresholds(
            _threshold("--min-overlap", min_overlap, None, 1),
            _threshold("--max-mass-lost", max_mass_lost, DEFAULT_MASS_LOST if judges and selects else None, 1),
            _threshold("--max-kld", max_kld, DEFAULT_KLD if judges and not selection_only else None),
        ),
        logits=not selection_only,
        isolate=isolate,
        attribute=attribute,
        groups=tuple(chosen("--group", name, GROUPS) for name in group or ()),
        state=state,
        restart=restart,
        device=device,
        isa=isa,
    )
    page = None
    if report is not None:
        page = _page_path(report, [reference, candidate, *([text] if text else [])])
    with run_check(check) as finished:
        note(f"done in {format_seconds(finished.seconds)}, peak memory {format_bytes(finished.peak_bytes)}")
        content = report_json(finished)
        try:
            if as_json:
                print(json.dumps(content, indent=2, allow_nan=False))
            else:
                print_report(content, sys.stdout)
            sys.stdout.flush()
        except BrokenPipeError:
            abandon_stdout()  # whoever read the report left; the verdict stands
        if page is not None:  # after the numbers, which a full disk shall not take along
            from m3_convert.report_page import write_page  # the template engine is needed here alone

            write_page(content, page)
    if finished.verdict.shortfalls:
        note(finished.verdict.shortfall)
    return finished.verdict.exit_code


def _threshold(option: str, value: float | None, default: float | None, most: float | None = None) -> float | None:
    if value is None:
        return default
    if not (0 <= value < math.inf and (most is None or value <= most)):  # NaN is neither
        expected = "a number of 0 or more" if most is None else f"0 to {most:g}"
        raise InputError(f"{option} is {exact(value)}, expected {expected}")
    return value + 0.0  # no -0


def _page_path(out: Path, inputs: list[Path]) -> Path:
    """Where the page goes. Raises InputError for a file that is no page: a slip would replace a model by its report."""
    page = check_output(out, "the report", inputs)
    if page.exists():
        try:
            with page.open("rb") as file:
                start = file.read(len(_HTML))
        except PermissionError as error:
            raise InputError(
                f"{out}: is there already and cannot be read: expected an HTML page, which alone the report may replace"
            ) from error
        if start and start.lower() != _HTML:
            raise InputError(f"{out}: is there already and is no HTML page, which alone the report may replace")
    return page


def main() -> NoReturn:
    """Entry point of m3-check-selection."""
    run(app, NAME)


if __name__ == "__main__":
    main()
