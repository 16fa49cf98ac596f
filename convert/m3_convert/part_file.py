"""OUT.gguf.part: a file on its way, written from where the journal says that it ends."""

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

from m3_convert.encode import Encoder
from m3_convert.gguf_file import OutputFile
from m3_convert.journal import Journal
from m3_convert.output_path import part_path
from m3_convert.plan import PlannedTensor, aligned
from m3_convert.shard_order import ReleasePoints
from m3_runtime.errors import InputError

#: Bytes between two records of the journal, or one matrix if that is more: what an interruption can cost. A record
#: waits for the disk, which has been writing most of it by then.
RECORD_BYTES: Final = 1 << 28


class DamagedError(InputError):
    """A part file is not as the journal says."""


def check_parts(files: Sequence[OutputFile], begun: Collection[str]) -> None:
    """Raises InputError if something else is in the way of a part file.

    begun: names of the files whose part files are known to be an earlier run's. Of the others there may be what begins
    as the file will, for want of its journal.
    """
    for file in files:
        part = part_path(file.path)
        if not os.path.lexists(part):
            continue
        if part.is_symlink() or not part.is_file():
            kind = "a link" if part.is_symlink() else "a folder" if part.is_dir() else "no regular file"
            raise InputError(f"{part}: expected room for the file in progress, found {kind}; remove it or rename it")
        if file.path.name not in begun and not _begins_as(part, file.header):
            raise InputError(
                f"{part}: is there already and not of this conversion; remove it if no other command is writing it"
            )


def _begins_as(part: Path, header: bytes) -> bool:
    with part.open("rb") as opened:
        return header.startswith(opened.read(len(header)))


class PartFile:
    """One file of a conversion.

    begin: bytes of the files before it, which are done. releases: are told what the journal says. advance: gets the
    number of bytes done since its last call.
    """

    def __init__(
        self,
        file: OutputFile,
        begin: int,
        journal: Journal,
        releases: ReleasePoints,
        advance: Callable[[int], None],
    ) -> None:
        self._file, self._begin, self._journal = file, begin, journal
        self._releases, self._advance = releases, advance
        self._path = part_path(file.path)
        self._descriptor = -1
        self._at = min(max(journal.done - begin, 0), file.n_bytes)

    def write(self, encoder: Encoder) -> None:
        """Afterwards the file is whole and on the disk, and the journal says so.

        Raises DamagedError if an earlier run's part of it is not there, OSError if it cannot be written, and what
        `Encoder.slabs` does.
        """
        if self._at == self._file.n_bytes:
            return
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._descriptor = os.open(self._path, flags if self._at else flags | os.O_CREAT, 0o666)
        except FileNotFoundError:
            raise self._damaged("is missing") from None
        try:
            self._continue()
            self._write_from(encoder)
            self._record()
        finally:
            os.close(self._descriptor)

    def _continue(self) -> None:
        """Takes off what was written after the last record: it may not be whole."""
        size = os.fstat(self._descriptor).st_size
        if size < self._at:
            raise self._damaged(f"has {size} bytes")
        os.ftruncate(self._descriptor, self._at)
        os.lseek(self._descriptor, self._at, os.SEEK_SET)
        header = self._file.header
        if self._at and os.pread(self._descriptor, len(header), 0) != header:
            raise self._damaged("has another header")

    def _damaged(self, found: str) -> DamagedError:
        return DamagedError(
            f"{self._path}: {found}, but {self._journal.path.name} says that {self._at} bytes of it are written. "
            "--restart starts anew"
        )

    def _write_from(self, encoder: Encoder) -> None:
        header = self._file.header
        if self._at == 0:
            self._append(header)
        for tensor in self._file.tensors:
            start = len(header) + tensor.offset
            if self._at < start + aligned(tensor.n_bytes):
                self._write_tensor(tensor, start, encoder)

    def _write_tensor(self, tensor: PlannedTensor, start: int, encoder: Encoder) -> None:
        size, n = tensor.n_bytes // len(tensor.matrices), len(tensor.matrices)
        first, rest = divmod(self._at - start, size)
        if rest or first < 0:
            raise self._damaged(f"has no matrix of {tensor.name} that ends at byte {self._at}")
        for index in range(first, n):
            for slab in encoder.slabs(tensor, index):
                self._append(slab.reshape(-1).data)
            if self._at != start + (index + 1) * size:
                raise AssertionError(f"{tensor.name}: {self._at - start} bytes encoded, {(index + 1) * size} planned")
            if index == n - 1:
                self._append(bytes(aligned(tensor.n_bytes) - tensor.n_bytes))
            written = self._begin + self._at
            if written - self._journal.done >= RECORD_BYTES or self._releases.due(written):
                self._record()

    def _append(self, data: bytes | memoryview) -> None:
        write_all(self._descriptor, data)
        self._at += len(data)
        self._advance(len(data))

    def _record(self) -> None:
        done = self._begin + self._at
        if done > self._journal.done:
            os.fsync(self._descriptor)
            self._journal.record(done)
            self._releases.recorded(done)


def write_all(file: int, data: bytes | memoryview) -> None:
    """Appends all of `data` (of bytes) to an open file."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
