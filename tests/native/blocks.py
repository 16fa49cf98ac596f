"""Blocks of every storage type as bytes, random but for their scales, and what the `gguf` package reads from them."""

import gguf
import numpy as np
from numpy.typing import NDArray

from m3_runtime.quantize import TensorType

# Where a block holds float16 scales (and offsets). F16 and BF16 are their own scale; IQ1_M has its scale in four parts,
# MXFP4 an exponent instead.
SCALE_OFFSETS = {
    TensorType.Q4_0: (0,),
    TensorType.Q4_1: (0, 2),
    TensorType.Q5_0: (0,),
    TensorType.Q5_1: (0, 2),
    TensorType.Q8_0: (0,),
    TensorType.Q2_K: (80, 82),
    TensorType.Q3_K: (108,),
    TensorType.Q4_K: (0, 2),
    TensorType.Q5_K: (0, 2),
    TensorType.Q6_K: (208,),
    TensorType.IQ2_XXS: (0,),
    TensorType.IQ2_XS: (0,),
    TensorType.IQ3_XXS: (0,),
    TensorType.IQ1_S: (0,),
    TensorType.IQ4_NL: (0,),
    TensorType.IQ3_S: (0,),
    TensorType.IQ2_S: (0,),
    TensorType.IQ4_XS: (0,),
}
QUANTIZED = tuple(t for t in TensorType if t.block_size > 1)


def block_bytes(type_: TensorType) -> int:
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(int(type_))][1]


def n_scales(type_: TensorType) -> int:
    """How many scales `set_scales` wants for a block."""
    return len(SCALE_OFFSETS.get(type_, (0,)))


def set_scales(type_: TensorType, blocks: NDArray[np.uint8], scales: NDArray[np.float16]) -> None:
    """Writes float16 scales [n, n_scales] into blocks uint8 [n, block_bytes]. MXFP4 takes their exponents."""
    codes = np.ascontiguousarray(scales, np.float16).view(np.uint16)
    if type_ is TensorType.MXFP4:
        exponents = np.frexp(scales[:, 0].astype(np.float32))[1] - 1
        blocks[:, 0] = np.clip(exponents + 128, 0, 254)
    elif type_ is TensorType.IQ1_M:
        for part in range(4):
            high = blocks[:, 48 + 2 * part + 1]
            high[:] = (high & 15) | ((codes[:, 0] >> 4 * part & 15) << 4).astype(np.uint8)
    else:
        for k, at in enumerate(SCALE_OFFSETS[type_]):
            blocks[:, at : at + 2] = codes[:, k : k + 1].view(np.uint8)


def random_blocks(
    type_: TensorType, n: int, random: np.random.Generator, scale: float | None = None
) -> NDArray[np.uint8]:
    """uint8 [n, block_bytes]: random bits; scales any finite float16, or of magnitude `scale` and random sign."""
    blocks = random.integers(0, 256, (n, block_bytes(type_)), dtype=np.uint8)
    if scale is None:
        codes = random.integers(0, 0x7C00, (n, n_scales(type_)), dtype=np.uint16)
        codes |= random.integers(0, 2, codes.shape, dtype=np.uint16) << 15
        scales = codes.view(np.float16)
    else:
        scales = np.where(random.integers(0, 2, (n, n_scales(type_))), scale, -scale).astype(np.float16)
    set_scales(type_, blocks, scales)
    return blocks


def oracle_dequantize(type_: TensorType, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Rows of bytes [n, bytes] as the gguf package reads them: float32 [n, elements]."""
    with np.errstate(all="ignore"):  # scales that are infinite or NaN, exponents near 255
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType(int(type_)))
