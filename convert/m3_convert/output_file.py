"""A file that a command shall write, looked at before the work that leads to it."""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from m3_convert.part_file import part_path
from m3_runtime.errors import InputError


def check_output(out: Path, what: str, sources: Iterable[Path]) -> Path:
    """The path that `out` stands for, links followed.

    what: the file is, as in "the report". sources: what must not be written over; a folder stands for the files in it.
    Raises InputError if no file can be put there.
    """
    target = Path(os.path.realpath(out))
    if target.is_dir():
        raise InputError(f"{out}: expected a file name for {what}, found a folder")
    if not target.parent.is_dir():
        raise InputError(f"{out}: its folder {target.parent} does not exist")
    if target.exists():
        if not stat.S_ISREG(target.stat().st_mode):
            raise InputError(f"{out}: expected a file, found a device or pipe")
        files = [file for source in sources for file in (source.iterdir() if source.is_dir() else [source])]
        if any(target.samefile(file) for file in files if file.is_file()):
            raise InputError(f"{out}: is part of the source")
    part = part_path(target)
    try:
        part.open("wb").close()
        part.unlink()
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror}") from error
    return target
