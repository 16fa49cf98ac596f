"""Makes encoded.npz: what the types without a codebook made of a few rows, without importance and with it.

    python tests/golden/make_encoded.py

No other program writes these bytes, so the engine made them; they are checked to be what `gguf` reads as the same
values, and the tests find out when they change: files that were begun by one version must not be ended by another.
"""

from pathlib import Path

import gguf
import numpy as np

from m3_runtime.quantize import TensorType, dequantize_rows, quantize_rows

PATH = Path(__file__).resolve().parent / "encoded.npz"
ROWS, COLUMNS = 4, 512
TYPES = [t for t in TensorType if t.block_size > 1 and not t.name.startswith(("IQ1", "IQ2", "IQ3"))]
#: Type names, followed by " weighted" where the importance is given.
CASES = tuple(t.name + weighted for t in TYPES for weighted in ("", " weighted"))


def main() -> None:
    random = np.random.default_rng(40)
    rows = random.standard_normal((ROWS, COLUMNS)) * np.array([[0.02], [1e-4], [3.0], [0.5]])
    rows[2] = np.abs(rows[2]) + 1
    rows[3] *= np.where(random.random(COLUMNS) < 0.02, 20, 1)
    rows = rows.astype(np.float32)
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
