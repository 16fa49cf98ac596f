"""The command m3-convert."""

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from m3_convert.conversion_text import (
    PlacedPlan,
    fallback_warnings,
    print_explanation,
    print_needed,
    print_plans,
    print_results,
)
from m3_convert.disk_room import check_rooms
from m3_convert.execute import check_outputs, convert, output_room
from m3_convert.gguf_file import OutputFile, check_header, header_bytes
from m3_convert.imatrix import ImportanceMatrix
from m3_convert.metadata import plan_metadata, template_notes
from m3_convert.output_path import recipe_path
from m3_convert.plan import Plan, plan_conversion
from m3_convert.precision import choose
from m3_convert.recipe import AUTO
from m3_convert.run_shards import Supply, check_discardable
from m3_convert.shard_order import ShardOrder
from m3_convert.source import open_source
from m3_convert.split import output_files
from m3_convert.stored_name import stored_name
from m3_convert.vision import VisionFile, parse_vision_type, plan_vision
from m3_runtime.command import guarded, new_app, run
from m3_runtime.errors import InputError
from m3_runtime.options import Threads, Version
from m3_runtime.quantities import parse_size

NAME = "m3-convert"

app = new_app()


@app.command(
    help="Converts a MiniMax-M3 checkpoint, or a GGUF file of one, to GGUF.",
    epilog="Exit codes: 0 done; 1 a target was not reached; 2 the source or the arguments are wrong; 3 --text is too "
    "short to measure with; 4 disk or memory is missing; 70 a bug; 130 interrupted.",
)
@guarded
def convert_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="Checkpoint folder, GGUF file (of several, any one or their folder), or Hub id."
        ),
    ],
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
    imatrix: Annotated[
        Path | None,
        typer.Option(
            "--imatrix",
            metavar="FILE",
            help="Importance of the columns, from m3-imatrix or llama.cpp: types that search for their scales weigh "
            "errors with it; iq2_xxs and iq1_m need it.",
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
    allow_requantize: Annotated[
        bool,
        typer.Option(
            "--allow-requantize",
            help="Let tensors of a GGUF source that are below Q8_0, or were by what it says, be rounded a second time; "
            "the file says so.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    explain: Annotated[
        str | None, typer.Option("--explain", metavar="TENSOR", help="Say which rule decides the type of a tensor.")
    ] = None,
    split_max_size: Annotated[
        str | None,
        typer.Option(
            "--split-max-size",
            metavar="N[M|G]",
            help="Write files OUT-00001-of-0000N.gguf of at most this many bytes (M: 10^6, G: 10^9). Any of them, or "
            "their folder, stands for the model.",
        ),
    ] = None,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart", help="Start anew where an interrupted run left OUT.gguf.part, instead of going on from there."
        ),
    ] = False,
    discard_source: Annotated[
        bool,
        typer.Option(
            "--discard-source",
            help="Keep each shard of a Hub id only while it is needed, in OUT.gguf.source, so that the source need not "
            "fit on the disk. Without it shards go to the Hub's cache and stay; what is there already stays anyway.",
        ),
    ] = False,
    target_overlap: Annotated[
        float | None,
        typer.Option(
            "--target-overlap",
            metavar="X",
            help="Raise the precision of tensors above that of --type or --recipe, as cheaply as possible, until every "
            "layer and index head has a mean overlap of at least X, 0 to 1, with the source over --text (see "
            "m3-check-selection --min-overlap). Writes the recipe that was found beside the file. Exit code 1 if X "
            "cannot be reached.",
        ),
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(
            "--max-size",
            metavar="N[M|G]",
            help="Choose the type of each tensor so that the KL divergence from the source over --text is smallest "
            "in a file of at most this size. Without --type the search begins with the largest recipe that fits.",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            "--text", metavar="FILE", help="Text for --target-overlap and --max-size, UTF-8; - is standard input."
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", metavar="N", min=1, help="Tokens of --text that checks read, 8192 by default."),
    ] = None,
    accept_best: Annotated[
        bool,
        typer.Option("--accept-best", help="Write the best file that was found if --target-overlap is not reached."),
    ] = False,
    state: Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="DIR",
            help="Where a search keeps what it has measured, for the same command after an interruption and for other "
            "targets. Default: m3-gguf/check in $XDG_CACHE_HOME or ~/.cache.",
        ),
    ] = None,
    vision: Annotated[
        Path | None,
        typer.Option(
            "--vision",
            metavar="OUT-mmproj.gguf",
            help="Write the vision part of the checkpoint, which turns images into tokens, to a file of its own, as "
            "llama.cpp reads it.",
        ),
    ] = None,
    vision_only: Annotated[
        Path | None,
        typer.Option("--vision-only", metavar="OUT-mmproj.gguf", help="Write that file and no OUT.gguf."),
    ] = None,
    vision_type: Annotated[
        str | None,
        typer.Option(
            "--vision-type",
            metavar="TYPE",
            help="For the linear layers of the vision file: f32, f16, bf16, q8_0 or auto, the default: the source's "
            "own precision. Patch embedding, norms and biases are always F32.",
        ),
    ] = None,
    threads: Threads = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan or the result as JSON.")] = False,
    version: Version = False,
) -> int | None:
    if not source:
        raise InputError("SOURCE is empty, expected the name of a file or folder or an id on the Hub")
    if vision_type is not None and vision is None and vision_only is None:
        raise InputError("--vision-type is for --vision and --vision-only, of which neither is given")
    linear = parse_vision_type(vision_type or AUTO)
    if vision_only is not None:
        _check_vision_only(
            {
                "OUT.gguf": out is not None,
                "--vision": vision is not None,
                "--type": type_ is not None,
                "--recipe": recipe is not None,
                "--rule": bool(rule),
                "--imatrix": imatrix is not None,
                "--strict": strict,
                "--allow-lossy-indexer": allow_lossy_indexer,
                "--allow-requantize": allow_requantize,
                "--split-max-size": split_max_size is not None,
                "--target-overlap": target_overlap is not None,
                "--max-size": max_size is not None,
                "--text": text is not None,
                "--context": context is not None,
                "--accept-best": accept_best,
                "--state": state is not None,
            }
        )
        opened = open_source(source)
        if discard_source:
            check_discardable(opened.shards)
        sight = plan_vision(opened, linear, vision_only)
        for warning in (*sight.plan.warnings, *fallback_warnings(sight.plan)):
            print(f"{NAME}: note: {warning}", file=sys.stderr)
        if explain is not None:
            print_explanation(sight.plan, explain, as_json)
        elif dry_run:
            print_plans([_placed(sight, discard_source)], as_json)
        else:
            print_needed(NAME, sight.files)
            result = convert(
                sight.plan, sight.files, sight.out, threads, restart=restart, discard_source=discard_source
            )
            print_results([(sight.plan, result)], as_json)
        return None
    if out is None and not dry_run and explain is None:
        raise InputError("OUT.gguf is missing (it may be left out with --dry-run or --explain)")
    max_bytes = None if split_max_size is None else parse_size(split_max_size, "--split-max-size")
    choice = replace(
        choose(type_, recipe, rule or ()),
        strict=strict,
        allow_lossy_indexer=allow_lossy_indexer,
        allow_requantize=allow_requantize,
    )
    searching = target_overlap is not None or max_size is not None
    _check_together(
        searching,
        {
            "--dry-run": dry_run,
            "--explain": explain is not None,
            "--split-max-size": split_max_size is not None,
            "--discard-source": discard_source,
            "--strict": strict,
            "--vision": vision is not None,
        },
        {
            "--text": text is not None,
            "--context": context is not None,
            "--state": state is not None,
            "--accept-best": accept_best,
        },
    )
    if searching:
        # Only here, since these import all that a check needs.
        from m3_convert.target_cli import TargetRequest, parse_overlap, search_target
        from m3_convert.target_search import Target

        if target_overlap is not None and max_size is not None:
            raise InputError("--target-overlap and --max-size: expected one of the two")
        if text is None:
            option = "--max-size" if target_overlap is None else "--target-overlap"
            raise InputError(f"{option} needs --text FILE, a text that the model is measured with")
        assert out is not None
        size = None if max_size is None else parse_size(max_size, "--max-size")
        return search_target(
            TargetRequest(
                source=source,
                out=out,
                target=Target(parse_overlap(target_overlap), size),
                base=choice,
                text=text,
                recipe=recipe,
                imatrix=imatrix,
                context=context,
                state=state,
                accept_best=accept_best,
                restart=restart,
                threads=threads,
                as_json=as_json,
            )
        )
    opened = open_source(source)
    if discard_source:
        check_discardable(opened.shards)
    plan = plan_conversion(opened, choice)
    plan = replace(plan, inputs=tuple(path for path in (recipe, imatrix) if path is not None))
    seen = None if vision is None else plan_vision(opened, linear, vision)
    if seen is not None:
        plan = replace(plan, left_out=())
        seen = replace(seen, plan=replace(seen.plan, inputs=plan.inputs))
    if explain is not None:
        in_vision = seen is not None and any(t.name == explain for t in seen.plan.tensors)
        print_explanation(seen.plan if seen is not None and in_vision else plan, explain, as_json)
        return None
    if imatrix is not None:
        stored_name(imatrix, "importance matrix")
        plan = plan.with_importance(ImportanceMatrix.load(imatrix))
    plan.check_importance()
    metadata, metadata_notes = plan_metadata(plan)
    plan = replace(plan, warnings=(*plan.warnings, *metadata_notes, *template_notes(metadata)))
    whole = OutputFile(out or Path("out.gguf"), header_bytes(plan, metadata), plan.tensors)
    check_header(whole.header, str(out or source))
    files = output_files(plan, metadata, whole, max_bytes)
    notes = plan.coverage.notes() if plan.coverage else ()
    for warning in (*plan.warnings, *fallback_warnings(plan), *notes):
        print(f"{NAME}: note: {warning}", file=sys.stderr)
    target = files[0].path
    if out is not None:
        target, files = check_outputs(plan, files, out)
        _note_other_recipe(plan, target, recipe)
    if seen is not None:
        for warning in fallback_warnings(seen.plan):
            print(f"{NAME}: note: {warning}", file=sys.stderr)
        if {file.path for file in files} & {file.path for file in seen.files}:
            raise InputError(f"{vision}: expected another file than OUT.gguf for the vision part")
    if dry_run:
        supply = Supply(opened.shards, ShardOrder.of(files), target, discard=discard_source)
        placed = [PlacedPlan(plan, files, supply, placed=out is not None)]
        print_plans(placed if seen is None else [*placed, _placed(seen, discard_source)], as_json)
        return None
    assert out is not None
    results = []
    print_needed(NAME, [*files, *(seen.files if seen is not None else ())], len(files))
    if seen is not None:
        check_rooms([output_room(files), output_room(seen.files)])
        # First, since it takes little: what is interrupted then is the other, which goes on where it stopped.
        result = convert(seen.plan, seen.files, seen.out, threads, restart=restart, discard_source=discard_source)
        results.append((seen.plan, result))
    result = convert(plan, files, out, threads, restart=restart, discard_source=discard_source)
    print_results([(plan, result), *results], as_json)
    return None


