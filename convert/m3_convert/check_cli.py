"""The command m3-check-selection."""

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, NoReturn

import numpy as np
import typer

from m3_convert.layer_walk import check_choice, check_comparable, check_memory, estimate_memory, walk, work
from m3_convert.layered_model import LayeredModel, open_layered
from m3_convert.progress import format_bytes, format_seconds
from m3_convert.report import CheckReport, SideSummary, print_report, report_json
from m3_convert.text_sample import TextSample, load_text, sample_text
from m3_convert.walk_progress import walk_progress
from m3_convert.walker import WalkOptions
from m3_runtime import memory
from m3_runtime.command import abandon_stdout, guarded, new_app, one_line, run
from m3_runtime.engine import CACHE_TYPES, ISAS
from m3_runtime.errors import InputError
from m3_runtime.native import version
from m3_runtime.text import ChatTokenizer

NAME = "m3-check-selection"
DEFAULT_CONTEXT = 8192

app = new_app()


@app.command(
    help="Compares which blocks the sparse attention of two models reads over the same text. A query that sees no more "
    "than top_k blocks reads them all and tests nothing; the others are compared layer by layer and head by head.",
    epilog="Exit codes: 0 done; 1 an overlap is below --min-overlap; 2 the models, the text or the arguments are "
    "wrong; 3 nothing was tested, no query had a choice of blocks; 4 memory is missing; 130 interrupted.",
)
@guarded
def check_command(
    reference: Annotated[
        Path,
        typer.Argument(metavar="REFERENCE", help="Checkpoint folder or GGUF file."),
    ],
    candidate: Annotated[
        Path,
        typer.Argument(metavar="CANDIDATE", help="The same model in another form: checkpoint folder or GGUF file."),
    ],
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="Text to read, UTF-8. Without it a text that ships with m3-gguf."),
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
    kv_type: Annotated[
        str, typer.Option("--kv-type", metavar="TYPE", help=f"K/V cache of both models: {', '.join(CACHE_TYPES)}.")
    ] = "f16",
    index_type: Annotated[
        str, typer.Option("--index-type", metavar="TYPE", help="Index keys of both models, one of the same types.")
    ] = "f32",
    isa: Annotated[str, typer.Option("--isa", metavar="ISA", help=f"CPU kernels: {', '.join(ISAS)}.")] = "auto",
    threads: Annotated[int, typer.Option("--threads", min=0, help="0 takes all cores.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON, with the numbers by head.")
    ] = False,
) -> int:
    start = time.monotonic()
    _check_threshold(min_overlap)
    options = WalkOptions(_cache_type("--kv-type", kv_type), _cache_type("--index-type", index_type), threads)
    source = load_text(text)
    with ExitStack() as stack:
        ours, theirs = (stack.enter_context(open_layered(p, isa=isa, threads=threads)) for p in (reference, candidate))
        for note in dict.fromkeys((*ours.notes, *theirs.notes)):
            _note(f"note: {note}")
        check_comparable(ours, theirs)
        n_wanted = _wanted_tokens(context, ours, theirs)
        sample = sample_text(source, _tokenizer(ours), n_wanted)
        check_choice(ours.hparams, len(sample.ids))
        estimated = _estimate(ours, theirs, sample, options)
        total = work(ours, theirs, len(sample.ids))
        with walk_progress(NAME, total, ours.hparams.n_layer, sys.stderr) as advance:
            agreement = walk(ours, theirs, np.array(sample.ids, np.int32), options, advance)
        report = CheckReport(
            agreement=agreement,
            reference=_summary(ours),
            candidate=_summary(theirs),
            hparams=ours.hparams,
            sample=sample,
            wanted_tokens=context,
            options=options,
            isa=ours.model.isa_name,
            min_overlap=min_overlap,
            program=version(),
            estimated_bytes=estimated,
            peak_bytes=memory.peak_resident_bytes(),
            seconds=time.monotonic() - start,
        )
    _note(f"done in {format_seconds(report.seconds)}, peak memory {format_bytes(report.peak_bytes)}")
    try:
        if as_json:
            print(json.dumps(report_json(report), indent=2))
        else:
            print_report(report, sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        abandon_stdout()  # whoever read the report left; the verdict stands
    if report.fell_short:
        _note(report.shortfall)
    return report.exit_code


def _note(text: str) -> None:
    print(f"{NAME}: {one_line(text)}", file=sys.stderr, flush=True)


def _check_threshold(min_overlap: float | None) -> None:
    if min_overlap is not None and not 0 <= min_overlap <= 1:  # NaN is neither
        raise InputError(f"--min-overlap is {min_overlap}, expected 0 to 1")


def _cache_type(option: str, value: str) -> str:
    if value.lower() not in CACHE_TYPES:
        raise InputError(f"{option} is '{value}', expected one of {', '.join(CACHE_TYPES)}")
    return value.lower()


def _tokenizer(side: LayeredModel) -> ChatTokenizer:
    try:
        return ChatTokenizer(side.model.gguf.metadata)
    except InputError as error:
        raise InputError(f"{side.name}: {error}") from error


def _wanted_tokens(context: int | None, ours: LayeredModel, theirs: LayeredModel) -> int:
    trained = min(ours.hparams.context_train, theirs.hparams.context_train)
    if context is None:
        return min(DEFAULT_CONTEXT, trained)
    if context > trained:
        raise InputError(f"--context is {context}, the model was trained for {trained} tokens")
    return context


def _estimate(ours: LayeredModel, theirs: LayeredModel, sample: TextSample, options: WalkOptions) -> int:
    """Prints and returns the memory that the process will have at its peak; MachineError if it is not there."""
    estimate = estimate_memory(ours, theirs, len(sample.ids), options)
    total = memory.peak_resident_bytes() + estimate.total
    room = memory.session_room()
    free = "" if room is None else f", {format_bytes(room)} are free"
    _note(f"{len(sample.ids)} tokens take about {format_bytes(total)} of memory at the peak{free}")
    check_memory(estimate, room)
    return total


def _summary(side: LayeredModel) -> SideSummary:
    return SideSummary(side.name, side.kind, side.n_bytes, side.types())


def main() -> NoReturn:
    """Entry point of m3-check-selection."""
    run(app, NAME)


if __name__ == "__main__":
    main()
