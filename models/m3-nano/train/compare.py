"""Do transformers, the training code and the engine compute the same? `python compare.py FOLDER [--text FILE]`

FOLDER: a model in the release's layout. transformers 5.24 in float32 with eager attention is the reference; both
others run the same tokens in float32, the engine on the F32 GGUF that m3-convert makes of FOLDER. Fails (exit code 1)

- if transformers misses a key of FOLDER, does not expect one or finds another shape,
- if a list of blocks or a set of experts differs where the reference's own scores leave more than 1e-3 between the
  last one chosen and the first one left out,
- if a logit of a token before the first difference is off by more than the tolerance.

Differences at smaller gaps are near-ties that the order of a float32 sum decides; they are counted and listed. Such a
token takes another path, and so, a little, does all that reads it: logits after the first one are reported only.
The engine does not tell its experts; tokens whose experts are a near-tie do not count as agreeing there.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import apply_rotary_pos_emb

from attention import block_scores, selected_keys
from checkpoint import load_release, read_config
from evaluate import exact_float32
from m3_runtime import Model as Engine
from make_checkpoint import TEXT
from model import ModelConfig, Pass, Stage

NEAR_TIE = 1e-3  #: gap of scores below which a difference is none
EXPERT_NOISE = 2e-6  #: of router scores between programs: below this gap the experts may differ
LISTED = 20  #: differences that are printed

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Run:
    """Logits [n, vocab] of n tokens, chosen blocks, bool [layers, heads, n, blocks],
    and experts, bool [layers, n, experts].
    """

    logits: Floats
    blocks: Flags
    experts: Flags | None


@dataclass(frozen=True)
class Reference(Run):
    """With score gaps at the cut, float32 [layers, heads, n] and [layers, n]; infinite where nothing is left out."""

    block_gaps: Floats
    expert_gaps: Floats


@dataclass
class _Taken:
    """What hooks take out of a run, an entry a layer."""

    blocks: list[Tensor] = field(default_factory=list)
    block_gaps: list[Tensor] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    expert_gaps: list[Tensor] = field(default_factory=list)


def gap_at_cut(scores: Tensor, chosen: int) -> Tensor:
    """Between the last of `chosen` best scores and the next: [..., options] -> [...]."""
    if scores.shape[-1] <= chosen:
        return torch.full(scores.shape[:-1], float("inf"))
    best = scores.topk(chosen + 1).values
    gap = best[..., -2] - best[..., -1]
    return gap.nan_to_num(nan=float("inf"), posinf=float("inf"))  # NaN: both -inf, fewer can be seen than chosen


def flags(chosen: Tensor, options: int) -> Tensor:
    """Lists of numbers, -1 for none, to bool [..., options]."""
    wide = torch.zeros(*chosen.shape[:-1], options + 1, dtype=torch.bool)
    return wide.scatter_(-1, chosen.masked_fill(chosen < 0, options), True)[..., :-1]


def run_transformers(folder: Path, ids: Tensor, config: ModelConfig) -> Reference:
    """ids int64 [n]. Raises ValueError unless every key of the folder has its place and the other way round."""
    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    model, loading = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loading[kind]:
            raise ValueError(f"{folder}: transformers has {len(loading[kind])} {kind}, one is {min(loading[kind])}")
    model.eval()
    taken = _Taken()
    n_blocks = len(ids) // config.block

    def take_blocks(indexer: nn.Module, args: tuple[Any, ...], chosen: Tensor) -> None:
        scores = _indexer_scores(indexer, args[0], args[1], config.block)
        own = torch.arange(len(ids))[:, None] // config.block
        scores = torch.where(torch.arange(n_blocks) == own, float("inf"), scores)
        taken.block_gaps.append(gap_at_cut(scores, config.top_k))
        taken.blocks.append(flags(chosen[0], n_blocks))

    def take_experts(gate: nn.Module, args: tuple[Any, ...], out: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, _, chosen = out
        bias = gate.get_buffer("e_score_correction_bias")
        taken.experts.append(flags(chosen, config.experts))
        taken.expert_gaps.append(gap_at_cut(logits.sigmoid() + bias, config.top))

    for layer in model.model.language_model.layers[config.dense :]:
        layer.self_attn.indexer.register_forward_hook(take_blocks)
        layer.mlp.gate.register_forward_hook(take_experts)
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
    return Reference(
        logits.numpy(),
        torch.stack(taken.blocks).numpy(),
        torch.stack(taken.experts).numpy(),
        torch.stack(taken.block_gaps).numpy(),
        torch.stack(taken.expert_gaps).numpy(),
    )


def _indexer_scores(indexer: nn.Module, hidden: Tensor, tables: tuple[Tensor, Tensor], block: int) -> Tensor:
    """Block scores [heads, n, blocks] of transformers' indexer, before it forces local blocks: it returns none."""

    def heads(part: str) -> Tensor:
        projected = indexer.get_submodule(part + "_proj")(hidden)
        projected = projected.view(*hidden.shape[:2], -1, indexer.head_dim)
        normalized: Tensor = indexer.get_submodule(part + "_norm")(projected)
        return normalized.transpose(1, 2)

    cos, sin = (table[..., : indexer.head_dim] for table in tables)
    query, key = apply_rotary_pos_emb(heads("q"), heads("k"), cos, sin)
    return block_scores(query, key, block)[0]


