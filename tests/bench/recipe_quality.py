"""What each recipe costs m3-nano: selection overlap, perplexity, KL divergence and recall on held-out text.

    python tests/bench/recipe_quality.py --csv tests/bench/recipe_quality.csv       # all recipes, an hour on two cores
    python tests/bench/recipe_quality.py --types q4_k_m --rule 'token_embd.weight=bf16'
    python tests/bench/recipe_quality.py --groups q4_k_m                            # which tensors are to blame

Every file is made by m3-convert from models/m3-nano and read by the engine (sparse, F16 cache) beside the BF16 file,
the reference. The text is train/heldout.xz: of its documents every fourth makes the importance matrix, the others make
the rows. Rows of text give perplexity, KL divergence and top-1; rows of hard recall (48 facts with look-alike names)
give answers; both give the overlap of the block lists as m3-check-selection counts it. All but the answers is taken
past the first top_k * block tokens, where blocks are chosen. --groups rounds one group of tensors as the recipe does
and keeps all others in BF16.

m3-nano has 5 layers and 13.6 M parameters, more than half of them outside the routed experts. Its figures tell recipes
and groups of tensors apart; they are not those of the 428B release, which has 3% there and bears rounding better.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from math import prod
from pathlib import Path

import numpy as np
from nano_files import CALIBRATION_SHARE, calibration_text, held_out_documents
from numpy.typing import NDArray
from quantize import NANO, processor
from recipe_sizes import RELEASE, tensors_without_data
from tokenizers import Tokenizer

from m3_convert.plan import plan_tensors
from m3_convert.precision import choose
from m3_convert.recipe import recipe_names
from m3_convert.selection import (
    Agreement,
    LayerTally,
    PositionBuckets,
    SelectionRule,
    compare_lists,
    score_rounding,
)
from m3_runtime import Model
from m3_runtime.quantize import TensorType

sys.path[:0] = [str(NANO / "train"), str(Path(__file__).resolve().parents[1])]

from chats import ChatFormat  # noqa: E402
from documents import Filler  # noqa: E402
from rows import TEMPLATE, Data, Row, held_out_rows  # noqa: E402

Floats = NDArray[np.float32]

CONTEXT = 4096

GROUPS = {
    "embeddings": ("token_embd.weight",),
    "head": ("output.weight",),
    "attention q": ("blk.*.attn_q.weight",),
    "attention k": ("blk.*.attn_k.weight",),
    "attention v": ("blk.*.attn_v.weight",),
    "attention output": ("blk.*.attn_output.weight",),
    "dense MLP": ("blk.*.ffn_gate.weight", "blk.*.ffn_up.weight", "blk.*.ffn_down.weight"),
    "shared experts": ("blk.*.ffn_*_shexp.weight",),
    "experts: gate, up": ("blk.*.ffn_gate_exps.weight", "blk.*.ffn_up_exps.weight"),
    "experts: down": ("blk.*.ffn_down_exps.weight",),
}


@dataclass(frozen=True)
class Variant:
    """A file to measure. rules: as for --rule. importance: with the matrix."""

    type: str
    importance: bool = False
    rules: tuple[str, ...] = ()
    label: str = ""  #: in place of the rules in the result


REFERENCE = Variant("bf16")


@dataclass(frozen=True)
class Quality:
    """One line of the result."""

    type: str
    importance: str  #: yes or no
    change: str  #: to the recipe
    release_gb: float  #: of the 428B release, 10^9 bytes
    release_bits_per_weight: float
    bytes: int  #: of the tensors of m3-nano
    bits_per_weight: float
    perplexity: float
    kl: float  #: mean divergence of the next token's distribution from the reference's, nats
    other_top1: float  #: share of positions
    overlap: float  #: mean of all block lists
    worst_overlap: float  #: mean of the lists of the layer and head where it is lowest
    worst_head: str  #: layer/head
    answers: int  #: right ones
    questions: int


@dataclass(frozen=True)
class Look:
    """One row through one model: log-probabilities float32 [n, n_vocab]; block lists of each sparse layer and, of the
    reference, scores."""

    log_probs: Floats
    lists: list[NDArray[np.int32]]
    scores: list[Floats]


class Tally:
    """Sums over rows of one model."""

    def __init__(self, model: Model, n_tokens: int) -> None:
        """n_tokens: of a row."""
        h = model.hparams
        self.rule = SelectionRule(h.top_k, h.block_size, h.local_blocks)
        self.buckets = PositionBuckets.over(self.rule, n_tokens)
        self.layers = []
        for layer in range(h.n_dense_layer, h.n_layer):
            norms = (f"blk.{layer}.indexer.{name}.weight" for name in ("q_norm", "k_norm"))
            q, k = (np.frombuffer(model.gguf.tensor_data(name), "<f4") for name in norms)
            self.layers.append(LayerTally(layer, h.n_index_head, self.buckets, score_rounding(q, k)))
        self.entropy = self.divergence = 0.0
        self.other_top = self.positions = self.right = self.asked = 0

    def add(self, row: Row, ours: Look, theirs: Look) -> None:
        """ours: what the reference makes of the row."""
        positions = np.arange(self.rule.always_read, len(row.ids) - 1)
        first = positions[0]
        for i, layer in enumerate(self.layers):
            scores = ours.scores[i][first:]
            forced = self.rule.forced(positions, scores.shape[-1])
            compared = compare_lists(ours.lists[i][first:], theirs.lists[i][first:], scores, forced, layer.rounding)
            layer.add(positions, compared)
        if row.kind == "text":
            self._add_text(row.ids[1:][first:], theirs.log_probs[first:], ours.log_probs[first:])
        else:
            right = right_answers(theirs.log_probs, row)
            self.right, self.asked = self.right + int(right.sum()), self.asked + len(right)

    def _add_text(self, ids: NDArray[np.int32], log_probs: Floats, reference: Floats) -> None:
        self.entropy -= float(np.take_along_axis(log_probs, ids[:, None], 1).sum(dtype=np.float64))
        self.divergence += float((np.exp(reference) * (reference - log_probs)).sum(dtype=np.float64))
        self.other_top += int((reference.argmax(1) != log_probs.argmax(1)).sum())
        self.positions += len(ids)

    def quality(self, variant: Variant, model: Model) -> Quality:
        n_weights = sum(prod(t.ne) for t in model.gguf.tensors)
        agreement = Agreement(self.rule, self.buckets, self.layers)
        worst, texts = agreement.worst, max(1, self.positions)
        release_bytes, release_bits = release_size(variant)
        return Quality(
            type=variant.type,
            importance="yes" if variant.importance else "no",
            change=variant.label or " ".join(variant.rules),
            release_gb=round(release_bytes / 1e9, 1),
            release_bits_per_weight=round(release_bits, 2),
            bytes=model.weight_bytes,
            bits_per_weight=round(8 * model.weight_bytes / n_weights, 2),
            perplexity=round(float(np.exp(self.entropy / texts)), 4),
            kl=round(self.divergence / texts, 6),
            other_top1=round(self.other_top / texts, 5),
            overlap=round(agreement.overlap_mean, 5),
            worst_overlap=round(worst.overlap, 5),
            worst_head=f"{worst.layer}/{worst.head}",
            answers=self.right,
            questions=self.asked,
        )


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def right_answers(log_probs: Floats, row: Row) -> NDArray[np.bool_]:
    """Which answers have the right token as the most likely one everywhere, bool [answers]."""
    wrong = np.zeros(int(row.answer.max()) + 1, bool)
    wrong[row.answer[1:][log_probs.argmax(1) != row.ids[1:]]] = True
    return ~wrong[1:]


def release_size(variant: Variant) -> tuple[int, float]:
    """Bytes of the tensors of the 428B release, and bits per weight."""
    tensors = plan_tensors(tensors_without_data(RELEASE), choose(variant.type, rules=variant.rules))[0]
    n_bytes = sum(t.n_bytes for t in tensors)
    return n_bytes, 8 * n_bytes / sum(prod(t.shape) for t in tensors)


class Bench:
    """Rows of held-out text, and the files of m3-nano that are measured over them."""

    def __init__(self, folder: Path, *, text_rows: int, recall_rows: int, threads: int) -> None:
        """folder: for files."""
        self._folder, self._threads = folder, threads
        tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
        rest = np.concatenate([d for i, d in enumerate(held_out_documents()) if i % CALIBRATION_SHARE])
        chat = ChatFormat(TEMPLATE.read_text(encoding="utf-8"))
        data = Data(tokenizer, Filler(tokenizer, rest), [], chat)
        self.rows = held_out_rows(data, CONTEXT, text=text_rows, recall=0, hard=recall_rows)
        self._text = folder / "calibration.txt"
        self._text.write_text(calibration_text(), encoding="utf-8")
        self._imatrix: Path | None = None

    def measure(self, variants: Sequence[Variant]) -> list[Quality]:
        """The reference comes first in the result, whether it is among the variants or not."""
        variants = [REFERENCE, *(v for v in variants if v != REFERENCE)]
        started = time.monotonic()
        with ExitStack() as stack:
            models = [stack.enter_context(Model(self._make(i, variant))) for i, variant in enumerate(variants)]
            tallies = [Tally(models[0], CONTEXT) for _ in models]
            for i, row in enumerate(self.rows):
                ours = self._look(models[0], row, scores=True)
                for model, tally in zip(models, tallies, strict=True):
                    tally.add(row, ours, ours if model is models[0] else self._look(model, row))
                print(f"{i + 1} of {len(self.rows)} rows, {time.monotonic() - started:.0f} s", file=sys.stderr)
            return [t.quality(v, m) for t, v, m in zip(tallies, variants, models, strict=True)]

    def _make(self, number: int, variant: Variant) -> Path:
        out = self._folder / f"{number}.gguf"
        options = [f"--rule={rule}" for rule in variant.rules]
        if variant.importance:
            if self._imatrix is None:
                self._imatrix = self._folder / "m3-nano.imatrix.gguf"
                self._run("imatrix_cli", NANO, self._imatrix, "--text", self._text)
            options += ["--imatrix", str(self._imatrix)]
        self._run("cli", NANO, out, "--type", variant.type, *options)
        return out

    def _run(self, command: str, *arguments: object) -> None:
        line = [sys.executable, "-m", f"m3_convert.{command}", *map(str, arguments), "--threads", str(self._threads)]
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(line[2:])}: {done.stderr}")

    def _look(self, model: Model, row: Row, *, scores: bool = False) -> Look:
        h, ids = model.hparams, row.ids[:-1]
        record = ("blocks", "scores") if scores else ("blocks",)
        layers = range(h.n_dense_layer, h.n_layer)
        with model.session(context=len(ids), record=record, threads=self._threads) as session:
            log_probs = log_softmax(session.eval(ids, all_logits=True))
            lists = [session.selected_blocks(layer) for layer in layers]
            return Look(log_probs, lists, [session.block_scores(layer) for layer in layers] if scores else [])


def recipe_variants(names: Sequence[str], rules: tuple[str, ...]) -> list[Variant]:
    """Each recipe with an importance matrix, and where it can do without one, without."""
    variants = []
    for name in names:
        tensors = plan_tensors(tensors_without_data(RELEASE), choose(name, rules=rules))[0]
        types = {t.type for t in tensors}
        if not any(t.needs_importance for t in types):
            variants.append(Variant(name, False, rules))
        if types - {TensorType.F32, TensorType.F16, TensorType.BF16, TensorType.Q8_0}:
            variants.append(Variant(name, True, rules))
    return variants


def group_variants(recipe: str, importance: bool) -> list[Variant]:
    """The recipe, and the recipe for one group of tensors alone, while the others are BF16."""
    variants = [Variant(recipe, importance)]
    for group in GROUPS:
        rules = tuple(f"{pattern}=bf16" for other in GROUPS if other != group for pattern in GROUPS[other])
        variants.append(Variant(recipe, importance, rules, f"only {group}"))
    return variants


def markdown(rows: Sequence[Quality]) -> str:
    lines = [
        "| `--type` | imatrix | bits per weight: release | m3-nano | perplexity | KL | other top-1 | overlap "
        "| worst head | answers |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        name = f"`{r.type}`{f', {r.change}' if r.change else ''}"
        lines.append(
            f"| {name} | {r.importance} | {r.release_bits_per_weight:.2f} | {r.bits_per_weight:.2f} "
            f"| {r.perplexity:.3f} | {r.kl:.4f} | {r.other_top1:.1%} | {r.overlap:.4f} | {r.worst_overlap:.4f} "
            f"({r.worst_head}) | {r.answers} of {r.questions} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--types", default=",".join(recipe_names()), help="recipes or types, separated by commas")
    parser.add_argument("--rule", action="append", default=[], help="as of m3-convert, for all types")
    parser.add_argument("--groups", metavar="RECIPE", help="one group of tensors at a time, in place of --types")
    parser.add_argument("--imatrix", action="store_true", help="--groups with an importance matrix")
    parser.add_argument("--rows", type=int, default=4, help=f"rows of {CONTEXT} tokens of text (4)")
    parser.add_argument("--recall", type=int, default=2, help="rows of hard recall, of 12 to 19 answers each (2)")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--csv", type=Path, help="file to write, for example tests/bench/recipe_quality.csv")
    arguments = parser.parse_args()
    if arguments.groups:
        variants = group_variants(arguments.groups, arguments.imatrix)
    else:
        variants = recipe_variants(arguments.types.split(","), tuple(arguments.rule))
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), text_rows=arguments.rows, recall_rows=arguments.recall, threads=arguments.threads)
        rows = bench.measure(variants)
    if not arguments.groups:
        rows.sort(key=lambda row: -row.release_gb)
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            about = f"{arguments.rows} rows of text and {arguments.recall} of hard recall, {CONTEXT} tokens each"
            file.write(f"# {processor()}; m3-gguf {version('m3-gguf')}; {about}\n")
            writer = csv.DictWriter(file, [f.name for f in fields(Quality)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    print(markdown(rows))


if __name__ == "__main__":
    main()
