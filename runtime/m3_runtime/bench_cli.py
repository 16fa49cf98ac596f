"""The command m3-bench: speed of a MiniMax-M3 GGUF file at depth."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from m3_runtime.command import guarded, new_app, run
from m3_runtime.errors import InputError
from m3_runtime.options import (
    Attention,
    Device,
    Exact,
    ExpertsOn,
    IndexScan,
    IndexType,
    Isa,
    KvType,
    NoMmap,
    Threads,
    Version,
)

NAME = "m3-bench"

app = new_app()


@app.command(
    help="Measures prefill and decode of a MiniMax-M3 GGUF file behind caches of growing depth. Each figure is the "
    "median of several runs after one that warms up.",
    epilog="Exit codes: 0 done; 2 the file or the arguments are wrong; 4 memory or the device is missing; 70 a bug; "
    "130 interrupted.",
)
@guarded
def bench_command(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL.gguf", help="File to measure; of a split model any file, or the folder.", show_default=False
        ),
    ],
    depth: Annotated[
        str | None,
        typer.Option(
            "--depth",
            metavar="N,N,...",
            help="Tokens that the cache holds before what is measured. 0, 2048 and 8192 by default, as far as the "
            "file's context goes.",
        ),
    ] = None,
    prefill: Annotated[
        int, typer.Option("-p", "--prefill", metavar="N", min=0, help="Tokens of a prefill; 0 measures none.")
    ] = 512,
    decode: Annotated[
        int, typer.Option("-n", "--decode", metavar="N", min=0, help="Tokens decoded one by one; 0 measures none.")
    ] = 32,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Measured runs of each.")] = 5,
    device: Device = "auto",
    experts_on: ExpertsOn = "auto",
    threads: Threads = 0,
    attention: Attention = "sparse",
    kv_type: KvType = "f16",
    index_type: IndexType = "f32",
    index_scan: IndexScan = "auto",
    exact: Exact = False,
    isa: Isa = "auto",
    chunk: Annotated[
        int, typer.Option("--chunk", metavar="N", min=0, help="Tokens of a prefill computed together; 0 is 512.")
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Start of the random token ids.")] = 1,
    no_mmap: NoMmap = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when all is measured.")] = False,
    version: Version = False,
) -> int:
    if not prefill and not decode:
        raise InputError("--prefill and --decode are both 0: nothing to measure")
    # Here, so that an engine that cannot be loaded is an error of the command like any other.
    from m3_runtime import memory
    from m3_runtime.bench import Bench, BenchOptions, Measurement
    from m3_runtime.engine import Model
    from m3_runtime.file_identity import unchanged_files

    options = BenchOptions(
        model=model,
        depths=None if depth is None else _depths(depth),
        prefill=prefill,
        decode=decode,
        repeats=repeats,
        device=device,
        isa=isa,
        threads=threads,
        attention=attention,
        kv_type=kv_type,
        index_type=index_type,
        index_scan=index_scan,
        exact=exact,
        chunk=chunk,
        seed=seed,
        mmap=not no_mmap,
        experts_on=experts_on,
    )
    memory.check_file_maps(model)
    start = time.perf_counter()
    with (
        Model(
            model, device=options.device, isa=options.isa, mmap=options.mmap, experts_on=options.experts_on
        ) as opened,
        unchanged_files(opened.gguf.files),
    ):
        bench = Bench(options, opened)
        progress = _Progress()
        opened.load(progress=lambda done, total: progress("load", done, total))
        progress.clear()
        bench.load_seconds = time.perf_counter() - start

        def show(m: Measurement) -> None:
            progress.clear()
            if not as_json:
                spread = f"{m.spread:.1%}" if m.spread is not None else "-"
                print(f"{m.test:8}{m.depth:>9}{m.tokens:>9}{m.rate:>12.2f}{spread:>10}", flush=True)

        if not as_json:
            print(f"{'test':8}{'depth':>9}{'tokens':>9}{'tok/s':>12}{'spread':>10}", flush=True)
        try:
            measurements = bench.run(show, progress)
        finally:
            progress.clear()
        if as_json:
            print(json.dumps(bench.report(measurements), indent=2))
    return 0


def _depths(text: str) -> list[int]:
    """Numbers separated by commas, in ascending order, each once."""
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() and len(part.strip()) < 10 for part in parts):
        raise InputError(f"--depth {text}: expected whole numbers separated by commas, such as 0,2048")
    return sorted({int(part) for part in parts})


class _Progress:
    """What is being measured, on one line of a terminal that is rewritten; nothing elsewhere."""

    def __init__(self) -> None:
        self._shown = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        if not sys.stderr.isatty():
            return
        text = f"{what}: {done / total:.0%}" if total > 0 else what
        sys.stderr.write("\r" + text.ljust(self._shown))
        sys.stderr.flush()
        self._shown = len(text)

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r" + " " * self._shown + "\r")
            sys.stderr.flush()
            self._shown = 0


def main() -> NoReturn:
    """Entry point of m3-bench."""
    run(app, NAME)


if __name__ == "__main__":
    main()
