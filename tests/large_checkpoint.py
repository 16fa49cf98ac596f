"""Checkpoints of many GB with the release's widths, written at the speed of the disk; as holes they take no room.

Weights are cut from a few MiB of random numbers again and again: every value is finite and has the magnitude of a
trained weight, but the model says nothing. `make_checkpoint.py` makes models that can be run.
"""

import json
import random
import shutil
import signal
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from checkpoint_tensors import DTYPE_BYTES, TEXT_PREFIX, mxfp8_quantize, write_json
from m3_convert.config import parse_config
from m3_convert.tensor_map import TensorSpec, tensor_specs
from make_checkpoint import HERE, CheckpointParts, CheckpointSpec, make_config, make_tokenizer, write_checkpoint

#: The release's dimensions, all 428 billion weights (852 GB in BF16); smaller ones come from `replace`.
RELEASE = CheckpointSpec(
    layers=60,
    dense=3,
    hidden=6144,
    heads=64,
    kv_heads=4,
    experts=128,
    inter=3072,
    shared_inter=3072,
    dense_inter=12288,
    vocab=200064,
    top_k=16,
    vision=False,
    shard_mb=13500,
)

POOL_VALUES = 1 << 22  #: random numbers of which weights are made


@contextmanager
def working_folder(parent: Path, n_bytes: int) -> Iterator[Path]:
    """A folder in `parent` for files of `n_bytes` in all. It is removed whatever ends the block, a signal included."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / "m3-large-files"
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    free = shutil.disk_usage(parent).free
    if free < n_bytes:
        sys.exit(f"{parent}: {n_bytes / 1e9:.0f} GB are needed, {free / 1e9:.0f} GB free")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda n, _: sys.exit(128 + n))
    try:
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Stored:
    """One tensor of a shard. `columns` of the weight that it belongs to say how large its values are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    columns: int
    norm: bool

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def make_large_checkpoint(out: Path, spec: CheckpointSpec, *, holes: bool = False) -> int:
    """Writes a whole checkpoint into the folder `out`; returns the bytes of its shards.

    holes: nothing but the headers is written, so that the shards take no room and all weights read as 0. Tensors are
    shuffled over the shards, as experts of a layer are in the release.
    """
    template = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
    write_checkpoint(out, spec, CheckpointParts(large_tokenizer(spec), {}, template))
    (shard,) = out.glob("*.safetensors")  # of no tensors
    shard.unlink()
    shards = _shards(sorted(stored_tensors(spec), key=lambda t: zlib.crc32(t.name.encode())), spec.shard_mb * 1e6)
    weight_map: dict[str, str] = {}
    for i, tensors in enumerate(shards, 1):
        path = out / f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(path, tensors, holes)
        weight_map |= dict.fromkeys((t.name for t in tensors), path.name)
    n_bytes = sum(t.n_bytes for tensors in shards for t in tensors)
    index = {"metadata": {"total_size": n_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(out / "model.safetensors.index.json", index)
    return n_bytes


def stored_tensors(spec: CheckpointSpec) -> Iterator[Stored]:
    """The text tensors of a checkpoint, as the release stores them."""
    for tensor in tensor_specs(parse_config(make_config(spec), "config.json")):
        shape = tensor.shape[1:] if tensor.stacked else tensor.shape
        for name in tensor.sources:
            source = (TEXT_PREFIX if spec.prefix else "") + name
            columns = 1 if name == "model.embed_tokens.weight" else shape[-1]
            if spec.mxfp8 and name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")):
                yield Stored(source, "F8_E4M3", shape, columns, False)
                yield Stored(source + "_scale_inv", "U8", (*shape[:-1], shape[-1] // 32), columns, False)
            else:
                yield Stored(source, _dtype(tensor), shape, columns, tensor.plus_one)


def _dtype(tensor: TensorSpec) -> str:
    return "F32" if tensor.name.endswith(("ffn_gate_inp.weight", "exp_probs_b.bias")) else "BF16"


def _shards(tensors: list[Stored], limit: float) -> list[list[Stored]]:
    shards: list[list[Stored]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.n_bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.n_bytes
    return shards


def _write_shard(path: Path, tensors: list[Stored], holes: bool) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    tensors = sorted(tensors, key=lambda t: (-DTYPE_BYTES[t.dtype], t.name))  # wide types first: aligned
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.n_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if holes:
            file.truncate(8 + len(text) + end)
            return
        for tensor in tensors:
            for piece in _pieces(tensor):
                file.write(piece)


def _pieces(tensor: Stored) -> Iterator[memoryview]:
    pool = _pool(tensor.dtype, tensor.columns, tensor.norm)
    at = zlib.crc32(tensor.name.encode()) % len(pool) // 64 * 64  # another part for each tensor
    left = tensor.n_bytes
    while left:
        piece = pool[at : at + left]
        yield piece
        left -= len(piece)
        at = 0


@cache
def _pool(dtype: str, columns: int, norm: bool) -> memoryview:
    values = np.random.default_rng(5).standard_normal(POOL_VALUES, np.float32)
    if norm:  # w where the model multiplies by 1 + w
        values = np.clip(values * np.float32(0.25), np.float32(-0.96), np.float32(2))
    else:
        values *= np.float32(columns**-0.5)
    match dtype:
        case "F32":
            return _bytes(values)
        case "BF16":
            return _bytes((values.view(np.uint32) >> 16).astype(np.uint16))
        case "F8_E4M3":
            return _bytes(mxfp8_quantize(values.reshape(-1, 32))[0])
        case _:
            return _bytes(mxfp8_quantize(values.reshape(-1, 32))[1])


def _bytes(values: npt.NDArray[Any]) -> memoryview:
    return memoryview(values.reshape(-1).view(np.uint8))


def large_tokenizer(spec: CheckpointSpec) -> str:
    """The text of a tokenizer.json with as many tokens as `spec` says; merges join tokens at random."""
    small = replace(spec, vocab=1024)
    content = json.loads(make_tokenizer(small).to_str())
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    trained = tokens.copy()
    known, merges, choice = set(tokens), content["model"]["merges"], random.Random(5)
    while len(tokens) < spec.first_special:
        pair = choice.choices(trained, k=2)
        merged = "".join(pair)
        if merged not in known:
            known.add(merged)
            tokens.append(merged)
            merges.append(pair)
    content["model"]["vocab"] = {token: i for i, token in enumerate(tokens)}
    for token in content["added_tokens"]:
        token["id"] += spec.first_special - small.first_special
    return json.dumps(content, indent=2, ensure_ascii=False)
