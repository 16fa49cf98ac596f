"""Every type and every recipe in llama.cpp: the same file through it and through the engine.

    pip install llama-cpp-python==0.3.36        # builds llama.cpp; not a dependency of the project
    python tests/compare_types.py models/m3-nano [--patched SITE_PACKAGES] [--csv tests/bench/llama_cpp_types.csv]

Converts a checkpoint to each of the 23 types (a recipe that has nothing but a default), by each recipe, and to several
files (--split-max-size); the types that need an importance matrix get one from the text that ships with m3-gguf, and
Q6_K for the embeddings, which have no importance. Each file is evaluated over the first tokens of that text with K/V
in float32, dense and sparse, by the engine and by llama.cpp. Before weights of block types llama.cpp rounds activations
to 8 bits, the engine to 16. So that this noise can be told from a file that means something else, both also get the
file's values as an F32 file, made by the gguf package's dequantizer. The runs:

    dense, F32    llama.cpp and the engine on those values, float32 attention: what the file means; must agree
    sparse, F32   the same with --patched (llama.cpp without its casts of K and V to F16, see tests/README.md)
    engine        the engine on the file against the engine on its values, sparse: the noise of the engine's rounding
    dense         llama.cpp and the engine on the file: differ by the noise of llama.cpp's rounding
    sparse        the same with --patched
    sparse, F16   the same in llama.cpp as it comes: differs by the noise of the casts too

Exit code 1 if a run with F32 values has a |dlogit| above --tolerance, the engine's own run a KL divergence above
--rounding, or another run of the file itself one above --noise. Where rounding tips a block or an expert over, logits
differ by units, there and at later positions, which read it: that is excused in the first two, and said, if the first
position that is off (in the engine's own run: above --jump) has a near-tie, two block scores at the cut within --tie or
two experts that rank within --expert-tie (--rounding-expert-tie: the engine's rounding of activations to 16 bits moves
ranks further than float32 does).
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from shutil import copyfile
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from m3_convert.recipe import recipe_names, shipped_recipe
from m3_convert.selection import SelectionRule
from m3_convert.text_sample import load_text, sample_text
from m3_runtime import GGUF, Model
from m3_runtime.quantize import TensorType
from m3_runtime.text import ChatTokenizer
from routing import expert_gaps, expert_ranks, write_silent

HERE = Path(__file__).resolve().parent
TEXT = HERE.parent / "convert" / "m3_convert" / "text.txt"
EMBEDDINGS = "q6_k"  #: type of the embeddings where the type needs importance
SPLIT = "q4_k_m"  #: recipe of the file that is split
ENGINE = "engine"  #: the run without llama.cpp

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Difference:
    """One run against another."""

    model: str
    type: str
    kind: str  #: type, recipe or split
    bytes: int
    fallbacks: int  #: tensors whose rows the type's block does not divide
    run: str
    max_dlogit: float
    mean_dlogit: float
    other_top1: float  #: share of positions
    kl: float  #: mean divergence of llama.cpp's distribution from the engine's, nats
    off: int  #: positions with a |dlogit| above the tolerance
    first_off: int | None  #: the first of these, in F32 runs; if the engine's own is above --rounding, above --jump
    gap: float | None  #: there, between the scores of the last block that is read and the next
    expert_gap: float | None  #: likewise between the ranks of the last expert that is chosen and the next
    as_near: int | None  #: positions of the text at which experts are as near

    @property
    def of_values(self) -> bool:
        """True if llama.cpp ran in float32 throughout."""
        return self.run.endswith(", F32")

    def __str__(self) -> str:
        found = f"|dlogit| up to {self.max_dlogit:.1e}, KL {self.kl:.1e}"
        if self.off and self.of_values:
            found += f", {self.off} positions off, the first {self.first_off}"
        elif self.first_off is not None:
            found += f", a jump at position {self.first_off}"
        return f"{self.model}: {self.type} ({self.kind}), {self.run}: {found}"


@dataclass(frozen=True)
class Limits:
    """What is not a difference."""

    tolerance: float  #: of |dlogit|
    tie: float  #: of block scores
    expert_tie: float  #: of what ranks experts
    rounding: float  #: KL divergence
    jump: float  #: of |dlogit| in the engine's own run: more than rounding gives where nothing tips over
    rounding_expert_tie: float  #: of what ranks experts there
    noise: float  #: KL divergence

    def excuse(self, d: Difference) -> str | None:
        """Why a run with F32 values or the engine's own may be off from a position on, None if there is no reason."""
        if d.first_off is None:
            return None
        if d.gap is not None and d.gap <= self.tie:
            return f"two block scores within {d.gap:.1e}"
        near = self.rounding_expert_tie if d.run == ENGINE else self.expert_tie
        if d.expert_gap is not None and d.expert_gap <= near:
            rare = "no other position" if d.as_near == 1 else f"{(d.as_near or 0) - 1} other positions"
            return f"two experts within {d.expert_gap:.1e}, as near as at {rare}"
        return None

    def exceeded(self, d: Difference) -> bool:
        if d.of_values:
            return d.off > 0
        return d.kl > (self.rounding if d.run == ENGINE else self.noise)

    def allow(self, d: Difference) -> bool:
        excusable = d.of_values or d.run == ENGINE
        return not self.exceeded(d) or (excusable and self.excuse(d) is not None)


