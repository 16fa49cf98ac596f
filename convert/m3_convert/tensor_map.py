"""The tensors of the GGUF file: names, shapes, and the source tensors they are made from.

The order is that of the file. No rows of q and k are permuted: the rotation pairs channel i with i + rotary_dim / 2 on
both sides.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from m3_convert.checkpoint import Checkpoint, SourceTensor, listed
from m3_convert.config import ModelConfig
from m3_runtime.errors import InputError

VISION_PREFIXES = ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")
SCALE_SUFFIX = "_scale_inv"
SCALE_BLOCK = 32  #: columns that share one scale byte
FP8 = "F8_E4M3"
WEIGHT_DTYPES = ("BF16", "F16", "F32", FP8)
SCALE_DTYPES = ("U8", "F8_E8M0")


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that a GGUF file of these dimensions holds."""

    name: str
    shape: tuple[int, ...]  #: outermost first; GGUF writes it reversed, as ne
    sources: tuple[str, ...]  #: source names without the text prefix; one for each expert if stacked
    plus_one: bool = False  #: the model multiplies by 1 + w, the file stores that sum

    @property
    def stacked(self) -> bool:
        """True for the 3-D tensors that hold one matrix for each expert."""
        return len(self.shape) == 3


@dataclass(frozen=True)
class SourceMatrix:
    """A weight of the checkpoint, with its scales if it is FP8. A 1-D tensor counts as one row.

    With `column_order` everything but the first axis of the tensor counts as columns.
    """

    tensor: SourceTensor
    scale: SourceTensor | None = None
    row_order: tuple[int, ...] = ()  #: source row of each row of the file; empty: as they are. Not of FP8
    column_order: tuple[int, ...] = ()  #: source column of each column of the file, not necessarily of all

    @property
    def sources(self) -> tuple[SourceTensor, ...]:
        """The tensor, and its scales if it has any."""
        return (self.tensor,) if self.scale is None else (self.tensor, self.scale)

    @property
    def rows(self) -> int:
        if self.column_order:
            return self.tensor.shape[0] if len(self.tensor.shape) > 1 else 1
        return prod(self.tensor.shape[:-1])

    @property
    def columns(self) -> int:
        return len(self.column_order) or self.tensor.shape[-1]

    @property
    def is_fp8(self) -> bool:
        return self.tensor.dtype == FP8


@dataclass(frozen=True)
class MappedTensor:
    """A GGUF tensor and where its values come from."""

    spec: TensorSpec
    matrices: tuple[SourceMatrix, ...]
    declared_origin: str = ""  #: type below Q8_0 that a GGUF file says its values had before; see `precision.origin`

    @property
    def source_dtypes(self) -> tuple[str, ...]:
        """Distinct dtypes of the sources in order of appearance."""
        return tuple(dict.fromkeys(m.tensor.dtype for m in self.matrices))


def tensor_specs(config: ModelConfig) -> list[TensorSpec]:
    """All tensors of a GGUF file in file order."""
    specs = [
        TensorSpec("output.weight", (config.vocab, config.hidden), ("lm_head.weight",)),
        TensorSpec("token_embd.weight", (config.vocab, config.hidden), ("model.embed_tokens.weight",)),
    ]
    for layer in range(config.n_layer):
        specs += _dense_layer(config, layer) if layer < config.n_dense else _sparse_layer(config, layer)
    specs.append(TensorSpec("output_norm.weight", (config.hidden,), ("model.norm.weight",), plus_one=True))
    return specs


def map_tensors(checkpoint: Checkpoint) -> tuple[list[MappedTensor], list[str]]:
    """Finds the sources of every GGUF tensor. Returns them in file order, and the source tensors left out (vision).

    Every other source tensor is used exactly once. Raises InputError, naming up to five and the total, for tensors that
    are missing, extra (`mtp.*` too), of another shape or dtype, for FP8 without a scale and a scale without FP8.
    """
    specs = tensor_specs(checkpoint.config)
    wanted = {
        checkpoint.prefix + name: spec.shape[1:] if spec.stacked else spec.shape
        for spec in specs
        for name in spec.sources
    }
    left_out = [name for name in checkpoint.tensors if name.startswith(VISION_PREFIXES)]
    _check_names(checkpoint, wanted, set(left_out))
    matrices = {name: _source_matrix(checkpoint, name, shape) for name, shape in wanted.items()}
    mapped = [MappedTensor(s, tuple(matrices[checkpoint.prefix + name] for name in s.sources)) for s in specs]
    return mapped, left_out


def layer_of(name: str) -> int:
    """Number of the layer in the name of a GGUF tensor, -1 for the tensors outside the layers."""
    first, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if first == "blk" else -1


def check_sources(
    checkpoint: Checkpoint, wanted: Mapping[str, tuple[int, ...]], dtypes: Sequence[str], part: str
) -> None:
    """Raises InputError for source tensors of another shape than `wanted` says, or of a dtype not in `dtypes`.

    part: of the model, with a space behind it, for the message; may be empty.
    """
    found, path = checkpoint.tensors, checkpoint.path
    shapes = [
        f"{name} (expected {list(shape)}, found {list(found[name].shape)})"
        for name, shape in wanted.items()
        if found[name].shape != shape
    ]
    if shapes:
        raise InputError(f"{path}: {len(shapes)} {part}tensors of another shape: {listed(shapes)}")
    others = [f"{name} ({found[name].dtype})" for name in wanted if found[name].dtype not in dtypes]
    if others:
        raise InputError(f"{path}: expected {', '.join(dtypes)} {part}weights, found {listed(others)}")


