"""A sequence of a session on disk: its tokens and its cache, so that another process goes on without a prefill.

    8 bytes            b"m3sess\\r\\n"
    uint32             bytes of the header that follows
    header             JSON, the fields of `SessionHeader`
    int32 [length]     token ids
    pages              as m3_session_export gives them, ceil(length / block_size) of them

Numbers are little-endian. Behind header, ids and every page stand 16 bytes: the BLAKE2b digest of all that is before
them but earlier digests. A file is refused that is not of this model, these types, blocks and layers, whose size is not
what its header asks for, or in which a digest is wrong. The digests tell damage, not an author: like a model, a session
is opened from where one trusts. Versions of the program that keep FORMAT read each other's files.

A sequence that blocks were dropped from is saved as it is: `length` tokens at the positions that they have now, with
`shifted_from` to tell that keys and values from there on were computed with other text in view. What was dropped is
not in the file.
"""

import errno
import hashlib
import json
import os
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from m3_runtime.engine import Session
from m3_runtime.errors import ContextError, InputError, MachineError
from m3_runtime.native import lib, version
from m3_runtime.quantize import TensorType

FORMAT: Final = 1
LARGEST_HEADER: Final = 1 << 24  #: bytes
_MAGIC: Final = b"m3sess\r\n"
_SIZE: Final = struct.Struct("<I")
_DIGEST: Final = 16
_DISK_FULL: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO))

Progress: TypeAlias = Callable[[int, int], None]  #: called with pages done and in all


