"""Whole evaluations of an M3-shaped model of the release's widths on a GPU: gpu_model.py [options]

Layers and experts are fewer than the release's, everything else is its size. Weights are random blocks of realistic
scale, never zeros, made here and bound to a model that is a header only; time does not depend on their values. Prints
time and bytes of one token after another, tokens per second of a prefill, and what the bandwidth of reading allows.
"""

import argparse
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from m3_runtime import Model, Session
from m3_runtime.engine import SessionOptions
from m3_runtime.quantize import TensorType, row_bytes

ARCH = "minimax-m3"
#: Where the float16 scales of a block stand, by type: bytes of the block, and (offset, scale for values of unit size).
SCALES = {
    "q4_k": (144, ((0, 1 / 180), (2, 1 / 24))),
    "q5_k": (176, ((0, 1 / 360), (2, 1 / 24))),
    "q6_k": (210, ((208, 1 / 1350),)),
    "q3_k": (110, ((108, 1 / 42),)),
    "q2_k": (84, ((80, 1 / 10), (82, 1 / 10))),
    "q8_0": (34, ((0, 1 / 73),)),
    "iq4_xs": (136, ((0, 1 / 1200),)),
    "iq2_xxs": (66, ((0, 1 / 48),)),
}


@dataclass(frozen=True)
class Shape:
    """The release's sizes but for the number of layers and experts."""

    layers: int
    dense: int
    experts: int
    used: int = 4
    embd: int = 6144
    heads: int = 64
    kv_heads: int = 4
    dim: int = 128
    ff: int = 12288
    expert_ff: int = 3072
    vocab: int = 200064


def keys(s: Shape, context: int) -> dict[str, int | float]:
    return {
        "block_count": s.layers, "context_length": context, "embedding_length": s.embd, "feed_forward_length": s.ff,
        "expert_feed_forward_length": s.expert_ff, "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads, "attention.key_length": s.dim, "attention.value_length": s.dim,
        "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 5e6, "rope.dimension_count": 64,
        "expert_count": s.experts, "expert_used_count": s.used, "expert_gating_func": 2, "expert_shared_count": 1,
        "expert_weights_scale": 2.0, "expert_weights_norm": 1, "leading_dense_block_count": s.dense,
        "attention.indexer.head_count": s.kv_heads, "attention.indexer.key_length": 128, "attention.indexer.top_k": 16,
        "attention.indexer.block_size": 128, "attention.indexer.local_blocks": 1,
    }  # fmt: skip