def run_training_code(folder: Path, ids: Tensor) -> Run:
    """ids int64 [n]."""
    model = load_release(folder, "cpu")
    logits, out = model.logits(ids[None], Pass(Stage.SPARSE, torch.float32))
    block = model.config.block
    blocks = [selected_keys(selection[0], len(ids) // block, 1) for selection in out.selections]
    return Run(logits[0].numpy(), torch.stack(blocks).numpy(), torch.stack(out.experts)[:, 0].numpy())


def run_engine(folder: Path, ids: NDArray[np.int32], config: ModelConfig) -> Run:
    """Converts the folder to F32 with the installed m3-convert and runs it, K/V in float32."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "model.gguf")
        command = [sys.executable, "-m", "m3_convert.cli", str(folder), str(path), "--type", "f32"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ)
        with (
            Engine(path) as model,
            model.session(context=len(ids), kv_type="f32", record=("blocks",)) as session,
        ):
            logits = session.eval(ids, all_logits=True)
            chosen = [session.selected_blocks(layer) for layer in range(config.dense, config.layers)]
    blocks = [flags(torch.from_numpy(x).long().transpose(0, 1), len(ids) // config.block) for x in chosen]
    return Run(logits, torch.stack(blocks).numpy(), None)


# ---------------------------------------------------------------------------------------------- judgement


@dataclass(frozen=True, order=True)
class Difference:
    """A choice that differs from the reference's, and the reference's gap there."""

    position: int
    layer: int
    what: str
    gap: float

    def __str__(self) -> str:
        return f"position {self.position}, layer {self.layer}, {self.what}: gap {self.gap:.1e}"


def differences(run: Run, reference: Reference, first_layer: int) -> list[Difference]:
    """By position."""
    found = []
    for layer, head, n in np.argwhere((run.blocks != reference.blocks).any(-1)):
        gap = float(reference.block_gaps[layer, head, n])
        found.append(Difference(int(n), first_layer + int(layer), f"blocks of index head {head}", gap))
    if run.experts is not None:
        assert reference.experts is not None
        for layer, n in np.argwhere((run.experts != reference.experts).any(-1)):
            gap = float(reference.expert_gaps[layer, n])
            found.append(Difference(int(n), first_layer + int(layer), "experts", gap))
    return sorted(found)


def judge(name: str, run: Run, reference: Reference, first_layer: int, tolerance: float) -> bool:
    """Prints how a run compares with the reference; whether it passes."""
    n = len(reference.logits)
    found = differences(run, reference, first_layer)
    wrong = [d for d in found if d.gap > NEAR_TIE]
    agree = np.ones(n, bool)
    agree[[d.position for d in found]] = False
    first = found[0].position if found else n
    if run.experts is None:
        least = reference.expert_gaps.min(0)
        agree &= least > NEAR_TIE
        first = min(first, *np.flatnonzero(least < EXPERT_NOISE).tolist(), n)
    error = np.abs(run.logits - reference.logits).max(1)
    before, among = float(error[:first].max(initial=0)), float(error[agree].max(initial=0))
    passed = not wrong and before <= tolerance and first > 0 and bool(np.isfinite(run.logits).all())
    lists, sets = reference.block_gaps.size, reference.expert_gaps.size
    block_count = sum(d.what != "experts" for d in found)
    print(f"{name}: {'equal' if passed else 'DIFFERENT'}")
    print(f"  block lists: {block_count} of {lists} differ", end="")
    print(f"; expert sets: {len(found) - block_count} of {sets} differ" if run.experts is not None else "")
    print(f"  of these {len(wrong)} where the reference's gap exceeds {NEAR_TIE:g}")
    print(f"  |dlogit|: max {before:.1e} at the {first} tokens before the first difference (allowed {tolerance:g})")
    print(f"            max {among:.1e}, mean {error[agree].mean():.1e} at the {agree.sum()} tokens that choose alike")
    for difference in found[:LISTED]:
        print(f"  {difference}")
    if len(found) > LISTED:
        print(f"  and {len(found) - LISTED} more")
    return passed


def main() -> int:
    """Parses the command line; 1 if something differs."""
    parser = argparse.ArgumentParser(description="Compares transformers, training code and engine in float32.")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--tokens", type=int, default=4096, help="a multiple of the block size (4096)")
    parser.add_argument("--text", type=Path, default=TEXT, help="text to read (the one of m3-check-selection)")
    parser.add_argument("--tolerance", type=float, default=5e-4, help="of logits (5e-4)")
    options = parser.parse_args()
    exact_float32()
    config = read_config(options.folder)
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    ids = np.array(tokenizer.encode(options.text.read_text(encoding="utf-8")).ids[: options.tokens], np.int32)
    if len(ids) < options.tokens or options.tokens % config.block or options.tokens > config.context:
        parser.error(
            f"{options.tokens} tokens of the {len(ids)} in {options.text}, expected a multiple of {config.block}, "
            f"at most {config.context} and that the text has them"
        )
    tokens = torch.from_numpy(ids).long()
    reference = run_transformers(options.folder, tokens, config)
    tight = {gap: int((reference.block_gaps < gap).sum()) for gap in (1e-3, 1e-4)}
    print(
        f"{options.folder}: transformers has a place for every key; {len(ids)} tokens, logit std "
        f"{reference.logits.std():.2f}; {tight[1e-3]} of {reference.block_gaps.size} block gaps are below 1e-3, "
        f"{tight[1e-4]} below 1e-4"
    )
    passed = judge(
        "training code", run_training_code(options.folder, tokens), reference, config.dense, options.tolerance
    )
    engine = run_engine(options.folder, ids, config)
    return int(not judge("engine", engine, reference, config.dense, options.tolerance) or not passed)


if __name__ == "__main__":
    sys.exit(main())
