"""Error and speed of the quantizers against ggml's, on the same rows in the same run.

    python tests/bench/quantize.py --ggml FOLDER_OF_LIBGGML_BASE [--types q4_k,q6_k] [--threads 1,2] [--csv FILE]

ggml's library is the one that llama-cpp-python brings (`site-packages/llama_cpp/lib`); without --ggml it is looked for
in this Python's environment. Errors are relative: sum of w (x - q)^2 over sum of w x^2 of a tensor, averaged over the
tensors of a set; w is the importance, or 1 without it. Speed counts float32 input, median of interleaved repeats;
tensors with rows of one length are one call then.
"""

import argparse
import csv
import ctypes
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from m3_runtime.errors import MachineError
from m3_runtime.quantize import TensorType, dequantize_rows, quantize_rows, row_bytes

HERE = Path(__file__).resolve().parent
NANO = HERE.parents[1] / "models" / "m3-nano"
COLUMNS = 2048
CSV_COLUMNS = (
    "type",
    "tensor set",
    "importance",
    "error",
    "ggml error",
    "error ratio",
    "worst tensor ratio",
    "MB/s",
    "ggml MB/s",
    "speed ratio",
    "threads",
)

Rows = NDArray[np.float32]
Quantizer = Callable[[TensorType, Rows, int, Rows | None], NDArray[np.uint8]]