def tensors(s: Shape, type_: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, type, ne) of all tensors; matrices have the type that is asked for, index projections BF16."""
    yield "token_embd.weight", type_, (s.embd, s.vocab)
    yield "output.weight", type_, (s.embd, s.vocab)
    yield "output_norm.weight", "f32", (s.embd,)
    q, kv = s.heads * s.dim, s.kv_heads * s.dim
    for i in range(s.layers):
        parts = [
            ("attn_norm", "f32", (s.embd,)), ("ffn_norm", "f32", (s.embd,)), ("attn_q_norm", "f32", (s.dim,)),
            ("attn_k_norm", "f32", (s.dim,)), ("attn_q", type_, (s.embd, q)), ("attn_k", type_, (s.embd, kv)),
            ("attn_v", type_, (s.embd, kv)), ("attn_output", type_, (q, s.embd)),
        ]  # fmt: skip
        if i < s.dense:
            parts += [("ffn_gate", type_, (s.embd, s.ff)), ("ffn_up", type_, (s.embd, s.ff))]
            parts += [("ffn_down", type_, (s.ff, s.embd))]
        else:
            e, w = s.experts, s.expert_ff
            parts += [
                ("indexer.q_proj", "bf16", (s.embd, s.kv_heads * 128)), ("indexer.k_proj", "bf16", (s.embd, 128)),
                ("indexer.q_norm", "f32", (128,)), ("indexer.k_norm", "f32", (128,)),
                ("ffn_gate_inp", "f32", (s.embd, e)), ("ffn_gate_exps", type_, (s.embd, w, e)),
                ("ffn_up_exps", type_, (s.embd, w, e)), ("ffn_down_exps", type_, (w, s.embd, e)),
                ("ffn_gate_shexp", type_, (s.embd, w)), ("ffn_up_shexp", type_, (s.embd, w)),
                ("ffn_down_shexp", type_, (w, s.embd)),
            ]  # fmt: skip
            yield f"blk.{i}.exp_probs_b.bias", "f32", (e,)
        for name, kind, ne in parts:
            yield f"blk.{i}.{name}.weight", kind, ne


def n_bytes(kind: str, ne: tuple[int, ...]) -> int:
    return row_bytes(TensorType.parse(kind), ne[0]) * int(np.prod(ne[1:], dtype=np.int64))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(s: Shape, type_: str, context: int) -> bytes:
    listed, metadata = list(tensors(s, type_)), keys(s, context)
    out = [b"GGUF", struct.pack("<IQQ", 3, len(listed), len(metadata) + 1)]
    out.append(text("general.architecture") + struct.pack("<I", 8) + text(ARCH))
    for name, value in metadata.items():
        packed = struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)
        out.append(text(f"{ARCH}.{name}") + packed)
    offset = 0
    for name, kind, ne in listed:
        out.append(text(name) + struct.pack("<I", len(ne)) + struct.pack(f"<{len(ne)}Q", *ne))
        out.append(struct.pack("<IQ", TensorType.parse(kind), offset))
        offset += (n_bytes(kind, ne) + 31) // 32 * 32
    return b"".join(out)


def random_data(kind: str, ne: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Random blocks whose values have about the size 1 / sqrt(columns); a few MB, repeated."""
    size, scale = n_bytes(kind, ne), ne[0] ** -0.5
    if kind == "f32":
        values = rng.standard_normal(size // 4, np.float32)
        return (1 + 0.1 * values if len(ne) == 1 else scale * values).view(np.uint8)
    if kind == "bf16":
        return (scale * rng.standard_normal(size // 2, np.float32)).view(np.uint16)[1::2].copy().view(np.uint8)
    block, scales = SCALES[kind]
    few = min(size, block * 40009)
    data = np.frombuffer(rng.bytes(few), np.uint8).reshape(-1, block).copy()
    for at, unit in scales:
        spread = scale * unit * (0.5 + rng.random(len(data)))
        data[:, at : at + 2] = spread.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return np.resize(data.reshape(-1), size)


def write(path: Path, s: Shape, type_: str, context: int) -> None:
    """A file of it, for m3-bench."""
    rng, made = np.random.default_rng(1), {}
    with path.open("wb") as file:
        file.write(header(s, type_, context))
        for _, kind, ne in tensors(s, type_):
            file.write(bytes(-file.tell() % 32))
            if (kind, ne) not in made:
                made[kind, ne] = random_data(kind, ne, rng)
            made[kind, ne].tofile(file)
        file.write(bytes(-file.tell() % 32))


def bind(model: Model, s: Shape, type_: str) -> None:
    rng, made = np.random.default_rng(1), {}
    for name, kind, ne in tensors(s, type_):
        shape = (kind, ne)
        if shape not in made:
            made[shape] = random_data(kind, ne, rng)
        model.bind(name, made[shape])


def read_per_token(s: Shape, type_: str) -> int:
    """Bytes of the weights that one token reads."""
    total = 0
    for name, kind, ne in tensors(s, type_):
        if name != "token_embd.weight":
            total += n_bytes(kind, ne) * (s.used if "_exps" in name else 1) // (s.experts if "_exps" in name else 1)
    return total


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda")
    p.add_argument("--experts-on", default="gpu", choices=("gpu", "cpu"))
    p.add_argument("--threads", type=int, default=0, help="of the CPU, for experts there")
    p.add_argument("--type", default="q4_k", choices=SCALES)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--dense", type=int, default=1)
    p.add_argument("--experts", type=int, default=16)
    p.add_argument("--prefill", type=int, nargs="+", default=[2048], help="tokens before the decoded ones, ascending")
    p.add_argument("--chunk", type=int, default=512)
    p.add_argument("--kv-type", default="f16")
    p.add_argument("--index-type", default="f32")
    p.add_argument("--exact", action="store_true")
    p.add_argument("--tokens", type=int, default=30)
    p.add_argument("--bandwidth", type=float, default=4.17, help="TB/s that reading reaches")
    p.add_argument("--write", type=Path, metavar="FILE", help="write the model to a file and end")
    a = p.parse_args()
    s = Shape(a.layers, a.dense, a.experts)
    if a.write:
        write(a.write, s, a.type, 1 << 20)
        return
    rng = np.random.default_rng(2)
    with Model.from_header(header(s, a.type, 1 << 20), "bench", device=a.device, experts_on=a.experts_on) as model:
        start = time.perf_counter()
        bind(model, s, a.type)
        print(f"{model.backend_name} {model.device_name}: {model.weight_bytes / 1e9:.2f} GB of {a.type} bound in "
              f"{time.perf_counter() - start:.1f} s")  # fmt: skip
        options: SessionOptions = {
            "context": max(a.prefill) + a.tokens,
            "kv_type": a.kv_type,
            "index_type": a.index_type,
        }
        options |= {"chunk": a.chunk, "exact": a.exact, "threads": a.threads}
        plan = model.plan(**options)
        print(
            f"experts on {a.experts_on}: {plan.experts_bytes / 1e9:.2f} GB on the GPU, "
            f"{plan.cpu_experts_bytes / 1e9:.2f} GB on the CPU, {plan.host_bytes / 1e6:.0f} MB of work memory there, "
            f"{plan.pinned_bytes / 1e6:.0f} MB pinned"
        )
        print(f"K/V {a.kv_type}, index keys {a.index_type}, chunks of {a.chunk}, msa {model.msa(**options)}")
        with model.session(**options) as session:
            session.eval(rng.integers(0, s.vocab, min(a.chunk, a.prefill[0]), np.int32))  # warms up
            session.rewind(0)
            for depth in a.prefill:
                measure(session, s, a, depth, rng)


def measure(session: Session, s: Shape, a: argparse.Namespace, depth: int, rng: np.random.Generator) -> None:
    """Prefill up to `depth`, then tokens one by one."""
    n = depth - session.length()
    start = time.perf_counter()
    session.eval(rng.integers(0, s.vocab, n, np.int32))
    seconds = time.perf_counter() - start
    print(f"prefill of {n} tokens to {depth}, {a.layers} layers: {seconds * 1e3:.1f} ms, {n / seconds:.0f} tok/s")
    times = []
    for id in rng.integers(0, s.vocab, a.tokens, np.int32):
        start = time.perf_counter()
        session.eval([id])
        times.append(time.perf_counter() - start)
    session.rewind(depth)
    # The first steps make what the later ones repeat.
    middle, read = float(np.median(times[3:])), read_per_token(s, a.type)
    print(f"first token, whose operations are called one by one: {times[0] * 1e6:.0f} us")
    bound = read / (a.bandwidth * 1e12)
    print(
        f"token after {depth}, {a.layers} layers and head: {middle * 1e6:.0f} us ({min(times) * 1e6:.0f} to "
        f"{max(times[3:]) * 1e6:.0f}), {read / 1e9:.3f} GB of weights: {read / middle / 1e12:.2f} TB/s, "
        f"{bound / middle:.0%} of the bound"
    )


if __name__ == "__main__":
    main()
