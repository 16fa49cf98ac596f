"""What block selection is worth: the model as trained, dense, with wrong blocks, with rounded weights.

    python evaluate.py FOLDER OUT.json [--device cuda] [--rows 64] [--only dense index-4 ...]
    python evaluate.py --markdown OUT.json

The first form runs the training code in float32 on the released weights in FOLDER over fixed held-out rows of text and
of recall documents (an answer counts if each of its tokens is the most likely one, teacher forced) and writes figures;
the second prints them as Markdown tables. Whatever compares with the reference, the model as trained, looks at
positions past the budget, top_k * block, where blocks are chosen; before it all are read.
"""

import argparse
import dataclasses
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention import MAX_BLOCKS, ScoreChange
from checkpoint import State, is_index_projection, load_index_projections, load_release
from evaluation_tables import print_tables
from model import Model, ModelConfig, Pass, Stage
from rows import Data, Row, held_out_rows

GROUP = 32  #: weights of a row that are rounded with one scale
DISTANCES = (512, 1024, 2048, 3072)  #: between fact and answer in tokens, borders of buckets
POSITIONS = 512  #: of a bucket of divergences
RANDOM_SEED = 1
GPU_BATCH = 4  #: rows; the masks of a pass take B * heads * S * S bytes


def score_answers(
    predicted_ids: NDArray[np.integer], ids: NDArray[np.integer], answer: NDArray[np.integer]
) -> NDArray[np.bool_]:
    """Which answers of a row are right in every token, bool [answers].

    predicted_ids [S]: the most likely successor of each of ids [S+1] but the last; answer [S+1]: k on the tokens of
    the k-th answer, k from 1, else 0.
    """
    wrong = np.zeros(int(answer.max()) + 1, bool)
    wrong[answer[1:][predicted_ids != ids[1:]]] = True
    return ~wrong[1:]


# ---------------------------------------------------------------------------------------------- variants


def round_weights(weight: Tensor, bits: int) -> Tensor:
    """To 2^bits - 1 symmetric steps, with one float32 scale for each GROUP weights of a row."""
    groups = weight.reshape(-1, GROUP)
    top = 2 ** (bits - 1) - 1
    scale = groups.abs().amax(-1, keepdim=True) / top
    rounded: Tensor = (groups / scale.clamp(min=1e-30)).round() * scale
    return rounded.view_as(weight)


def _is_other_matrix(name: str, value: Tensor) -> bool:
    """Any matrix, embedding and head too, but those of index branch and router."""
    return value.dim() > 1 and not is_index_projection(name) and not name.endswith(".router")


def _rounded(index_bits: int | None, other_bits: int | None) -> Callable[[State, State], State]:
    def change(state: State, index_master: State) -> State:
        changed = dict(state)
        for name, value in state.items():
            if index_bits and is_index_projection(name):
                changed[name] = round_weights(value, index_bits)
            elif other_bits and _is_other_matrix(name, value):
                changed[name] = round_weights(value, other_bits)
        return changed

    return change


def _as_released(state: State, index_master: State) -> State:
    return state


def _index_as_trained(state: State, index_master: State) -> State:
    return state | index_master


