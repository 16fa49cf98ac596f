"""One MSA layer at depth against llama.cpp's, in turn on the same file, with the same threads.

    python tests/bench/models.py FOLDER layer-q8_0
    python tests/bench/compare_layer.py FOLDER/layer-q8_0.gguf --llama PYTHON [--depth 131072] [--csv OUT.csv]

The file has one sparse layer with the release's heads and little else. What a step takes at a depth, less what it
takes behind an empty cache, is what the layer pays for the depth: index scan, top-k and attention. Three processes: the
engine with a full index scan, the engine with low-bit copies of the index keys, llama.cpp; a round is one run of each.

Filling 131,072 tokens by prefill would take llama.cpp hours, and is not what is measured. In a model of one layer, keys
and values depend on the token and, by a rotation, on its position only. So llama.cpp computes each token of the
vocabulary once, and gets back a saved state of all positions made of these; the engine is given block lists that read
the row's own block only. That both then hold the same cache is checked: their logits behind it must agree.
"""

import argparse
import csv
import ctypes
import statistics
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compare_llama_cpp import GGML_TYPE_F16, LlamaCpp, OurEngine, Worker, add_options, header, work

COLUMNS = (
    "file",
    "threads",
    "depth",
    "test",
    "index scan",
    "m3 step ms",
    "llama.cpp step ms",
    "m3 layer ms",
    "llama.cpp layer ms",
    "layer ratio",
    "least",
    "greatest",
    "step ratio",
    "rounds",
)
WARM_TOKENS = 32  #: before the rounds
LEAST_CORRELATION = 0.999  #: of the logits of both programs behind the filled cache


class OurLayer(OurEngine):
    """m3-gguf."""

    def __init__(self, path: str, context: int, threads: int, scan: str) -> None:
        from m3_runtime import Model

        self._hparams = Model(path).hparams
        super().__init__(path, context, threads, scan)

    def fill(self, ids: NDArray[np.int32], *_: float) -> None:
        """Grows the empty cache to the ids."""
        h = self._hparams
        blocks = np.full((1, len(ids), h.n_index_head, h.top_k), -1, np.int32)
        blocks[:, :, :, 0] = (np.arange(len(ids)) // h.block_size)[:, None]
        self._session.forward([(0, ids)], blocks=blocks)


class LlamaLayer(LlamaCpp):
    """llama.cpp by its C interface."""

    def fill(self, ids: NDArray[np.int32], theta: float, n_rot: int, dim: int) -> None:
        """The same. Keys, index keys too, are heads of `dim`, of which the first n_rot channels are rotated."""
        self.eval(np.arange(self._n_vocab, dtype=np.int32))
        state = bytearray(State(self._state()).of(ids, Rotation(theta, n_rot, dim)))
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), False)
        data = (ctypes.c_uint8 * len(state)).from_buffer(state)
        if self._lib.llama_state_seq_set_data(self._context, data, len(state), 0) != len(state):
            sys.exit("llama.cpp does not take the state: another version than 0.3.36?")
        self._length = len(ids)

    def _state(self) -> bytes:
        data = (ctypes.c_uint8 * self._lib.llama_state_seq_get_size(self._context, 0))()
        n = self._lib.llama_state_seq_get_data(self._context, data, len(data), 0)
        return bytes(data[:n])


@dataclass(frozen=True)
class Rotation:
    """RoPE on the first channels of each head, in pairs (i, i + n_rot / 2)."""

    theta: float
    n_rot: int
    dim: int

    def moved(self, rows: NDArray[np.float16], by: NDArray[np.int64]) -> NDArray[np.float16]:
        """Rows [n, heads * dim] as they would be `by` [n] positions further on."""
        half = self.n_rot // 2
        heads = rows.astype(np.float32).reshape(len(rows), -1, self.dim)
        angles = by[:, None, None] * self.theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        a, b = heads[:, :, :half].copy(), heads[:, :, half : self.n_rot].copy()
        heads[:, :, :half], heads[:, :, half : self.n_rot] = a * cos - b * sin, a * sin + b * cos
        return heads.reshape(rows.shape).astype(np.float16)