@dataclass(frozen=True)
class Case:
    """A conversion. options: of m3-convert."""

    type: str
    kind: str
    options: tuple[str, ...]
    needs_importance: bool


class LlamaCpp:
    """llama.cpp in a process of its own: two builds of it cannot live in one."""

    def __init__(self, site: Path | None) -> None:
        """site: the folder that has the package llama_cpp, None where it is installed here."""
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _use, (site,))

    def logits(self, path: Path, ids: NDArray[np.int32], n_vocab: int, *, sparse: bool) -> Floats:
        """float32 [n, n_vocab]. path: a file, or the first of several."""
        return self._pool.submit(_logits, str(path), ids, n_vocab, sparse).result()

    def close(self) -> None:
        self._pool.shutdown()


def _use(site: Path | None) -> None:
    if site is not None:
        sys.path.append(str(site))  # behind this environment's packages


def _logits(path: str, ids: NDArray[np.int32], n_vocab: int, sparse: bool) -> Floats:
    from compare_llama_cpp import Run, llama_logits

    return llama_logits(path, ids, Run(sparse, len(ids)), n_vocab)


def cases(folder: Path) -> Iterator[Case]:
    """All types, all recipes, a split. folder: for recipe files."""
    for type_ in TensorType:
        recipe = folder / f"all-{type_.name.lower()}.toml"
        # Embeddings are looked up, not multiplied with: there is no importance of their columns.
        rule = f'[[rule]]\ntensors = "token_embd.weight"\ntype = "{EMBEDDINGS}"\n' if type_.needs_importance else ""
        recipe.write_text(f'{rule}[default]\ntype = "{type_.name.lower()}"\n', encoding="utf-8")
        yield Case(type_.name, "type", ("--recipe", str(recipe)), type_.needs_importance)
    for name in recipe_names():
        types = [rule.type for rule in shipped_recipe(name).rules]
        yield Case(name, "recipe", ("--type", name), any(type_.needs_importance for type_ in types))
    yield Case(SPLIT, "split", ("--type", SPLIT, "--split-max-size", "4M"), False)


def run(command: str, *arguments: object) -> str:
    line = [sys.executable, "-m", f"m3_convert.{command}", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(line[2:])}: {done.stderr}")
    return done.stdout


