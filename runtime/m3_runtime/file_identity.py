"""Whether files are still those that were opened: weights stay mapped, and what is written into them is used."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from m3_runtime.errors import InputError, NotFiniteError

Identity = Mapping[str, list[int | str]]  #: what tells the content of files, by name: size and time, or a digest


def file_identity(paths: Sequence[Path]) -> Identity:
    """Size, time of the last change, and number on the disk of each file.

    Raises InputError for one that is not there any more.
    """
    found: dict[str, list[int | str]] = {}
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from error
        found[str(path)] = [status.st_size, status.st_mtime_ns, status.st_ino]
    return found


@contextmanager
def unchanged_files(names: Sequence[str]) -> Iterator[None]:
    """For what is done with open files: if it fails for what stands in them, and one of them is not what it was when
    the block began, then InputError says that in place of the error. One that was removed is still what it was."""
    paths = [Path(name) for name in names]
    before = file_identity(paths)
    try:
        yield
    except (InputError, NotFiniteError) as error:
        there = [path for path in paths if path.exists()]
        changed = [name for name, now in file_identity(there).items() if before[name] != now]
        if changed:
            raise InputError(f"{changed[0]}: changed while it was in use, and then: {error}") from error
        raise
