"""What m3-check-selection says of m3-nano in every recipe, with rounded indexers, caches of all types, and dense.

    python tests/bench/selection.py [--llama PYTHON] [--csv tests/bench/selection.csv]     # half an hour on two cores

PYTHON has llama-cpp-python 0.3.36, whose quantizer makes files of the same names. All are compared with the BF16 folder
over the text that ships with m3-check-selection. The folder's index projections are BF16; those of the training, which
m3-nano ships too, are float32 and are compared in a file of their own. A file is made with an importance matrix only
where one of the two programs cannot do without.
"""

import argparse
import csv
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from nano_files import NanoFiles
from quantize import NANO, processor
from recipe_sizes import RELEASE, tensors_without_data
from safetensors.numpy import load_file

from m3_convert.plan import plan_tensors
from m3_convert.precision import choose
from m3_convert.recipe import recipe_names
from m3_runtime import GGUF
from m3_runtime.choices import CACHE_TYPES

CONTEXT = 4096
INDEX_TYPES = ("f16", "q8_0", "q4_0", "q2_k")
INDEX_RULE = "blk.*.indexer.*_proj.weight"
LLAMA_NEEDS_IMPORTANCE = ("iq3_xxs",)  #: it stores some tensors in smaller types than the recipe of that name does
TRAINED_INDEX = NANO / "train" / "index_projections_f32.safetensors"


@dataclass(frozen=True)
class Line:
    """One candidate."""

    group: str  #: recipe, llama.cpp, index projections, attention, K/V cache or index cache
    candidate: str
    importance: str  #: yes or no
    bytes: int  #: of the file on disk; of the folder's shards
    overlap: float | None  #: mean; None for dense attention
    worst_overlap: float | None  #: of a layer and index head
    worst_head: str  #: layer/head
    mass_lost: float  #: mean
    worst_mass: float  #: of a query head
    worst_query_head: str  #: layer/query head
    near_ties: float | None  #: share of the lost blocks; None if there are none
    kl: float
    forced_kl: float  #: with the reference's blocks
    same_top1: float
    changed: int  #: lists
    lists: int  #: that were compared
    missed: str  #: default thresholds


