"""Writing of the file: to OUT.part, checked against the plan, and only then renamed to OUT."""

import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from m3_convert.encode import Encoder
from m3_convert.gguf_file import file_bytes
from m3_convert.plan import Plan, aligned
from m3_convert.progress import format_bytes, progress
from m3_runtime.engine import GGUF
from m3_runtime.errors import InputError, M3Error, MachineError

PART_SUFFIX = ".part"


@dataclass(frozen=True)
class Result:
    """A finished conversion."""

    path: Path
    n_bytes: int
    seconds: float


def check_output(plan: Plan, out: Path) -> Path:
    """The path that OUT stands for, links followed. Raises InputError if no file can be put there.

    An existing file is allowed: it is replaced by the finished one in one step.
    """
    target = Path(os.path.realpath(out))
    if target.is_dir():
        raise InputError(f"{out}: expected a file name for the GGUF, found a folder")
    if not target.parent.is_dir():
        raise InputError(f"{out}: its folder {target.parent} does not exist")
    if target.exists():
        if not stat.S_ISREG(target.stat().st_mode):
            raise InputError(f"{out}: expected a file, found a device or pipe")
        # By what the names stand for: the files of a Hub snapshot are links to elsewhere.
        folder = plan.checkpoint.folder
        if any(target.samefile(file) for file in folder.iterdir() if file.is_file() and file.suffix != ".gguf"):
            raise InputError(f"{out}: is part of the source")
    return target


def free_bytes(target: Path) -> int:
    """Bytes free for a file of this name; what a killed run left of it counts, since it will be replaced."""
    free = shutil.disk_usage(target.parent).free
    part = _part_path(target)
    if part.is_file() and not part.is_symlink():
        free += part.stat().st_blocks * 512
    return free


def check_disk_space(target: Path, needed: int) -> None:
    """Raises MachineError with both numbers if a file of `needed` bytes does not fit."""
    free = free_bytes(target)
    if needed > free:
        raise MachineError(
            f"{target.parent}: the file needs {needed} bytes ({format_bytes(needed)}), "
            f"free are {free} ({format_bytes(free)})"
        )


def convert(plan: Plan, header: bytes, out: Path, threads: int = 0) -> Result:
    """Writes the GGUF file of `plan` with `header` (from `header_bytes`) to `out`.

    The file appears under its name when it is whole, flushed to disk and checked, or not at all: whatever goes wrong,
    an interrupt included, OUT.part is removed. Memory does not grow with the model. Progress goes to stderr.
    threads: for quantization, 0 takes all cores.
    Raises InputError for types that need an importance matrix, broken values in the source (see `Encoder.slabs`) and an
    output that cannot be written;
    MachineError if the disk is or gets full.
    """
    start = time.monotonic()
    plan.check_importance()
    target = check_output(plan, out)
    n_bytes = file_bytes(plan, header)
    check_disk_space(target, n_bytes)
    with _part_file(target) as (part, file):
        with progress(target.name, n_bytes) as advance:
            _write_all(file, header)
            advance(len(header))
            _write_tensors(file, plan, threads, advance)
        os.fsync(file)
        _check_written(part, plan, n_bytes, len(header))
        part.replace(target)
    _sync_folder(target.parent)
    return Result(out, n_bytes, time.monotonic() - start)


def _part_path(target: Path) -> Path:
    return target.with_name(target.name + PART_SUFFIX)


@contextmanager
def _part_file(target: Path) -> Iterator[tuple[Path, int]]:
    """An empty OUT.part, open and locked so that two runs cannot share it; removed if the block raises."""
    part = _part_path(target)
    file = -1
    try:
        # Not truncated before it is locked: it may be the work of another process in progress.
        file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        _lock(file)
        # Another process may have finished and renamed it between the opening and the lock.
        if not part.exists() or part.stat().st_ino != os.fstat(file).st_ino:
            raise _LockedError
        os.ftruncate(file, 0)
        yield part, file
    except _LockedError as error:
        raise InputError(f"{part}: another process is writing it") from error
    except BaseException as error:
        if file >= 0:
            part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _write_error(part, error) from error
        raise
    finally:
        if file >= 0:
            os.close(file)


class _LockedError(Exception):
    """Another process holds the lock of the file."""


def _lock(file: int) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _LockedError from error
    except OSError:
        # Some network file systems have no locks. The lock only guards against two runs with one output.
        return


def _write_error(part: Path, error: OSError) -> M3Error:
    # EFBIG: the limit of the file system or of the shell (ulimit -f).
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return MachineError(
            f"{part}: the disk is full or the file too large for it: {error.strerror}; nothing was kept"
        )
    if error.errno == errno.EIO:
        return MachineError(f"{part}: the disk failed: {error.strerror}; nothing was kept")
    return InputError(f"{part}: cannot be written: {error.strerror}")


def _write_tensors(file: int, plan: Plan, threads: int, advance: Callable[[int], None]) -> None:
    with Encoder(threads) as encoder:
        for tensor in plan.tensors:
            written = 0
            for slab in encoder.slabs(tensor):
                _write_all(file, slab.reshape(-1).data)
                written += slab.size
                advance(slab.size)
            if written != tensor.n_bytes:
                raise AssertionError(f"{tensor.name}: {written} bytes encoded, {tensor.n_bytes} planned")
            padding = aligned(written) - written
            _write_all(file, bytes(padding))
            advance(padding)


def _write_all(file: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _check_written(part: Path, plan: Plan, n_bytes: int, data_start: int) -> None:
    """Reads the file back as the engine will see it. A difference is an error of this program or of the disk."""
    size = part.stat().st_size
    if size != n_bytes:
        raise AssertionError(f"{part}: {size} bytes written, {n_bytes} planned")
    with GGUF(part) as gguf:
        found = [(t.name, int(t.type), tuple(t.ne), t.offset, t.n_bytes) for t in gguf.tensors]
    planned = [(t.name, int(t.type), t.ne, data_start + t.offset, t.n_bytes) for t in plan.tensors]
    if found != planned:
        different = next((p for p, f in zip(planned, found, strict=False) if p != f), "number of tensors")
        raise AssertionError(f"{part}: the file read back differs from the plan at {different}")


def _sync_folder(folder: Path) -> None:
    """Makes the new name last. Some file systems cannot flush a folder and say so; they need not."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise MachineError(f"{folder}: the disk failed after the file was complete: {error.strerror}") from error
    finally:
        os.close(descriptor)
