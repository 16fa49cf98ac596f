"""Entry points of the commands: what runs before their modules, which take a moment to import, are there."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import NoReturn

from m3_runtime.errors import ExitCode


def start(name: str, load: Callable[[], Callable[[], NoReturn]]) -> NoReturn:
    """Loads a command and runs it. Ctrl-C and a lack of memory while it loads end as they do later: one line, no
    traceback."""
    try:
        main = load()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        sys.exit(ExitCode.INTERRUPTED)
    except (MemoryError, ImportError) as error:
        print(f"{name}: cannot be loaded: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(ExitCode.MACHINE)
    main()


def m3_run() -> NoReturn:
    """m3-run."""
    start("m3-run", lambda: import_module("m3_runtime.cli").main)


def m3_bench() -> NoReturn:
    """m3-bench."""
    start("m3-bench", lambda: import_module("m3_runtime.bench_cli").main)


def m3_serve() -> NoReturn:
    """m3-serve."""
    start("m3-serve", lambda: import_module("m3_runtime.serve_cli").main)
