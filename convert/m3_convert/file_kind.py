"""What lies under a name where a file is expected, in words."""

import stat
from pathlib import Path
from typing import Final

_KINDS: Final = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def file_kind(path: Path) -> str:
    """Links are followed; one that leads nowhere is "a link to TARGET, which does not exist". "nothing" for no file.

    Raises OSError if the folder that it lies in cannot be looked at.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return f"a link to {path.readlink()}, which does not exist" if path.is_symlink() else "nothing"
    return next((kind for test, kind in _KINDS if test(mode)), "a device")