def line_of(group: str, name: str, report: dict[str, Any], *, importance: bool = False) -> Line:
    overall, logits = report["overall"], report["logits"]
    worst, mass = overall["worst"], overall["mass_lost"]["worst"]
    line = Line(
        group=group,
        candidate=name,
        importance="yes" if importance else "no",
        bytes=report["candidate"]["bytes"],
        overlap=_rounded(overall["overlap_mean"], 5),
        worst_overlap=_rounded(worst["overlap_mean"], 5) if worst else None,
        worst_head=f"{worst['layer']}/{worst['head']}" if worst else "",
        mass_lost=round(overall["mass_lost"]["mean"], 6),
        worst_mass=round(mass["mean"], 6),
        worst_query_head=f"{mass['layer']}/{mass['query_head']}" if mass["mean"] else "",
        near_ties=_rounded(overall["flips"]["near_ties"], 4),
        kl=round(logits["candidate"]["kld"]["mean"], 7),
        forced_kl=round(logits["forced"]["kld"]["mean"], 7),
        same_top1=round(logits["candidate"]["top1"], 5),
        changed=overall["changed"],
        lists=report["tested"]["lists"],
        missed=" ".join(report["verdict"]["failed"]),
    )
    print(line, file=sys.stderr, flush=True)
    return line


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _by_size(lines: Iterable[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: -line.bytes)


def needs_importance(recipe: str) -> bool:
    tensors = plan_tensors(tensors_without_data(RELEASE), choose(recipe))[0]
    return any(tensor.type.needs_importance for tensor in tensors)


class Bench:
    def __init__(self, files: NanoFiles, device: str, *, llama: bool) -> None:
        self._files, self._llama = files, llama
        self._options = ("--context", CONTEXT, "--device", device)

    def lines(self) -> Iterator[Line]:
        yield from self._recipes()
        yield from self._index_projections()
        yield from self._settings()

    def _recipes(self) -> Iterator[Line]:
        needing = {name: needs_importance(name) for name in recipe_names()}
        ours = [(name, False) for name, needed in needing.items() if not needed]
        ours += [(name, True) for name, needed in needing.items() if needed or name in LLAMA_NEEDS_IMPORTANCE]
        yield from _by_size(self._recipe(name, importance) for name, importance in ours)
        if self._llama:
            theirs = [(name, needed or name in LLAMA_NEEDS_IMPORTANCE) for name, needed in needing.items()]
            yield from _by_size(self._by_llama(name.upper(), importance) for name, importance in theirs)

    def _recipe(self, name: str, importance: bool) -> Line:
        matrix = ("--imatrix", self._files.matrix) if importance else ()
        file = self._files.convert(f"{name}{'-i' if importance else ''}.gguf", "--type", name, *matrix)
        return self._line("recipe", name, file, importance=importance)

    def _by_llama(self, name: str, importance: bool) -> Line:
        file = self._files.quantize(name, importance=importance)
        return self._line("llama.cpp", name, file, importance=importance)

    def _index_projections(self) -> Iterator[Line]:
        for type_ in INDEX_TYPES:
            rule = ("--rule", f"{INDEX_RULE}={type_}", "--allow-lossy-indexer")
            yield self._line("index projections", type_, self._files.convert(f"index-{type_}.gguf", *rule))
        trained = self._trained_index()
        for type_ in ("f16", "bf16"):
            rule = ("--type", "f32", "--rule", f"{INDEX_RULE}={type_}", "--allow-lossy-indexer")
            file = self._files.convert(f"trained-{type_}.gguf", *rule, source=trained)
            report = self._files.check(file, *self._options, reference=trained)
            yield line_of("index projections", f"{type_}, of float32", report)

    def _trained_index(self) -> Path:
        """The F32 file with the index projections as they were before they were rounded to BF16."""
        out = self._files.folder / "trained.gguf"
        out.write_bytes(self._files.f32.read_bytes())
        with GGUF(out) as gguf:
            places = {tensor.name: tensor.offset for tensor in gguf.tensors}
        with out.open("r+b") as file:
            for name, values in load_file(TRAINED_INDEX).items():
                _, layer, projection = name.split(".")  # as in layers.1.index_q_proj
                file.seek(places[f"blk.{layer}.indexer.{projection.removeprefix('index_')}.weight"])
                rounded = np.frombuffer(file.read(values.nbytes), "<f4").reshape(values.shape)
                if not np.allclose(rounded, values, rtol=2**-8, atol=0):
                    sys.exit(f"{TRAINED_INDEX}: {name} is not what m3-nano was rounded from")
                file.seek(-values.nbytes, 1)
                file.write(values.astype("<f4").tobytes())
        return out

    def _settings(self) -> Iterator[Line]:
        yield self._line("attention", "dense", NANO, "--candidate-attention", "dense")
        for type_ in CACHE_TYPES:
            if type_ != "f16":  # the reference's
                yield self._line("K/V cache", type_, NANO, "--candidate-kv-type", type_)
        for type_ in CACHE_TYPES:
            if type_ != "f32":
                yield self._line("index cache", type_, NANO, "--candidate-index-type", type_)

    def _line(self, group: str, name: str, candidate: Path, *options: object, importance: bool = False) -> Line:
        report = self._files.check(candidate, *self._options, *options)
        return line_of(group, name, report, importance=importance)


def markdown(lines: Sequence[Line]) -> str:
    rows = [
        "| candidate | MB | overlap, mean and worst head | mass lost | near-ties | KL | with the reference's blocks "
        "| same top-1 |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for r in lines:
        size = f"{r.bytes / 1e6:.2f}" if r.group in ("recipe", "llama.cpp") else ""
        overlap = "reads all" if r.overlap is None else f"{_share(r.overlap)}, {_share(r.worst_overlap or 0)}"
        near = "" if r.near_ties is None else f"{r.near_ties:.0%}"
        rows.append(
            f"| {_name(r)} | {size} | {overlap} | {_lost(r.worst_mass)} | {near} | {_kl(r.kl)} | {_kl(r.forced_kl)} "
            f"| {_top1(r.same_top1)} |"
        )
    return "\n".join(rows)


def _name(line: Line) -> str:
    importance = ", with importance" if line.importance == "yes" else ""
    if line.group == "recipe":
        return f"`{line.candidate}`{importance}"
    if line.group == "llama.cpp":
        return f"llama.cpp's {line.candidate}{importance}"
    if line.group == "attention":
        return f"{line.candidate} attention"
    type_, *more = line.candidate.split(",")
    return ",".join((f"{line.group} {type_.upper()}", *more))


def _share(value: float) -> str:
    return "1" if value == 1 else f"{value:.4f}".removeprefix("0")


def _lost(value: float) -> str:
    return "0" if value == 0 else f"{value:.2%}" if value < 0.1 else f"{value:.1%}"


def _kl(value: float) -> str:
    if value < 0.00005:
        return "0" if value == 0 else "<.0001"
    return (f"{value:.4f}" if value < 0.1 else f"{value:.3f}").removeprefix("0")


def _top1(value: float) -> str:
    return "100%" if value == 1 else f"{value:.2%}" if value > 0.999 else f"{value:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--llama", default="", help="a Python that has llama-cpp-python, for its quantizer's files")
    parser.add_argument("--folder", type=Path, help="for files, which stay there; a temporary one by default")
    parser.add_argument("--device", default="cpu", help="as of m3-check-selection")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--csv", type=Path, help="file to write, for example tests/bench/selection.csv")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        files = NanoFiles(arguments.folder or Path(temporary), llama=arguments.llama, threads=arguments.threads)
        lines = list(Bench(files, arguments.device, llama=bool(arguments.llama)).lines())
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            about = f"{arguments.device}; {CONTEXT} tokens of the built-in text"
            file.write(f"# {processor()}; m3-gguf {version('m3-gguf')}; {about}\n")
            writer = csv.DictWriter(file, [f.name for f in fields(Line)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(line) for line in lines)
    print(markdown(lines))


if __name__ == "__main__":
    main()
