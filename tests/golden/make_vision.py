"""Computes the golden features of images beside this file with transformers, in float32 on the CPU.

    python tests/golden/make_vision.py      # needs torch and transformers of the versions of make_golden.py

Each case of vision_cases.py gives one NAME.npz:
    shards           str     [n_shards]         name and sha256 of the checkpoint's files
    tokens_<i>       float32 [tokens, hidden]   of the images of batch i, one after the other
    versions         str     [2]                torch, transformers
The pixel values are made again by `vision_cases.pixels_of`.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import transformers

from golden.cases import shard_hashes
from golden.make_golden import VERSIONS
from golden.vision_cases import CASES, VisionCase, pixels_of
from make_checkpoint import make_checkpoint


def load(folder: Path) -> Any:
    """The checkpoint in float32. Ends the program if transformers does not take all of it."""
    model, info = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"]:
        raise SystemExit(f"{folder}: transformers did not take the checkpoint: {info}")
    return model.eval()


def run(case: VisionCase, folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Makes the checkpoint in `folder`, runs it, returns what NAME.npz holds."""
    make_checkpoint(folder, case.spec)
    model = load(folder)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "shards": np.array(shard_hashes(folder)),
        "versions": np.array([f"torch {torch.__version__}", f"transformers {transformers.__version__}"]),
    }
    for i, grids in enumerate(case.batches):
        with torch.no_grad():
            features = model.model.get_image_features(torch.tensor(pixels_of(case, i)), torch.tensor(grids))
        tokens = torch.cat(list(features.pooler_output)).numpy()
        print(f"  batch {i}: {len(tokens)} tokens, rms {np.sqrt((tokens**2).mean()):.2f}")
        arrays[f"tokens_{i}"] = tokens
    return arrays


def main() -> int:
    found = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    if found != VERSIONS:
        print(f"make_vision: needs {VERSIONS}, found {found}", file=sys.stderr)
        return 2
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            arrays = run(case, Path(folder))
        np.savez_compressed(case.path, **arrays)  # type: ignore[arg-type]
        print(f"{case.path.name}: {case.path.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
