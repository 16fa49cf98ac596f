"""What a run costs before and beside its kernels: `python tests/bench/machine.py FOLDER [--csv OUT.csv]`.

    load      a fresh process opens a file that the system's cache does not hold, evaluates 16 tokens and decodes 16
              more: seconds to the first logits and to the last ones, and bytes read from the disk. Mapped, where what
              is touched is read, with experts asked for ahead; --no-mmap, which reads all first; and mapped again
              with the file in the cache. `read` reads the file from its beginning to its end and does nothing with it.
    threads   tokens a second with one thread and with one for each core, in turn in one run: prefill of 512, decode.

The files are m3-nano in Q4_K_M and mid-q4_k_m of models.py, both made in FOLDER if they are not there. Each round does
all of it once, in turn; figures are medians of the rounds. Clocks are the wall's: let the machine do nothing else.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from quantize import NANO, processor

from m3_runtime import Model
from m3_runtime.native import default_threads
from models import make_models

COLUMNS = ("file", "test", "how", "threads", "figure", "median", "least", "greatest", "rounds")
PROMPT, DECODED = 16, 16  #: tokens of a start
PREFILL, DECODE = 512, 64  #: of the comparison of threads
LOADS = ("read", "mmap", "no-mmap", "mmap, cached")
READ_BYTES = 8 << 20

Key = tuple[str, str, str, int, str]


def forget(path: Path) -> None:
    """Takes a file out of the system's cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def start(path: Path, how: str) -> dict[str, float]:
    """One start, in a process that has imported all that it needs."""
    before, begin = disk_bytes(), time.perf_counter()
    if how == "read":
        with path.open("rb", buffering=0) as file:
            while file.read(READ_BYTES):
                pass
        return {"seconds": time.perf_counter() - begin, "MB read": (disk_bytes() - before) / 1e6}
    with Model(path, mmap=how != "no-mmap") as model, model.session(context=PROMPT + DECODED) as session:
        ids = np.random.default_rng(1).integers(0, model.hparams.n_vocab, PROMPT + DECODED).astype(np.int32)
        session.eval(ids[:PROMPT])
        first = time.perf_counter() - begin
        for i in range(PROMPT, PROMPT + DECODED):
            session.eval(ids[i : i + 1])
    last = time.perf_counter() - begin
    return {"s to first logits": first, "s to last logits": last, "MB read": (disk_bytes() - before) / 1e6}


def measure_loads(path: Path, figures: dict[Key, list[float]]) -> None:
    for how in LOADS:
        forget(path)
        if how == "mmap, cached":
            path.read_bytes()
        line = [sys.executable, __file__, "--start", str(path), how]
        result = json.loads(subprocess.run(line, stdout=subprocess.PIPE, check=True).stdout)
        for figure, value in result.items():
            figures.setdefault((path.name, "load", how, default_threads(), figure), []).append(value)


def measure_threads(path: Path, rounds: int, figures: dict[Key, list[float]]) -> None:
    with Model(path) as model:
        ids = np.random.default_rng(1).integers(0, model.hparams.n_vocab, PREFILL + DECODE).astype(np.int32)
        counts = sorted({1, default_threads()})
        sessions = [model.session(context=PREFILL + DECODE, threads=threads) for threads in counts]
        for number in range(rounds + 1):
            for threads, session in zip(counts, sessions, strict=True):
                begin = time.perf_counter()
                session.eval(ids[:PREFILL])
                filled = time.perf_counter()
                for i in range(PREFILL, PREFILL + DECODE):
                    session.eval(ids[i : i + 1])
                decoded = time.perf_counter()
                session.rewind(0)
                if not number:  # warms up
                    continue
                for how, n, taken in (("prefill", PREFILL, filled - begin), ("decode", DECODE, decoded - filled)):
                    figures.setdefault((path.name, "threads", how, threads, "tok/s"), []).append(n / taken)
        for session in sessions:
            session.close()


def make_files(folder: Path) -> list[Path]:
    nano = folder / "nano-q4_k_m.gguf"
    if not nano.exists():
        line = [sys.executable, "-m", "m3_convert.cli", str(NANO), str(nano), "--type", "q4_k_m"]
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    return [nano, *make_models(["mid-q4_k_m"], folder)]


def main() -> None:
    if sys.argv[1:2] == ["--start"]:
        print(json.dumps(start(Path(sys.argv[2]), sys.argv[3])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", default="", help="what is measured, for the first line")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    figures: dict[Key, list[float]] = {}
    for path in make_files(arguments.folder):
        for _ in range(arguments.rounds):
            measure_loads(path, figures)
        measure_threads(path, arguments.rounds, figures)
    first_line = f"# {processor()}; m3-gguf {version('m3-gguf')} {arguments.commit}".rstrip()
    lines = [
        (*key, *(f"{f(values):.4g}" for f in (statistics.median, min, max)), len(values))
        for key, values in figures.items()
    ]
    print(first_line)
    for line in (COLUMNS, *lines):
        print("  ".join(f"{value!s:>17}" for value in line))
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            file.write(first_line + "\n")
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *lines])


if __name__ == "__main__":
    main()
