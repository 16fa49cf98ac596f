"""The vision file of a checkpoint: tower, projector and patch merger, which turn images into tokens of the text model.

The layout is llama.cpp's for "minimax_m3". Linear layers get the chosen type; patch embedding, norms and biases are
F32: 16-bit numbers in the first of these are visible in what comes out, and the others are small.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from m3_convert.checkpoint import Checkpoint
from m3_convert.execute import check_outputs
from m3_convert.gguf_file import OutputFile, header_bytes
from m3_convert.plan import Plan, place_tensors
from m3_convert.precision import Decision, TypeChoice, source_precision
from m3_convert.recipe import AUTO
from m3_convert.source import Source
from m3_convert.tensor_map import MappedTensor
from m3_convert.vision_config import load_vision_config
from m3_convert.vision_map import map_vision
from m3_convert.vision_metadata import vision_metadata
from m3_runtime.errors import InputError
from m3_runtime.quantize import TensorType

TYPES: Final = (TensorType.F32, TensorType.F16, TensorType.BF16, TensorType.Q8_0)


@dataclass(frozen=True)
class VisionFile:
    """A vision file to be written."""

    plan: Plan
    files: Sequence[OutputFile]  #: one
    out: Path  #: as the user wrote it


def parse_vision_type(name: str) -> TensorType | None:
    """The type of the linear layers, None for the source's own. Raises InputError for any but TYPES and auto."""
    if name.lower() == AUTO:
        return None
    found = next((t for t in TYPES if t.name.lower() == name.lower()), None)
    if found is None:
        names = ", ".join(t.name.lower() for t in TYPES)
        raise InputError(f"--vision-type: expected {AUTO} or one of {names}, found '{name}'")
    return found


def plan_vision(source: Source, type_: TensorType | None, out: Path) -> VisionFile:
    """Plans the vision file of a checkpoint; nothing but headers and small files is read.

    type_: of linear layers, None for their own precision. Raises InputError for a source without a vision part, one
    that the file cannot express, tensors that are missing, extra or mis-shaped, and an output that cannot be written.
    """
    if not isinstance(source, Checkpoint):
        raise InputError(f"{source.path}: expected a checkpoint for the vision file, found GGUF: it holds text only")
    config = load_vision_config(source.folder)
    mapped = map_vision(source, config)
    tensors = place_tensors(mapped, [_decide(tensor, type_) for tensor in mapped])
    plan = Plan(source, TypeChoice(type_), tensors, (), source.warnings)
    file = OutputFile(out, header_bytes(plan, vision_metadata(plan, source, config)), tensors)
    _, files = check_outputs(plan, [file], out)
    return VisionFile(plan, files, out)


def _decide(tensor: MappedTensor, type_: TensorType | None) -> Decision:
    if len(tensor.spec.shape) != 2:
        what = "norms and biases" if len(tensor.spec.shape) == 1 else "the patch embedding"
        return Decision(TensorType.F32, f"the fixed rule for {what}")
    if type_ is None:
        return Decision(source_precision(tensor.source_dtypes), f"--vision-type {AUTO}: the source's own precision")
    reason, columns = f"--vision-type {type_.name.lower()}", tensor.spec.shape[-1]
    if columns % type_.block_size:
        note = f"F16 instead of {type_.name}: rows of {columns} are not a multiple of {type_.block_size}"
        return Decision(TensorType.F16, reason, note)
    return Decision(type_, reason)
