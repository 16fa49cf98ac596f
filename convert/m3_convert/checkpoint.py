"""A checkpoint folder: its config, its shards and every tensor in them by name, checked before anything is read.

The `safetensors` library validates each shard (header, offsets without holes or overlap, sizes, end of file); its NumPy
side cannot read BF16 or FP8, so the byte ranges are taken from the header and the raw bytes are read directly.
"""

import json
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from safetensors import SafetensorError, safe_open

from m3_convert.config import ModelConfig, load_config
from m3_convert.file_kind import file_kind
from m3_convert.json_file import read_object
from m3_convert.shards import LocalShards, Shards
from m3_runtime.errors import InputError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
TEXT_PREFIX = "language_model."


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of a shard. `shape` is outermost first; `offset` and `n_bytes` are its byte range in the file."""

    name: str
    dtype: str  #: as safetensors spells it: "BF16", "F8_E4M3", ...; of a GGUF file the name of its type
    shape: tuple[int, ...]
    shard: Path
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: nothing but headers has been read."""

    folder: Path
    name: str  #: for general.name: the name of the folder, or the id on the Hub
    config: ModelConfig
    tensors: Mapping[str, SourceTensor]  #: by source name, in the order of the shards
    prefix: str  #: of the text tensors: "language_model." or ""
    warnings: tuple[str, ...] = ()
    shards: Shards = field(default_factory=LocalShards)
    hub_id: str | None = None  #: if it lies on the Hub; `folder` is then its snapshot in the cache, without all shards

    @property
    def path(self) -> Path:
        """What messages name."""
        return self.folder if self.hub_id is None else Path(self.hub_id)

    @property
    def files(self) -> tuple[Path, ...]:
        """What must not be written over."""
        return tuple(file for file in self.folder.iterdir() if file.is_file() and file.suffix != ".gguf")


@dataclass(frozen=True)
class CheckpointFiles:
    """What a checkpoint is loaded from."""

    path: Path  #: what messages name
    folder: Path  #: where its small files lie: config.json, the index, the tokenizer
    names: Collection[str]  #: of all its files
    headers: Callable[[Sequence[str]], Iterable[list[SourceTensor]]]  #: the tensors of each of some shards
    elsewhere: str = ""  #: why shards may be absent, if that is known


