"""What rounding alone makes of rows, by the formulas of the types (`native/src/quant/blocks.h`) in double precision:
scales from the extremes of a block or group, scales of groups rounded, then the nearest codes. It is what a search must
not fall behind, and what the types without a search must be near."""

import gguf
import numpy as np

from m3_runtime.quantize import TensorType

AFFINE = {TensorType.Q2_K: (16, 3, 15), TensorType.Q4_K: (32, 15, 63), TensorType.Q5_K: (32, 31, 63)}
IQ4 = gguf.quants.IQ4_NL.kvalues
SYMMETRIC = {
    TensorType.Q3_K: (16, np.arange(-4, 4), 31),
    TensorType.Q6_K: (16, np.arange(-32, 32), 127),
    TensorType.IQ4_XS: (32, np.array(IQ4), 31),
}
SINGLE = {
    TensorType.Q4_0: np.arange(-8, 8),
    TensorType.Q5_0: np.arange(-16, 16),
    TensorType.IQ4_NL: np.array(IQ4),
}
OFFSET = {TensorType.Q4_1: 15, TensorType.Q5_1: 31}
MXFP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])

IQ3 = (TensorType.IQ3_XXS, TensorType.IQ3_S)
IQ2 = (TensorType.IQ2_XXS, TensorType.IQ2_XS, TensorType.IQ2_S)
IQ1 = (TensorType.IQ1_S, TensorType.IQ1_M)
CODEBOOK = (*IQ3, *IQ2, *IQ1)
EVEN_SIGNS = (TensorType.IQ3_XXS, TensorType.IQ2_XXS, TensorType.IQ2_XS)
#: Elements that share a scale; elements that are one entry of the codebook.
GROUP = dict(zip(CODEBOOK, (32, 32, 32, 16, 16, 32, 16), strict=True))
RUN = {t: 4 if t in IQ3 else 8 for t in CODEBOOK}
#: The scale of a group is d times this times an odd number below twice the other.
UNIT = dict(zip(CODEBOOK, (0.25, 1, 0.125, 0.125, 0.125, 1, 1), strict=True))
MULTIPLES = {t: 8 if t in IQ1 else 16 for t in CODEBOOK}


def half(x):
    return np.asarray(x, np.float16).astype(np.float64)


def inverse(x):
    return np.divide(1, x, out=np.zeros_like(x), where=x != 0)


def nearest(numbers, x):
    bounds = (numbers[1:] + numbers[:-1]) / 2
    return numbers[np.searchsorted(bounds, x)]


def extreme(x):
    """Of equal magnitudes the positive one: where the scale for the other sign would be no float16, near the limits of
    the types, a search can fall back on this one only."""
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    return np.where(-low > high, low, high)


def codebook(type_):
    """Levels, float64 [entries, run]."""
    quant = getattr(gguf.quants, "IQ1_S" if type_ in IQ1 else type_.name)
    quant.init_grid()
    return quant.grid.reshape(quant.grid_shape).astype(np.float64)


