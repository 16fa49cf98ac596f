"""A model whose weights are bound to the engine one layer at a time: a GGUF file, a checkpoint folder, or a Hub id.

A checkpoint is evaluated as the file that `m3-convert --type auto` would write from it, without writing it.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from m3_convert.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint, listed
from m3_convert.disk_room import check_rooms
from m3_convert.gguf_file import header_bytes
from m3_convert.hub_shards import HubShards
from m3_convert.metadata import plan_metadata
from m3_convert.plan import plan_conversion
from m3_convert.source import open_source
from m3_convert.tensor_group import TENSOR_GROUPS, tensor_group
from m3_convert.tensor_map import layer_of
from m3_convert.weights import CheckpointWeights, MappedWeights, Weights
from m3_runtime.engine import GGUF, Model
from m3_runtime.errors import InputError, NotFiniteError
from m3_runtime.file_identity import Identity, file_identity
from m3_runtime.quantize import TensorType, dequantize_rows, row_bytes, type_name
from m3_runtime.text import ChatTokenizer

Kind = Literal["gguf", "checkpoint"]


class FilesChangedError(InputError):
    """A model's files are not those that were opened: what was computed is of no model."""


@dataclass(frozen=True)
class Origin:
    """Where a model comes from."""

    identity: Identity = field(default_factory=dict)
    """What tells its content, of its files and of what else it is made from, the same after they were moved."""

    described_by: tuple[Path, ...] = ()
    """The files whose hash stands for it: all of a GGUF model; of a checkpoint its config and the index of its shards,
    or its only shard if that is there already."""

    notes: tuple[str, ...] = ()  #: warnings of the source, for people

    look: Callable[[], Identity] = dict
    """Gives that of its files as they are now. Raises InputError for one that is not there any more."""

    opened: Identity = field(default_factory=dict)  #: what that was when the model was opened

    def changed(self) -> list[str]:
        """The files that are not what they were when the model was opened. Raises InputError as `look` does."""
        return [Path(name).name for name, now in self.look().items() if self.opened[name] != now]


class LayeredModel:
    """One side of a comparison. Use it as a context manager.

    `model` knows shapes and types; `bound` gives it the weights of one layer.
    """

    def __init__(self, name: str, kind: Kind, model: Model, weights: Weights, origin: Origin) -> None:
        self.name = name  #: as the user wrote it
        self.kind: Kind = kind
        self.model = model
        self.hparams = model.hparams
        self.origin = origin
        self.notes = origin.notes
        self.weights = weights
        self._types = {t.name: (t.type, t.ne[0]) for t in model.gguf.tensors}
        self._sizes = {t.name: t.n_bytes for t in model.gguf.tensors}
        self._by_layer: dict[int, list[str]] = {}
        for tensor in self._sizes:
            self._by_layer.setdefault(layer_of(tensor), []).append(tensor)

    @property
    def n_bytes(self) -> int:
        """Bytes on disk: of the GGUF file, or of all shards of the checkpoint."""
        return self.weights.n_bytes

    @property
    def mapped(self) -> bool:
        """True if bound weights are pages of a file, False if they are memory of this process."""
        return self.weights.mapped

    def check_unchanged(self) -> None:
        """Raises FilesChangedError if its files are not those that were opened, InputError as `Origin.look` does."""
        if changed := self.origin.changed():
            which = "" if changed == [Path(self.name).name] else f": {listed(changed)}"
            raise FilesChangedError(f"{self.name}: changed while it was in use{which}")

    def tokenizer(self) -> ChatTokenizer:
        """Raises InputError, naming the model, if its metadata make none."""
        try:
            return ChatTokenizer(self.model.gguf.metadata)
        except InputError as error:
            raise InputError(f"{self.name}: {error}") from error

    def layer_bytes(self, layer: int) -> int:
        """Bytes of the weights that `bound(layer)` binds."""
        return sum(self._sizes[name] for name in self._needed(layer))

    def owned_bytes(self, layer: int) -> int:
        """Of these, those that are memory of this process."""
        return 0 if self.mapped else self.layer_bytes(layer)

    def types(self) -> dict[str, dict[str, int]]:
        """Bytes by type name in each tensor group, as evaluated, in the order of TENSOR_GROUPS."""
        found: dict[str, dict[str, int]] = {group: {} for group, _ in TENSOR_GROUPS}
        for tensor in self.model.gguf.tensors:
            sizes = found.setdefault(tensor_group(tensor.name), {})
            name = type_name(tensor.type)
            sizes[name] = sizes.get(name, 0) + tensor.n_bytes
        return {group: sizes for group, sizes in found.items() if sizes}

    def vector(self, tensor: str) -> npt.NDArray[np.float32]:
        """A one-dimensional tensor; the engine accepts these as F32 only."""
        (_, data), *_ = self.weights.parts(tensor)
        return np.frombuffer(data, "<f4").astype(np.float32)

    def values(self, tensor: str) -> npt.NDArray[np.float32]:
        """The values of a tensor that is no stack of experts, float32 [rows, ne[0]]."""
        (_, data), *_ = self.weights.parts(tensor)
        type_, columns = self._types[tensor]
        rows = np.frombuffer(data, np.uint8).reshape(-1, row_bytes(type_, columns))
        return dequantize_rows(TensorType(type_), rows, columns)

    @contextmanager
    def bound(self, layer: int, done: Callable[[int], None]) -> Iterator[Model]:
        """The model with what a window of this one layer needs; the weights are let go at the end.

        layer: n_layer stands for output norm and head. done: told the bytes of each tensor that was bound. Raises
        InputError for broken values in a checkpoint.
        """
        names = self._needed(layer)
        try:
            for name in names:
                for expert, data in self.weights.parts(name):
                    self.model.bind(name, data, expert)
                done(self._sizes[name])
            yield self.model
        finally:
            if layer < self.hparams.n_layer:
                self.model.unbind_layer(layer)
            self.model.unbind_layer(-1)
            self.weights.release(names)

    def _needed(self, layer: int) -> list[str]:
        names = list(self._by_layer.get(layer, ()))
        if layer == 0:
            names.append("token_embd.weight")
        if layer >= self.hparams.n_layer - 1:  # the engine asks for the head with the last layer
            names += ["output_norm.weight", "output.weight"]
        return names

    def close(self) -> None:
        self.model.close()
        self.weights.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def unchanged(*sides: LayeredModel) -> Iterator[None]:
    """For a block that reads models: raises FilesChangedError if their files are not those that were opened, at its end
    and in place of what the block says is wrong with their content."""
    try:
        yield
    except (InputError, NotFiniteError):
        for side in sides:
            side.check_unchanged()
        raise
    for side in sides:
        side.check_unchanged()


