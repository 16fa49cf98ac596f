"""Writing of the file: to OUT.part, checked against the plan, and only then renamed to OUT.

A conversion that ends before its time leaves OUT.part and OUT.journal, from which the next run goes on (see `journal`),
and with --discard-source OUT.source (see `temporary_shards`).
"""

import contextlib
import errno
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from m3_convert.decode import SourceLostError
from m3_convert.disk_room import DISK_FULL, Room, check_rooms
from m3_convert.encode import Encoder
from m3_convert.gguf_file import OutputFile
from m3_convert.journal import Journal, basis_of, journal_path, locked
from m3_convert.output_path import output_path, part_path
from m3_convert.part_file import DamagedError, PartFile, check_parts
from m3_convert.plan import Plan
from m3_convert.progress import progress
from m3_convert.run_shards import Supply, check_discardable
from m3_convert.shard_order import ReleasePoints, ShardOrder
from m3_convert.split import is_shard_name, other_division
from m3_runtime.engine import GGUF
from m3_runtime.errors import InputError, M3Error, MachineError, NotFiniteError
from m3_runtime.quantities import format_bytes


class ReadBackError(MachineError):
    """What was written is not what is read: the disk, or another program, changed it."""


@dataclass(frozen=True)
class Result:
    """A finished conversion."""

    paths: Sequence[Path]
    n_bytes: int
    seconds: float
    resumed: int  #: bytes that an earlier run had written


def check_output(plan: Plan, out: Path) -> Path:
    """The path that OUT stands for, links followed. Raises InputError if no file can be put there."""
    return output_path(out, "the GGUF", (*plan.source.files, *plan.inputs))


def check_outputs(plan: Plan, files: Sequence[OutputFile], out: Path) -> tuple[Path, list[OutputFile]]:
    """The path that OUT stands for, and the files with the paths that theirs stand for.

    Raises InputError as `check_output` does, for a name that says which of several files it is, and for a model of this
    name in another number of files, beside which the new one would lie: a folder would stand for the wrong one, or for
    two. The source itself may be that model.
    """
    target = check_output(plan, out)
    if is_shard_name(target.name):
        raise InputError(f"{out}: expected the name of the whole, without -0000M-of-0000N, which --split-max-size adds")
    placed = [replace(file, path=check_output(plan, file.path)) for file in files]
    sources = [path for path in plan.source.files if path.exists()]
    others = [path for path in other_division(target, placed) if not any(map(path.samefile, sources))]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        them = "them" if more else "it"
        raise InputError(
            f"{others[0]}{more}: of an earlier conversion with this name, to another number of files; remove {them} or "
            "take another name"
        )
    return target, placed


@contextmanager
def hold_output(target: Path) -> Iterator[None]:
    """Keeps conversions and searches of other processes off a file while the block lasts.

    target: as from `check_output`. Raises InputError if one of them is at work on it, and what an output that cannot be
    written does.
    """
    path = journal_path(target)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(path))
        except OSError as error:
            raise _write_error(path, error, kept=False) from error
        yield


def free_bytes(targets: Sequence[Path]) -> int:
    """Bytes free for files of these names; what an earlier run left of them counts, since it is part of them."""
    free = shutil.disk_usage(targets[0].parent).free
    for part in map(part_path, targets):
        if part.is_file() and not part.is_symlink():
            free += part.stat().st_blocks * 512
    return free


def output_room(files: Sequence[OutputFile]) -> Room:
    """The disk space that the files take."""
    paths = [file.path for file in files]
    return Room(paths[0].parent, sum(file.n_bytes for file in files), "the file", free_bytes(paths))


def convert(
    plan: Plan,
    files: Sequence[OutputFile],
    out: Path,
    threads: int = 0,
    *,
    restart: bool = False,
    discard_source: bool = False,
) -> Result:
    """Writes the files of `plan` (from `output_files`). `out` names the whole, which may be several.

    They appear under their names when all are whole, flushed to disk and checked, or not at all. What ends the
    conversion before that, an interrupt included, leaves part files and OUT.journal, if the next call with the same
    arguments can go on from them: not for broken values in the source. Memory does not grow with the model. Progress
    goes to stderr.
    threads: for quantization, 0 takes all cores. restart: what an earlier call left is given up. discard_source: shards
    on the Hub are kept only while they are needed.
    Raises InputError for types that need an importance matrix, broken values in the source (see `Encoder.slabs`), an
    output that cannot be written (see `check_outputs`), what an earlier call left if it does not belong to this one,
    other files in the way of part files and journal,
    a source that changed meanwhile; MachineError if the disk is or gets full, or does not give back what was written.
    """
    start = time.monotonic()
    plan.check_importance()
    if discard_source:
        check_discardable(plan.source.shards)
    target, files = check_outputs(plan, files, out)
    n_bytes = sum(file.n_bytes for file in files)
    with _journal(target, plan, files, restart=restart) as journal:
        resumed = journal.done
        if resumed > n_bytes:
            raise DamagedError(
                f"{journal.path}: says that {resumed} bytes are written, expected at most {n_bytes}. --restart starts "
                "anew"
            )
        order = ShardOrder.of(files).after(resumed)
        supply = Supply(plan.source.shards, order, target, discard=discard_source)
        with _keeping(journal, files, supply):
            if resumed < n_bytes:  # else some may have left their part files
                check_rooms(supply.rooms(output_room(files)))
            if resumed:
                _say(f"{target.name}: goes on after {format_bytes(resumed)} of {format_bytes(n_bytes)}")
            else:
                _sync_folder(target.parent)
            _say(*supply.begin())
            try:
                _write(plan, files, journal, supply, threads)
            except (InputError, NotFiniteError):
                journal.check_source(plan)  # what is broken in it may be what was written over it meanwhile
                raise
            journal.check_source(plan)
            _give_names(files, named=resumed == n_bytes)
        _say(*supply.remove())
        journal.finish()
    return Result([file.path for file in files], n_bytes, time.monotonic() - start, resumed)


