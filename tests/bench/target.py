"""What m3-convert --max-size makes of m3-nano, beside the shipped recipes and llama.cpp's quantizer.

    python tests/bench/target.py --llama PYTHON [--folder DIR] [--csv tests/bench/target.csv]     # an hour on two cores

PYTHON has llama-cpp-python 0.3.36. For each of Q4_K_M, Q3_K_M and Q2_K: llama.cpp's file (from an F32 file of the same
model), the shipped recipe's, and two searched ones that may have the size of these. All are checked by
m3-check-selection on the text that ships with it, which no search has seen; searches and the importance matrix, which
is the same wherever there is one, read held-out documents of m3-nano, the first 1,024 tokens of every fourth.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from quantize import NANO, processor
from tokenizers import Tokenizer

from m3_convert.imatrix import ImportanceMatrix

sys.path[:0] = [str(NANO / "train"), str(Path(__file__).resolve().parents[1])]

from documents import Filler  # noqa: E402
from rows import HELD_OUT  # noqa: E402
from vocabulary import read_ids  # noqa: E402

TYPES = ("Q4_K_M", "Q3_K_M", "Q2_K")
CONTEXT = 4096
CALIBRATION_SHARE = 4  #: one document of so many is read by searches
CALIBRATION_TOKENS = 1024  #: of each of these, at most

# Runs in the other Python. The matrix is an array of {name, values, number of values} that ends with a name of NULL.
QUANTIZE = """
import ctypes, sys
import llama_cpp as llama
import numpy as np
source, out, kind, matrix = sys.argv[1:5]
parameters = llama.llama_model_quantize_default_params()
parameters.ftype = getattr(llama, "LLAMA_FTYPE_MOSTLY_" + kind)
held = []
if matrix:
    class Entry(ctypes.Structure):
        _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("size", ctypes.c_size_t)]
    with np.load(matrix) as file:
        held = [(name.encode(), np.ascontiguousarray(file[name])) for name in file.files]
    entries = (Entry * (len(held) + 1))(*[Entry(n, a.ctypes.data, a.size) for n, a in held], Entry(None, None, 0))
    kind_of_pointer = dict(llama.llama_model_quantize_params._fields_)["imatrix"]
    parameters.imatrix = ctypes.cast(entries, kind_of_pointer)