class State:
    """The saved state of a sequence of llama.cpp 0.3.36: of one layer and F16 caches, with token i at position i.

    8 bytes, and then the cache of K and V and that of index keys, each as: streams (1), cells, [position, 1, sequence]
    of each cell, transposed (0), layers (1), and twice the type, the bytes of a row (uint64), the rows.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 8
        self._caches = [self._cache(), self._cache()]
        if self._at != len(data):
            sys.exit(f"a state of {len(data)} bytes, {self._at} were expected")

    def _take(self, n: int) -> bytes:
        self._at += n
        return self._data[self._at - n : self._at]

    def _cache(self) -> list[tuple[bytes, NDArray[np.float16]]]:
        """Keys and values, each with what stands before them."""
        streams, n_cells = struct.unpack("<II", self._take(8))
        self._take(12 * n_cells)
        middle = struct.unpack("<II", self._take(8))
        if streams != 1 or middle != (0, 1):
            sys.exit(f"{streams} streams, transposed and layers {middle}: expected 1, (0, 1)")
        found = []
        for _ in range(2):
            head = self._take(12)
            kind, n_bytes = struct.unpack("<iQ", head)
            if kind != GGML_TYPE_F16:
                sys.exit(f"a cache of type {kind}, expected F16")
            found.append((head, np.frombuffer(self._take(n_bytes * n_cells), np.float16).reshape(n_cells, -1)))
        return found

    def of(self, ids: NDArray[np.int32], rotation: Rotation) -> bytes:
        """The same of other tokens from position 0 on."""
        cells = np.zeros((len(ids), 3), np.uint32)
        cells[:, 0], cells[:, 1] = np.arange(len(ids)), 1
        parts = [self._data[:8]]
        for (key_head, keys), (value_head, values) in self._caches:
            parts += [struct.pack("<II", 1, len(ids)), cells.tobytes(), struct.pack("<II", 0, 1)]
            parts += [key_head, rotation.moved(keys[ids], np.arange(len(ids)) - ids).tobytes()]
            parts += [value_head, values[ids].tobytes()]
        return b"".join(parts)


class Comparison:
    """The programs on one file. Times are medians over rounds, in milliseconds for a token or a prefill."""

    def __init__(self, path: Path, arguments: argparse.Namespace, hparams: Any) -> None:
        """hparams: of the file, an `m3_runtime.engine.Hparams`."""
        self._path, self._arguments, self._hparams = path, arguments, hparams
        self._tests = {"decode": (arguments.decode, 1), "prefill": (arguments.prefill, arguments.prefill)}
        context = arguments.depth + max(arguments.prefill, arguments.decode) + 1
        self._ids = np.random.default_rng(1).integers(0, hparams.n_vocab, context).tolist()
        kinds = {"full": sys.executable, "low_bit": sys.executable, "llama": arguments.llama}
        self._workers = {k: Worker(python, k, path, context, arguments) for k, python in kinds.items()}

    def run(self) -> list[dict[str, object]]:
        depth = self._arguments.depth
        shallow = {test: self._rounds(test, 0) for test in self._tests}
        h = self._hparams
        for worker in self._workers.values():
            worker.ask("fill", self._ids[:depth], h.rope_theta, h.n_rot, h.head_dim)
        self._check_logits(depth)
        lines = []
        for test in self._tests:
            deep = self._rounds(test, depth)
            for scan in ("full", "low_bit") if test == "decode" else ("full",):
                lines.append(self._line(test, scan, shallow[test], deep))
        for worker in self._workers.values():
            worker.close()
        return lines

    def _check_logits(self, depth: int) -> None:
        logits = {k: np.array(w.ask("logits", [self._ids[depth]])) for k, w in self._workers.items()}
        for worker in self._workers.values():
            worker.ask("rewind", depth)
        if not np.array_equal(logits["full"], logits["low_bit"]):
            sys.exit("the two index scans give different logits")
        correlation = np.corrcoef(logits["full"], logits["llama"])[0, 1]
        print(f"correlation of the logits with llama.cpp's: {correlation:.6f}", file=sys.stderr)
        if correlation < LEAST_CORRELATION:
            sys.exit(f"expected at least {LEAST_CORRELATION}: the caches differ")

    def _rounds(self, test: str, depth: int) -> dict[str, list[float]]:
        n, at_once = self._tests[test]
        times: dict[str, list[float]] = {kind: [] for kind in self._workers}
        for number in range(self._arguments.rounds + 1):
            for kind, worker in self._workers.items():
                if test == "prefill" and kind == "low_bit":
                    continue  # scans of many queries are full
                size = n if number else min(n, WARM_TOKENS)
                seconds = worker.ask("eval", self._ids[depth : depth + size], at_once)
                worker.ask("rewind", depth)
                if number:
                    times[kind].append(1e3 * seconds * at_once / n)
        return times

    def _line(
        self, test: str, scan: str, shallow: dict[str, list[float]], deep: dict[str, list[float]]
    ) -> dict[str, object]:
        steps = {kind: statistics.median(deep[kind]) for kind in (scan, "llama")}
        rest = {kind: statistics.median(shallow[kind]) for kind in (scan, "llama")}
        layers = {kind: steps[kind] - rest[kind] for kind in steps}
        ratios = [
            (theirs - rest["llama"]) / (ours - rest[scan])
            for ours, theirs in zip(deep[scan], deep["llama"], strict=True)
        ]
        values = (
            self._path.name,
            self._arguments.threads,
            self._arguments.depth,
            test,
            scan,
            f"{steps[scan]:.3f}",
            f"{steps['llama']:.3f}",
            f"{layers[scan]:.3f}",
            f"{layers['llama']:.3f}",
            f"{layers['llama'] / layers[scan]:.2f}",
            f"{min(ratios):.2f}",
            f"{max(ratios):.2f}",
            f"{steps['llama'] / steps[scan]:.2f}",
            len(ratios),
        )
        print("  ".join(f"{value!s:>14}" for value in values), flush=True)
        return dict(zip(COLUMNS, values, strict=True))


def main() -> None:
    # Here: the process of llama.cpp, which reads this file too, may have none of them.
    from m3_runtime import Model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--depth", type=int, default=131072)
    parser.add_argument("--decode", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    add_options(parser)
    arguments = parser.parse_args()
    first_line = header(arguments)
    print(first_line)
    print("  ".join(f"{column:>14}" for column in COLUMNS))
    with Model(arguments.file) as model:
        h = model.hparams
        if h.n_layer != 1 or h.n_dense_layer or h.index_dim != h.head_dim:
            sys.exit(f"{arguments.file}: expected one sparse layer, and index keys as wide as keys")
    lines = Comparison(arguments.file, arguments, h).run()
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            file.write(first_line + "\n")
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        kind, path, context, threads, clock = sys.argv[2:]
        layer: OurLayer | LlamaLayer
        if kind == "llama":
            layer = LlamaLayer(path, int(context), int(threads))
        else:
            layer = OurLayer(path, int(context), int(threads), kind)
        work(layer, sys.stdin, clock)
    else:
        main()
