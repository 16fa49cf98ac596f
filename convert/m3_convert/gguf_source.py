"""A GGUF file as the source of a conversion: any model of the architecture, in one file or several.

Tensors keep their names and shapes, metadata is carried over. Norms hold 1 + w already.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gguf import GGUFValueType
from gguf.gguf_writer import GGUFValue

from m3_convert.checkpoint import SourceTensor
from m3_convert.precision import FULL_DTYPES
from m3_convert.shards import LocalShards, Shards
from m3_convert.tensor_map import MappedTensor, SourceMatrix, TensorSpec
from m3_runtime.engine import GGUF, Model
from m3_runtime.errors import InputError
from m3_runtime.gguf_reader import Tensor, is_split_key
from m3_runtime.quantize import TensorType, type_name

# Keys by which a file tells what its values have lost; `metadata` says what they hold.
LOSSY_INDEXER: Final = "m3.indexer_lossy"
REQUANTIZED: Final = "m3.requantized"
DEQUANTIZED: Final = "m3.dequantized"


@dataclass(frozen=True)
class GgufSource:
    """An open model: nothing but headers has been read."""

    path: Path  #: as the user wrote it
    files: tuple[Path, ...]
    mapped: tuple[MappedTensor, ...]  #: in file order
    metadata: dict[str, GGUFValue]  #: without the keys that tell how the files are laid out
    warnings: tuple[str, ...] = ()
    shards: Shards = field(default_factory=LocalShards)


def load_gguf(path: Path) -> GgufSource:
    """Opens a GGUF file, any one of a split model, or the folder of one.

    Raises InputError naming what is wrong with the file, and for one that the engine would not run.
    """
    with GGUF(path) as gguf:
        with Model.from_header(gguf.header(), str(path), device="cpu"):
            pass  # architecture, dimensions, and that each tensor is there with its shape
        files = tuple(Path(file) for file in gguf.files)
        origins = _origins(gguf)
        mapped = tuple(_mapped(t, files[t.file], origins.get(t.name, "")) for t in gguf.tensors)
        metadata, warnings = _metadata(gguf)
    return GgufSource(path, files, mapped, metadata, tuple(warnings))


def _origins(gguf: GGUF) -> dict[str, str]:
    """What DEQUANTIZED says, by tensor."""
    entries = gguf.metadata.get(DEQUANTIZED, [])
    if not isinstance(entries, list):
        raise InputError(f"{gguf.name}: {DEQUANTIZED}: expected a list of TENSOR=TYPE, found {entries!r}")
    names, types = {t.name for t in gguf.tensors}, {t.name for t in TensorType if t.name not in FULL_DTYPES}
    origins = {}
    for entry in entries:
        name, _, origin = str(entry).rpartition("=")
        if name not in names or origin not in types:
            raise InputError(
                f"{gguf.name}: {DEQUANTIZED}: expected a tensor of the file and a type below Q8_0, found {entry!r}"
            )
        origins[name] = origin
    return origins


def _mapped(tensor: Tensor, file: Path, origin: str) -> MappedTensor:
    shape = tensor.ne[::-1]
    n = shape[0] if len(shape) == 3 else 1
    n_bytes = tensor.n_bytes // n
    matrices = tuple(
        SourceMatrix(
            SourceTensor(
                name=tensor.name,
                dtype=type_name(tensor.type),
                shape=shape[1:] if len(shape) == 3 else shape,
                shard=file,
                offset=tensor.offset + i * n_bytes,
                n_bytes=n_bytes,
            )
        )
        for i in range(n)
    )
    return MappedTensor(TensorSpec(tensor.name, shape, (tensor.name,) * n), matrices, origin)


def _metadata(gguf: GGUF) -> tuple[dict[str, GGUFValue], list[str]]:
    kept, warnings = {}, []
    for key, value in gguf.metadata.items():
        # How this file is split and padded says nothing of the next one.
        if is_split_key(key) or key == "general.alignment":
            continue
        kind, element = gguf.metadata.types(key)
        if kind != GGUFValueType.ARRAY:
            kept[key] = GGUFValue(value, GGUFValueType(kind))
        elif isinstance(value, list) and value:
            kept[key] = GGUFValue(value, GGUFValueType.ARRAY, GGUFValueType(element))
        else:
            warnings.append(f"{gguf.name}: key {key} is left out: its list is empty")
    return kept, warnings
