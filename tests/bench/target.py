"""What m3-convert --max-size makes of m3-nano, beside the shipped recipes and llama.cpp's quantizer.

    python tests/bench/target.py --llama PYTHON [--folder DIR] [--csv tests/bench/target.csv]     # an hour on two cores

PYTHON has llama-cpp-python 0.3.36. For each of Q4_K_M, Q3_K_M and Q2_K: llama.cpp's file (from an F32 file of the same
model), the shipped recipe's, and two searched ones that may have the size of these. All are checked by
m3-check-selection on the text that ships with it, which no search has seen; searches and the importance matrix, which
is the same wherever there is one, read held-out documents of m3-nano, the first 1,024 tokens of every fourth.
"""

import argparse
import csv
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path

from nano_files import NanoFiles
from quantize import processor

TYPES = ("Q4_K_M", "Q3_K_M", "Q2_K")
CONTEXT = 4096


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
    def __init__(self, files: NanoFiles) -> None:
        self._files = files

    def lines(self, kind: str) -> list[Line]:
        files, shipped, matrix = self._files, kind.lower(), ("--imatrix", self._files.matrix)
        found = [
            self._line(kind, "llama.cpp", False, files.quantize(kind)),
            self._line(kind, "llama.cpp", True, files.quantize(kind, importance=True)),
            self._line(kind, "recipe", False, files.convert(f"{kind}-a.gguf", "--type", shipped)),
            self._line(kind, "recipe", True, files.convert(f"{kind}-b.gguf", "--type", shipped, *matrix)),
        ]
        sizes = min(found[0].bytes, found[1].bytes), min(found[2].bytes, found[3].bytes)
        for size, than in zip(sizes, ("llama.cpp", "recipe"), strict=True):
            search = ("--max-size", size, "--text", files.text, "--state", files.folder / "state")
            out = files.convert(f"{kind}-{size}.gguf", "--type", shipped, *matrix, *search)
            found.append(self._line(kind, f"search, as large as {than}", True, out))
        return found

    def _line(self, kind: str, made_by: str, importance: bool, file: Path) -> Line:
        report = self._files.check(file, "--context", CONTEXT)
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
        bench = Bench(NanoFiles(folder, llama=arguments.llama, threads=arguments.threads))
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