def write_values(quantized: Path, f32: Path, out: Path) -> None:
    """The values of a file, or of several, as F32. f32: a file of the same model, for the header."""
    copyfile(f32, out)
    values = gguf.GGUFReader(out, "r+")
    target = {tensor.name: tensor.data for tensor in values.tensors}
    with GGUF(quantized) as whole:
        files = whole.files
    for path in files:
        for tensor in gguf.GGUFReader(path).tensors:
            target.pop(tensor.name)[...] = gguf.dequantize(tensor.data, tensor.tensor_type)
    values.data.flush()
    if target:
        sys.exit(f"{quantized}: has no {min(target)}")


class Comparison:
    """The cases of one checkpoint."""

    def __init__(
        self, source: Path, folder: Path, tokens: int, limits: Limits, builds: tuple[LlamaCpp, LlamaCpp | None]
    ) -> None:
        """folder: for files. builds: llama.cpp as it comes and patched."""
        self._source, self._folder, self._limits = source, folder, limits
        self._stock, self._patched = builds
        self._f32, self._imatrix = folder / "f32.gguf", folder / "imatrix.gguf"
        run("cli", source, self._f32, "--type", "f32")
        run("imatrix_cli", source, self._imatrix, "--text", TEXT)
        with Model(self._f32) as model:
            ids = sample_text(load_text(TEXT), ChatTokenizer(model.gguf.metadata), tokens).ids
            self._ids, self._n_vocab = np.array(ids, np.int32), model.hparams.n_vocab
            self._experts_used = model.hparams.n_expert_used
            self.always_read = model.hparams.top_k * model.hparams.block_size

    def compare(self, case: Case) -> Iterator[Difference]:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        importance = ("--imatrix", self._imatrix) if case.needs_importance else ()
        result = json.loads(run("cli", self._source, folder / "out.gguf", *case.options, *importance, "--json"))
        path = min(folder.iterdir())
        values = self._folder / "values.gguf"
        write_values(path, self._f32, values)
        n_bytes = sum(file.stat().st_size for file in folder.iterdir())
        runs: list[tuple[str, LlamaCpp, Path, bool]] = [
            ("dense, F32", self._stock, values, False),
            ("dense", self._stock, path, False),
            ("sparse, F16", self._stock, path, True),
        ]
        if self._patched:
            runs += [("sparse, F32", self._patched, values, True), ("sparse", self._patched, path, True)]
        ours = {
            (file, sparse): self._engine(file, sparse=sparse) for file in (path, values) for sparse in (False, True)
        }
        found = {ENGINE: self._measure(*ours[values, True], ours[path, True][0])}
        if found[ENGINE]["kl"] > self._limits.rounding:
            found[ENGINE] |= self._first_jump(values, *ours[values, True], ours[path, True][0])
        for name, llama, file, sparse in runs:
            theirs = llama.logits(file, self._ids, self._n_vocab, sparse=sparse)
            found[name] = self._measure(*ours[file, sparse], theirs)
            if file == values and found[name]["off"]:
                first = int(np.argmax(self._is_off(ours[file, sparse][0], theirs)))
                found[name] |= {"first_off": first, **self._expert_tie(values, first, sparse=sparse)}
        fallbacks = sum(" instead of " in note for note in result["notes"].values())
        for name, measured in found.items():
            yield Difference(self._source.name, case.type, case.kind, n_bytes, fallbacks, name, **measured)
        for file in folder.iterdir():
            file.unlink()

    def _engine(self, path: Path, *, sparse: bool) -> tuple[Floats, Floats]:
        """Logits, and for each position the smallest gap between block scores at the cut, float32 [n]."""
        with Model(path) as model:
            h, attention = model.hparams, "sparse" if sparse else "dense"
            rule = SelectionRule(h.top_k, h.block_size, h.local_blocks)
            gaps = np.full(len(self._ids), np.inf, np.float32)
            record = ("scores",) if sparse else ()
            with model.session(context=len(self._ids), kv_type="f32", attention=attention, record=record) as session:
                logits = session.eval(self._ids, all_logits=True)
                for layer in range(h.n_dense_layer, h.n_layer) if sparse else ():
                    gaps = np.minimum(gaps, _gaps(session.block_scores(layer), rule))
        return logits, gaps

    def _measure(self, ours: Floats, gaps: Floats, theirs: Floats) -> dict[str, Any]:
        d = np.abs(ours - theirs)
        p, q = (x - x.max(1, keepdims=True) for x in (ours.astype(np.float64), theirs.astype(np.float64)))
        p, q = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (p, q))
        off = np.flatnonzero(self._is_off(ours, theirs))
        return {
            "max_dlogit": float(f"{d.max():.2e}"),
            "mean_dlogit": float(f"{d.mean():.2e}"),
            "other_top1": float(f"{np.mean(ours.argmax(1) != theirs.argmax(1)):.4f}"),
            "kl": float(f"{(np.exp(p) * (p - q)).sum(1).mean():.2e}"),
            "off": len(off),
            "first_off": None,
            "gap": float(f"{gaps[off[0]]:.2e}") if len(off) and np.isfinite(gaps[off[0]]) else None,
            "expert_gap": None,
            "as_near": None,
        }

    def _first_jump(self, values: Path, ours: Floats, gaps: Floats, theirs: Floats) -> dict[str, Any]:
        """Where the engine's own run leaves what rounding gives, and the near-ties there; nothing if it never does."""
        jumps = np.flatnonzero(np.abs(ours - theirs).max(1) > self._limits.jump)
        if not len(jumps):
            return {}
        first = int(jumps[0])
        gap = float(f"{gaps[first]:.2e}") if np.isfinite(gaps[first]) else None
        return {"first_off": first, "gap": gap, **self._expert_tie(values, first, sparse=True)}

    def _is_off(self, ours: Floats, theirs: Floats) -> NDArray[np.bool_]:
        off: NDArray[np.bool_] = np.abs(ours - theirs).max(1) > self._limits.tolerance
        return off

    def _expert_tie(self, values: Path, position: int, *, sparse: bool) -> dict[str, Any]:
        silent = self._folder / "silent.gguf"
        write_silent(values, silent)
        ranks = expert_ranks(values, silent, self._ids, "sparse" if sparse else "dense")
        gaps = expert_gaps(ranks, self._experts_used)
        gap = gaps[position]
        return {"expert_gap": float(f"{gap:.2e}"), "as_near": int((gaps <= gap).sum())}


