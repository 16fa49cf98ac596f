"""The command m3-convert."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from m3_convert.checkpoint import load_checkpoint
from m3_convert.execute import Result, check_output, convert, free_bytes
from m3_convert.gguf_file import check_header, file_bytes, header_bytes
from m3_convert.hub import resolve_source
from m3_convert.metadata import build_metadata
from m3_convert.plan import Plan, plan_conversion, tensor_json
from m3_convert.precision import choose
from m3_convert.progress import format_bytes, format_seconds
from m3_convert.vocabulary import load_vocabulary
from m3_runtime.command import guarded, new_app, run
from m3_runtime.errors import InputError

NAME = "m3-convert"

app = new_app()


@app.command(
    help="Converts a MiniMax-M3 checkpoint to GGUF.",
    epilog="Exit codes: 0 done; 2 the source or the arguments are wrong; 4 disk or memory is missing; 130 interrupted.",
)
@guarded
def convert_command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Checkpoint folder, or id on the Hub (owner/name).")],
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUT.gguf",
            help="File to write; an existing one is replaced when the new one is complete. Not needed with --dry-run "
            "or --explain.",
        ),
    ] = None,
    type_: Annotated[
        str | None,
        typer.Option(
            "--type",
            metavar="TYPE",
            help="A recipe (q8_0, q6_k, q5_k_m, q4_k_m, q4_k_s, q3_k_m, q2_k, iq4_xs, iq3_xxs, iq2_xxs, iq1_m, "
            "mxfp4_moe), a plain type (f32, f16, bf16, q4_0, ...) or auto, the default: the source's own precision, "
            "tensor by tensor. Norms and router are always F32.",
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option("--recipe", metavar="FILE.toml", help="A recipe of your own in place of --type."),
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            "--rule",
            metavar="PATTERN=TYPE",
            help="Type for the tensors whose GGUF name matches a glob, as in 'blk.*.ffn_down_exps.weight=q8_0'. "
            "Repeatable; the first rule that matches a tensor decides, before the recipe.",
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="An error where a type's block does not divide a row, instead of a fallback type."
        ),
    ] = False,
    allow_lossy_indexer: Annotated[
        bool,
        typer.Option(
            "--allow-lossy-indexer",
            help="Let rules round the index projections, which choose the blocks that are read; the file says so. "
            "Without it they are F32, or F16 or BF16 where a rule asks for it and their values survive.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="TENSOR", help="Say which rule decides the type of a tensor.")
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=0, help="Threads for quantization; 0 takes all cores.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan or the result as JSON.")] = False,
) -> None:
    if out is None and not dry_run and explain is None:
        raise InputError("OUT.gguf is missing (it may be left out with --dry-run or --explain)")
    choice = replace(choose(type_, recipe, rule or ()), strict=strict, allow_lossy_indexer=allow_lossy_indexer)
    found = resolve_source(source)
    plan = plan_conversion(load_checkpoint(found.folder, found.name), choice)
    if explain is not None:
        _print_explanation(plan, explain, as_json)
        return
    plan.check_importance()
    vocabulary = load_vocabulary(found.folder, plan.checkpoint.config)
    header = header_bytes(plan, build_metadata(plan, vocabulary))
    check_header(header, str(out or source))
    for warning in (*plan.warnings, *vocabulary.warnings, *_fallback_warnings(plan)):
        print(f"{NAME}: note: {warning}", file=sys.stderr)
    target = check_output(plan, out) if out is not None else None
    if dry_run:
        _print_plan(plan, file_bytes(plan, header), target, as_json)
        return
    assert out is not None and target is not None
    needed, free = format_bytes(file_bytes(plan, header)), format_bytes(free_bytes(target))
    print(f"{NAME}: {needed} to write, {free} free", file=sys.stderr)
    _print_result(plan, convert(plan, header, out, threads), as_json)


def _fallback_warnings(plan: Plan) -> Sequence[str]:
    notes = [t for t in plan.tensors if t.note]
    return [f"{len(notes)} tensors fall back, the first: {notes[0].name}: {notes[0].note}"] if notes else []


def _print_explanation(plan: Plan, name: str, as_json: bool) -> None:
    tensor = plan.tensor(name)
    if as_json:
        print(json.dumps(tensor_json(tensor), indent=2))
        return
    note = f"; {tensor.note}" if tensor.note else ""
    print(f"{tensor.name}: {tensor.type.name} by {tensor.reason}{note}")
    print(f"  from {tensor.source} ({tensor.source_type}){', + 1 in float32' if tensor.plus_one else ''}")


def _print_plan(plan: Plan, n_bytes: int, target: Path | None, as_json: bool) -> None:
    free = free_bytes(target) if target else None
    if as_json:
        print(json.dumps({**plan.as_json(), "file_bytes": n_bytes, "free_bytes": free}, indent=2))
        return
    rows = [("tensor", "source", "shape (ne)", "type", "bytes", "note")]
    for t in plan.tensors:
        ne = "x".join(map(str, t.ne))
        note = "; ".join(filter(None, ("+1" if t.plus_one else "", t.note)))
        rows.append((t.name, t.source, ne, f"{t.source_type} -> {t.type.name}", str(t.n_bytes), note))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for row in rows:
        cells = [
            cell.rjust(w) if i == 4 else cell.ljust(w) for i, (cell, w) in enumerate(zip(row[:5], widths, strict=True))
        ]
        print("  ".join([*cells, row[5]]).rstrip())
    for name in plan.left_out:
        print(f"left out (vision): {name}")
    by_type = ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.bytes_by_type().items())
    print(f"total: {len(plan.tensors)} tensors, {n_bytes} bytes ({format_bytes(n_bytes)}): {by_type}")
    if free is not None and target is not None:
        fits = "enough" if free >= n_bytes else "not enough"
        print(f"disk: {free} bytes free in {target.parent} ({format_bytes(free)}), {fits}")


def _print_result(plan: Plan, result: Result, as_json: bool) -> None:
    rate = result.n_bytes / max(result.seconds, 1e-9)
    if as_json:
        answer: dict[str, Any] = {
            "file": str(result.path),
            "bytes": result.n_bytes,
            "tensors": len(plan.tensors),
            "bytes_by_type": plan.bytes_by_type(),
            "left_out": len(plan.left_out),
            "notes": {t.name: t.note for t in plan.tensors if t.note},
            "seconds": round(result.seconds, 3),
            "mb_per_s": round(rate / 1e6, 1),
        }
        print(json.dumps(answer, indent=2))
        return
    by_type = ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.bytes_by_type().items())
    left_out = f"; {len(plan.left_out)} vision tensors left out" if plan.left_out else ""
    print(
        f"{result.path}: {len(plan.tensors)} tensors, {format_bytes(result.n_bytes)} ({by_type}) in "
        f"{format_seconds(result.seconds)}, {format_bytes(rate)}/s{left_out}"
    )


def main() -> NoReturn:
    """Entry point of m3-convert."""
    run(app, NAME)


if __name__ == "__main__":
    main()
