"""Writes the codebook tables of the IQ and MXFP4 types as C, from the `gguf` package: make_tables.py OUT.h

The package holds them in packed form; nothing of them is typed in here. What they mean stands in
native/src/quant/codebooks.h, which declares them.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import quants

GRIDS: tuple[tuple[str, str, Any], ...] = (
    ("uint8_t", "m3_iq2_xxs_grid", quants.IQ2_XXS),
    ("uint8_t", "m3_iq2_xs_grid", quants.IQ2_XS),
    ("uint8_t", "m3_iq2_s_grid", quants.IQ2_S),
    ("uint8_t", "m3_iq3_xxs_grid", quants.IQ3_XXS),
    ("uint8_t", "m3_iq3_s_grid", quants.IQ3_S),
    ("int8_t", "m3_iq1_grid", quants.IQ1_S),
)
LISTS: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("uint8_t", "m3_sign_patterns", tuple(quants.IQ2_XXS.ksigns)),
    ("int8_t", "m3_iq4_values", quants.IQ4_NL.kvalues),
    ("int8_t", "m3_mxfp4_values", quants.MXFP4.kvalues),
)
NUMBERS_PER_LINE = 32


def definitions() -> Iterator[str]:
    """The lines of the header."""
    yield "/* Made by native/make_tables.py from the gguf package. M3_TABLE: const and what else the includer wants. */"
    for c_type, name, quant in GRIDS:
        quant.init_grid()
        grid = quant.grid.reshape(quant.grid_shape)
        whole = grid.astype(np.int64)
        if not np.array_equal(whole, grid):
            raise SystemExit(f"make_tables.py: {name} of this gguf package holds numbers that are not whole")
        n, width = grid.shape
        yield f"M3_TABLE {c_type} {name}[{n}][{width}] = {{"
        per_line = NUMBERS_PER_LINE // width
        for first in range(0, n, per_line):
            yield " ".join(
                "{" + ", ".join(map(str, entry)) + "}," for entry in whole[first : first + per_line].tolist()
            )
        yield "};"
    for c_type, name, values in LISTS:
        yield f"M3_TABLE {c_type} {name}[{len(values)}] = {{"
        for first in range(0, len(values), NUMBERS_PER_LINE):
            yield ", ".join(map(str, values[first : first + NUMBERS_PER_LINE])) + ","
        yield "};"


def main(out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(out.name + ".part")
    part.write_text("".join(line + "\n" for line in definitions()), encoding="ascii")
    part.rename(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