sys.exit(llama.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(parameters)))
"""


@dataclass(frozen=True)
class Line:
    """One file."""

    type: str
    made_by: str
    importance: str  #: yes or no
    bytes: int
    overlap: float  #: mean
    worst_overlap: float  #: of a layer and head
    worst_head: str  #: layer/head
    mass_lost: float  #: mean
    worst_mass: float  #: of a query head
    kl: float
    same_top1: float


class Bench:
    def __init__(self, folder: Path, llama: str, threads: int) -> None:
        self._folder, self._llama, self._threads = folder, llama, str(threads)
        self._text = folder / "calibration.txt"
        tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
        stream = read_ids(NANO / HELD_OUT)
        documents = np.split(stream, np.flatnonzero(stream == Filler(tokenizer, stream).opening)[1:])
        calibration = [d[:CALIBRATION_TOKENS].tolist() for d in documents[::CALIBRATION_SHARE]]
        self._text.write_text("\n".join(tokenizer.decode(ids) for ids in calibration), encoding="utf-8")
        self._matrix = folder / "nano.imatrix.gguf"
        self._f32 = folder / "nano-f32.gguf"
        self._convert(self._f32, "--type", "f32")
        self._run("imatrix_cli", NANO, self._matrix, "--text", self._text, "--threads", self._threads)
        matrix = ImportanceMatrix.load(self._matrix)
        means = {name: entry.sums / np.maximum(entry.counts, 1)[:, None] for name, entry in matrix.entries.items()}
        self._means = folder / "means.npz"
        np.savez(self._means, **{name: mean.astype(np.float32).ravel() for name, mean in means.items()})

    def lines(self, kind: str) -> list[Line]:
        shipped, matrix = kind.lower(), ("--imatrix", self._matrix)
        found = [
            self._line(kind, "llama.cpp", False, self._quantize(kind, "")),
            self._line(kind, "llama.cpp", True, self._quantize(kind, str(self._means))),
            self._line(kind, "recipe", False, self._convert(self._folder / f"{kind}-a.gguf", "--type", shipped)),
            self._line(
                kind, "recipe", True, self._convert(self._folder / f"{kind}-b.gguf", "--type", shipped, *matrix)
            ),
        ]
        sizes = min(found[0].bytes, found[1].bytes), min(found[2].bytes, found[3].bytes)
        for size, than in zip(sizes, ("llama.cpp", "recipe"), strict=True):
            out = self._folder / f"{kind}-{size}.gguf"
            search = ("--max-size", size, "--text", self._text, "--state", self._folder / "state")
            self._convert(out, "--type", shipped, *matrix, *search)
            found.append(self._line(kind, f"search, as large as {than}", True, out))
        return found

    def _quantize(self, kind: str, matrix: str) -> Path:
        out = self._folder / f"llama-{kind}{'-i' if matrix else ''}.gguf"
        line = [self._llama, "-c", QUANTIZE, str(self._f32), str(out), kind, matrix]
        done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
        if done.returncode:
            sys.exit(f"llama.cpp, {kind}: {done.stderr[-2000:]}")
        return out

    def _convert(self, out: Path, *options: object) -> Path:
        self._run("cli", NANO, out, *options, "--threads", self._threads)
        return out

    def _line(self, kind: str, made_by: str, importance: bool, file: Path) -> Line:
        arguments = (NANO, file, "--context", CONTEXT, "--json", "--threads", self._threads)
        report: dict[str, Any] = json.loads(self._run("check_cli", *arguments, "--no-thresholds"))
        overall, logits = report["overall"], report["logits"]["candidate"]
        line = Line(
            type=kind,
            made_by=made_by,
            importance="yes" if importance else "no",
            bytes=file.stat().st_size,
            overlap=round(overall["overlap_mean"], 5),
            worst_overlap=round(overall["worst"]["overlap_mean"], 5),
            worst_head=f"{overall['worst']['layer']}/{overall['worst']['head']}",
            mass_lost=round(overall["mass_lost"]["mean"], 6),
            worst_mass=round(overall["mass_lost"]["worst"]["mean"], 5),
            kl=round(logits["kld"]["mean"], 6),
            same_top1=round(logits["top1"], 5),
        )
        print(line, file=sys.stderr, flush=True)
        return line

    def _run(self, command: str, *arguments: object) -> str:
        line = [sys.executable, "-m", f"m3_convert.{command}", *map(str, arguments)]
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(line[2:])}: {done.stderr}")
        return done.stdout


def markdown(lines: Sequence[Line]) -> str:
    rows = [
        "| | importance | MB | overlap, mean and worst head | mass lost, mean and worst | KL | same top-1 |",
        "|---|---|---:|---|---|---:|---:|",
    ]
    for r in lines:
        rows.append(
            f"| {r.type}, {r.made_by} | {r.importance} | {r.bytes / 1e6:.2f} | {r.overlap:.4f}, {r.worst_overlap:.4f} "
            f"| {r.mass_lost:.2%}, {r.worst_mass:.2%} | {r.kl:.4f} | {r.same_top1:.1%} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--llama", required=True, help="a Python that has llama-cpp-python")
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--folder", type=Path, help="for files, which stay there; a temporary one by default")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--csv", type=Path, help="file to write, for example tests/bench/target.csv")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder, arguments.llama, arguments.threads)
        lines = [line for kind in arguments.types.split(",") for line in bench.lines(kind)]
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            file.write(f"# {processor()}; m3-gguf {version('m3-gguf')}; {CONTEXT} tokens of the built-in text\n")
            writer = csv.DictWriter(file, [f.name for f in fields(Line)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(line) for line in lines)
    print(markdown(lines))


if __name__ == "__main__":
    main()
