"""Computes the golden vectors beside this file with transformers, in float32 on the CPU.

    python tests/golden/make_golden.py            # all cases; needs torch and transformers of the versions below
    python tests/golden/make_golden.py --search   # the first seed of each case that keeps the gaps of cases.py

Each case of cases.py gives one NAME.npz:
    ids             int32 [n]                    the text, with the image tokens of IMAGE_PROMPT
    shards          str   [n_shards]             name and sha256 of the checkpoint's files
    positions       int32 [p]                    positions of `logits` and `scores_L*`
    logits          float32 [p, vocab]
    columns         int32 [c]                    vocabulary ids of `column_logits`
    column_logits   float32 [n, c]
    log_sum_exp     float32 [n]                  over the whole vocabulary
    rms             float32 [n]                  root mean square over the whole vocabulary
    blocks_L<i>     int16 [n, heads, top_k]      ascending, -1 at the end; sparse layers
    scores_L<i>     float32 [p, heads, blocks]   before local blocks are forced, -inf for blocks not visible
    gaps_L<i>       float32 [n, heads]           last block taken minus first block left, inf without a choice
    experts_L<i>    int8 [n, top]                ascending; layers with experts
    expert_gaps_L<i> float32 [n]
    versions        str [2]                      torch, transformers
"""

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m3

from golden.cases import CASES, IMAGE_PROMPT, MIN_BLOCK_GAP, MIN_EXPERT_GAP, GoldenCase, shard_hashes
from golden.vision_cases import VisionCase, pixels_of
from make_checkpoint import TEXT, make_checkpoint

VERSIONS = {"torch": "2.13.0", "transformers": "5.24.0"}

Arrays = dict[str, np.ndarray[Any, Any]]


