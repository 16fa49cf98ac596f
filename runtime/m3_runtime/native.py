"""The only module that knows cffi: loads libm3 with the declarations of its own header, and turns m3_error into
exceptions.

Library and header lie side by side in `lib/`, put there by the build, so they always belong together.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from cffi import FFI

from m3_runtime.errors import (
    CancelledError,
    ContextError,
    ExitCode,
    InputError,
    M3Error,
    MachineError,
    NotFiniteError,
)

LIBRARY_FOLDER: Final = Path(__file__).parent / "lib"
_BEGIN, _END = "/* [declarations]", "/* [end of declarations] */"


def _declarations(header: str) -> str:
    begin, end = header.find(_BEGIN), header.find(_END)
    if begin < 0 or end < begin:
        raise MachineError(f"{LIBRARY_FOLDER / 'm3.h'}: the declaration markers are missing; run `make native`")
    return header[begin:end]


def _load() -> tuple[FFI, Any]:
    header, library = LIBRARY_FOLDER / "m3.h", LIBRARY_FOLDER / "libm3.so"
    for path in (header, library):
        if not path.is_file():
            raise MachineError(f"{path} is missing: the engine is not built; run `make native`")
    # OpenMP threads that wait for the others spin for milliseconds by default. Where another program wants the same
    # cores, that starves the very thread they wait for (20 times slower was seen); a few microseconds keep what
    # spinning gains on an idle machine. Read by libgomp when it is loaded; a value that the user set stays.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    loaded = FFI()
    loaded.cdef(_declarations(header.read_text(encoding="utf-8")))
    try:
        functions = loaded.dlopen(str(library))
    except OSError as error:
        raise MachineError(f"{library} cannot be loaded: {error}") from None
    if functions.m3_abi_version() != functions.M3_ABI_VERSION:
        raise MachineError(
            f"{library} has interface version {functions.m3_abi_version()}, its header says "
            f"{functions.M3_ABI_VERSION}; run `make native`"
        )
    return loaded, functions


ffi, lib = _load()

_ERRORS: Final[dict[int, type[M3Error]]] = {
    lib.M3_ERROR_ARGUMENT: InputError,
    lib.M3_ERROR_IO: InputError,
    lib.M3_ERROR_FORMAT: InputError,
    lib.M3_ERROR_MODEL: InputError,
    lib.M3_ERROR_MEMORY: MachineError,
    lib.M3_ERROR_CONTEXT: ContextError,
    lib.M3_ERROR_NOT_FINITE: NotFiniteError,
    lib.M3_ERROR_CANCELLED: CancelledError,
    lib.M3_ERROR_UNSUPPORTED: MachineError,
    lib.M3_ERROR_UNBOUND: InputError,
    lib.M3_ERROR_DEVICE: MachineError,
}


def call(function: Callable[..., int], *arguments: Any) -> None:
    """Calls an m3 function whose last parameter is an m3_error, and raises what it reports."""
    error = ffi.new("m3_error *")
    status = function(*arguments, error)
    if status != lib.M3_OK:
        message = ffi.string(error.message).decode("utf-8", errors="replace")
        raise _ERRORS.get(status, M3Error)(message)


def text(value: Any) -> str:
    """A static C string."""
    return str(ffi.string(value).decode())


def size_of(struct: str) -> int:
    return int(ffi.sizeof(struct))


def version() -> str:
    """Version of the engine, "major.minor.patch"."""
    return text(lib.m3_version())


def interface_version() -> int:
    """M3_ABI_VERSION of the engine."""
    return int(lib.m3_abi_version())


def end_on_bus_error(name: str) -> None:
    """For commands: a mapped file that is shortened ends the process with a line; see m3_end_on_bus_error."""
    call(lib.m3_end_on_bus_error, name.encode(), int(ExitCode.BAD_INPUT), int(ExitCode.MACHINE))


def default_threads() -> int:
    """CPU threads that a number of 0 stands for."""
    return int(lib.m3_default_threads())
