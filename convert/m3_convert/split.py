"""The files that a conversion writes: one, or several of a limited size as llama.cpp names and marks them.

    NAME-00001-of-0000N.gguf    keys split.no (from 0), split.count, split.tensors.count (of all files), m3.split.id

The first has all other keys too; every one has the tensors that lie in it, which keep their order and stay whole.
m3.split.id is no key of llama.cpp: a hash of what the files were made from, by which files of two conversions are told
apart that agree in everything else. The reader refuses a model whose files do not have the same one.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from gguf import GGUFValueType, Keys
from gguf.gguf_writer import GGUFValue

from m3_convert.gguf_file import OutputFile, encode_header
from m3_convert.journal import basis_of
from m3_convert.metadata import Metadata
from m3_convert.plan import Plan, PlannedTensor, aligned
from m3_runtime.errors import InputError
from m3_runtime.gguf_reader import SPLIT_ID
from m3_runtime.native import lib

MAX_FILES: Final = int(lib.M3_MAX_FILES)

_NUMBER: Final = r"-\d{5}-of-\d{5}\.gguf"  # at the end of a name
_NO_ID: Final = "0" * 64  # as long as one


def output_files(plan: Plan, metadata: Metadata, whole: OutputFile, max_bytes: int | None = None) -> list[OutputFile]:
    """The files that hold `plan`, none larger than `max_bytes`; just `whole`, the file of everything, if that suffices.

    Raises InputError if a tensor, or the metadata with the first tensor, is larger, and for too many files.
    """
    if max_bytes is None or whole.n_bytes <= max_bytes:
        return [whole]
    groups = list(_groups(plan, metadata, max_bytes))
    if len(groups) > MAX_FILES:
        raise InputError(f"--split-max-size {max_bytes}: {len(groups)} files, expected at most {MAX_FILES}")
    files, id_ = [], split_id(plan, whole, [len(group) for group in groups])
    for no, group in enumerate(groups):
        keys = {**(metadata if no == 0 else {}), **_split_keys(no, len(groups), len(plan.tensors), id_)}
        files.append(OutputFile(shard_path(whole.path, no, len(groups)), encode_header(plan, keys, group), group))
    return files


def shard_path(out: Path, no: int, count: int) -> Path:
    """The name of file `no` (from 0) of `count`."""
    return out.with_name(f"{out.name.removesuffix('.gguf')}-{no + 1:05}-of-{count:05}.gguf")


def is_shard_name(name: str) -> bool:
    """Whether a file of this name would be taken for one of several."""
    return re.fullmatch(rf".*{_NUMBER}", name, re.DOTALL) is not None


def other_division(out: Path, files: Sequence[OutputFile]) -> list[Path]:
    """Files beside `out` that are of a model of its name in another number of files than `files`, in order."""
    own = {file.path.name for file in files}
    shard = re.compile(re.escape(out.name.removesuffix(".gguf")) + _NUMBER)
    found = [path for path in out.parent.iterdir() if path.name not in own]
    return sorted(path for path in found if path.name == out.name or shard.fullmatch(path.name))


def split_id(plan: Plan, whole: OutputFile, sizes: Sequence[int]) -> str:
    """What m3.split.id says in the files of a conversion: 64 hexadecimal digits.

    A hash of what the source's tensors hold (see `Shards.content_hash`), of recipe and rules, of the metadata and of
    the number of tensors in each file; not of names and times, so that a conversion that goes on, or is made once more
    of a copy, gives the same. whole: the file of everything.
    """
    basis = basis_of(plan, [whole])
    tensors = [source for tensor in plan.tensors for matrix in tensor.matrices for source in matrix.sources]
    parts = [plan.source.shards.content_hash(tensors), basis.rules, basis.contents, list(sizes)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _split_keys(no: int, count: int, tensors: int, id_: str = _NO_ID) -> Metadata:
    return MappingProxyType(
        {
            Keys.Split.LLM_KV_SPLIT_NO: GGUFValue(no, GGUFValueType.UINT16),
            Keys.Split.LLM_KV_SPLIT_COUNT: GGUFValue(count, GGUFValueType.UINT16),
            Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT: GGUFValue(tensors, GGUFValueType.INT32),
            SPLIT_ID: GGUFValue(id_, GGUFValueType.STRING),
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
