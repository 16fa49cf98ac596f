"""What m3-convert prints: plans, the rule behind a tensor, results."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from m3_convert.disk_room import fits
from m3_convert.execute import Result, free_bytes, output_room
from m3_convert.gguf_file import OutputFile
from m3_convert.plan import Plan, tensor_json
from m3_convert.precision import stored_as
from m3_convert.run_shards import Supply
from m3_runtime.quantities import format_bytes, format_seconds


@dataclass(frozen=True)
class PlacedPlan:
    """A plan, the files that it makes and the shards that it reads."""

    plan: Plan
    files: Sequence[OutputFile]
    supply: Supply
    placed: bool  #: the paths of the files are where they would be written


def print_needed(name: str, files: Sequence[OutputFile], of_text: int = 1) -> None:
    needed, free = format_bytes(_total(files)), format_bytes(free_bytes([file.path for file in files]))
    into = f" in {len(files)} files" if of_text > 1 else ""
    print(f"{name}: {needed} to write{into}, {free} free", file=sys.stderr)


def _total(files: Sequence[OutputFile]) -> int:
    return sum(file.n_bytes for file in files)


def fallback_warnings(plan: Plan) -> Sequence[str]:
    notes = [t for t in plan.tensors if t.note]
    return [f"{len(notes)} tensors fall back, the first: {notes[0].name}: {notes[0].note}"] if notes else []


def print_explanation(plan: Plan, name: str, as_json: bool) -> None:
    tensor = plan.tensor(name)
    if as_json:
        print(json.dumps(tensor_json(tensor), indent=2))
        return
    note = f"; {tensor.note}" if tensor.note else ""
    print(f"{tensor.name}: {tensor.type.name} by {tensor.reason}{note}")
    source_type = stored_as(tensor.source_type, tensor.origin)
    print(f"  from {tensor.source} ({source_type}){', + 1 in float32' if tensor.plus_one else ''}")


def print_plans(plans: Sequence[PlacedPlan], as_json: bool) -> None:
    """The plan of the model, then that of the vision file; or either alone."""
    if as_json:
        first, *others = map(_plan_json, plans)
        print(json.dumps({**first, **({"vision": others[0]} if others else {})}, indent=2))
        return
    for plan in plans:
        _print_plan(plan)


def _plan_json(placed: PlacedPlan) -> dict[str, Any]:
    files, demand = placed.files, placed.supply.demand()
    return {
        **placed.plan.as_json(),
        "file_bytes": _total(files),
        "files": [{"name": f.path.name, "bytes": f.n_bytes, "tensors": len(f.tensors)} for f in files],
        "free_bytes": free_bytes([file.path for file in files]) if placed.placed else None,
        "download": demand.as_json() if demand else None,
    }


def _print_plan(placed: PlacedPlan) -> None:
    plan, files, supply = placed.plan, placed.files, placed.supply
    n_bytes, free = _total(files), free_bytes([file.path for file in files]) if placed.placed else None
    demand = supply.demand()
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
    for f in files if len(files) > 1 else ():
        print(f"file: {f.path.name}: {len(f.tensors)} tensors, {f.n_bytes} bytes")
    by_type = ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.bytes_by_type().items())
    print(f"total: {len(plan.tensors)} tensors, {n_bytes} bytes ({format_bytes(n_bytes)}): {by_type}")
    if demand is not None:
        print(f"source: {demand}; with --discard-source at most {format_bytes(demand.peak_bytes)} at a time")
    if free is not None:
        enough = "enough" if fits(supply.rooms(output_room(files))) else "not enough"
        print(f"disk: {free} bytes free in {files[0].path.parent} ({format_bytes(free)}), {enough}")


def print_results(results: Sequence[tuple[Plan, Result]], as_json: bool) -> None:
    """That of the model, then that of the vision file; or either alone."""
    if as_json:
        first, *others = [_result_json(plan, result) for plan, result in results]
        print(json.dumps({**first, **({"vision": others[0]} if others else {})}, indent=2))
        return
    for plan, result in results:
        _print_result(plan, result)


def _rate(result: Result) -> float:
    return (result.n_bytes - result.resumed) / max(result.seconds, 1e-9)


def _result_json(plan: Plan, result: Result) -> dict[str, Any]:
    return {
        "file": str(result.paths[0]),
        "files": [str(path) for path in result.paths],
        "bytes": result.n_bytes,
        "tensors": len(plan.tensors),
        "bytes_by_type": plan.bytes_by_type(),
        "left_out": len(plan.left_out),
        "warnings": list(plan.warnings),
        "notes": {t.name: t.note for t in plan.tensors if t.note},
        "importance": plan.coverage.as_json() if plan.coverage else None,
        "resumed_bytes": result.resumed,
        "seconds": round(result.seconds, 3),
        "mb_per_s": round(_rate(result) / 1e6, 1),
    }


def _print_result(plan: Plan, result: Result) -> None:
    by_type = ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.bytes_by_type().items())
    left_out = f"; {len(plan.left_out)} vision tensors left out" if plan.left_out else ""
    more = f" and {len(result.paths) - 1} more" if len(result.paths) > 1 else ""
    print(
        f"{result.paths[0]}{more}: {len(plan.tensors)} tensors, {format_bytes(result.n_bytes)} ({by_type}) in "
        f"{format_seconds(result.seconds)}, {format_bytes(_rate(result))}/s{left_out}"
    )