def _check_vision_only(given: Mapping[str, bool]) -> None:
    """Raises InputError for what the vision file has no use for."""
    name = next((name for name, is_given in given.items() if is_given), None)
    if name is not None:
        raise InputError(f"{name} does not go with --vision-only, which writes the vision file alone")


def _check_together(searching: bool, not_with_search: Mapping[str, bool], for_search: Mapping[str, bool]) -> None:
    """Raises InputError for options, by name with whether they were given, that are not for what is to be done."""
    for option, given in (not_with_search if searching else for_search).items():
        if given and not searching:
            raise InputError(f"{option} is for --target-overlap and --max-size, of which neither is given")
        if given:
            then = {
                "--split-max-size": ": divide the file afterwards, m3-convert takes it as a source",
                "--explain": ": ask afterwards, with the recipe that was written",
            }.get(option, "")
            raise InputError(f"{option} does not go with --target-overlap and --max-size{then}")


def _placed(sight: VisionFile, discard: bool) -> PlacedPlan:
    supply = Supply(sight.plan.source.shards, ShardOrder.of(sight.files), sight.files[0].path, discard=discard)
    return PlacedPlan(sight.plan, sight.files, supply, placed=True)


def _note_other_recipe(plan: Plan, target: Path, recipe: Path | None) -> None:
    """A recipe of an earlier search by the name of the file would be taken for the file's own."""
    path = recipe_path(target)
    if not path.is_file() or (recipe is not None and path.samefile(recipe)):
        return
    used = plan.choice.recipe.sha256 if plan.choice.recipe else ""
    try:
        same = hashlib.sha256(path.read_bytes()).hexdigest() == used
    except PermissionError:  # no reason not to convert
        same = False
    if not same:
        print(f"{NAME}: note: {path} is there already; it is not the recipe of this file", file=sys.stderr)


def main() -> NoReturn:
    """Entry point of m3-convert."""
    run(app, NAME)


if __name__ == "__main__":
    main()
