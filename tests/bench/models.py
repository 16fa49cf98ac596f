"""Random M3-shaped files to measure speed on: `python tests/bench/models.py FOLDER [NAME ...]`.

    mid     hidden 2048, 16 query and 4 KV heads, head_dim 128, 8 layers (1 dense), 32 experts of which 4 work
    pair    a dense and a sparse layer of the release's widths: hidden 6144, 64 query heads, 128 experts

A name is a model and a recipe: mid-q8_0, mid-q4_k_m, mid-iq2_xxs, pair-q4_k_m. The checkpoint is made, converted and
removed; files that are there already are kept. The importance matrix that IQ2_XXS needs is collected from the text that
ships with m3-gguf. `pair` takes 15 GB of disk while it is made.
"""

import argparse
import subprocess
import sys
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
MODELS = {"mid": (MID, 2.4e9), "pair": (PAIR, 15.5e9)}  #: and bytes of the checkpoint, about
NAMES = ("mid-q8_0", "mid-q4_k_m", "mid-iq2_xxs")


def make_model(name: str, folder: Path) -> Path:
    """Makes a file if it is not there; returns its path."""
    path = folder / f"{name}.gguf"
    if not path.exists():
        model, _, recipe = name.partition("-")
        spec, n_bytes = MODELS[model]
        with working_folder(folder, int(n_bytes)) as work:
            make_large_checkpoint(work / model, spec)
            options = ["--type", recipe]
            if recipe.startswith("iq"):
                imatrix = work / "imatrix.gguf"
                _run("imatrix_cli", work / model, imatrix, "--text", TEXT, "--context", "512")
                options += ["--imatrix", str(imatrix)]
            _run("cli", work / model, path, *options)
    return path


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
        print(make_model(name, arguments.folder))


if __name__ == "__main__":
    main()