def _gaps(scores: Floats, rule: SelectionRule) -> Floats:
    """Between the last block that is read and the next, the smallest of all heads, float32 [n]; infinity where there
    is no choice. scores: float32 [n, heads, n_blocks], -inf for blocks that are not visible."""
    if scores.shape[-1] <= rule.top_k:
        return np.full(len(scores), np.inf, np.float32)
    forced = rule.forced(np.arange(len(scores)), scores.shape[-1])[:, None, :]
    ordered = -np.sort(-np.where(forced, np.inf, scores), axis=-1)
    last, after = ordered[..., rule.top_k - 1], ordered[..., rule.top_k]
    choice = np.isfinite(last) & np.isfinite(after)
    return np.where(choice, last - np.where(choice, after, 0), np.inf).min(axis=1)


def markdown(found: Sequence[Difference]) -> str:
    """A line for each file, a column for each run."""
    names = list(dict.fromkeys(d.run for d in found))
    header = [f"{n}: max, mean" if n.endswith(", F32") else f"{n}: mean, other top-1, KL" for n in names]
    lines = [f"| type | MB | fallbacks | {' | '.join(header)} |", f"|---|---:|---:|{'---|' * len(names)}"]
    by_file: dict[tuple[str, str, str], dict[str, Difference]] = {}
    for d in found:
        by_file.setdefault((d.model, d.type, d.kind), {})[d.run] = d
    for (_, type_, kind), of in by_file.items():
        first = next(iter(of.values()))
        cells = [
            f"{d.max_dlogit:.1e}, {d.mean_dlogit:.1e}{f', {d.off} off' if d.off else ''}"
            if d.of_values
            else f"{d.mean_dlogit:.1e}, {d.other_top1:.1%}, {d.kl:.1e}"
            for d in (of[name] for name in names)
        ]
        kind = "" if kind == "type" else f" ({kind})"
        lines.append(f"| {type_}{kind} | {first.bytes / 1e6:.1f} | {first.fallbacks} | {' | '.join(cells)} |")
    return "\n".join(lines)


