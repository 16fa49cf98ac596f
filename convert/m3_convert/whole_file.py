"""Files that appear under their names when they are whole, or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from m3_convert.output_path import part_path


@contextmanager
def whole_file(path: Path, part: Path | None = None) -> Iterator[Path]:
    """Yields where to write: that file is flushed and gets its name if the block ends without an exception, and is
    removed otherwise.

    part: that place, OUT.part if it is not given. Raises OSError if the file cannot be flushed or renamed.
    """
    part = part or part_path(path)
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def own_part(path: Path) -> Path:
    """A place of this process: two that keep the same file in a folder of states do not meet."""
    return path.with_name(f"{path.name}.{os.getpid()}.part")


def write_whole(path: Path, content: bytes) -> None:
    """Writes a small file of a folder of states, or one that nothing but this command writes. Raises OSError."""
    with whole_file(path, own_part(path)) as part:
        part.write_bytes(content)