def _say(*lines: str) -> None:
    with contextlib.suppress(OSError):  # a stderr that is gone must not hide why the conversion ended
        for line in lines:
            print(line, file=sys.stderr, flush=True)


def _journal(target: Path, plan: Plan, files: Sequence[OutputFile], *, restart: bool) -> Journal:
    path = journal_path(target)
    try:
        return Journal(path, basis_of(plan, files), restart=restart, check_parts=partial(check_parts, files))
    except OSError as error:
        raise _write_error(path, error, kept=False) from error


@contextmanager
def _keeping(journal: Journal, files: Sequence[OutputFile], supply: Supply) -> Iterator[None]:
    """If the block raises, keeps what the same command can go on from, and removes the rest."""
    try:
        yield
    except DamagedError:
        supply.close()
        raise
    except BaseException as error:
        supply.close()
        # Broken values stay broken, and a file that does not read back as it was written is of no use.
        final = isinstance(error, InputError | ReadBackError | AssertionError)
        final = final and not isinstance(error, SourceLostError)
        part = part_path(files[0].path)
        kept = journal.done > 0 and not final
        if kept:
            of = format_bytes(sum(file.n_bytes for file in files))
            _say(
                f"{part}: {format_bytes(journal.done)} of {of} are kept; the same command goes on from there, with "
                "--restart from the beginning"
            )
        else:
            journal.give_up()
        _say(*(supply.remove() if final else supply.kept()))
        if isinstance(error, OSError):
            raise _write_error(part, error, kept=kept) from error
        raise


def _write_error(path: Path, error: OSError, *, kept: bool) -> M3Error:
    nothing = "" if kept else "; nothing was kept"
    if error.errno in DISK_FULL:
        return MachineError(f"{path}: the disk is full or the file too large for it: {error.strerror}{nothing}")
    if error.errno == errno.EIO:
        return MachineError(f"{path}: the disk failed: {error.strerror}{nothing}")
    return InputError(f"{path}: cannot be written: {error.strerror}")


def _write(plan: Plan, files: Sequence[OutputFile], journal: Journal, supply: Supply, threads: int) -> None:
    n_bytes = sum(file.n_bytes for file in files)
    encoder = Encoder(threads, plan.importance, supply.shards)
    with progress(supply.name, n_bytes, start=journal.done) as (advance, downloads), encoder:
        supply.show(downloads)
        releases = ReleasePoints(supply.order, encoder.release, eager=supply.discards)
        begin = 0
        for file in files:
            PartFile(file, begin, journal, releases, advance).write(encoder)
            begin += file.n_bytes


def _give_names(files: Sequence[OutputFile], *, named: bool) -> None:
    """Checks and renames all files. named: an earlier run was at it, so that some may have their names."""
    places = [file.path if named and not part_path(file.path).exists() else part_path(file.path) for file in files]
    for file, place in zip(files, places, strict=True):
        _check_written(file, place, named=place == file.path)
    if len(files) == 1:  # one of several cannot be opened without the others, nor they under these names
        _check_opens(files[0], places[0])
    # The first file of several comes last: who sees it sees all.
    for file, place in reversed(list(zip(files, places, strict=True))):
        if place != file.path:
            place.replace(file.path)
    _sync_folder(files[0].path.parent)


def _check_written(file: OutputFile, place: Path, *, named: bool) -> None:
    """named: its part file is gone, which an earlier run may have renamed to it, or somebody removed."""
    size = place.stat().st_size if place.exists() else None
    if size == file.n_bytes:
        with place.open("rb") as opened:
            if opened.read(len(file.header)) == file.header:
                return
    if named:
        raise DamagedError(
            f"{part_path(place)}: is missing, but the journal says that it is whole. --restart starts anew"
        )
    found = "nothing" if size is None else f"{size} bytes" if size != file.n_bytes else "another header"
    raise ReadBackError(f"{place}: {file.n_bytes} bytes were written, found {found}; nothing was kept")


def _check_opens(file: OutputFile, place: Path) -> None:
    """Reads the file back as the engine will see it. A difference is an error of this program."""
    with GGUF(place) as gguf:
        found = [(t.name, int(t.type), tuple(t.ne), t.offset, t.n_bytes) for t in gguf.tensors]
    planned = [(t.name, int(t.type), t.ne, len(file.header) + t.offset, t.n_bytes) for t in file.tensors]
    if found != planned:
        different = next((p for p, f in zip(planned, found, strict=False) if p != f), "number of tensors")
        raise AssertionError(f"{place}: the file read back differs from the plan at {different}")


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