def load_checkpoint(path: Path | str, name: str | None = None) -> Checkpoint:
    """Opens a checkpoint folder in the release's layout.

    path: folder with config.json and either model.safetensors.index.json and its shards, or one model.safetensors.
    name: what general.name is made from; by default the folder's name.
    Raises InputError that names the file or tensor for: a missing or broken file, a config that GGUF cannot express, an
    absent, truncated or damaged shard, a tensor that index and shards do not agree on.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(f"{folder}: expected a checkpoint folder, found {'a file' if folder.exists() else 'nothing'}")
    names = {p.name for p in folder.iterdir() if p.is_file()}
    files = CheckpointFiles(folder, folder, names, lambda shards: (read_shard_header(folder / s) for s in shards))
    return load_files(files, name or folder.resolve().name, LocalShards())


def load_files(files: CheckpointFiles, name: str, shards: Shards) -> Checkpoint:
    """The checkpoint that these files make. Raises InputError as `load_checkpoint` does."""
    config = load_config(files.folder / "config.json")
    if INDEX_NAME in files.names:
        tensors, used = _indexed_tensors(files)
    elif SINGLE_NAME in files.names:
        tensors, used = {t.name: t for header in files.headers([SINGLE_NAME]) for t in header}, {SINGLE_NAME}
    else:
        for name_there in (INDEX_NAME, SINGLE_NAME):
            _check_kind(files.folder / name_there)
        raise InputError(f"{files.path}: expected {INDEX_NAME} or {SINGLE_NAME}, found neither")
    unlisted = sorted(name for name in files.names if name.endswith(".safetensors") and name not in used)
    warnings = (f"{files.path}: not part of the checkpoint, left out: {listed(unlisted)}",) if unlisted else ()
    return Checkpoint(
        folder=files.folder,
        name=name,
        config=config,
        tensors=MappingProxyType(tensors),
        prefix=TEXT_PREFIX if f"{TEXT_PREFIX}model.embed_tokens.weight" in tensors else "",
        warnings=warnings,
        shards=shards,
    )


def _check_kind(path: Path) -> None:
    """Raises InputError for something under a name that is no file: a link that leads nowhere is not absent."""
    if (kind := file_kind(path)) not in ("a file", "nothing"):
        raise InputError(f"{path}: expected a file, found {kind}")


def listed(names: Iterable[str], limit: int = 5) -> str:
    """Up to `limit` names, and how many there are if more: "a, b, c, d, e and 7 more (12 in all)"."""
    names = list(names)
    text = ", ".join(names[:limit])
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more ({len(names)} in all)"


def read_shard_header(path: Path, shard: Path | None = None) -> list[SourceTensor]:
    """The tensors of one safetensors file in file order. Raises InputError if the file is not whole and valid.

    shard: what tensors and messages name in place of `path`.
    """
    shard = path if shard is None else shard
    try:
        # Opened first: safetensors says of any file that it cannot open that there is none.
        with path.open("rb") as file:
            with safe_open(path, framework="numpy"):  # validates; the handle offers no byte offsets
                pass
            (n_header,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(n_header))
    except SafetensorError as error:
        size = path.stat().st_size
        raise InputError(f"{shard}: shard is damaged or truncated ({size} bytes): {error}") from error
    except OSError as error:
        raise InputError(f"{shard}: shard cannot be read: {error.strerror or error}") from error
    header.pop("__metadata__", None)
    tensors = [
        SourceTensor(
            name=name,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            shard=shard,
            offset=8 + n_header + entry["data_offsets"][0],
            n_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
    ]
    return sorted(tensors, key=lambda t: t.offset)


def _indexed_tensors(files: CheckpointFiles) -> tuple[dict[str, SourceTensor], set[str]]:
    index = files.folder / INDEX_NAME
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(
            f"{index}: weight_map: expected an object of shards by tensor, found {type(weight_map).__name__}"
        )
    for tensor, shard in weight_map.items():
        # A name with a separator could lead anywhere on this machine; shards lie beside the index.
        if not isinstance(shard, str) or not shard or shard in (".", "..") or set(shard) & set("/\\\0"):
            raise InputError(f"{index}: weight_map: {tensor}: expected a file name in this folder, found {shard!r}")
    shards = sorted(set(weight_map.values()))
    absent = [shard for shard in shards if shard not in files.names]
    for shard in absent:
        _check_kind(files.folder / shard)
    if absent:
        why = files.elsewhere and f" ({files.elsewhere})"
        raise InputError(f"{files.path}: {len(absent)} of {len(shards)} shards absent{why}: {listed(absent)}")
    tensors: dict[str, SourceTensor] = {}
    for tensor in (t for header in files.headers(shards) for t in header):
        other = tensors.get(tensor.name)
        if other:
            raise InputError(f"{tensor.name}: is in two shards, {other.shard.name} and {tensor.shard.name}")
        tensors[tensor.name] = tensor
    misplaced = [
        f"{name} (index: {shard}, found in: {tensors[name].shard.name if name in tensors else 'no shard'})"
        for name, shard in weight_map.items()
        if name not in tensors or tensors[name].shard.name != shard
    ]
    if misplaced:
        raise InputError(f"{index}: {len(misplaced)} tensors are not where the index says: {listed(misplaced)}")
    unlisted = [f"{t.name} ({t.shard.name})" for t in tensors.values() if t.name not in weight_map]
    if unlisted:
        raise InputError(f"{index}: {len(unlisted)} tensors of the shards are not in it: {listed(unlisted)}")
    return tensors, set(shards)
