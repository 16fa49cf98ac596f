"""The command m3-imatrix."""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import typer

from m3_convert.imatrix import ImportanceMatrix
from m3_convert.imatrix_collect import (
    ExpertReach,
    always_read,
    collect,
    default_context,
    estimate_memory,
    expert_reach,
    few_tokens,
    work,
)
from m3_convert.layered_model import LayeredModel, open_layered
from m3_convert.output_path import check_output
from m3_convert.stored_name import stored_name
from m3_convert.text_sample import TextSample, context_tokens, load_text, sample_text
from m3_convert.walk_progress import layer_stages, walk_progress
from m3_convert.walker import WalkOptions, check_memory
from m3_runtime import memory
from m3_runtime.command import guarded, new_app, run, tell
from m3_runtime.errors import InputError
from m3_runtime.native import version
from m3_runtime.options import IndexType, Isa, KvType, Threads, Version
from m3_runtime.quantities import format_bytes, format_seconds

NAME = "m3-imatrix"
_LISTED = 12  #: experts that are named in the report for people

app = new_app()


@dataclass(frozen=True)
class ImatrixReport:
    """A finished collection."""

    out: Path
    n_bytes: int
    model: LayeredModel
    sample: TextSample
    options: WalkOptions
    context: int
    chunks: int
    tensors: int
    reach: ExpertReach
    estimated_bytes: int
    peak_bytes: int
    seconds: float