class RandomBlocks:
    """Random scores of the blocks that a query sees, others for each query, head and layer."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generator: torch.Generator | None = None

    def __call__(self, scores: Tensor) -> Tensor:
        if self._generator is None:
            self._generator = torch.Generator(scores.device).manual_seed(self._seed)
        drawn = torch.rand(scores.shape, generator=self._generator, device=scores.device)
        return drawn.masked_fill(scores == float("-inf"), float("-inf"))


def recent_blocks(scores: Tensor) -> Tensor:
    """The later a block that a query sees, the higher its score."""
    numbers = torch.arange(scores.shape[-1], device=scores.device, dtype=scores.dtype)
    return numbers.expand(scores.shape).masked_fill(scores == float("-inf"), float("-inf"))


@dataclass(frozen=True)
class Variant:
    """A way to run the model. weights: makes the state from the released one and the float32 index projections."""

    key: str
    title: str
    weights: Callable[[State, State], State] = _as_released
    stage: Stage = Stage.SPARSE
    change: ScoreChange | None = None
    index_dtype: torch.dtype = torch.float32
    top_k: int | None = None  #: blocks that are read, None: as many as the model was trained with

    def run(self) -> Pass:
        return Pass(self.stage, torch.float32, change=self.change, index_dtype=self.index_dtype)


REFERENCE = Variant("sparse", "sparse as trained")
VARIANTS = (
    REFERENCE,
    Variant("dense", "dense, index ignored", stage=Stage.FULL),
    Variant("random", "random blocks", change=RandomBlocks(RANDOM_SEED)),
    Variant("recent", "most recent blocks", change=recent_blocks),
    Variant("index-f32", "index projections F32 master instead of BF16", _index_as_trained),
    Variant("index-8", "index projections 8 bit", _rounded(8, None)),
    Variant("index-6", "index projections 6 bit", _rounded(6, None)),
    Variant("index-4", "index projections 4 bit", _rounded(4, None)),
    Variant("index-3", "index projections 3 bit", _rounded(3, None)),
    Variant("index-bf16", "index queries, keys and scores in BF16", index_dtype=torch.bfloat16),
    Variant("other-8", "all other weights 8 bit, index untouched", _rounded(None, 8)),
    Variant("other-4", "all other weights 4 bit, index untouched", _rounded(None, 4)),
    Variant("all-4", "all weights 4 bit", _rounded(4, 4)),
    Variant("all-4-dense", "all weights 4 bit, dense", _rounded(4, 4), Stage.FULL),
    Variant("top-2", "two blocks", top_k=2),
    Variant("top-2-index-4", "two blocks, index projections 4 bit", _rounded(4, None), top_k=2),
    Variant("top-2-index-3", "two blocks, index projections 3 bit", _rounded(3, None), top_k=2),
)


# ---------------------------------------------------------------------------------------------- sums


@dataclass(frozen=True)
class Look:
    """A batch of rows through a variant: logits float32 [B, S, vocab], selections int32 [B, G, S] of sparse layers."""

    logits: Tensor
    selections: list[Tensor]


@dataclass
class Tally:
    """Sums of one variant over rows. entropy, divergence and other_top float64 [S], of texts; overlap [L, G, S]."""

    entropy: Tensor
    divergence: Tensor
    other_top: Tensor
    overlap: Tensor
    texts: int = 0
    rows: int = 0
    right: dict[str, list[NDArray[np.bool_]]] = field(default_factory=lambda: {"recall": [], "hard": []})

    @classmethod
    def empty(cls, config: ModelConfig, device: str) -> "Tally":
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, config.context, dtype=torch.float64, device=device)

        return cls(zeros(), zeros(), zeros(), zeros(config.layers - config.dense, config.kv_heads))

    def add_text(self, ids: Tensor, log_probs: Tensor, reference: Tensor) -> None:
        """ids int64 [B, S+1], log-probabilities of the variant and of the reference, float32 [B, S, vocab]."""
        self.entropy -= log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(0, dtype=torch.float64)
        self.divergence += (reference.exp() * (reference - log_probs)).sum(-1).sum(0, dtype=torch.float64)
        self.other_top += (reference.argmax(-1) != log_probs.argmax(-1)).sum(0)
        self.texts += len(ids)

    def add_selections(self, look: Look, reference: Look) -> None:
        """Jaccard indices; a dense variant has none."""
        self.rows += len(look.logits)
        for layer, (mine, theirs) in enumerate(zip(look.selections, reference.selections, strict=False)):
            shared, either = _count_blocks(mine & theirs), _count_blocks(mine | theirs)
            self.overlap[layer] += (shared / either).sum(0)


def _count_blocks(selection: Tensor) -> Tensor:
    bits = torch.arange(MAX_BLOCKS, device=selection.device, dtype=torch.int32)
    return ((selection.unsqueeze(-1) >> bits) & 1).sum(-1).double()


def tokens_to_fact(row: Row) -> NDArray[np.int32]:
    """int32 [answers], -1 for one that no document states."""
    return np.where(row.fact_at >= 0, row.asked_at - row.fact_at, -1)


class Evaluation:
    """The rows through all variants."""

    def __init__(self, folder: Path, rows: Sequence[Row], variants: Sequence[Variant], device: str) -> None:
        self.device = device
        self.rows = rows
        released = load_release(folder, device)
        self.config = released.config
        state = released.state_dict()
        master = {name: value.to(device) for name, value in load_index_projections(folder).items()}
        for name, value in master.items():
            if not torch.equal(value.bfloat16().float(), state[name]):
                raise ValueError(f"{folder}: {name} is not the BF16 form of its float32 master")
        self.variants = [REFERENCE, *(v for v in variants if v is not REFERENCE)]
        self._models: dict[str, Model] = {}
        for variant in self.variants:
            model = released
            if variant.weights is not _as_released or variant.top_k:
                config = dataclasses.replace(self.config, top_k=variant.top_k or self.config.top_k)
                model = Model(config).to(device)
                model.load_state_dict(variant.weights(state, master))
            self._models[variant.key] = model
        self.tallies = {v.key: Tally.empty(self.config, device) for v in self.variants}
        #: of each right answer whose fact is in another block: which [layer, head] read the fact's block
        self.reads: dict[str, list[NDArray[np.bool_]]] = {"recall": [], "hard": []}

    @property
    def budget(self) -> int:
        """Tokens that a query reads."""
        return self.config.top_k * self.config.block

    def run(self, progress: Callable[[str], None]) -> None:
        size = 1 if self.device == "cpu" else GPU_BATCH
        done, started = 0, time.monotonic()
        for kind in ("text", "recall", "hard"):
            for batch in _batches([row for row in self.rows if row.kind == kind], size):
                self._run_batch(kind, batch)
                done += len(batch)
                progress(f"{done} of {len(self.rows)} rows ({kind}), {time.monotonic() - started:.1f} s")

    def _run_batch(self, kind: str, batch: list[Row]) -> None:
        ids = torch.from_numpy(np.stack([row.ids for row in batch])).long().to(self.device)
        reference = self._look(REFERENCE, ids)
        expected = reference.logits.log_softmax(-1) if kind == "text" else reference.logits
        for variant in self.variants:
            look = reference if variant is REFERENCE else self._look(variant, ids)
            tally = self.tallies[variant.key]
            tally.add_selections(look, reference)
            if kind == "text":
                tally.add_text(ids, look.logits.log_softmax(-1), expected)
                continue
            predicted = look.logits.argmax(-1).cpu().numpy()
            right = [score_answers(p, row.ids, row.answer) for p, row in zip(predicted, batch, strict=True)]
            tally.right[kind] += right
            if variant is REFERENCE:
                selections = torch.stack(look.selections, 1).cpu().numpy()
                for row, chosen, good in zip(batch, selections, right, strict=True):
                    self.reads[kind] += self._reads(row, chosen, good)

    def _look(self, variant: Variant, ids: Tensor) -> Look:
        # Other kernels of attention multiply in TF32, whatever is set for matrix products.
        with sdpa_kernel(SDPBackend.MATH) if self.device != "cpu" else nullcontext():
            logits, out = self._models[variant.key].logits(ids[:, :-1], variant.run())
        return Look(logits, out.selections)

    def _reads(self, row: Row, selection: NDArray[np.int32], right: NDArray[np.bool_]) -> Iterator[NDArray[np.bool_]]:
        """selection int32 [L, G, S]: for right answers, which heads read the fact's block at a token of the answer.

        Leaves out answers before the budget's end, and facts in the block of the answer, which is always read.
        """
        for k in np.flatnonzero(right & (row.fact_at >= 0)):
            queries = np.flatnonzero(row.answer[1:] == k + 1)
            block = row.fact_at[k] // self.config.block
            if queries[0] >= self.budget and block < queries[0] // self.config.block:
                yield ((selection[:, :, queries] >> block) & 1).any(-1)

    # -------------------------------------------------------------------------------------------- figures

    def figures(self) -> dict[str, Any]:
        """Everything that JSON is to hold about rows, variants and heads."""
        counts = {kind: sum(row.kind == kind for row in self.rows) for kind in ("text", "recall", "hard")}
        digest = hashlib.sha256(b"".join(row.ids.astype("<i4").tobytes() for row in self.rows))
        return {
            "config": dataclasses.asdict(self.config),
            "budget": self.budget,
            "position_bucket": POSITIONS,
            "rows": counts,
            "rows_sha256": digest.hexdigest(),
            "rounding": f"symmetric, groups of {GROUP} weights of a row with a float32 scale each",
            "variants": {v.key: {"title": v.title, **self._variant_figures(v)} for v in self.variants},
            "readers": {kind: self._reader_figures(kind) for kind in self.reads},
        }

    def _variant_figures(self, variant: Variant) -> dict[str, Any]:
        tally = self.tallies[variant.key]
        found: dict[str, Any] = {}
        if tally.texts:
            entropy = tally.entropy / tally.texts
            divergence = tally.divergence / tally.texts
            found["perplexity"] = float(entropy.mean().exp())
            found["perplexity_past_budget"] = float(entropy[self.budget :].mean().exp())
            found["kl"] = float(divergence[self.budget :].mean())
            found["other_top1"] = float(tally.other_top[self.budget :].mean() / tally.texts)
            found["kl_by_position"] = [float(part.mean()) for part in torch.split(divergence, POSITIONS)]
        for kind, right in tally.right.items():
            if right:
                found[kind] = self._recall_figures(kind, right)
        if variant.stage is Stage.SPARSE:
            found["overlap"] = self._overlap_figures(tally)
        return found

    def _recall_figures(self, kind: str, right: list[NDArray[np.bool_]]) -> list[dict[str, Any]]:
        """Right answers and all, of all distances and by distance."""
        distance = np.concatenate([tokens_to_fact(row) for row in self.rows if row.kind == kind])
        good = np.concatenate(right)
        edges = [0, *(d for d in DISTANCES if d < self.config.context), self.config.context + 1]
        parts: list[dict[str, Any]] = [{"from": None, "to": None, "right": int(good.sum()), "of": len(good)}]
        for low, high in pairwise(edges):
            here = (distance >= low) & (distance < high)
            parts.append({"from": low, "to": high, "right": int(good[here].sum()), "of": int(here.sum())})
        return parts

    def _overlap_figures(self, tally: Tally) -> dict[str, Any]:
        heads = (tally.overlap[..., self.budget :].mean(-1) / tally.rows).cpu()
        layer, head = divmod(int(heads.argmin()), heads.shape[1])
        layers = heads.mean(1)
        return {
            "mean": float(heads.mean()),
            "worst_layer": {"layer": self.config.dense + int(layers.argmin()), "mean": float(layers.min())},
            "worst_head": {"layer": self.config.dense + layer, "head": head, "mean": float(heads.min())},
            "heads": heads.tolist(),
        }

    def _reader_figures(self, kind: str) -> dict[str, Any]:
        """The share of right answers at which each head read the fact's block, by layer; any: one of all heads."""
        reads = self.reads[kind]
        if not reads:
            return {"answers": 0}
        stacked = np.stack(reads)
        return {
            "answers": len(reads),
            "any": float(stacked.any((1, 2)).mean()),
            "layers": {str(self.config.dense + i): heads for i, heads in enumerate(stacked.mean(0).tolist())},
        }


