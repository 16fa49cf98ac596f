"""Computes the golden preprocessing beside this file with the processor of transformers.

    python tests/golden/make_images.py    # needs torch, transformers (see make_golden.py) and torchvision of that torch

images.npz, for each picture of image_cases.py:
    shape_<i>     int32   [2]                  height and width that it is resized to
    picture_<i>   uint8   [rows, columns, 3]   resized, before normalization; every STEPS[i]th row and column
    pixels        float32 [patches, 1176]      what the processor gives of picture WHOLE
    versions      str     [3]                  torch, transformers, torchvision
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torchvision
import transformers
from transformers.models.minimax_m3_vl.image_processing_minimax_m3_vl import MiniMaxM3VLImageProcessor

from golden.image_cases import PATH, SIZES, STEPS, WHOLE, picture_of
from make_checkpoint import PREPROCESSOR_CONFIG

VERSIONS = {"torch": "2.13.0", "transformers": "5.24.0", "torchvision": "0.28.0"}


def unpatched(pixels: np.ndarray[Any, Any], grid: list[int]) -> np.ndarray[Any, Any]:
    """Values of the first frame as [height, width, 3]."""
    _, h, w = grid
    cut = pixels.reshape(h // 2, w // 2, 2, 2, 3, 2, 14, 14)[:, :, :, :, :, 0]
    return cut.transpose(0, 2, 5, 1, 3, 6, 4).reshape(h * 14, w * 14, 3)


def main() -> int:
    modules = (("torch", torch), ("transformers", transformers), ("torchvision", torchvision))
    found = {name: module.__version__.split("+")[0] for name, module in modules}
    if found != VERSIONS:
        print(f"make_images: needs {VERSIONS}, found {found}", file=sys.stderr)
        return 2
    config = {k: v for k, v in PREPROCESSOR_CONFIG.items() if not k.endswith(("_type", "_class"))}
    processor = MiniMaxM3VLImageProcessor(**config)
    mean, std = np.array(processor.image_mean), np.array(processor.image_std)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "versions": np.array([f"{name} {version}" for name, version in VERSIONS.items()])
    }
    for i in range(len(SIZES)):
        given = torch.tensor(picture_of(i)).permute(2, 0, 1)
        answer = processor(images=[given], return_tensors="pt", input_data_format="channels_first")
        pixels, grid = answer["pixel_values"].numpy(), answer["image_grid_thw"][0].tolist()
        levels = (unpatched(pixels, grid).astype(np.float64) * std + mean) * 255
        arrays[f"shape_{i}"] = np.array(levels.shape[:2], np.int32)
        arrays[f"picture_{i}"] = np.rint(levels).astype(np.uint8)[:: STEPS[i], :: STEPS[i]]
        if np.abs(levels - np.rint(levels)).max() > 1e-3:
            raise SystemExit(f"picture {i}: the processor does not resize whole numbers")
        if i == WHOLE:
            arrays["pixels"] = pixels
        print(f"  {SIZES[i]} -> {levels.shape[:2]}")
    np.savez_compressed(PATH, **arrays)  # type: ignore[arg-type]
    print(f"{PATH.name}: {PATH.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
