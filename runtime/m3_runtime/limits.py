"""The limits of the engine (m3.h): what lies beyond them could be written to a file but not run."""

from typing import Final

from m3_runtime.native import lib

MAX_LAYERS: Final[int] = lib.M3_MAX_LAYERS
MAX_HEADS: Final[int] = lib.M3_MAX_HEADS
MAX_HEAD_DIM: Final[int] = lib.M3_MAX_HEAD_DIM
MAX_EXPERTS: Final[int] = lib.M3_MAX_EXPERTS
MAX_DIM: Final[int] = lib.M3_MAX_DIM
MAX_VOCAB: Final[int] = lib.M3_MAX_VOCAB
MAX_TOP_K: Final[int] = lib.M3_MAX_TOP_K
BLOCK_SIZES: Final[tuple[int, int]] = (lib.M3_MIN_BLOCK, lib.M3_MAX_BLOCK)