def open_layered(path: Path, *, device: str = "cpu", isa: str = "auto", threads: int = 0) -> LayeredModel:
    """Opens a GGUF file, any one of a split model, the folder of one, a checkpoint folder, or an id on the Hub, whose
    shards are then downloaded into the Hub's cache, each when its first layer is bound.

    device and isa: as for `Model`. threads: for the conversion of a checkpoint's tensors, 0 takes all cores. Raises
    InputError that names what is wrong, as the engine and m3-convert do, and MachineError for a device that is missing.
    """
    source = open_source(str(path))
    if isinstance(source, Checkpoint):
        return _open_checkpoint(source, device, isa, threads)
    return _open_gguf(path, device, isa)


def _open_gguf(path: Path, device: str, isa: str) -> LayeredModel:
    with GGUF(path) as gguf:  # checks counts, offsets and sizes against the files
        tensors, files, header = gguf.tensors, gguf.files, gguf.header()
    weights = MappedWeights(files, tensors)
    paths = tuple(map(Path, files))
    look = partial(file_identity, paths)
    opened = look()
    # Without the number on the disk, which some file systems give anew when they are mounted again.
    identity = {Path(name).name: about[:2] for name, about in opened.items()}
    origin = Origin(identity, paths, look=look, opened=opened)
    model = Model.from_header(header, str(path), device=device, isa=isa)
    return LayeredModel(str(path), "gguf", model, weights, origin)


def _open_checkpoint(checkpoint: Checkpoint, device: str, isa: str, threads: int) -> LayeredModel:
    plan = plan_conversion(checkpoint)
    metadata, notes = plan_metadata(plan)
    if isinstance(checkpoint.shards, HubShards):
        needed = sorted({t.shard for tensor in plan.tensors for m in tensor.matrices for t in m.sources})
        check_rooms([checkpoint.shards.room(needed)])
        checkpoint.shards.expect(len(checkpoint.shards.missing(needed)))
    name, header = str(checkpoint.path), header_bytes(plan, metadata)
    model = Model.from_header(header, name, device=device, isa=isa)
    shards = sorted({t.shard for tensor in plan.tensors for m in tensor.matrices for t in m.sources})

    def look() -> Identity:
        return {shard.name: checkpoint.shards.identity(shard) for shard in shards}

    opened = look()
    identity: Identity = {**opened, "header": [hashlib.sha256(header).hexdigest()]}
    described_by = [checkpoint.folder / name for name in ("config.json", INDEX_NAME)]
    if not described_by[1].is_file():
        described_by[1] = checkpoint.folder / SINGLE_NAME
    described_by = [path for path in described_by if path.is_file()]  # the only shard of a Hub id may be yet to come
    origin = Origin(identity, tuple(described_by), (*plan.warnings, *notes), look, opened)
    return LayeredModel(name, "checkpoint", model, CheckpointWeights(plan, threads), origin)
