"""Writes encoded_iq.npz beside this file: rows, importance and the bytes that the codebook types get of them.

    python tests/golden/make_encoded_iq.py

The bytes are this engine's own: the file shows when an encoder changes what it writes. Whether they are good is the
business of tests/native/test_encode_iq.py. Contents:
    rows        float32 [4, 512]   normal, Laplace, normal with large exceptions, and edges
    importance  float32 [512]
    <TYPE>      uint8 [4, bytes]   with the importance
    <TYPE>_plain                   without, for the types that do not need it
"""

from pathlib import Path
from typing import Any

import numpy as np

from m3_runtime.quantize import TensorType, quantize_rows

TYPES = (
    TensorType.IQ3_XXS,
    TensorType.IQ3_S,
    TensorType.IQ2_XXS,
    TensorType.IQ2_XS,
    TensorType.IQ2_S,
    TensorType.IQ1_S,
    TensorType.IQ1_M,
)
OUT = Path(__file__).with_name("encoded_iq.npz")


def main() -> None:
    random = np.random.default_rng(2024)
    rows = np.empty((4, 512), np.float32)
    rows[0] = random.standard_normal(512) * 0.02
    rows[1] = random.laplace(size=512) * 0.02
    rows[2] = random.standard_normal(512) * np.where(random.random(512) < 0.02, 0.5, 0.02)
    rows[3, :256] = 0
    rows[3, 256:] = np.linspace(-1, 1, 256) ** 3
    importance = random.chisquare(1, 512).astype(np.float32)
    arrays: dict[str, Any] = {"rows": rows, "importance": importance}
    for type_ in TYPES:
        arrays[type_.name] = quantize_rows(type_, rows, importance=importance)
        if not type_.needs_importance:
            arrays[f"{type_.name}_plain"] = quantize_rows(type_, rows)
    np.savez_compressed(OUT, **arrays)


if __name__ == "__main__":
    main()