def processor() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{names[0].split(':', 1)[1].strip()}, {len(names)} cores" if names else "unknown processor"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, nargs="+", help="checkpoint folders")
    parser.add_argument("--llama", type=Path, help="folder with the package llama_cpp, if it is not installed here")
    parser.add_argument("--patched", type=Path, help="folder with a llama_cpp that keeps K and V in float32")
    parser.add_argument("--types", help="types and recipes, separated by commas, as the first column prints them; all")
    parser.add_argument("--tokens", type=int, default=900)
    parser.add_argument("--tolerance", type=float, default=2e-4, help="largest |dlogit| of F32 runs (2e-4)")
    parser.add_argument(
        "--rounding", type=float, default=5e-4, help="largest KL divergence of the engine's own run (5e-4)"
    )
    parser.add_argument(
        "--jump", type=float, default=0.02, help="|dlogit| there that rounding alone does not give (0.02)"
    )
    parser.add_argument("--rounding-expert-tie", type=float, default=1e-5, help="ranks of experts there (1e-5)")
    parser.add_argument("--noise", type=float, default=0.1, help="largest KL divergence of the others, nats (0.1)")
    parser.add_argument("--tie", type=float, default=1e-3, help="scores so close may be swapped in F32 runs (1e-3)")
    parser.add_argument("--expert-tie", type=float, default=1e-6, help="ranks of experts likewise (1e-6)")
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    limits = Limits(
        tolerance=arguments.tolerance,
        tie=arguments.tie,
        expert_tie=arguments.expert_tie,
        rounding=arguments.rounding,
        jump=arguments.jump,
        rounding_expert_tie=arguments.rounding_expert_tie,
        noise=arguments.noise,
    )
    wanted = arguments.types.split(",") if arguments.types else None
    stock, patched = LlamaCpp(arguments.llama), LlamaCpp(arguments.patched) if arguments.patched else None
    found: list[Difference] = []
    with tempfile.TemporaryDirectory() as temporary:
        for i, source in enumerate(arguments.source):
            folder = Path(temporary) / str(i)
            folder.mkdir()
            comparison = Comparison(source, folder, arguments.tokens, limits, (stock, patched))
            for case in cases(folder):
                if wanted and case.type not in wanted:
                    continue
                for difference in comparison.compare(case):
                    found.append(difference)
                print(f"{source.name}: {case.type} ({case.kind})", file=sys.stderr, flush=True)
            print(f"{source.name}: {arguments.tokens} tokens, selection begins at {comparison.always_read}\n")
            print(markdown([d for d in found if d.model == source.name]), flush=True)
    for llama in filter(None, (stock, patched)):
        llama.close()
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            about = f"m3-gguf {version('m3-gguf')}; llama-cpp-python 0.3.36; {arguments.tokens} tokens"
            file.write(f"# {processor()}; {about}\n")
            writer = csv.DictWriter(file, [f.name for f in fields(Difference)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(d) for d in found)
    for d in found:
        if limits.exceeded(d) and limits.allow(d):
            print(f"excused: {d}, which has {limits.excuse(d)}", flush=True)
    wrong = [d for d in found if not limits.allow(d)]
    for d in wrong:
        known = d.first_off is not None
        ties = f"; block scores within {d.gap}, experts within {d.expert_gap} there" if known else ""
        print(f"wrong: {d}{ties}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
