"""Speed against llama.cpp at depth, in turn on the same file, with the same threads.

    pip install llama-cpp-python==0.3.36        # builds llama.cpp; not a dependency of the project
    python tests/bench/compare_llama_cpp.py FILE.gguf ... [--llama PYTHON] [--depth 0,4096,16384] [--csv OUT.csv]

Both programs are processes that hold their caches (K and V in F16; index keys in their defaults) and do what they are
told, one at a time: grow the cache to a depth, evaluate 512 tokens there and drop them again, decode 32 tokens one by
one and drop them. A round is one run of each program; the ratio is that of the medians of the rounds, its spread the
least and the greatest ratio of a round. llama.cpp runs with flash attention, which it needs for its sparse path, and
with batches of 512. Growing the cache is measured once.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

COLUMNS = (
    "file",
    "threads",
    "test",
    "depth",
    "tokens",
    "m3 tok/s",
    "llama.cpp tok/s",
    "ratio",
    "least",
    "greatest",
    "rounds",
)
BATCH = 512  #: tokens of a prefill that llama.cpp computes together
GGML_TYPE_F16 = 1


class OurEngine:
    """m3-gguf with one sequence. `eval` appends ids and returns the logits of the last one."""

    def __init__(self, path: str, context: int, threads: int, scan: str = "auto") -> None:
        from m3_runtime import Model

        self._session = Model(path).session(context=context, threads=threads, index_scan=scan)

    def eval(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        return self._session.eval(ids)

    def rewind(self, length: int) -> None:
        self._session.rewind(length)


class LlamaCpp:
    """The same of llama.cpp by its C interface."""

    def __init__(self, path: str, context: int, threads: int) -> None:
        import llama_cpp

        self._lib = llama_cpp
        self._silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silent, None)
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = (context + 255) // 256 * 256
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = GGML_TYPE_F16
        params.flash_attn_type = 1
        self._context = llama_cpp.llama_init_from_model(model, params) if model else None
        if not self._context:
            sys.exit(f"{path}: llama.cpp does not load it")
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._length = 0

    def eval(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        for first in range(0, len(ids), BATCH):
            part, b = ids[first : first + BATCH], self._batch
            b.n_tokens = len(part)
            for i, token in enumerate(part):
                b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0] = int(token), self._length + i, 1, 0
                b.logits[i] = int(first + i == len(ids) - 1)
            if self._lib.llama_decode(self._context, b):
                sys.exit("llama_decode failed")
            self._length += len(part)
        self._lib.llama_synchronize(self._context)
        logits = self._lib.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(logits, (self._n_vocab,))

    def rewind(self, length: int) -> None:
        if not self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(self._context), 0, length, -1):
            sys.exit("llama.cpp does not drop tokens")
        self._length = length


def work(engine: Any, commands: IO[str], clock: str) -> None:
    """Answers each command, a JSON list: "eval" ids, so many at once, with the seconds that it took; "logits" ids with
    the logits of the last one; any other method of the engine ("rewind") with its seconds.

    clock: "wall", or "cpu" for the time of the process.
    """
    now = {"wall": time.perf_counter, "cpu": time.process_time}[clock]
    for line in commands:
        kind, *arguments = json.loads(line)
        if isinstance(arguments[0], list):
            arguments[0] = np.array(arguments[0], np.int32)
        if kind == "logits":
            print(json.dumps(engine.eval(arguments[0]).tolist()), flush=True)
            continue
        start = now()
        if kind == "eval":
            ids, at_once = arguments
            for first in range(0, len(ids), at_once):
                engine.eval(ids[first : first + at_once])
        else:
            getattr(engine, kind)(*arguments)
        print(now() - start, flush=True)


class Worker:
    """A program in a process of its own."""

    def __init__(self, python: str, kind: str, path: Path, context: int, arguments: argparse.Namespace) -> None:
        clock = "cpu" if arguments.cpu_time else "wall"
        line = [python, sys.argv[0], "--worker", kind, str(path), str(context), str(arguments.threads), clock]
        self._process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, *command: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            sys.exit(f"the process ended with {self._process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


class Comparison:
    """Both programs on one file."""

    def __init__(self, path: Path, arguments: argparse.Namespace, n_vocab: int) -> None:
        self._path, self._arguments = path, arguments
        self._depths = sorted({int(depth) for depth in arguments.depth.split(",")})
        context = self._depths[-1] + max(arguments.prefill, arguments.decode)
        self._ids = np.random.default_rng(1).integers(0, n_vocab, context).tolist()
        kinds = {"m3": sys.executable, "llama": arguments.llama}
        self._workers = [Worker(p, kind, path, context, arguments) for kind, p in kinds.items()]

    def run(self) -> list[dict[str, object]]:
        lines, length = [], 0
        for depth in self._depths:
            if depth > length:
                seconds = [w.ask("eval", self._ids[length:depth], depth) for w in self._workers]
                lines.append(self._line("fill", length, depth - length, [seconds]))
                length = depth
            tests = {"prefill": (self._arguments.prefill,) * 2, "decode": (self._arguments.decode, 1)}
            for test, (n, at_once) in tests.items():
                if n:
                    lines.append(self._line(test, depth, n, self._rounds(depth, n, at_once)))
        for worker in self._workers:
            worker.close()
        return lines

    def _rounds(self, depth: int, n: int, at_once: int) -> list[list[float]]:
        rounds = []
        for number in range(self._arguments.rounds + 1):
            seconds = []
            for worker in self._workers:
                seconds.append(worker.ask("eval", self._ids[depth : depth + n], at_once))
                worker.ask("rewind", depth)
            if number:  # the first one warms up
                rounds.append(seconds)
        return rounds

    def _line(self, test: str, depth: int, n: int, rounds: Sequence[Sequence[float]]) -> dict[str, object]:
        ours, theirs = (statistics.median(seconds) for seconds in zip(*rounds, strict=True))
        ratios = [other / own for own, other in rounds]
        values = (
            self._path.name,
            self._arguments.threads,
            test,
            depth,
            n,
            f"{n / ours:.2f}",
            f"{n / theirs:.2f}",
            f"{theirs / ours:.2f}",
            f"{min(ratios):.2f}",
            f"{max(ratios):.2f}",
            len(rounds),
        )
        print("  ".join(f"{value!s:>14}" for value in values), flush=True)
        return dict(zip(COLUMNS, values, strict=True))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of both comparisons."""
    from m3_runtime.native import default_threads

    parser.add_argument("--llama", default=sys.executable, help="a Python that has llama-cpp-python")
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="processor time of one thread in place of the clock: for a machine that is busy with other things",
    )
    parser.add_argument("--csv", type=Path)


