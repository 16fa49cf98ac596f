"""The record of a conversion in progress: OUT.gguf.journal beside OUT.gguf.part.

Lines of text, each flushed to the disk before the program goes on. The first is a JSON object of what the bytes of the
output depend on; every further one is a number: so many bytes of the output, its files one after the other, are safely
on the disk. A line without its end was being written when the program or the machine stopped, and does not count.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from m3_convert.checkpoint import listed
from m3_convert.gguf_file import OutputFile
from m3_convert.output_path import part_path
from m3_convert.plan import Plan, PlannedTensor
from m3_runtime.errors import InputError
from m3_runtime.native import LIBRARY_FOLDER, version

_SUFFIX: Final = ".journal"
MAX_BYTES: Final = 1 << 24  #: of a journal: a line for each quarter of a GiB stays far below

_BEGINNING: Final = b'{"program": '  # of every journal, whatever its version


def journal_path(target: Path) -> Path:
    """The journal of the conversion to a file."""
    return target.with_name(target.name + _SUFFIX)


@dataclass(frozen=True)
class Basis:
    """What the bytes of the output depend on. Values are what JSON gives back, so that a stored one compares equal."""

    program: str  #: version and the hash of the compiled part, which quantizes
    source: dict[str, list[int | str]]  #: what tells the content of every shard that is read, by name
    rules: dict[str, Any]  #: what decides the types
    files: dict[str, int]  #: names of the output and number of tensors in each
    contents: str  #: hash of the headers, and of where each tensor comes from

    def changes(self, stored: "Basis") -> list[str]:
        """What is no longer as it was stored, in words; empty if nothing."""
        changes = []
        if self.program != stored.program:
            changes.append(f"the program (it was {stored.program}, this is {self.program})")
        names = sorted(self.source.keys() | stored.source.keys())
        differing = [name for name in names if self.source.get(name) != stored.source.get(name)]
        if differing:
            changes.append(f"the source ({listed(differing)})")
        if self.rules != stored.rules:
            which = [key for key in self.rules if self.rules[key] != stored.rules.get(key)]
            changes.append(f"the rules ({', '.join(which)})")
        if self.files != stored.files:
            changes.append(f"what goes into which file (--split-max-size: {_shown(stored)} then, {_shown(self)} now)")
        if not changes and self.contents != stored.contents:
            changes.append("the metadata (config, tokenizer, chat template or model card of the source)")
        return changes


def basis_of(plan: Plan, files: Sequence[OutputFile]) -> Basis:
    """The basis of a conversion. Raises InputError for a shard that is not there any more."""
    choice = plan.choice
    contents = hashlib.sha256()
    for file in files:
        contents.update(file.header)
        for tensor in file.tensors:
            contents.update(json.dumps(_layout(tensor)).encode())
    return Basis(
        program=f"{version()}, library {library_hash()[:12]}",
        source={shard.name: plan.source.shards.identity(shard) for shard in _shards(plan)},
        rules={
            "--type or --recipe": [choice.name, choice.recipe.sha256 if choice.recipe else None],
            "--rule": [str(rule) for rule in choice.rules],
            "--allow-lossy-indexer": choice.allow_lossy_indexer,
            "--imatrix": plan.importance.sha256 if plan.importance else None,
        },
        files={file.path.name: len(file.tensors) for file in files},
        contents=contents.hexdigest(),
    )


class Journal:
    """An open journal, locked so that two runs cannot share an output. A context manager; leaving it keeps the file.

    done: bytes of the output that are on the disk.
    """

    def __init__(
        self,
        path: Path,
        basis: Basis,
        *,
        restart: bool = False,
        check_parts: Callable[[Collection[str]], None] = lambda _: None,
    ) -> None:
        """Opens the journal at `path`, or makes it. restart: what is there is given up, its part files included.

        check_parts: is given the names of the files whose part files an earlier run began, before anything is changed;
        it raises if another part file is in the way. Raises InputError if another process holds the journal, if it is
        another kind of file, and if it belongs to another conversion: the message names what has changed.
        """
        self.path = path
        self._source = basis.source
        self._files = tuple(basis.files)
        self._file = _open(path)
        try:
            _lock(self._file, path)
            stored, self.done, end = self._read(lenient=restart)
            if stored is not None and not restart and (changes := basis.changes(stored)):
                raise InputError(
                    f"{path}: the unfinished conversion cannot be resumed: changed since it began: "
                    f"{'; '.join(changes)}. --restart starts anew"
                )
            self._check_parts(check_parts, stored)
            if stored is None or restart:
                self._begin(basis, stored.files if stored else ())
            else:
                os.ftruncate(self._file, end)
                os.lseek(self._file, end, os.SEEK_SET)
        except BaseException:
            os.close(self._file)
            raise

    def record(self, done: int) -> None:
        """Notes that `done` bytes are on the disk; the caller has flushed them."""
        self._append(f"{done}\n".encode())
        self.done = done

    def check_source(self, plan: Plan) -> None:
        """Raises InputError if a shard is no longer what it was when this run began: some of both may have been read.

        One that is not there any more was read before it went.
        """
        changed = []
        for shard in _shards(plan):
            with contextlib.suppress(InputError):
                if plan.source.shards.identity(shard) != self._source[shard.name]:
                    changed.append(shard.name)
        if changed:
            raise InputError(f"the source changed while it was read: {listed(changed)}; nothing was kept")

    def finish(self) -> None:
        """Removes the journal: the files have their names."""
        self.path.unlink(missing_ok=True)

    def give_up(self) -> None:
        """Removes the part files, then the journal: what was written cannot be gone on with."""
        with contextlib.suppress(OSError):  # a disk that fails is why this is called, at times
            self._forget_records()
        self._remove_parts(self._files)
        self.path.unlink(missing_ok=True)
        self.done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def _check_parts(self, check: Callable[[Collection[str]], None], stored: Basis | None) -> None:
        try:
            check(stored.files if stored else ())
        except BaseException:
            if os.fstat(self._file).st_size == 0:  # made above, or left before it said anything
                self.path.unlink(missing_ok=True)
            raise

    def _read(self, *, lenient: bool) -> tuple[Basis | None, int, int]:
        """Basis, bytes done and where the last whole line ends; None if the journal was not even begun.

        lenient: as good as empty if it is a journal that cannot be read.
        """
        content = _content(self._file, self.path)
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines()
        if not lines:
            return None, 0, 0
        try:
            values = json.loads(lines[0])
            stored = Basis(**{field.name: values[field.name] for field in fields(Basis)})
            numbers = [int(line) for line in lines[1:]]
            if numbers != sorted(set(numbers)) or not _is_valid(stored):
                raise ValueError("not in order")
        except (ValueError, TypeError, KeyError) as error:
            if lenient:
                return None, 0, 0
            raise InputError(
                f"{self.path}: is not the journal of a conversion by this version of m3-convert. --restart starts anew"
            ) from error
        return stored, numbers[-1] if numbers else 0, len(whole)

    def _begin(self, basis: Basis, old_files: Collection[str]) -> None:
        if os.fstat(self._file).st_size:
            self._forget_records()
            self._remove_parts(old_files)
            os.ftruncate(self._file, 0)
            os.fsync(self._file)
        os.lseek(self._file, 0, os.SEEK_SET)
        self.done = 0
        self._append(json.dumps(asdict(basis)).encode() + b"\n")

    def _forget_records(self) -> None:
        """All but the first line goes before the data does: a journal that says more than there is would be believed.
        The first line stays as long as there are part files: without it they would be taken for those of others."""
        first = os.pread(self._file, MAX_BYTES, 0).find(b"\n") + 1
        os.ftruncate(self._file, first)
        os.fsync(self._file)

    def _remove_parts(self, files: Collection[str]) -> None:
        for name in files:
            part_path(self.path.with_name(name)).unlink(missing_ok=True)

    def _append(self, line: bytes) -> None:
        view = memoryview(line)
        while view:
            view = view[os.write(self._file, view) :]
        os.fsync(self._file)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of the journal at `path` for what leads to the same output without being a conversion to it.

    What an interrupted conversion left there stays as it is. Raises InputError as `Journal` does for another process at
    work and for another kind of file, OSError if no file can be there.
    """
    file = _open(path)
    try:
        _lock(file, path)
        try:
            _content(file, path)
            yield
        finally:
            if os.fstat(file).st_size == 0:  # made above
                path.unlink(missing_ok=True)
    finally:
        os.close(file)