def _check_names(checkpoint: Checkpoint, wanted: Mapping[str, tuple[int, ...]], left_out: set[str]) -> None:
    found = checkpoint.tensors
    missing = [name for name in wanted if name not in found]
    if missing:
        raise InputError(f"{checkpoint.path}: {len(missing)} tensors missing: {listed(missing)}")
    scales = {name + SCALE_SUFFIX for name in wanted}
    extra = [name for name in found if name not in wanted and name not in scales and name not in left_out]
    # A scale whose weight is not there is told apart: its weight was lost, or it belongs to a part that is unknown.
    orphans = [name for name in extra if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) not in found]
    if orphans:
        raise InputError(f"{checkpoint.path}: {len(orphans)} scales without their tensor: {listed(orphans)}")
    if extra:
        raise InputError(
            f"{checkpoint.path}: {len(extra)} tensors that a model of this config does not have: {listed(extra)}"
        )
    check_sources(checkpoint, wanted, WEIGHT_DTYPES, "")
    bare = [name for name in wanted if found[name].dtype == FP8 and name + SCALE_SUFFIX not in found]
    if bare:
        raise InputError(f"{checkpoint.path}: {len(bare)} FP8 tensors without a {SCALE_SUFFIX} scale: {listed(bare)}")
    idle = [
        f"{name}{SCALE_SUFFIX} (the tensor is {found[name].dtype})"
        for name in wanted
        if found[name].dtype != FP8 and name + SCALE_SUFFIX in found
    ]
    if idle:
        raise InputError(f"{checkpoint.path}: {len(idle)} scales without an FP8 tensor: {listed(idle)}")


def _source_matrix(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> SourceMatrix:
    tensor = checkpoint.tensors[name]
    if tensor.dtype != FP8:
        return SourceMatrix(tensor)
    scale = checkpoint.tensors[name + SCALE_SUFFIX]
    expected = (*shape[:-1], shape[-1] // SCALE_BLOCK)
    if shape[-1] % SCALE_BLOCK or scale.shape != expected or scale.dtype not in SCALE_DTYPES:
        raise InputError(
            f"{scale.name}: expected {' or '.join(SCALE_DTYPES)} of shape {list(expected)}, one byte for each "
            f"{SCALE_BLOCK} columns of {list(shape)}, found {scale.dtype} {list(scale.shape)}"
        )
    return SourceMatrix(tensor, scale)


def _attention(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for name, shape, source in (
        ("attn_k_norm", (config.head_dim,), "k_norm"),
        ("attn_k", (kv, config.hidden), "k_proj"),
        ("attn_output", (config.hidden, q), "o_proj"),
        ("attn_q_norm", (config.head_dim,), "q_norm"),
        ("attn_q", (q, config.hidden), "q_proj"),
        ("attn_v", (kv, config.hidden), "v_proj"),
    ):
        yield _layer_tensor(layer, name, shape, f"self_attn.{source}")


def _indexer(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    for name, shape in (
        ("k_norm", (config.index_dim,)),
        ("k_proj", (config.index_dim, config.hidden)),
        ("q_norm", (config.index_dim,)),
        ("q_proj", (config.kv_heads * config.index_dim, config.hidden)),
    ):
        yield _layer_tensor(layer, f"indexer.{name}", shape, f"self_attn.index_{name}")


def _dense_layer(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    yield _layer_tensor(layer, "attn_norm", (config.hidden,), "input_layernorm")
    yield _layer_tensor(layer, "ffn_down", (config.hidden, config.dense_ff), "mlp.down_proj")
    yield _layer_tensor(layer, "ffn_gate", (config.dense_ff, config.hidden), "mlp.gate_proj")
    yield _layer_tensor(layer, "ffn_up", (config.dense_ff, config.hidden), "mlp.up_proj")
    yield _layer_tensor(layer, "ffn_norm", (config.hidden,), "post_attention_layernorm")
    yield from _attention(config, layer)


def _sparse_layer(config: ModelConfig, layer: int) -> Iterator[TensorSpec]:
    moe = f"model.layers.{layer}.block_sparse_moe."
    yield TensorSpec(f"blk.{layer}.exp_probs_b.bias", (config.n_expert,), (moe + "e_score_correction_bias",))
    yield TensorSpec(f"blk.{layer}.ffn_gate_inp.weight", (config.n_expert, config.hidden), (moe + "gate.weight",))
    yield _layer_tensor(layer, "attn_norm", (config.hidden,), "input_layernorm")
    yield _layer_tensor(layer, "ffn_norm", (config.hidden,), "post_attention_layernorm")
    yield from _indexer(config, layer)
    yield from _attention(config, layer)
    for name, source, shape in (
        ("ffn_gate_exps", "w1", (config.expert_ff, config.hidden)),
        ("ffn_down_exps", "w2", (config.hidden, config.expert_ff)),
        ("ffn_up_exps", "w3", (config.expert_ff, config.hidden)),
    ):
        sources = tuple(f"{moe}experts.{e}.{source}.weight" for e in range(config.n_expert))
        yield TensorSpec(f"blk.{layer}.{name}.weight", (config.n_expert, *shape), sources)
    for name, shape in (
        ("down", (config.hidden, config.shared_ff)),
        ("gate", (config.shared_ff, config.hidden)),
        ("up", (config.shared_ff, config.hidden)),
    ):
        yield _layer_tensor(layer, f"ffn_{name}_shexp", shape, f"block_sparse_moe.shared_experts.{name}_proj")


def _layer_tensor(layer: int, name: str, shape: tuple[int, ...], source: str) -> TensorSpec:
    return TensorSpec(
        name=f"blk.{layer}.{name}.weight",
        shape=shape,
        sources=(f"model.layers.{layer}.{source}.weight",),
        plus_one=name.endswith("norm"),
    )
