"""A GGUF file as the source of a conversion: any model of the architecture, in one file or several.

Tensors keep their names and shapes, metadata is carried over. Norms hold 1 + w already.
"""

from dataclasses import dataclass, field
from pathlib import Path

from gguf import GGUFValueType
from gguf.gguf_writer import GGUFValue

from m3_convert.checkpoint import SourceTensor
from m3_convert.shards import LocalShards, Shards
from m3_convert.tensor_map import MappedTensor, SourceMatrix, TensorSpec
from m3_runtime.engine import GGUF, Model
from m3_runtime.gguf_reader import Tensor
from m3_runtime.quantize import type_name


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
        mapped = tuple(_mapped(tensor, files[tensor.file]) for tensor in gguf.tensors)
        metadata, warnings = _metadata(gguf)
    return GgufSource(path, files, mapped, metadata, tuple(warnings))


def _mapped(tensor: Tensor, file: Path) -> MappedTensor:
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
    return MappedTensor(TensorSpec(tensor.name, shape, (tensor.name,) * n), matrices)


def _metadata(gguf: GGUF) -> tuple[dict[str, GGUFValue], list[str]]:
    kept, warnings = {}, []
    for key, value in gguf.metadata.items():
        # How this file is split and padded says nothing of the next one.
        if key.startswith("split.") or key == "general.alignment":
            continue
        kind, element = gguf.metadata.types(key)
        if kind != GGUFValueType.ARRAY:
            kept[key] = GGUFValue(value, GGUFValueType(kind))
        elif isinstance(value, list) and value:
            kept[key] = GGUFValue(value, GGUFValueType.ARRAY, GGUFValueType(element))
        else:
            warnings.append(f"{gguf.name}: key {key} is left out: its list is empty")
    return kept, warnings
