"""Options that are the same in several commands."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from typing import Annotated, TypeAlias

import typer

from m3_runtime.choices import ATTENTIONS, CACHE_TYPES, DEVICES, EXPERTS_ON, INDEX_SCANS, ISAS, chosen
from m3_runtime.errors import InputError


def one_of(known: tuple[str, ...]) -> Callable[[typer.CallbackParam, str | None], str | None]:
    """A callback of an option that has one of these values, in upper or lower case, or none."""

    def check(option: typer.CallbackParam, value: str | None) -> str | None:
        return None if value is None else chosen(option.opts[0], value, known)

    return check


def check_threads(threads: int) -> int:
    """Returns `threads`. Raises InputError for a number that the engine does not take, MachineError without engine."""
    if threads:
        from m3_runtime.native import lib  # here, so that an engine that cannot be loaded is an error of the command

        most = int(lib.m3_max_threads())
        if not 0 <= threads <= most:
            raise InputError(f"--threads is {threads}, expected 0 (all cores) to {most}")
    return threads


def show_version(context: typer.Context, wanted: bool) -> None:
    """Prints the version of the program and of the engine that it has loaded, and ends the command."""
    if not wanted:
        return
    from m3_runtime.native import interface_version, version

    try:
        program = package_version("m3-gguf")
    except PackageNotFoundError:  # run from its folder
        program = "(not installed)"
    print(f"{context.find_root().info_name} {program}; engine {version()}, interface {interface_version()}")
    raise typer.Exit


Threads: TypeAlias = Annotated[
    int, typer.Option("--threads", metavar="N", callback=check_threads, help="CPU threads; 0 takes all cores.")
]
Device: TypeAlias = Annotated[
    str, typer.Option("--device", metavar="|".join(DEVICES), callback=one_of(DEVICES), help="Where models run.")
]
ExpertsOn: TypeAlias = Annotated[
    str,
    typer.Option(
        "--experts-on",
        metavar="|".join(EXPERTS_ON),
        callback=one_of(EXPERTS_ON),
        help="With a GPU: where the routed experts are computed, which are nearly all of the weights. cpu leaves them "
        "in the file; auto takes as many layers of them to the GPU as its memory holds.",
    ),
]
Isa: TypeAlias = Annotated[
    str,
    typer.Option(
        "--isa",
        metavar="|".join(ISAS),
        callback=one_of(ISAS),
        help="Instruction set of the CPU kernels; auto takes the widest one.",
    ),
]
Attention: TypeAlias = Annotated[
    str,
    typer.Option(
        "--attention",
        metavar="|".join(ATTENTIONS),
        callback=one_of(ATTENTIONS),
        help="sparse is what the model was trained for; dense reads every token and is out of distribution.",
    ),
]
KvType: TypeAlias = Annotated[
    str,
    typer.Option(
        "--kv-type",
        metavar="|".join(CACHE_TYPES),
        callback=one_of(CACHE_TYPES),
        help="Type of the cached keys and values; below 16 bits the model reads other blocks.",
    ),
]
IndexType: TypeAlias = Annotated[
    str,
    typer.Option(
        "--index-type",
        metavar="|".join(CACHE_TYPES),
        callback=one_of(CACHE_TYPES),
        help="Type of the cached index keys, which choose the blocks; below 16 bits others.",
    ),
]
IndexScan: TypeAlias = Annotated[
    str,
    typer.Option(
        "--index-scan",
        metavar="|".join(INDEX_SCANS),
        callback=one_of(INDEX_SCANS),
        help="How blocks are chosen: full scores every key, low_bit rules most out by int8 copies, which take memory. "
        "Both choose the same blocks; auto takes copies for long contexts on the CPU.",
    ),
]
Exact: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="On a GPU: float32 everywhere, and results that do not depend on how tokens are evaluated together, as on "
        "the CPU. Slower.",
    ),
]
NoMmap: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--no-mmap",
        help="On the CPU: read all weights into memory before the run, in place of mapping the file, which reads them "
        "when they are first used.",
    ),
]
Version: TypeAlias = Annotated[
    bool,
    typer.Option("--version", callback=show_version, is_eager=True, help="Print the versions of program and engine."),
]
