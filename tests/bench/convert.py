"""Time of m3-convert against llama.cpp's two steps, and against a plain copy, on the same checkpoint in the same run.

    python tests/bench/convert.py --llama PYTHON --script convert_hf_to_gguf.py [--torch PYTHON] [--csv FILE]

The checkpoint is random, in the release's layout and widths but for fewer layers, experts and tokens (2.3 GB in BF16).
llama.cpp's steps are its sdist's convert script to BF16, run by a Python that has torch and transformers (--torch), and
then `llama_model_quantize` of llama-cpp-python (--llama is a Python that has it), with as many threads as m3-convert.

What is timed: m3-convert and the script from start to end of the process, m3-convert with its fsync; the quantizer
within its call; the copy with its fsync. "start" is the time of m3-convert --dry-run, which any model costs once; only
the ratio to the copy leaves it out. "warm": the source lies in the page cache; "cold": none of it does. The
intermediate file of the two steps always lies in the page cache when the second begins, since it has just been written.
All is repeated in turn; the figures are medians, ratios those of medians.
"""

import argparse
import csv
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from large_checkpoint import RELEASE, make_large_checkpoint, working_folder

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
THREADS = len(os.sched_getaffinity(0))
SPEC = replace(RELEASE, layers=2, dense=1, experts=8, vocab=16384, shard_mb=600)
IDLE_SECONDS = 3  #: until a disk has done what freeing a large file takes
DISK = 9 * 10**9  #: bytes of all files that exist together
CSV_COLUMNS = (
    "source",
    "to",
    "page cache",
    "source MB",
    "m3-convert s",
    "start s",
    "llama.cpp script s",
    "copy s",
    "llama.cpp quantizer s",
    "ratio to script and quantizer",
    "ratio to copy and quantizer",
    "ratio to copy without start",
)

# The script as it is, with two questions answered for it. Of transformers it expects a version that does not know this
# architecture, and reads config.json then; later ones do, and drop fields of it. And it knows the release's tokenizer
# by what it makes of a text, which no random one can imitate.
SCRIPT = """
import runpy, sys, transformers
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
def unknown(*arguments, **options):
    raise ValueError("not known")
transformers.AutoConfig.from_pretrained = unknown
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "minimax-m2"
runpy.run_path(sys.argv[0], run_name="__main__")
"""

QUANTIZER = """
import sys, time, llama_cpp
source, target, file_type, pure, threads = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.pure, params.nthread = int(file_type), pure == "pure", int(threads)
llama_cpp.llama_backend_init()
start = time.perf_counter()
if llama_cpp.llama_model_quantize(source.encode(), target.encode(), params):
    sys.exit("llama_model_quantize failed")
print("seconds", time.perf_counter() - start)
"""


@dataclass(frozen=True)
class Quantization:
    """A target that both sides have. file_type, pure: what llama.cpp's quantizer is told."""

    type: str
    file_type: int
    pure: bool


QUANTIZATIONS = (
    Quantization("q4_k", 14, pure=True),  # every matrix in Q4_K
    Quantization("q4_k_m", 15, pure=False),  # each side's own mixture
)

RUNS = (("BF16", "q4_k"), ("BF16", "q4_k_m"), ("MXFP8", "q4_k"), ("MXFP8", "bf16"))
DISK_REPEATS = 2  #: in a round, of what only the disk limits: its speed varies more