@dataclass(frozen=True)
class SessionHeader:
    """What a file says of itself."""

    format: int
    program: str  #: version of the engine that wrote it
    model: str  #: `Model.digest`
    model_name: str  #: of its file
    kv_type: str
    index_type: str
    attention: str
    layers: list[int]  #: the window: first layer and number of layers
    block_size: int
    page_bytes: int
    length: int  #: tokens
    shifted_from: int | None  #: as `Session.shifted_from`
    note: Any  #: any JSON of the caller's

    @classmethod
    def of(cls, session: Session, seq: int, note: Any = None) -> Self:
        """What a file of a sequence says."""
        model, options = session.model, session.options
        first, count = options.get("layers") or (0, 0)
        return cls(
            format=FORMAT,
            program=version(),
            model=model.digest,
            model_name=Path(model.path).name,
            kv_type=TensorType.parse(options.get("kv_type", "f16")).name,
            index_type=TensorType.parse(options.get("index_type", "f32")).name,
            attention=options.get("attention", "sparse"),
            layers=[first, count or model.hparams.n_layer - first],
            block_size=model.hparams.block_size,
            page_bytes=session.page_bytes,
            length=session.length(seq),
            shifted_from=session.shifted_from(seq),
            note=note,
        )

    @property
    def n_pages(self) -> int:
        return -(-self.length // self.block_size)

    @property
    def body_bytes(self) -> int:
        """Of what follows the header and its digest."""
        return 4 * self.length + _DIGEST + self.n_pages * (self.page_bytes + _DIGEST)


@dataclass(frozen=True)
class SavedSession:
    """What a file held beside the cache."""

    ids: npt.NDArray[np.int32]  #: [length] tokens of the sequence, in order
    note: Any
    shifted_from: int | None


def save_session(
    path: str | os.PathLike[str],
    session: Session,
    seq: int,
    ids: Sequence[int] | npt.NDArray[np.integer[Any]],
    note: Any = None,
    *,
    progress: Progress | None = None,
) -> None:
    """Writes a sequence to a file, which is there whole or not at all; one that was there is replaced.

    ids: the tokens that the sequence holds. note: any JSON, such as the conversation's messages. Nobody but the owner
    may read the file. InputError for ids that are not as many as the sequence's tokens, or a path that cannot be
    written; MachineError if the disk is full. The memory that it takes is that of one page and the ids.
    """
    target = Path(path)
    header = SessionHeader.of(session, seq, note)
    tokens = np.asarray(ids) if len(ids) else np.empty(0, np.int32)
    if tokens.shape != (header.length,) or not np.issubdtype(tokens.dtype, np.integer):
        raise InputError(
            f"{target}: {tokens.dtype} ids of shape {tokens.shape} for a sequence of {header.length} tokens"
        )
    _check_ids(target, tokens, session)
    try:
        text = json.dumps(asdict(header), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{target}: the note is no JSON: {error}") from None
    if len(text) > LARGEST_HEADER:
        raise InputError(f"{target}: a header of {len(text)} bytes with its note, at most {LARGEST_HEADER} are allowed")
    with _replacing(target) as out:
        out.write(_MAGIC + _SIZE.pack(len(text)) + text)
        out.write(tokens.astype("<i4").tobytes())
        page = np.empty(header.page_bytes, np.uint8)
        for block in range(header.n_pages):
            if progress:
                progress(block, header.n_pages)
            out.write(session.export_page(block, seq, page).data)
        if session.length(seq) != header.length:
            raise InputError(f"{target}: the sequence was changed while it was saved")


def load_session(
    path: str | os.PathLike[str], session: Session, seq: int = 0, *, progress: Progress | None = None
) -> SavedSession:
    """Fills a sequence from a file; what it held before is dropped.

    InputError names what does not fit or is damaged, ContextError what the session has no room for. A file that is
    refused by its header or its size leaves the sequence as it was; any other failure leaves it empty.
    """
    with _opened(Path(path)) as file:
        header = file.header()
        _check_fits(file.path, header, session, seq)
        ids = np.frombuffer(file.part(4 * header.length, "the token ids"), "<i4").astype(np.int32)
        _check_ids(file.path, ids, session)
        session.rewind(0, seq)
        try:
            _load_pages(file, header, session, seq, progress)
            if header.shifted_from is not None:
                session.mark_shifted(header.shifted_from, seq)
        except BaseException:
            session.rewind(0, seq)
            raise
    return SavedSession(ids, header.note, header.shifted_from)


def read_header(path: str | os.PathLike[str]) -> SessionHeader:
    """What a file says of itself, for one who has no session yet. InputError if it is damaged as far as that goes."""
    with _opened(Path(path)) as file:
        return file.header()


def _load_pages(file: "_Reader", header: SessionHeader, session: Session, seq: int, progress: Progress | None) -> None:
    page = np.empty(header.page_bytes, np.uint8)
    for block in range(header.n_pages):
        if progress:
            progress(block, header.n_pages)
        file.part_into(page.data, f"page {block}")
        session.import_page(page, min(header.block_size, header.length - block * header.block_size), seq)


def _check_ids(path: Path, ids: npt.NDArray[np.integer[Any]], session: Session) -> None:
    n_vocab = session.model.hparams.n_vocab
    if ids.size and (ids.min() < 0 or ids.max() >= n_vocab):
        raise InputError(f"{path}: a token id is not one of the model's {n_vocab}")


def _check_fits(path: Path, header: SessionHeader, session: Session, seq: int) -> None:
    """Refuses a file of another model or of a session that keeps its cache in another way."""
    mine = SessionHeader.of(session, seq)
    for name, what in _MUST_AGREE.items():
        found, expected = getattr(header, name), getattr(mine, name)
        if found != expected:
            raise InputError(f"{path}: {what} {_shown(header, name)}, this session has {_shown(mine, name)}")
    context = session.options.get("context", 4096)
    if header.length > context:
        raise ContextError(f"{path}: it holds {header.length} tokens, the context {context}")


_MUST_AGREE: Final = {
    "model": "it is of the model",
    "kv_type": "its keys and values are",
    "index_type": "its index keys are",
    "attention": "its attention is",
    "layers": "its layers (first, number) are",
    "block_size": "its blocks have tokens:",
    "page_bytes": "its pages have bytes:",
}


def _shown(header: SessionHeader, name: str) -> str:
    if name == "model":
        return f"{header.model_name!r} ({header.model[:8]})"
    return str(getattr(header, name))


# ---------------------------------------------------------------------------------------------------- writing


def _not_written(target: Path, error: OSError) -> InputError | MachineError:
    kind = MachineError if error.errno in _DISK_FULL else InputError
    return kind(f"{target}: cannot be written: {error.strerror}")


class _Writer:
    """Parts of a file, each followed by the digest of all so far. target: the path that messages name."""

    def __init__(self, target: Path, descriptor: int) -> None:
        self._target, self._descriptor = target, descriptor
        self._digest = hashlib.blake2b(digest_size=_DIGEST)

    def write(self, part: bytes | memoryview) -> None:
        self._digest.update(part)
        self._write(part)
        self._write(self._digest.digest())

    def _write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            raise _not_written(self._target, error) from error


@contextmanager
def _replacing(target: Path) -> Iterator[_Writer]:
    """A new file beside `target`, which takes its place when it is on the disk; removed on any failure."""
    try:
        descriptor, name = tempfile.mkstemp(".part", f"{target.name}.", target.parent)
    except OSError as error:
        raise _not_written(target, error) from error
    try:
        try:
            yield _Writer(target, descriptor)
            _move(target, descriptor, name)
        finally:
            os.close(descriptor)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _move(target: Path, descriptor: int, name: str) -> None:
    try:
        os.fsync(descriptor)
        Path(name).replace(target)
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise _not_written(target, error) from error


# ---------------------------------------------------------------------------------------------------- reading


class _Reader:
    """Parts of a file, each checked by its digest. Messages begin with the path."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._left = os.fstat(descriptor).st_size
        self._digest = hashlib.blake2b(digest_size=_DIGEST)

    def header(self) -> SessionHeader:
        """The first part. Checks the size of the whole file too."""
        start = self._read(min(len(_MAGIC), self._left), "the first bytes")
        if start != _MAGIC:
            raise InputError(f"{self.path}: not a saved session")
        (size,) = _SIZE.unpack(self._read(_SIZE.size, "the first bytes"))
        if size > LARGEST_HEADER:
            raise InputError(f"{self.path}: a header of {size} bytes, at most {LARGEST_HEADER} are allowed")
        header = _parsed(self.path, self.part(size, "the header"))
        if header.body_bytes != self._left:
            fault = "is cut off" if header.body_bytes > self._left else "has bytes behind its end"
            raise InputError(
                f"{self.path}: {fault}: {header.body_bytes} bytes are to follow the header, {self._left} do"
            )
        return header

    def part(self, size: int, what: str) -> bytes:
        data = self._read(size, what)
        self._check(what)
        return data

    def part_into(self, target: memoryview, what: str) -> None:
        self._read_into(target, what)
        self._check(what)

    def _read(self, size: int, what: str) -> bytes:
        if size > self._left:
            raise InputError(f"{self.path}: is cut off in {what}: {size} bytes are needed, {self._left} are left")
        data = bytearray(size)
        self._read_into(memoryview(data), what)
        return bytes(data)

    def _read_into(self, target: memoryview, what: str) -> None:
        self._digest.update(self._raw(target, what))

    def _raw(self, target: memoryview, what: str) -> memoryview:
        at = 0
        while at < len(target):
            try:
                n = os.readv(self._descriptor, [target[at:]])
            except OSError as error:
                raise InputError(f"{self.path}: cannot be read: {error.strerror}") from error
            if not n:
                raise InputError(f"{self.path}: is cut off in {what}")
            at += n
        self._left -= len(target)
        return target

    def _check(self, what: str) -> None:
        expected = self._digest.digest()
        if self._left < _DIGEST:
            raise InputError(f"{self.path}: is cut off in {what}")
        if self._raw(memoryview(bytearray(_DIGEST)), what) != expected:
            raise InputError(f"{self.path}: {what} is damaged: the digest is not that of the bytes")


@contextmanager
def _opened(path: Path) -> Iterator[_Reader]:
    try:
        # Without waiting for the writer of a pipe, which is refused.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InputError(f"{path}: expected a saved session, found no regular file")
        yield _Reader(path, descriptor)
    finally:
        os.close(descriptor)


def _parsed(path: Path, text: bytes) -> SessionHeader:
    """The fields of a header, each of its type and in its range."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: the header is no JSON: {error}") from None
    if not isinstance(raw, dict) or type(raw.get("format")) is not int:
        raise InputError(f"{path}: the header names no format")
    if raw["format"] != FORMAT:
        raise InputError(
            f"{path}: a session of format {raw['format']}, written by version {raw.get('program')!r}; "
            f"this version {version()} reads format {FORMAT}"
        )
    if set(raw) != {field.name for field in fields(SessionHeader)}:
        raise InputError(f"{path}: the header has other fields than those of format {FORMAT}")
    header = SessionHeader(**raw)
    for name, fits in _RANGES.items():
        if not fits(raw[name]):
            raise InputError(f"{path}: '{name}' of the header is out of range")
    if header.shifted_from is not None and not _is_int(header.shifted_from, 0, header.length - 1):
        raise InputError(f"{path}: 'shifted_from' of the header is out of range")
    return header


def _is_int(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_RANGES: Final[dict[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("program", "model", "model_name", "kv_type", "index_type", "attention"), _is_text),
    "layers": lambda v: isinstance(v, list) and len(v) == 2 and all(_is_int(n, 0, lib.M3_MAX_LAYERS) for n in v),
    "block_size": lambda v: _is_int(v, lib.M3_MIN_BLOCK, lib.M3_MAX_BLOCK),
    "page_bytes": lambda v: _is_int(v, 0, 1 << 48),
    "length": lambda v: _is_int(v, 0, lib.M3_MAX_CONTEXT),
}
