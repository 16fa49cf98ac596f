"""Makes encoded.npz: what the types without a codebook made of a few rows, without importance and with it.

    python tests/golden/make_encoded.py

The engine made these bytes, as no other program writes those of the types that search; they are checked to be what
`gguf` reads as the same values, and the tests find out when they change: files that were begun by one version must not
be ended by another.
"""

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from m3_runtime.quantize import TensorType, dequantize_rows, quantize_rows

PATH = Path(__file__).resolve().parent / "encoded.npz"
COLUMNS = 512
TYPES = [t for t in TensorType if not t.name.startswith(("IQ1", "IQ2", "IQ3"))]
#: Type names, followed by " weighted" where the importance is given.
CASES = tuple(t.name + weighted for t in TYPES for weighted in ("", " weighted") if t.block_size > 1 or not weighted)


def edges() -> NDArray[np.float64]:
    """A row: a block of 256 with a block of 32 each of zeros of both signs, equal values, subnormal ones, the largest
    that all types hold, one far out, halves; then one of float16's last places."""
    row = np.zeros(COLUMNS)
    row[1:32:2] = -0.0
    row[32:64] = -0.37
    row[64:96] = np.arange(-16, 16) * 2.0**-140
    row[96:128] = np.where(np.arange(32) % 3, 65504, -65504)
    row[128:160] = np.linspace(-1e-3, 1e-3, 32)
    row[144] = 40
    row[160:192] = np.arange(-16, 16) / 2
    row[256:] = np.arange(-128, 128) * 2.0**-25
    return row


def main() -> None:
    random = np.random.default_rng(40)
    rows = random.standard_normal((4, COLUMNS)) * np.array([[0.02], [1e-4], [3.0], [0.5]])
    rows[2] = np.abs(rows[2]) + 1
    rows[3] *= np.where(random.random(COLUMNS) < 0.02, 20, 1)
    rows = np.concatenate([rows, edges()[None]]).astype(np.float32)
    importance = random.exponential(size=COLUMNS).astype(np.float32)
    stored = {"rows": rows, "importance": importance}
    for case in CASES:
        name, _, weighted = case.partition(" ")
        type_ = TensorType[name]
        data = quantize_rows(type_, rows, importance=importance if weighted else None)
        values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(int(type_)))
        if not np.array_equal(values, dequantize_rows(type_, data, COLUMNS)):
            raise SystemExit(f"{name}: gguf reads other values")
        stored[case] = data
    np.savez_compressed(PATH, **stored)
    print(f"{PATH.name}: {len(CASES)} cases, {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()