def header(arguments: argparse.Namespace) -> str:
    """What the figures were taken with."""
    from quantize import processor

    if arguments.cpu_time and arguments.threads != 1:
        sys.exit("--cpu-time: expected --threads 1: threads that wait take processor time too")
    busy = "; processor time of one thread, on a machine that did other work too" if arguments.cpu_time else ""
    ours, theirs = version("m3-gguf"), llama_version(arguments.llama)
    return f"# {processor()}; m3-gguf {ours}; llama-cpp-python {theirs}{busy}"


def llama_version(python: str) -> str:
    code = "import llama_cpp; print(llama_cpp.__version__)"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    # Here: the process of llama.cpp, which reads this file too, may have none of them.
    from m3_runtime import Model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--depth", default="0,4096,16384")
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    add_options(parser)
    arguments = parser.parse_args()
    first_line = header(arguments)
    print(first_line)
    print("  ".join(f"{column:>14}" for column in COLUMNS))
    lines: list[dict[str, object]] = []
    for path in arguments.files:
        with Model(path) as model:
            n_vocab = model.hparams.n_vocab
        lines += Comparison(path, arguments, n_vocab).run()
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            file.write(first_line + "\n")
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        kind, path, context, threads, clock = sys.argv[2:]
        engine = (OurEngine if kind == "m3" else LlamaCpp)(path, int(context), int(threads))
        work(engine, sys.stdin, clock)
    else:
        main()