class Ggml:
    """ggml_quantize_chunk, rows shared out among threads as llama.cpp's quantizer does."""

    def __init__(self, folder: Path) -> None:
        self.lib = ctypes.CDLL(str(folder / "libggml-base.so"))
        self.lib.ggml_quantize_chunk.restype = ctypes.c_size_t
        self.lib.ggml_quantize_chunk.argtypes = [
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
        ]
        self.lib.ggml_version.restype = ctypes.c_char_p
        self.pools: dict[int, ThreadPoolExecutor] = {}
        package = next(folder.parents[1].glob("llama_cpp_python-*.dist-info"), None)
        self.version = f"ggml {self.lib.ggml_version().decode()}"
        if package:
            self.version += f" of llama-cpp-python {package.name.removesuffix('.dist-info').split('-')[1]}"

    def quantize(self, type_: TensorType, rows: Rows, threads: int, importance: Rows | None) -> NDArray[np.uint8]:
        n_rows, n = rows.shape
        out = np.empty((n_rows, row_bytes(type_, n)), np.uint8)
        weights = None if importance is None else importance.ctypes.data

        def chunk(first: int, count: int) -> None:
            self.lib.ggml_quantize_chunk(int(type_), rows.ctypes.data, out.ctypes.data, first * n, count, n, weights)

        if threads == 1:
            chunk(0, n_rows)
            return out
        pool = self.pools.setdefault(threads, ThreadPoolExecutor(threads))
        ends = [n_rows * k // threads for k in range(threads + 1)]
        list(pool.map(chunk, ends[:-1], np.diff(ends).tolist()))
        return out


def find_ggml(folder: Path | None) -> Path:
    if folder is None:
        found = importlib.util.find_spec("llama_cpp")
        if found is None or found.origin is None:
            sys.exit("llama_cpp is not installed here: name the folder of its libggml-base.so with --ggml")
        folder = Path(found.origin).parent / "lib"
    return folder


@dataclass(frozen=True)
class Tensor:
    rows: Rows
    importance: Rows


def importance_of(columns: int, random: np.random.Generator) -> Rows:
    """Mean squares of activations are spread about like this: log-normal, a few columns far above the others."""
    weights = np.exp(random.normal(0, 1.2, columns))
    weights[random.integers(0, columns, max(1, columns // 200))] *= 50
    return weights.astype(np.float32)


def nano_tensors(values: int, random: np.random.Generator) -> list[Tensor]:
    """Every matrix of m3-nano with rows of a multiple of 256, some rows of each so that all make about `values`."""
    matrices = dict(matrices_of(NANO))
    total = sum(m.size for m in matrices.values())
    tensors = []
    for _, m in sorted(matrices.items()):
        step = max(1, round(total / values))
        rows = np.ascontiguousarray(m[::step]).astype(np.uint32) << 16
        tensors.append(Tensor(rows.view(np.float32), importance_of(m.shape[1], random)))
    return tensors


def matrices_of(folder: Path) -> Iterator[tuple[str, NDArray[np.uint16]]]:
    """BF16 codes of the matrices in the safetensors files of a folder, with their names."""
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name == "__metadata__" or entry["dtype"] != "BF16" or len(entry["shape"]) != 2:
                continue
            start, stop = entry["data_offsets"]
            codes = np.frombuffer(data, np.uint16, (stop - start) // 2, 8 + size + start).reshape(entry["shape"])
            if codes.shape[1] % 256 == 0:
                yield name, codes


def tensor_sets(values: int) -> dict[str, list[Tensor]]:
    random = np.random.default_rng(20)
    shape = max(1, values // COLUMNS), COLUMNS
    outliers = random.standard_normal(shape)
    outliers[random.random(shape) < 0.004] *= 20
    outliers[:, random.integers(0, COLUMNS, 8)] *= 8
    made = {
        "gaussian": random.standard_normal(shape) * 0.02,
        "laplace": random.laplace(size=shape) * 0.02,
        "outliers": outliers * 0.02,
    }
    sets = {n: [Tensor(rows.astype(np.float32), importance_of(COLUMNS, random))] for n, rows in made.items()}
    if NANO.is_dir():
        sets = {"m3-nano": nano_tensors(values, random), **sets}
    return sets


def relative_error(type_: TensorType, data: NDArray[np.uint8], tensor: Tensor, weighted: bool) -> float:
    x = tensor.rows.astype(np.float64)
    w = tensor.importance.astype(np.float64) if weighted else 1.0
    values = dequantize_rows(type_, data, x.shape[1]).astype(np.float64)
    return float((w * (x - values) ** 2).sum() / (w * x**2).sum())


def seconds(quantize: Quantizer, type_: TensorType, tensors: list[Tensor], threads: int, weighted: bool) -> float:
    start = time.perf_counter()
    for t in tensors:
        quantize(type_, t.rows, threads, t.importance if weighted else None)
    return time.perf_counter() - start


def stacked(tensors: list[Tensor]) -> list[Tensor]:
    """Few large tensors, so that the time is not that of starting threads."""
    by_columns: dict[int, list[Tensor]] = {}
    for t in tensors:
        by_columns.setdefault(t.rows.shape[1], []).append(t)
    return [Tensor(np.concatenate([t.rows for t in same]), same[0].importance) for same in by_columns.values()]


@dataclass(frozen=True)
class Options:
    threads: list[int]
    repeats: int
    no_speed: bool


def compare(
    type_: TensorType, tensors: list[Tensor], weighted: bool, ggml: Ggml, options: Options
) -> list[dict[str, object]]:
    """The figures of one type on one set, a line for each number of threads."""
    errors: list[tuple[float, float]] = []
    for t in tensors:
        importance = t.importance if weighted else None
        ours = quantize_rows(type_, t.rows, 0, importance)
        theirs = ggml.quantize(type_, t.rows, 1, importance)
        errors.append((relative_error(type_, ours, t, weighted), relative_error(type_, theirs, t, weighted)))
    error, their_error = np.mean(errors, axis=0)
    worst = max(a / b if b else float(a > 0) + 1 for a, b in errors)
    megabytes = sum(t.rows.nbytes for t in tensors) / 1e6
    tensors = stacked(tensors)
    lines = []
    for threads in options.threads:
        line: dict[str, object] = {
            "error": f"{error:.5e}",
            "ggml error": f"{their_error:.5e}",
            "error ratio": f"{error / their_error:.4f}",
            "worst tensor ratio": f"{worst:.4f}",
            "threads": threads,
        }
        if not options.no_speed:
            times = [
                (
                    seconds(quantize_rows, type_, tensors, threads, weighted),
                    seconds(ggml.quantize, type_, tensors, threads, weighted),
                )
                for _ in range(options.repeats)
            ]
            mine, their = (statistics.median(side) for side in zip(*times, strict=True))
            line |= {
                "MB/s": f"{megabytes / mine:.1f}",
                "ggml MB/s": f"{megabytes / their:.1f}",
                "speed ratio": f"{statistics.median(b / a for a, b in times):.2f}",
            }
        lines.append(line)
    return lines


def processor() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{names[0].split(':', 1)[1].strip()}, {len(names)} cores" if names else platform.machine()


def can_write(type_: TensorType) -> bool:
    row = np.ones((1, type_.block_size), np.float32)
    try:
        quantize_rows(type_, row, 1, row[0])
    except MachineError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ggml", type=Path, help="folder of libggml-base.so")
    parser.add_argument("--types", help="names separated by commas; default: all that both can write")
    parser.add_argument("--sets", help="tensor sets separated by commas; default: all")
    parser.add_argument("--importance", choices=("yes", "no", "both"), default="both")
    parser.add_argument("--threads", default="1,2", help="numbers of threads separated by commas")
    parser.add_argument("--values", type=int, default=1 << 19, help="values of a set, about")
    parser.add_argument("--repeats", type=int, default=5, help="runs of which the median is taken")
    parser.add_argument("--no-speed", action="store_true", help="errors only")
    parser.add_argument("--csv", type=Path, help="file to write, for example tests/bench/quantize.csv")
    arguments = parser.parse_args()
    if "OMP_WAIT_POLICY" not in os.environ:
        # Threads of ours that wait for the next call must not take the cores from ggml's; read when OpenMP starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_WAIT_POLICY": "passive"})

    ggml = Ggml(find_ggml(arguments.ggml))
    types = [TensorType.parse(name) for name in arguments.types.split(",")] if arguments.types else list(TensorType)
    types = [t for t in types if t.block_size > 1 and can_write(t)]
    sets = tensor_sets(arguments.values)
    if arguments.sets:
        sets = {name: sets[name] for name in arguments.sets.split(",")}
    threads = [int(t) for t in arguments.threads.split(",")]
    options = Options(threads[:1] if arguments.no_speed else threads, arguments.repeats, arguments.no_speed)

    print("  ".join(f"{c:>11}" for c in CSV_COLUMNS))
    lines: list[dict[str, object]] = []
    for type_ in types:
        for name, tensors in sets.items():
            for weighted in (False, True):
                if arguments.importance == ("no" if weighted else "yes") or (type_.needs_importance and not weighted):
                    continue
                for line in compare(type_, tensors, weighted, ggml, options):
                    line |= {"type": type_.name, "tensor set": name, "importance": "yes" if weighted else "no"}
                    lines.append(line)
                    print("  ".join(f"{line.get(c, '')!s:>11}" for c in CSV_COLUMNS), flush=True)
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            file.write(f"# {processor()}; {platform.system()}; m3-gguf {version('m3-gguf')}; {ggml.version}\n")
            writer = csv.DictWriter(file, CSV_COLUMNS)
            writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    main()
