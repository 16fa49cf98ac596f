"""GGUF files through the engine's reader, which is written for untrusted input."""

import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, TypeAlias

import numpy as np

from m3_runtime.errors import InputError
from m3_runtime.native import call, ffi, lib
from m3_runtime.quantize import row_bytes

Value: TypeAlias = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]

_NUMPY = {
    lib.M3_KV_U8: "<u1",
    lib.M3_KV_I8: "<i1",
    lib.M3_KV_U16: "<u2",
    lib.M3_KV_I16: "<i2",
    lib.M3_KV_U32: "<u4",
    lib.M3_KV_I32: "<i4",
    lib.M3_KV_F32: "<f4",
    lib.M3_KV_BOOL: "?",
    lib.M3_KV_U64: "<u8",
    lib.M3_KV_I64: "<i8",
    lib.M3_KV_F64: "<f8",
}

SPLIT_ID: Final = "m3.split.id"  #: the same in all files of one conversion; see m3_gguf_open

_SPLIT_NAME = re.compile(r"(.+)-[0-9]{5}(-of-[0-9]{5}\.gguf)", re.DOTALL)


def gguf_files(path: Path) -> list[Path]:
    """The files that opening `path` would open, by their names alone.

    `path` itself, unless it is one of a split model (NAME-00001-of-0000N.gguf): then all of them that are there. Of a
    folder: all files in it with such names, which may be none.
    """
    own = _SPLIT_NAME.fullmatch(path.name)
    if path.is_dir():
        return sorted(file for file in path.iterdir() if _SPLIT_NAME.fullmatch(file.name))
    if own is None or not path.parent.is_dir():
        return [path]
    named = ((file, _SPLIT_NAME.fullmatch(file.name)) for file in path.parent.iterdir())
    return sorted(file for file, found in named if found and found.groups() == own.groups()) or [path]


def is_split_key(key: str) -> bool:
    """True for the keys that mark a file as one of several."""
    return key.startswith("split.") or key == SPLIT_ID


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file. ne: dimensions, contiguous one first. offset: bytes from the start of its file.

    file: which of `GGUF.files` it lies in.
    """

    name: str
    type: int
    ne: tuple[int, ...]
    offset: int
    n_bytes: int
    file: int = 0


def _decode(string: Any, what: str) -> str:
    try:
        return bytes(ffi.buffer(string.data, string.size)).decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{what} is not valid UTF-8") from None


def _bytes(string: Any) -> bytes:
    return bytes(ffi.buffer(string.data, string.size))


def _packed(string: bytes) -> bytes:
    return struct.pack("<Q", len(string)) + string


class Metadata(Mapping[str, Value]):
    """Keys of a file in file order; values are decoded when asked for."""

    def __init__(self, gguf: Any, name: str) -> None:
        self._name = name
        self._kv = {}
        for i in range(lib.m3_gguf_n_kv(gguf)):
            kv = lib.m3_gguf_kv(gguf, i)
            self._kv[_decode(kv.key, f"{name}: key {i}")] = kv

    def __getitem__(self, key: str) -> Value:
        kv = self._kv[key]
        what = f"{self._name}: the value of key '{key}'"
        if kv.element_type == lib.M3_KV_STRING:
            strings = [_decode(kv.strings[i], what) for i in range(kv.n)]
            return strings if kv.type == lib.M3_KV_ARRAY else strings[0]
        dtype = np.dtype(_NUMPY[kv.element_type])
        raw = bytes(ffi.buffer(kv.data, kv.n * dtype.itemsize)) if kv.n else b""
        values: list[Any] = np.frombuffer(raw, dtype).tolist()
        if kv.type == lib.M3_KV_ARRAY:
            return values
        scalar: Value = values[0]
        return scalar

    def types(self, key: str) -> tuple[int, int]:
        """GGUF's number of the type of a value, and of its elements: the same number unless it is a list."""
        kv = self._kv[key]
        return int(kv.type), int(kv.element_type)

    def close(self) -> None:
        """Forgets the keys, whose values lie in the file."""
        self._kv.clear()

    def __iter__(self) -> Iterator[str]:
        return iter(self._kv)

    def __len__(self) -> int:
        return len(self._kv)


