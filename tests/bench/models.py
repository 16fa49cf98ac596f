"""Random M3-shaped files to measure speed on: `python tests/bench/models.py FOLDER [NAME ...]`.

    mid     hidden 2048, 16 query and 4 KV heads, head_dim 128, 8 layers (1 dense), 32 experts of which 4 work
    pair    a dense and a sparse layer of the release's widths: hidden 6144, 64 query heads, 128 experts
    layer   one sparse layer with the release's heads and index (64 and 4 heads, 4 index heads, top 16 blocks of 128)
            and as little as possible beside: hidden 256, four experts of 256

A name is a model and a recipe: mid-q8_0, mid-q4_k_m, mid-iq2_xxs, pair-q4_k_m. The checkpoint is made, converted to all
recipes that are asked for, and removed; files that are there already are kept. The importance matrix that IQ2_XXS needs
is collected from the start of the text that ships with m3-gguf. `pair` takes 15 GB of disk while it is made.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from large_checkpoint import RELEASE, make_large_checkpoint, working_folder
from make_checkpoint import TEXT, CheckpointSpec

MID = CheckpointSpec(
    layers=8,
    dense=1,
    hidden=2048,
    heads=16,
    kv_heads=4,
    experts=32,
    inter=768,
    shared_inter=768,
    dense_inter=4096,
    vocab=32000,
    top_k=16,
    vision=False,
    shard_mb=500,
)
PAIR = replace(RELEASE, layers=2, dense=1, vocab=32000, shard_mb=2000)
LAYER = replace(
    RELEASE, layers=1, dense=0, hidden=256, experts=4, inter=256, shared_inter=256, dense_inter=256, vocab=1024
)
MODELS = {"mid": (MID, 2.6e9), "pair": (PAIR, 15.5e9), "layer": (LAYER, 2e7)}  #: and bytes of the checkpoint, about
NAMES = ("mid-q8_0", "mid-q4_k_m", "mid-iq2_xxs")
TEXT_BYTES = 2000  #: of the text for importance: every matrix gets some; speed does not depend on what


def make_models(names: Sequence[str], folder: Path) -> list[Path]:
    """Makes the files that are not there; returns the paths of all."""
    paths = [folder / f"{name}.gguf" for name in names]
    missing = [(name.partition("-")[0], path) for name, path in zip(names, paths, strict=True) if not path.exists()]
    for model in dict.fromkeys(model for model, _ in missing):
        spec, n_bytes = MODELS[model]
        with working_folder(folder, int(n_bytes)) as work:
            make_large_checkpoint(work / model, spec)
            for path in (path for of, path in missing if of == model):
                _convert(work / model, path, path.stem.partition("-")[2])
    return paths


def _convert(checkpoint: Path, path: Path, recipe: str) -> None:
    options = ["--type", recipe]
    if recipe.startswith("iq"):
        imatrix, text = checkpoint.parent / "imatrix.gguf", checkpoint.parent / "text.txt"
        text.write_bytes(TEXT.read_bytes()[:TEXT_BYTES])
        if not imatrix.exists():
            _run("imatrix_cli", checkpoint, imatrix, "--text", text, "--context", "512")
        options += ["--imatrix", str(imatrix)]
    _run("cli", checkpoint, path, *options)


def _run(command: str, *arguments: object) -> None:
    line = [sys.executable, "-m", f"m3_convert.{command}", *map(str, arguments)]
    if subprocess.run(line, stdout=subprocess.DEVNULL).returncode:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help=f"default: {' '.join(NAMES)}")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name.partition("-")[0] not in MODELS:
            sys.exit(f"{name}: expected a model of {', '.join(MODELS)} and a recipe, such as {NAMES[1]}")
    for path in make_models(arguments.names, arguments.folder):
        print(path)


if __name__ == "__main__":
    main()
