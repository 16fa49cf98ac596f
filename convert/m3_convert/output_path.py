"""A file that a command shall write: where it goes, looked at before the work that leads to it."""

import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from m3_runtime.errors import InputError
from m3_runtime.gguf_reader import gguf_files

PART_SUFFIX: Final = ".part"


def part_path(target: Path) -> Path:
    """Where a file is written until it gets its name."""
    return target.with_name(target.name + PART_SUFFIX)


def recipe_path(out: Path) -> Path:
    """Where the recipe goes that was found for a file."""
    return out.with_name(out.name.removesuffix(".gguf") + ".toml")


def imatrix_path(out: Path) -> Path:
    """Where the importance matrix goes that was collected for a file."""
    return out.with_name(out.name.removesuffix(".gguf") + ".imatrix.gguf")


def output_path(out: Path, what: str, inputs: Iterable[Path]) -> Path:
    """The path that `out` stands for, links followed. An existing file is allowed: it is replaced in one step.

    what: the file is, as in "the report". inputs: see `check_apart`. Raises InputError if no file can be put there.
    """
    target = Path(os.path.realpath(out))
    if target.is_dir():
        raise InputError(f"{out}: expected a file name for {what}, found a folder")
    if not target.parent.is_dir():
        raise InputError(f"{out}: its folder {target.parent} does not exist")
    if target.exists() and not stat.S_ISREG(target.stat().st_mode):
        raise InputError(f"{out}: expected a file, found a device or pipe")
    check_apart(out, target, inputs)
    return target


def check_output(out: Path, what: str, inputs: Iterable[Path]) -> Path:
    """The path as `output_path` gives it, for a file that no earlier run can have left in part.

    Raises InputError also if its part file is there already, which may be the work of another command, and if its
    folder cannot be written to.
    """
    target = output_path(out, what, inputs)
    part = part_path(target)
    if os.path.lexists(part):
        raise InputError(f"{part}: is there already; remove it if no other command is writing it")
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror}") from error
    return target


def check_apart(out: Path, target: Path, inputs: Iterable[Path]) -> None:
    """Raises InputError if `target`, which `out` stands for, or its part file is one of the `inputs` of the command.

    A folder stands for the files in it, a GGUF file for all files of its model. By what the names stand for: the files
    of a Hub snapshot are links to elsewhere.
    """
    files = [file for path in inputs for file in (path.iterdir() if path.is_dir() else gguf_files(path))]
    for path in (target, part_path(target)):
        if path.exists() and any(path.samefile(file) for file in files if file.is_file()):
            what = "is part of the source or another input" if path is target else f"{path.name} is one of its inputs"
            raise InputError(f"{out}: {what}")
