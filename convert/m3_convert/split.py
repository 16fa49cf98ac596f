"""The files that a conversion writes: one, or several of a limited size as llama.cpp names and marks them.

    NAME-00001-of-0000N.gguf    keys split.no (from 0), split.count, split.tensors.count (of all files)

The first has all other keys too; every one has the tensors that lie in it, which keep their order and stay whole.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from gguf import GGUFValueType, Keys
from gguf.gguf_writer import GGUFValue

from m3_convert.gguf_file import OutputFile, encode_header
from m3_convert.metadata import Metadata
from m3_convert.plan import Plan, PlannedTensor, aligned
from m3_runtime.errors import InputError
from m3_runtime.native import lib

SIZE_UNITS: Final = {"": 1, "M": 10**6, "G": 10**9}
MAX_FILES: Final = int(lib.M3_MAX_FILES)

_SIZE = re.compile(r"([0-9]+)([MG]?)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes that "500M", "40G" or "123456789" stand for, in powers of 1000. Raises InputError for anything else."""
    match = _SIZE.fullmatch(text)
    size = int(match[1]) * SIZE_UNITS[match[2].upper()] if match and len(match[1]) < 20 else 0
    if not size:
        raise InputError(f"--split-max-size {text}: expected a number of bytes, or one followed by M or G")
    return size


def output_files(plan: Plan, metadata: Metadata, whole: OutputFile, max_bytes: int | None = None) -> list[OutputFile]:
    """The files that hold `plan`, none larger than `max_bytes`; just `whole`, the file of everything, if that suffices.

    Raises InputError if a tensor, or the metadata with the first tensor, is larger, and for too many files.
    """
    if max_bytes is None or whole.n_bytes <= max_bytes:
        return [whole]
    groups = list(_groups(plan, metadata, max_bytes))
    if len(groups) > MAX_FILES:
        raise InputError(f"--split-max-size {max_bytes}: {len(groups)} files, expected at most {MAX_FILES}")
    files = []
    for no, group in enumerate(groups):
        keys = {**(metadata if no == 0 else {}), **_split_keys(no, len(groups), len(plan.tensors))}
        files.append(OutputFile(shard_path(whole.path, no, len(groups)), encode_header(plan, keys, group), group))
    return files


def shard_path(out: Path, no: int, count: int) -> Path:
    """The name of file `no` (from 0) of `count`."""
    return out.with_name(f"{out.name.removesuffix('.gguf')}-{no + 1:05}-of-{count:05}.gguf")


def _split_keys(no: int, count: int, tensors: int) -> Metadata:
    return MappingProxyType(
        {
            Keys.Split.LLM_KV_SPLIT_NO: GGUFValue(no, GGUFValueType.UINT16),
            Keys.Split.LLM_KV_SPLIT_COUNT: GGUFValue(count, GGUFValueType.UINT16),
            Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT: GGUFValue(tensors, GGUFValueType.INT32),
        }
    )


def _groups(plan: Plan, metadata: Metadata, max_bytes: int) -> Iterator[tuple[PlannedTensor, ...]]:
    """As many tensors in each file as fit, with their offsets in it."""
    keys = _split_keys(0, 0, 0)
    header, data = len(encode_header(plan, {**metadata, **keys}, (), pad=False)), 0
    group: list[PlannedTensor] = []
    for tensor in plan.tensors:
        if group and aligned(header + _entry(tensor)) + data + aligned(tensor.n_bytes) > max_bytes:
            yield _placed(group)
            header, data, group = len(encode_header(plan, keys, (), pad=False)), 0, []
        header, data = header + _entry(tensor), data + aligned(tensor.n_bytes)
        group.append(tensor)
        if aligned(header) + data > max_bytes:
            raise InputError(
                f"--split-max-size {max_bytes}: expected at least {aligned(header) + data}, the size of a file with "
                f"{tensor.name} alone: a tensor is not divided"
            )
    yield _placed(group)


def _entry(tensor: PlannedTensor) -> int:
    """Bytes of a tensor in the header: its name and the length of that, number of dimensions and each, type, offset."""
    return 8 + len(tensor.name.encode()) + 4 + 8 * len(tensor.shape) + 4 + 8


def _placed(tensors: Iterable[PlannedTensor]) -> tuple[PlannedTensor, ...]:
    placed, offset = [], 0
    for tensor in tensors:
        placed.append(replace(tensor, offset=offset))
        offset += aligned(tensor.n_bytes)
    return tuple(placed)