@app.command(
    help="Collects an importance matrix: the mean square of what each column of each weight matrix is multiplied with "
    "while the model reads a text. Quantizers spend their precision by it. The model is read layer by layer, one layer "
    "in memory at a time, with sparse attention.",
    epilog="Exit codes: 0 done; 2 the model, the text or the arguments are wrong; 4 memory or disk is missing; 70 a "
    "bug; 130 interrupted.",
)
@guarded
def imatrix_command(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="Checkpoint folder, GGUF file of any type, or Hub id.")
    ],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT.imatrix.gguf",
            help="File to write, in llama.cpp's format; an existing one is replaced when the new one is complete.",
        ),
    ],
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="Text to read, UTF-8; - is standard input.")],
    context: Annotated[
        int | None,
        typer.Option(
            "--context",
            metavar="N",
            min=1,
            help="Tokens of a chunk; each chunk is read on its own. Default: twice what a query reads in full, at most "
            "what the model was trained for (4096 for MiniMax-M3).",
        ),
    ] = None,
    chunks: Annotated[
        int | None, typer.Option("--chunks", metavar="N", min=1, help="Read at most so many chunks of the text.")
    ] = None,
    kv_type: KvType = "f16",
    index_type: IndexType = "f32",
    isa: Isa = "auto",
    threads: Threads = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    show_version: Version = False,
) -> None:
    start = time.monotonic()
    options = WalkOptions(kv_type, index_type, threads)
    target = check_output(out, "the importance matrix", [source, text])
    content = load_text(text)
    text_name = stored_name(Path(content.name), "text")
    with open_layered(source, isa=isa, threads=threads) as model:
        for note in model.notes:
            _note(f"note: {note}")
        n = _context(context, model)
        # No text has more tokens than bytes.
        sample = sample_text(content, model.tokenizer(), n * chunks if chunks else max(content.n_bytes, 1))
        if not sample.ids:
            raise InputError(f"{text}: the text is empty")
        estimated = _estimate(model, len(sample.ids), n, options)
        stages = layer_stages(model.hparams.n_layer, work(model, len(sample.ids)))
        with walk_progress(NAME, stages, sys.stderr) as advance:
            entries = collect(model, np.array(sample.ids, np.int32), n, options, advance)
        n_chunks = -(-len(sample.ids) // n)
        matrix = ImportanceMatrix(str(out), entries, (text_name,), n_chunks, n)
        report = ImatrixReport(
            out=out,
            n_bytes=matrix.save(target),
            model=model,
            sample=sample,
            options=options,
            context=n,
            chunks=n_chunks,
            tensors=len(entries),
            reach=expert_reach(entries),
            estimated_bytes=estimated,
            peak_bytes=memory.peak_resident_bytes(),
            seconds=time.monotonic() - start,
        )
        if few := few_tokens(len(sample.ids), model.hparams, report.reach):
            _note(few)
    _note(f"done in {format_seconds(report.seconds)}, peak memory {format_bytes(report.peak_bytes)}")
    print(json.dumps(_as_json(report), indent=2) if as_json else "\n".join(_lines(report)))


def _note(text: str) -> None:
    tell(NAME, text)


def _context(wanted: int | None, model: LayeredModel) -> int:
    h = model.hparams
    context = context_tokens(wanted, h.context_train, default_context(h))
    if context <= always_read(h):
        _note(
            f"note: in chunks of {context} tokens the sparse layers read every block, as in no longer text: they "
            f"choose from {always_read(h) + 1} tokens on"
        )
    return context


def _estimate(model: LayeredModel, n_tokens: int, context: int, options: WalkOptions) -> int:
    """Prints and returns the memory that the process will have at its peak; MachineError if it is not there."""
    estimate = estimate_memory(model, n_tokens, context, options)
    total = memory.peak_resident_bytes() + estimate.total
    room = memory.session_room()
    free = "" if room is None else f", {format_bytes(room)} are free"
    chunks = -(-n_tokens // context)
    _note(
        f"{n_tokens} tokens in {chunks} {_plural('chunk', chunks)} take about {format_bytes(total)} of memory at the "
        f"peak{free}"
    )
    check_memory(estimate, room, "collecting", "fewer --chunks take less")
    return total


def _plural(word: str, n: int) -> str:
    return word if n == 1 else word + "s"


def _lines(r: ImatrixReport) -> list[str]:
    """The report for people."""
    n = len(r.sample.ids)
    lines = [
        f"{r.out}: importance of {r.tensors} tensors, {format_bytes(r.n_bytes)}, from {n:,} tokens of "
        f"{r.sample.text.name} in {r.chunks} {_plural('chunk', r.chunks)} of {r.context:,}"
    ]
    reach = r.reach
    if reach.unreached:
        named = ", ".join(f"{layer}/{expert}" for layer, expert in reach.unreached[:_LISTED])
        more = f" and {len(reach.unreached) - _LISTED} more" if len(reach.unreached) > _LISTED else ""
        lines.append(
            f"experts: {len(reach.unreached)} of {reach.experts} were never reached (layer/expert {named}{more}): they "
            "alone will be quantized with equal weights; a longer or more varied text reaches more"
        )
    elif reach.experts:
        lines.append(f"experts: all {reach.experts} were reached")
    if reach.least is not None:
        layer, expert = reach.least
        lines.append(f"fewest rows of an expert that was reached: {reach.least_rows} (layer {layer}, expert {expert})")
    return lines


def _as_json(r: ImatrixReport) -> dict[str, Any]:
    text, reach = r.sample.text, r.reach
    least = None
    if reach.least is not None:
        least = {"layer": reach.least[0], "expert": reach.least[1], "rows": reach.least_rows}
    return {
        "schema": {"name": NAME, "version": 1},
        "program": version(),
        "source": {"path": r.model.name, "kind": r.model.kind, "bytes": r.model.n_bytes, "types": r.model.types()},
        "out": {"path": str(r.out), "bytes": r.n_bytes, "tensors": r.tensors},
        "text": {
            "name": text.name,
            "bytes": text.n_bytes,
            "sha256": text.sha256,
            "tokens": len(r.sample.ids),
            "whole": r.sample.whole,
        },
        "settings": {
            "attention": "sparse",
            "context": r.context,
            "chunks": r.chunks,
            "kv_type": r.options.kv_type,
            "index_type": r.options.index_type,
            "isa": r.model.model.isa_name,
            "threads": r.options.threads,
        },
        "experts": {
            "total": reach.experts,
            "unreached": [{"layer": layer, "expert": expert} for layer, expert in reach.unreached],
            "fewest": least,
        },
        "memory": {"estimated_bytes": r.estimated_bytes, "peak_bytes": r.peak_bytes},
        "seconds": round(r.seconds, 3),
    }


def main() -> NoReturn:
    """Entry point of m3-imatrix."""
    run(app, NAME)


if __name__ == "__main__":
    main()