@dataclass(frozen=True)
class Peers:
    """llama.cpp: Pythons with llama_cpp and with torch, and its script."""

    llama: Path
    torch: Path
    script: Path

    def version(self) -> str:
        text = subprocess.run(
            [self.llama, "-c", "from importlib.metadata import version as v; print(v('llama-cpp-python'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        return f"llama-cpp-python {text.strip()}"

    def convert(self, source: Path, out: Path) -> float:
        arguments = [source, "--outtype", "bf16", "--outfile", out]
        return _seconds([self.torch, "-c", SCRIPT, self.script, *arguments])

    def quantize(self, source: Path, out: Path, to: Quantization) -> float:
        pure = "pure" if to.pure else "mixed"
        arguments = [source, out, str(to.file_type), pure, str(THREADS)]
        return float(_run([self.llama, "-c", QUANTIZER, *arguments]).split()[-1])


def m3_convert(options: Sequence[str], source: Path, out: Path) -> float:
    command = "from m3_convert.start import m3_convert; m3_convert()"
    return _seconds([sys.executable, "-c", command, source, out, "--threads", THREADS, *options])


def copy(source: Path, out: Path) -> float:
    """Seconds to write the bytes of all shards into one file and to flush it."""
    start = time.perf_counter()
    with out.open("wb") as file:
        for shard in shards(source):
            with shard.open("rb") as opened:
                shutil.copyfileobj(opened, file, 1 << 22)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - start


def shards(source: Path) -> list[Path]:
    return sorted(source.glob("*.safetensors"))


def _seconds(command: list[object]) -> float:
    start = time.perf_counter()
    _run(command)
    return time.perf_counter() - start


def _run(command: list[object]) -> str:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    if process.returncode:
        sys.exit(f"{process.stderr}\n{command[0]} failed")
    return process.stdout


def prepare(source: Path, cold: bool) -> None:
    """The disk is idle, and the source is in the page cache, or nothing of it is."""
    os.sync()
    time.sleep(IDLE_SECONDS)
    for shard in shards(source):
        with shard.open("rb") as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(1 << 22):
                    pass


Key = tuple[str, str, str]  #: source, target, page cache or ""


class Bench:
    """Runs everything once a round, and keeps the seconds by what was run."""

    def __init__(self, folder: Path, peers: Peers | None) -> None:
        self.folder, self.peers = folder, peers
        self.seconds: defaultdict[tuple[str, Key], list[float]] = defaultdict(list)
        self.sources = {"BF16": folder / "bf16", "MXFP8": folder / "mxfp8"}
        self.sizes = {
            name: make_large_checkpoint(path, replace(SPEC, mxfp8=name == "MXFP8"))
            for name, path in self.sources.items()
        }

    def round(self) -> None:
        for name, source in self.sources.items():
            self._note("start", (name, "", ""), m3_convert(("--dry-run",), source, self.folder / "none.gguf"))
        for cache in ("warm", "cold"):
            for name, to in RUNS:
                self._time("m3-convert", (name, to, cache), partial(m3_convert, ("--type", to)))
            for _ in range(DISK_REPEATS):
                self._time("m3-convert", ("BF16", "bf16", cache), partial(m3_convert, ("--type", "bf16")))
                self._time("copy", ("BF16", "", cache), copy)
            if self.peers:
                intermediate = self._time("script", ("BF16", "", cache), self.peers.convert, keep=cache == "cold")
        if self.peers:
            out = self.folder / "out.gguf"
            for target in QUANTIZATIONS:
                self._note("quantizer", ("BF16", target.type, ""), self.peers.quantize(intermediate, out, target))
                out.unlink()
            intermediate.unlink()

    def _time(self, what: str, key: Key, work: Callable[[Path, Path], float], keep: bool = False) -> Path:
        source, out = self.sources[key[0]], self.folder / f"{what}.gguf"
        prepare(source, cold=key[2] == "cold")
        self._note(what, key, work(source, out))
        if not keep:
            out.unlink()
        return out

    def _note(self, what: str, key: Key, seconds: float) -> None:
        self.seconds[what, key].append(seconds)
        print(f"{what:12} {' '.join(key):22} {seconds:7.1f} s", flush=True)

    def lines(self) -> Iterator[dict[str, str]]:
        for (what, (source, to, cache)), runs in self.seconds.items():
            if what != "m3-convert":
                continue
            ours, start = statistics.median(runs), statistics.median(self.seconds["start", (source, "", "")])
            script, copied = (self._median(other, (source, "", cache)) for other in ("script", "copy"))
            quantizer = self._median("quantizer", (source, to, ""))
            line = {
                "source": source,
                "to": to,
                "page cache": cache,
                "source MB": f"{self.sizes[source] / 1e6:.0f}",
                "m3-convert s": f"{ours:.1f}",
                "start s": f"{start:.1f}",
            }
            if script and quantizer:
                line |= {
                    "llama.cpp script s": f"{script:.1f}",
                    "llama.cpp quantizer s": f"{quantizer:.1f}",
                    "ratio to script and quantizer": f"{ours / (script + quantizer):.2f}",
                }
            if copied and quantizer:
                line |= {"copy s": f"{copied:.1f}", "ratio to copy and quantizer": f"{ours / (copied + quantizer):.2f}"}
            elif copied and to == "bf16":
                line |= {"copy s": f"{copied:.1f}", "ratio to copy without start": f"{(ours - start) / copied:.2f}"}
            yield line

    def _median(self, what: str, key: Key) -> float | None:
        runs = self.seconds.get((what, key))
        return statistics.median(runs) if runs else None


def processor() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{names[0].split(':', 1)[1].strip()}, {len(names)} cores" if names else platform.machine()


def commit() -> str:
    """The commit that ran, with a plus if the working tree has changes."""
    text = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True)
    return text.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--llama", type=Path, help="a Python that has llama_cpp; without it only m3-convert is timed")
    parser.add_argument("--torch", type=Path, help="a Python that has torch and transformers; default: that of --llama")
    parser.add_argument("--script", type=Path, help="convert_hf_to_gguf.py in the source of llama-cpp-python")
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="for 9 GB of files, removed afterwards")
    parser.add_argument("--repeats", type=int, default=3, help="runs of which the median is taken")
    parser.add_argument("--csv", type=Path, help="file to write, for example tests/bench/convert.csv")
    arguments = parser.parse_args()
    if (arguments.llama is None) != (arguments.script is None):
        parser.error("--llama and --script go together")
    peers = None
    if arguments.llama:
        peers = Peers(arguments.llama, arguments.torch or arguments.llama, arguments.script)
    with working_folder(arguments.folder, DISK) as folder:
        bench = Bench(folder, peers)
        for _ in range(arguments.repeats):
            bench.round()
    lines = list(bench.lines())
    for line in lines:
        print("; ".join(f"{name} {value}" for name, value in line.items()))
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            theirs = f"; {peers.version()}" if peers else ""
            file.write(f"# {processor()}; {platform.system()}; m3-gguf {version('m3-gguf')} ({commit()}){theirs}; ")
            file.write(f"{THREADS} threads; median of {arguments.repeats}\n")
            writer = csv.DictWriter(file, CSV_COLUMNS)
            writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    main()