def plainly_rounded(type_, rows):
    """The rows float32 [n, columns] as values of the type, float64."""
    x = rows.astype(np.float64)
    if type_ in AFFINE:
        n, top, scale_top = AFFINE[type_]
        x = x.reshape(-1, 256 // n, n)
        low = np.minimum(x.min(axis=-1, keepdims=True), 0)
        scale = (np.maximum(x.max(axis=-1, keepdims=True), low) - low) / top
        d, dmin = (half(v.max(axis=1, keepdims=True) / scale_top) for v in (scale, -low))
        a = d * np.clip(np.rint(scale * inverse(d)), 0, scale_top)
        b = -dmin * np.clip(np.rint(-low * inverse(dmin)), 0, scale_top)
        values = a * np.clip(np.rint((x - b) * inverse(a)), 0, top) + b
    elif type_ in SYMMETRIC:
        n, numbers, scale_top = SYMMETRIC[type_]
        x = x.reshape(-1, 256 // n, n)
        scale = extreme(x) / numbers[0]
        d = half(np.abs(scale).max(axis=1, keepdims=True) / scale_top)
        a = d * np.clip(np.rint(scale * inverse(d)), -scale_top - 1, scale_top)
        values = a * nearest(numbers, x * inverse(a))
    elif type_ in SINGLE:
        numbers = SINGLE[type_]
        x = x.reshape(-1, 32)
        a = half(extreme(x) / numbers[0])
        values = a * nearest(numbers, x * inverse(a))
    elif type_ in OFFSET:
        top = OFFSET[type_]
        x = x.reshape(-1, 32)
        low = x.min(axis=-1, keepdims=True)
        a, b = half((x.max(axis=-1, keepdims=True) - low) / top), half(low)
        values = a * np.clip(np.rint((x - b) * inverse(a)), 0, top) + b
    elif type_ in CODEBOOK:
        values = _entries(type_, x)
    else:
        assert type_ is TensorType.MXFP4
        x = x.reshape(-1, 32)
        exponent = np.frexp(np.abs(x).max(axis=-1, keepdims=True))[1] - 1  # floor of the logarithm
        scale = np.ldexp(1.0, np.clip(exponent - 2, -127, 127))
        values = np.copysign(scale * nearest(MXFP4, np.abs(x) / scale), x)
    return values.reshape(rows.shape)


def _entries(type_, x):
    """The entries of the codebook nearest to values, where the largest magnitude of a group gets the largest level."""
    levels, size = codebook(type_), GROUP[type_]
    scale = np.abs(x.reshape(-1, 256 // size, size)).max(axis=-1) / (1.125 if type_ in IQ1 else levels.max())
    d = half(scale.max(axis=1, keepdims=True) / (UNIT[type_] * (2 * MULTIPLES[type_] - 1)))
    unit = d * UNIT[type_]
    scale = unit * (2 * np.clip(np.rint((scale * inverse(unit) - 1) / 2), 0, MULTIPLES[type_] - 1) + 1)
    scale = np.repeat(scale.reshape(-1), size // 8)[:, None]
    x = x.reshape(-1, 8)
    if type_ in IQ1:
        shifted = [_nearest_entries(levels + delta, x * inverse(scale)) for delta in (0.125, -0.125)]
        costs = np.stack([((s - x * inverse(scale)) ** 2).sum(axis=-1) for s in shifted])
        if type_ is TensorType.IQ1_S:  # four runs share the shift
            costs = np.repeat(costs.reshape(2, -1, 4).sum(axis=-1), 4, axis=-1)
        return scale * np.where((costs[0] <= costs[1])[:, None], *shifted)
    magnitudes, negative = np.abs(x), np.signbit(x)
    if type_ in EVEN_SIGNS:
        odd = np.flatnonzero(negative.sum(axis=1) % 2)
        least = magnitudes[odd].argmin(axis=1)
        magnitudes[odd, least] *= -1
        negative[odd, least] ^= True
    return scale * np.where(negative, -1, 1) * _nearest_entries(levels, magnitudes * inverse(scale))


def _nearest_entries(levels, x):
    run = levels.shape[1]
    return levels[((levels**2).sum(axis=1) - 2 * x.reshape(-1, run) @ levels.T).argmin(axis=1)].reshape(x.shape)


def rounding_bound(type_, rows):
    """How far from the rows the values of a type without a search may be, float64: half a step, what float16 makes of
    the scale, and what lies beyond the last code."""
    x = rows.astype(np.float64)
    if type_ is TensorType.F32:
        return np.zeros(rows.shape)
    if type_ in (TensorType.F16, TensorType.BF16):
        digits, least = (11, 2.0**-25) if type_ is TensorType.F16 else (8, 2.0**-134)
        return np.maximum(np.abs(x) * 2.0**-digits, least)
    x = x.reshape(-1, 32)
    if type_ in OFFSET:
        top, low = OFFSET[type_], x.min(axis=-1, keepdims=True)
        d = (x.max(axis=-1, keepdims=True) - low) / top
        bound = np.abs(d) / 2 + top * np.abs(d - half(d)) + np.abs(low - half(low))
    else:
        zero = {TensorType.Q4_0: 8, TensorType.Q5_0: 16, TensorType.Q8_0: 127}[type_]
        first = np.abs(x).argmax(axis=-1)[..., None]  # the sign of the scale is that of the first of equal magnitudes
        d = np.take_along_axis(x, first, axis=-1) / -zero
        last = zero if type_ is TensorType.Q8_0 else zero - 1
        bound = np.maximum(np.abs(d) / 2, x * np.sign(d) - last * np.abs(d)) + zero * np.abs(d - half(d))
    # Operations are those of float32; a scale below 2^-128 has no inverse there and counts as zero.
    return (bound + np.abs(x) * 2.0**-20 + 2.0**-120).reshape(rows.shape)
