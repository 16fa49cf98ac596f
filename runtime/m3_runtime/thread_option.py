"""The option --threads, which is the same in every command."""

from typing import Annotated, TypeAlias

import typer

from m3_runtime.errors import InputError


def check_threads(threads: int) -> int:
    """Returns `threads`. Raises InputError for a number that the engine does not take, MachineError without engine."""
    if threads:
        from m3_runtime.native import lib  # here, so that an engine that cannot be loaded is an error of the command

        most = int(lib.m3_max_threads())
        if not 0 <= threads <= most:
            raise InputError(f"--threads is {threads}, expected 0 (all cores) to {most}")
    return threads


Threads: TypeAlias = Annotated[
    int, typer.Option("--threads", metavar="N", callback=check_threads, help="CPU threads; 0 takes all cores.")
]