def block_scores(indexer: Any, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Maximum score of each visible block, [n, heads, blocks], from the indexer's own parts."""
    n = hidden.shape[1]
    q = indexer.q_norm(indexer.q_proj(hidden).view(1, n, -1, indexer.head_dim)).transpose(1, 2)
    k = indexer.k_norm(indexer.k_proj(hidden).view(1, n, 1, indexer.head_dim)).transpose(1, 2)
    q, k = m3.apply_rotary_pos_emb(q, k, rotary[0], rotary[1])
    scores = (q @ k.transpose(-1, -2))[0]
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(future, -torch.inf)
    scores = torch.nn.functional.pad(scores, (0, -n % indexer.block_size), value=-torch.inf)
    return scores.view(scores.shape[0], n, -1, indexer.block_size).amax(-1).transpose(0, 1)


def choose(scores: np.ndarray[Any, Any], block: int, top_k: int, local: int) -> tuple[Any, Any]:
    """Blocks [n, heads, top_k] and gaps [n, heads] that follow from scores [n, heads, blocks]."""
    n, heads, _ = scores.shape
    blocks = np.full((n, heads, top_k), -1, np.int16)
    gaps = np.full((n, heads), np.inf, np.float32)
    for p in range(n):
        last = p // block
        forced = list(range(max(0, last - local + 1), last + 1))
        free = top_k - len(forced)
        others = scores[p, :, : forced[0]]
        order = np.argsort(-others, axis=-1, kind="stable")
        ranked = np.take_along_axis(others, order, -1)
        for h in range(heads):
            taken = sorted([*forced, *order[h, :free].tolist()])
            blocks[p, h, : len(taken)] = taken
        if 0 < free < forced[0]:
            gaps[p] = ranked[:, free - 1] - ranked[:, free]
    return blocks, gaps


def insert_images(case: GoldenCase, ids: np.ndarray[Any, Any], tokenizer: Any) -> np.ndarray[Any, Any]:
    """The text with the tokens that the release's processor writes for the images of a case."""
    image, start, end = (tokenizer.token_to_id(name) for name in
                         ("]<]image[>[", "]<]start of image[>[", "]<]end of image[>["))  # fmt: skip
    parts, first = [], 0
    for place, (t, h, w) in case.images:
        parts += [ids[first:place], [start, *[image] * (t * h * w // 4), end]]
        first = place
    return np.concatenate([*parts, ids[first:]]).astype(np.int32)


def run(case: GoldenCase, folder: Path) -> Arrays:
    """Makes the checkpoint in `folder`, runs it, returns what NAME.npz holds."""
    spec = case.spec
    make_checkpoint(folder, spec)
    hashes = shard_hashes(folder)
    if not spec.prefix:  # transformers takes text tensors with the prefix only; the values are the same
        make_checkpoint(folder, dataclasses.replace(spec, prefix=True))
    model, info = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    model.eval()
    text_only = not spec.vision
    missing = [key for key in info["missing_keys"] if not (text_only and ("vision" in key or "multi_modal" in key))]
    if missing or info["unexpected_keys"] or info["mismatched_keys"]:
        raise SystemExit(f"{case.name}: transformers did not take the checkpoint: {info}")
    language = model.model.language_model
    seen: dict[str, Any] = {}

    def keep_indexer_input(i: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            named = dict(zip(("hidden_states", "position_embeddings"), args, strict=False)) | kwargs
            seen[f"scores{i}"] = block_scores(module, named["hidden_states"], named["position_embeddings"])
            seen[f"blocks{i}"] = output[0].transpose(0, 1)

        return hook

    def keep_router(i: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            biased = torch.sigmoid(output[0].float()) + module.e_score_correction_bias
            ranked = biased.sort(-1, descending=True).values
            seen[f"experts{i}"] = output[2].sort(-1).values
            seen[f"expert_gaps{i}"] = ranked[:, spec.top - 1] - ranked[:, spec.top]
            seen[f"bias{i}"] = (torch.sigmoid(output[0].float()).topk(spec.top).indices.sort(-1).values
                                != seen[f"experts{i}"]).any(-1).float().mean()  # fmt: skip

        return hook

    for i in range(spec.dense, spec.layers):
        language.layers[i].self_attn.indexer.register_forward_hook(keep_indexer_input(i), with_kwargs=True)
        language.layers[i].mlp.gate.register_forward_hook(keep_router(i))

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = np.array(tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids[: case.n_tokens], np.int32)
    if len(ids) != case.n_tokens:
        raise SystemExit(f"{case.name}: the text gives {len(ids)} tokens, {case.n_tokens} are needed")
    images: dict[str, torch.Tensor] = {}
    if case.images:
        ids = insert_images(case, ids, tokenizer)
        grids = tuple(grid for _, grid in case.images)
        pixels = pixels_of(VisionCase(case.name, spec, (grids,)), 0)
        images = {"pixel_values": torch.tensor(pixels), "image_grid_thw": torch.tensor(grids)}
    with torch.no_grad():
        output = model.model(input_ids=torch.tensor(ids, dtype=torch.long)[None], use_cache=False, **images)
        logits = model.lm_head(output.last_hidden_state)[0].float()

    limit = spec.top_k * spec.block  # from here on a query has a choice
    n = len(ids)
    edges = [0, 1, spec.block - 1, spec.block, spec.block + 1, limit - 1, limit, limit + 1, limit + spec.block, n - 1]
    positions = np.array(sorted({*edges, *range(limit + spec.block // 2, n, (n - limit) // 12)}), np.int32)
    columns = np.linspace(0, spec.vocab - 1, 12).astype(np.int32)
    arrays: Arrays = {
        "ids": ids,
        "shards": np.array(hashes),
        "positions": positions,
        "logits": logits.numpy()[positions],
        "columns": columns,
        "column_logits": logits.numpy()[:, columns],
        "log_sum_exp": torch.logsumexp(logits.double(), -1).float().numpy(),
        "rms": logits.double().pow(2).mean(-1).sqrt().float().numpy(),
        "versions": np.array([f"torch {torch.__version__}", f"transformers {transformers.__version__}"]),
    }
    for i in range(spec.dense, spec.layers):
        scores = seen[f"scores{i}"].numpy()
        blocks, gaps = choose(scores, spec.block, spec.top_k, spec.local)
        theirs = seen[f"blocks{i}"].numpy()
        if any(
            set(ours[ours >= 0]) != set(other[other >= 0])
            for ours, other in zip(blocks.reshape(-1, spec.top_k), theirs.reshape(-1, theirs.shape[-1]), strict=True)
        ):
            raise SystemExit(f"{case.name}: layer {i}: the blocks of the indexer do not follow from its scores")
        arrays[f"blocks_L{i}"] = blocks
        arrays[f"scores_L{i}"] = scores[positions]
        arrays[f"gaps_L{i}"] = gaps
        arrays[f"experts_L{i}"] = seen[f"experts{i}"].numpy().astype(np.int8)
        arrays[f"expert_gaps_L{i}"] = seen[f"expert_gaps{i}"].numpy()
    print(f"  logits std {float(logits.std()):.2f}; router choices that the bias changed "
          f"{float(np.mean([seen[f'bias{i}'] for i in range(spec.dense, spec.layers)])):.2f}")  # fmt: skip
    return arrays


def smallest_gaps(arrays: Arrays) -> tuple[float, float]:
    """The smallest gap between blocks and between experts."""
    block = min(float(value.min()) for key, value in arrays.items() if key.startswith("gaps_L"))
    expert = min(float(value.min()) for key, value in arrays.items() if key.startswith("expert_gaps_L"))
    return block, expert


def search(case: GoldenCase) -> None:
    """Prints the first seed that keeps both gaps."""
    for seed in range(1, 5000):
        trial = dataclasses.replace(case, spec=dataclasses.replace(case.spec, seed=seed))
        with tempfile.TemporaryDirectory() as folder:
            block, expert = smallest_gaps(run(trial, Path(folder)))
        print(f"{case.name}: seed {seed}: block gap {block:.2e}, expert gap {expert:.2e}", flush=True)
        if block > MIN_BLOCK_GAP and expert > MIN_EXPERT_GAP:
            return


def main() -> int:
    parser = argparse.ArgumentParser(description="Computes the golden vectors with transformers.")
    parser.add_argument("--search", action="store_true", help="look for seeds instead of writing files")
    parser.add_argument("names", nargs="*", help="cases; all without names")
    options = parser.parse_args()
    found = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    if found != VERSIONS:
        print(f"make_golden: needs {VERSIONS}, found {found}", file=sys.stderr)
        return 2
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for case in (*CASES, IMAGE_PROMPT):
        if options.names and case.name not in options.names:
            continue
        if options.search:
            search(case)
            continue
        with tempfile.TemporaryDirectory() as folder:
            arrays = run(case, Path(folder))
        block, expert = smallest_gaps(arrays)
        if block <= MIN_BLOCK_GAP or expert <= MIN_EXPERT_GAP:
            print(f"make_golden: {case.name}: gaps {block:.2e}, {expert:.2e} are too small", file=sys.stderr)
            return 1
        np.savez_compressed(case.path, **arrays)  # type: ignore[arg-type]
        print(
            f"{case.path.name}: {case.path.stat().st_size} bytes, smallest gaps: block {block:.2e}, expert {expert:.2e}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