def _batches(rows: list[Row], size: int) -> Iterator[list[Row]]:
    for first in range(0, len(rows), size):
        yield rows[first : first + size]


def exact_float32() -> None:
    """Matrix products in float32 on every device, not in TF32."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def _commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of the command line's folder, rows and variants."""
    exact_float32()
    started = time.monotonic()
    context = load_release(options.folder, "cpu").config.context
    data = Data.of_release(options.folder)
    rows = held_out_rows(data, context, text=options.rows, recall=options.rows, hard=(options.rows + 1) // 2)
    variants = [v for v in VARIANTS if not options.only or v.key in options.only]
    evaluation = Evaluation(options.folder, rows, variants, options.device)
    print(f"{len(rows)} rows of {context} tokens, {len(evaluation.variants)} variants", flush=True)
    evaluation.run(lambda line: print(line, flush=True))
    name = torch.cuda.get_device_name() if options.device != "cpu" else "cpu"
    return {
        "commit": _commit(),
        "device": name,
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - started, 1),
        "random_seed": RANDOM_SEED,
        **evaluation.figures(),
    }


def main() -> None:
    """Parses the command line; evaluates or prints tables."""
    parser = argparse.ArgumentParser(description="Measures what block selection is worth.")
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="model in the release's layout")
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT.json")
    parser.add_argument("--device", default="cuda", help="cuda or cpu (cuda)")
    parser.add_argument("--rows", type=int, default=64, help="rows of text and of recall, half as many hard ones (64)")
    parser.add_argument("--only", nargs="+", choices=[v.key for v in VARIANTS], help="these besides the reference")
    parser.add_argument("--markdown", type=Path, metavar="OUT.json", help="print an evaluation as tables")
    options = parser.parse_args()
    if options.markdown:
        print_tables(json.loads(options.markdown.read_text(encoding="utf-8")))
        return
    if options.out is None or options.rows < 1:
        parser.error("FOLDER, OUT.json and at least one row are needed")
    if not options.out.absolute().parent.is_dir():
        parser.error(f"{options.out.parent}: no such folder")
    try:
        text = json.dumps(evaluate(options), indent=1)
    except (OSError, ValueError) as error:
        sys.exit(f"evaluate: {error}")
    options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
