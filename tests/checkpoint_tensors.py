"""The tensors of a small random MiniMax-M3 checkpoint, and the safetensors files that hold them.

The random numbers come from integer arithmetic on PCG64's output, which NumPy guarantees, and each tensor has its
own stream, so that leaving one out changes no other.
"""

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from make_checkpoint import CheckpointSpec

Order = Literal["sequential", "shuffled"]

TEXT_PREFIX = "language_model."
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}


@dataclass(frozen=True)
class Tensor:
    """One tensor as safetensors stores it: dtype name, shape (outermost first), little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def _bf16_codes(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounds finite float32 to bfloat16, nearest even."""
    bits = values.view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def _e4m3_codes(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Rounds finite float32 to E4M3 (bias 7, largest value 448, no infinity), nearest even, saturating."""
    magnitude = np.minimum(np.abs(values), np.float32(448))
    # Below 2^-6 the step stays 2^-9; zero belongs there too, but frexp gives it exponent 0.
    exponent = np.where(magnitude == 0, -6, np.maximum(np.frexp(magnitude)[1] - 1, -6))
    # 8 steps a binade: the rounded mantissa (0 to 16) carries into the exponent by plain addition
    mantissa = np.rint(np.ldexp(magnitude, 3 - exponent)).astype(np.int32)
    codes: npt.NDArray[np.uint8] = ((exponent + 6) * 8 + mantissa).astype(np.uint8)
    codes[np.signbit(values)] |= 0x80
    return codes


def mxfp8_quantize(values: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """float32 [rows, columns] to E4M3 codes [rows, columns] and scale bytes [rows, columns / 32].

    OCP Microscaling: the scale is 2^(byte - 127), with the exponent of the tile's largest magnitude minus 8.
    value = e4m3 * scale. Raises ValueError if 32 does not divide the columns.
    """
    rows, columns = values.shape
    if columns % 32:
        raise ValueError(f"MXFP8 needs columns in multiples of 32, found {columns}")
    tiles = values.reshape(rows, columns // 32, 32)
    exponent = np.clip(np.frexp(np.abs(tiles).max(axis=-1))[1] - 1 - 8, -127, 127)
    codes = _e4m3_codes(np.ldexp(tiles, -exponent[..., None]))
    return codes.reshape(rows, columns), (exponent + 127).astype(np.uint8)


def mxfp8_dequantize(codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """The inverse of `mxfp8_quantize`, exact. Codes 0x7f and 0xff (NaN) must not occur."""
    rows, columns = codes.shape
    exponent = (codes >> 3) & 15
    mantissa = (codes & 7).astype(np.float32)
    magnitude = np.where(
        exponent > 0, np.ldexp(8 + mantissa, exponent.astype(np.int32) - 10), np.ldexp(mantissa, np.int32(-9))
    ).astype(np.float32)
    signed = np.where(codes & 0x80, -magnitude, magnitude).reshape(rows, columns // 32, 32)
    return np.ldexp(signed, scales.astype(np.int32)[..., None] - 127).astype(np.float32).reshape(rows, columns)


@dataclass(frozen=True)
class _Random:
    """Named streams of nearly normal numbers."""

    seed: int

    def normal(self, name: str, shape: tuple[int, ...], std: float = 1.0, mean: float = 0.0) -> npt.NDArray[np.float32]:
        """float32 of the given shape: sums of four uniform 16-bit integers, scaled (within 3.5 std of the mean).

        Integers, because the normal numbers of NumPy's Generator may change between its versions.
        """
        stream = np.random.PCG64(np.random.SeedSequence([self.seed, zlib.crc32(name.encode())]))
        pieces = stream.random_raw(int(np.prod(shape))).view(np.uint16).reshape(-1, 4)
        total = sum((pieces[:, i].astype(np.int32) for i in range(1, 4)), start=pieces[:, 0].astype(np.int32))
        scale = np.float32(std * (3 / (65536.0**2 - 1)) ** 0.5)
        return ((total - 2 * 65535).astype(np.float32) * scale + np.float32(mean)).reshape(shape)


# ---------------------------------------------------------------------------------------------- tensors


def _f32(values: npt.NDArray[np.float32]) -> Tensor:
    return Tensor("F32", values.shape, values.astype("<f4").tobytes())


def _bf16(values: npt.NDArray[np.float32]) -> Tensor:
    return Tensor("BF16", values.shape, _bf16_codes(values).tobytes())


def _is_mxfp8(spec: "CheckpointSpec", name: str) -> bool:
    """The release's MXFP8 form covers every linear of the text layers; router, head, embeddings and vision stay."""
    if not spec.mxfp8 or not name.startswith(TEXT_PREFIX + "model.layers."):
        return False
    linear = name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))
    return linear and not (spec.mxfp8_skip and spec.mxfp8_skip in name)


