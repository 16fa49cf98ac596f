"""What the machine has left for a run, and the context that fits in it."""

import os
import resource
from collections.abc import Callable
from pathlib import Path

from m3_runtime.errors import MachineError
from m3_runtime.gguf_reader import gguf_files
from m3_runtime.quantities import format_bytes

DEFAULT_CONTEXT = 32768  #: tokens, where nobody asks for another and there is room
DEFAULT_ANSWER = 4096  #: tokens that are kept free for the answer to a given prompt
_SMALLEST_DEFAULT = 512


def available_memory() -> int | None:
    """Bytes that the kernel can give out without swapping, None where that is unknown.

    The lesser of MemAvailable and what the process's control group (a container) leaves.
    """
    known = [room for room in (_system_memory(), _group_memory()) if room is not None]
    return min(known, default=None)


def _system_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _group_memory(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The limit of a version 2 control group less what is in use, file cache apart, which can be given up."""
    try:
        limit = (root / "memory.max").read_text(encoding="ascii").strip()
        used = int((root / "memory.current").read_text(encoding="ascii"))
        stat = dict(line.split() for line in (root / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - used + int(stat.get("file", 0)))


def address_space_left() -> int | None:
    """Bytes that this process may still map under its limit (RLIMIT_AS), None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:
        return limit
    return max(0, limit - pages * os.sysconf("SC_PAGE_SIZE"))


def peak_resident_bytes() -> int:
    """Most memory that this process has held so far, mapped weights included."""
    # VmHWM is this program's own; ru_maxrss takes over that of the process which started it.
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def session_room(weights: int = 0) -> int | None:
    """Bytes that a session may take: the lesser of free memory and address space; None if both are unknown.

    weights: bytes that are still to be read into memory (--no-mmap). Raises MachineError if they do not fit.
    """
    known = [room for room in (available_memory(), address_space_left()) if room is not None]
    room = min(known, default=None)
    if room is not None and weights > room:
        raise MachineError(
            f"not enough memory: the weights take {format_bytes(weights)}, {format_bytes(room)} are free; "
            "without --no-mmap they are read as they are used"
        )
    return None if room is None else room - weights


def check_file_maps(path: Path) -> None:
    """Raises MachineError if the limit on address space is below the size of the files that are to be mapped.

    path: as for `GGUF`.
    """
    left = address_space_left()
    if left is None:
        return
    # What cannot be opened is named by the one who opens it.
    size = sum(file.stat().st_size for file in gguf_files(path) if file.is_file())
    if size > left:
        raise MachineError(
            f"{path}: {format_bytes(size)} to map, the limit on address space leaves {format_bytes(left)}"
        )


def check_session_fits(n_bytes: int, context: int, room: int | None) -> None:
    """Raises MachineError if a session of `n_bytes` is more than `room` (see `session_room`)."""
    if room is not None and n_bytes > room:
        raise MachineError(
            f"not enough memory: a context of {context} tokens takes {format_bytes(n_bytes)}, {format_bytes(room)} are "
            "free"
        )


def default_context(trained: int, needed: int, session_bytes: Callable[[int], int], room: int | None) -> int:
    """The context of a run that does not name one, in tokens.

    DEFAULT_CONTEXT, or `needed` (prompt and answer) if that is more; at most `trained`, the file's context; halved
    while the session would take more than half of `room`, but not below `needed` and 512.
    """
    smallest = min(trained, max(needed, _SMALLEST_DEFAULT))
    context = min(trained, max(needed, DEFAULT_CONTEXT))
    while room is not None and context > smallest and session_bytes(context) > room // 2:
        context = max(smallest, context // 2)
    return context
