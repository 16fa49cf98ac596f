"""Disk space that files will take, and whether it is there before they are written."""

import errno
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from m3_runtime.errors import MachineError
from m3_runtime.quantities import format_bytes

#: Numbers of an OSError for want of space. EFBIG: the limit of the file system or of the shell (ulimit -f).
DISK_FULL: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
DISK_FAULTS: Final = DISK_FULL | {errno.EIO}  #: numbers of an OSError that the machine is to blame for


@dataclass(frozen=True)
class Room:
    """Space on the disk of a folder, which need not exist yet.

    n_bytes: that is needed; free: that is there, None for what the file system says. what: will lie there.
    """

    folder: Path
    n_bytes: int
    what: str
    free: int | None = None


def fits(rooms: Iterable[Room]) -> bool:
    """Whether `check_rooms` would let them pass."""
    try:
        check_rooms(rooms)
    except MachineError:
        return False
    return True


def check_rooms(rooms: Iterable[Room]) -> None:
    """Raises MachineError with both numbers if a disk has less space than is needed on it altogether."""
    by_disk: dict[int, list[Room]] = {}
    for room in rooms:
        if room.n_bytes > 0:
            by_disk.setdefault(_existing(room.folder).stat().st_dev, []).append(room)
    for together in by_disk.values():
        needed = sum(room.n_bytes for room in together)
        free = max(room.free if room.free is not None else _free(room.folder) for room in together)
        if needed > free:
            what = " and ".join(room.what for room in together)
            raise MachineError(
                f"{together[0].folder}: {what} {'need' if len(together) > 1 else 'needs'} {needed} bytes "
                f"({format_bytes(needed)}), free are {free} ({format_bytes(free)})"
            )


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def _free(folder: Path) -> int:
    return shutil.disk_usage(_existing(folder)).free