def make_tensors(spec: "CheckpointSpec") -> dict[str, Tensor]:
    """All tensors by name, in the order in which the layers use them."""
    random = _Random(spec.seed)
    tensors: dict[str, Tensor] = {}

    def linear(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        values = random.normal(name, (rows, columns), gain / columns**0.5)
        if spec.tie and name.endswith("index_q_proj.weight"):
            values[:] = 0
        if _is_mxfp8(spec, name):
            codes, scales = mxfp8_quantize(values)
            tensors[name] = Tensor("F8_E4M3", codes.shape, codes.tobytes())
            tensors[name + "_scale_inv"] = Tensor("U8", scales.shape, scales.tobytes())
        else:
            tensors[name] = _bf16(values)

    def norm(name: str, size: int, mean: float = 0.0, std: float = 0.25) -> None:
        # Holds w where the model multiplies by 1 + w: kept away from -1.
        tensors[name] = _bf16(np.clip(random.normal(name, (size,), std, mean), np.float32(-0.96), np.float32(2)))

    def text_layer(i: int) -> None:
        base = f"{TEXT_PREFIX}model.layers.{i}."
        # The release's first input norm has a mean near -0.9; there 1 + w rounds differently in bf16 than in float32.
        norm(base + "input_layernorm.weight", spec.hidden, *((0.0, 0.25) if i else (-0.9, 0.03)))
        norm(base + "post_attention_layernorm.weight", spec.hidden, 0.1)
        attention = base + "self_attn."
        linear(attention + "q_proj.weight", spec.heads * spec.head_dim, spec.hidden)
        linear(attention + "k_proj.weight", spec.kv_heads * spec.head_dim, spec.hidden)
        linear(attention + "v_proj.weight", spec.kv_heads * spec.head_dim, spec.hidden, 1.2)
        linear(attention + "o_proj.weight", spec.hidden, spec.heads * spec.head_dim, 1.2)
        norm(attention + "q_norm.weight", spec.head_dim, 0.5, 0.2)
        norm(attention + "k_norm.weight", spec.head_dim, 0.4, 0.2)
        if i < spec.dense:
            linear(base + "mlp.gate_proj.weight", spec.dense_inter, spec.hidden, 2.5)
            linear(base + "mlp.up_proj.weight", spec.dense_inter, spec.hidden, 2.5)
            linear(base + "mlp.down_proj.weight", spec.hidden, spec.dense_inter, 0.3)
            return
        linear(attention + "index_q_proj.weight", spec.kv_heads * spec.index_dim, spec.hidden)
        linear(attention + "index_k_proj.weight", spec.index_dim, spec.hidden)
        norm(attention + "index_q_norm.weight", spec.index_dim, 0.1, 0.3)
        norm(attention + "index_k_norm.weight", spec.index_dim, -0.1, 0.3)
        moe = base + "block_sparse_moe."
        gate, bias = moe + "gate.weight", moe + "e_score_correction_bias"
        tensors[gate] = _f32(random.normal(gate, (spec.experts, spec.hidden), 1.5 / spec.hidden**0.5))
        tensors[bias] = _f32(random.normal(bias, (spec.experts,), 0.15, 0.4))
        for e in range(spec.experts):
            linear(f"{moe}experts.{e}.w1.weight", spec.inter, spec.hidden, 2.5)
            linear(f"{moe}experts.{e}.w2.weight", spec.hidden, spec.inter, 0.25)
            linear(f"{moe}experts.{e}.w3.weight", spec.inter, spec.hidden, 2.5)
        linear(moe + "shared_experts.gate_proj.weight", spec.shared_inter, spec.hidden, 2.5)
        linear(moe + "shared_experts.up_proj.weight", spec.shared_inter, spec.hidden, 2.5)
        linear(moe + "shared_experts.down_proj.weight", spec.hidden, spec.shared_inter, 0.25)

    def layer_norm(name: str, size: int) -> None:
        tensors[name + ".weight"] = _bf16(random.normal(name + ".weight", (size,), 0.2, 1.0))
        tensors[name + ".bias"] = _bf16(random.normal(name + ".bias", (size,), 0.1))

    def biased(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        linear(name + ".weight", rows, columns, gain)
        tensors[name + ".bias"] = _bf16(random.normal(name + ".bias", (rows,), 0.1))

    def vision() -> None:
        width = spec.vit_hidden
        biased("multi_modal_projector.linear_1", spec.hidden, width, 1.4)
        biased("multi_modal_projector.linear_2", spec.hidden, spec.hidden, 1.4)
        biased("patch_merge_mlp.linear_1", spec.hidden, 4 * spec.hidden, 1.4)
        biased("patch_merge_mlp.linear_2", spec.hidden, spec.hidden, 1.4)
        tower = "vision_tower.vision_model."
        patch = tower + "embeddings.patch_embedding.weight"
        tensors[patch] = _f32(random.normal(patch, (width, 3, 2, 14, 14), (3 * 2 * 14 * 14) ** -0.5))
        layer_norm(tower + "pre_layrnorm", width)  # the release spells it so
        for i in range(spec.vit_layers):
            base = f"{tower}encoder.layers.{i}."
            layer_norm(base + "layer_norm1", width)
            layer_norm(base + "layer_norm2", width)
            biased(base + "mlp.fc1", 4 * width, width)
            biased(base + "mlp.fc2", width, 4 * width)
            for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                biased(f"{base}self_attn.{part}", width, width)

    linear(TEXT_PREFIX + "lm_head.weight", spec.vocab, spec.hidden, 2.5)
    embedding = TEXT_PREFIX + "model.embed_tokens.weight"
    tensors[embedding] = _bf16(random.normal(embedding, (spec.vocab, spec.hidden)))
    for i in range(spec.layers):
        text_layer(i)
    norm(TEXT_PREFIX + "model.norm.weight", spec.hidden, 0.2)
    if spec.vision:
        vision()
    if not spec.prefix:  # last, so that the values are those of the checkpoint with it
        tensors = {name.removeprefix(TEXT_PREFIX): tensor for name, tensor in tensors.items()}
    return tensors


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes one file: 8-byte header length, JSON header padded to 8 bytes, data without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names = sorted(tensors, key=lambda name: (-DTYPE_BYTES[tensors[name].dtype], name))  # wide types first: aligned
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(tensors[name].data)


def write_shards(
    out: Path, tensors: dict[str, Tensor], shard_mb: float = 8.0, order: Order = "sequential"
) -> list[Path]:
    """Writes the shards and their index; a shard holds at most `shard_mb` unless one tensor alone is larger."""
    names = list(tensors)
    if order == "shuffled":  # experts of a layer, and weights and scales, come to lie in different shards
        names.sort(key=lambda name: zlib.crc32(name.encode()))
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name in names:
        n_bytes = len(tensors[name].data)
        if shards[-1] and size + n_bytes > shard_mb * 1e6:
            shards.append({})
            size = 0
        shards[-1][name] = tensors[name]
        size += n_bytes
    paths = [out / f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    weight_map: dict[str, str] = {}
    for path, shard in zip(paths, shards, strict=True):
        write_safetensors(path, shard)
        weight_map |= dict.fromkeys(shard, path.name)
    total = sum(len(tensor.data) for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(out / "model.safetensors.index.json", index)
    return paths


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes `value` as the release does: two spaces, UTF-8."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