class GGUF:
    """An open file: `metadata`, `tensors` in file order, `tensor_data`. Use it as a context manager.

    path: the file, any one of a model that is split into several, or their folder. `files` are all of them, and
    `file_bytes` is the size of all. InputError names what is wrong with the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        out = ffi.new("m3_gguf **")
        call(lib.m3_gguf_open, os.fsencode(path), out)
        try:
            self._fill(out[0], os.fspath(path), owned=True)
        except InputError:
            lib.m3_gguf_close(out[0])
            raise

    @classmethod
    def _borrow(cls, pointer: Any, name: str) -> "GGUF":
        """The file of an open model, which stays its owner."""
        self = cls.__new__(cls)
        self._fill(pointer, name, owned=False)
        return self

    def _fill(self, pointer: Any, name: str, *, owned: bool) -> None:
        self._pointer, self._owned, self.name = pointer, owned, name
        self.file_bytes = int(lib.m3_gguf_file_bytes(pointer))
        count = lib.m3_gguf_n_files(pointer)
        self.files = [os.fsdecode(ffi.string(lib.m3_gguf_file_name(pointer, i))) for i in range(count)]
        self.metadata = Metadata(pointer, name)
        self.tensors = [self._tensor(lib.m3_gguf_tensor(pointer, i)) for i in range(lib.m3_gguf_n_tensors(pointer))]

    def _tensor(self, t: Any) -> Tensor:
        name = _decode(t.name, f"{self.name}: a tensor name")
        return Tensor(name, t.type, tuple(t.ne[0 : t.n_dims]), t.offset, t.n_bytes, t.file)

    def tensor_data(self, name: str) -> memoryview:
        """Bytes of a tensor in the mapped file, read-only, valid until close; InputError if there is none."""
        if self._pointer == ffi.NULL:
            raise InputError(f"{self.name}: the file is closed")
        t = lib.m3_gguf_find_tensor(self._pointer, name.encode())
        if t == ffi.NULL or t.data == ffi.NULL:
            raise InputError(f"{self.name}: there is no data of a tensor '{name}'")
        return memoryview(ffi.buffer(ffi.cast("char *", t.data), t.n_bytes)).toreadonly()

    def header(self, types: Mapping[str, int] = MappingProxyType({})) -> bytes:
        """The header that one file with all keys and tensors would have, for `Model.from_header`.

        The keys that mark a file as one of several are left out. types: of tensors that shall have another one.
        """
        keys = [lib.m3_gguf_kv(self._pointer, i) for i in range(lib.m3_gguf_n_kv(self._pointer))]
        keys = [kv for kv in keys if not is_split_key(_bytes(kv.key).decode())]
        alignment = int(self.metadata.get("general.alignment", 32))  # type: ignore[arg-type]
        out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(keys)))
        for kv in keys:
            out += _packed(_bytes(kv.key)) + struct.pack("<I", kv.type)
            if kv.type == lib.M3_KV_ARRAY:
                out += struct.pack("<IQ", kv.element_type, kv.n)
            if kv.element_type == lib.M3_KV_STRING:
                for i in range(kv.n):
                    out += _packed(_bytes(kv.strings[i]))
            elif kv.n:
                out += ffi.buffer(kv.data, kv.n * np.dtype(_NUMPY[kv.element_type]).itemsize)
        offset = 0
        for t in self.tensors:
            type_, n_bytes = t.type, t.n_bytes
            if t.name in types:
                type_ = types[t.name]
                n_bytes = row_bytes(type_, t.ne[0]) * prod(t.ne[1:])
            out += _packed(t.name.encode()) + struct.pack(f"<I{len(t.ne)}QIQ", len(t.ne), *t.ne, type_, offset)
            offset += -(-n_bytes // alignment) * alignment
        return bytes(out) + bytes(-len(out) % alignment)

    def close(self) -> None:
        """Unmaps the file. Memory views of it must not be used any more."""
        if self._owned and self._pointer != ffi.NULL:
            lib.m3_gguf_close(self._pointer)
        self._pointer = ffi.NULL
        self.metadata.close()

    def __enter__(self) -> "GGUF":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