class _LockedError(Exception):
    """Another process holds the lock of the file."""


def _open(path: Path) -> int:
    # Not truncated before it is locked: it may be the work of another process in progress.
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def _lock(file: int, path: Path) -> None:
    # Some network file systems have no locks. The lock only guards against two runs with one output.
    try:
        with contextlib.suppress(OSError):
            _lock_file(file)
        # Another process may have finished and removed it between the opening and the lock.
        if not path.exists() or path.stat().st_ino != os.fstat(file).st_ino:
            raise _LockedError
    except _LockedError as error:
        raise InputError(f"{path}: another process is writing it") from error


def _lock_file(file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _LockedError from error


def _content(file: int, path: Path) -> bytes:
    content = os.pread(file, MAX_BYTES, 0)
    if content[: len(_BEGINNING)] != _BEGINNING[: len(content)]:
        raise InputError(f"{path}: is there already and no journal of m3-convert; remove it or rename it")
    return content


def _shown(basis: Basis) -> str:
    return f"{len(basis.files)} file{'s' * (len(basis.files) > 1)} of {listed(map(str, basis.files.values()))} tensors"


def _is_valid(basis: Basis) -> bool:
    """Types as written, and names of files that lie beside the journal: they may be removed by them."""
    return (
        all(isinstance(text, str) for text in (basis.program, basis.contents))
        and isinstance(basis.source, dict)
        and isinstance(basis.rules, dict)
        and isinstance(basis.files, dict)
        and all(isinstance(name, str) and name not in ("", ".", "..") and "/" not in name for name in basis.files)
    )


def _shards(plan: Plan) -> list[Path]:
    """Those that the conversion reads."""
    return sorted({t.shard for tensor in plan.tensors for matrix in tensor.matrices for t in matrix.sources})


def _layout(tensor: PlannedTensor) -> list[Any]:
    sources = [
        [t.name, t.dtype, list(t.shape), t.shard.name, t.offset] for matrix in tensor.matrices for t in matrix.sources
    ]
    return [tensor.name, int(tensor.type), list(tensor.ne), tensor.offset, tensor.plus_one, tensor.bounded, sources]


def library_hash() -> str:
    with (LIBRARY_FOLDER / "libm3.so").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
