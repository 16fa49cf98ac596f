"""config.json of a MiniMax-M3 checkpoint, and the refusal of what a GGUF file cannot express.

The file is read as JSON, not through `transformers`, whose configuration class drops or renames some of its fields.
A GGUF file of this architecture has no place for the constants of the activation, for the score type of the indexer,
or for a plan in which the MoE layers and the sparse layers differ: a checkpoint that says otherwise is refused by name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from m3_convert.json_file import read_object
from m3_runtime.errors import InputError
from m3_runtime.limits import (
    BLOCK_SIZES,
    MAX_DIM,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_TOP_K,
    MAX_VOCAB,
)

ARCHITECTURES = (
    "MiniMaxM3SparseForConditionalGeneration",
    "MiniMaxM3SparseForCausalLM",
    "MiniMaxM3VLForConditionalGeneration",
)

# What the architecture fixes and the file does not hold. A field that is absent has this value in the reference
# implementation (transformers 5.24, `minimax_m3_vl`).
TEXT_CONSTANTS: Mapping[str, bool | int | float | str] = {
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "attention_output_gate": False,
    "tie_word_embeddings": False,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "hidden_act": "swigluoai",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
SPARSE_CONSTANTS: Mapping[str, bool | int | float | str] = {
    "use_sparse_attention": True,
    "sparse_score_type": "max",
    "sparse_init_block": 0,
}


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of the text model: widths in elements, `top_k` and `local_blocks` in blocks, `block_size` tokens."""

    n_layer: int
    n_dense: int  #: leading layers with full attention and a dense MLP; all others are sparse and MoE
    hidden: int
    heads: int
    kv_heads: int  #: also the number of index heads
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_eps: float
    vocab: int
    context: int
    dense_ff: int
    expert_ff: int
    n_shared: int
    n_expert: int
    n_expert_used: int
    expert_scale: float  #: factor on the routed sum
    index_dim: int
    top_k: int
    block_size: int
    local_blocks: int

    @property
    def shared_ff(self) -> int:
        """Width of the shared experts together."""
        return self.expert_ff * self.n_shared


def load_config(path: Path) -> ModelConfig:
    """Reads and checks config.json. Raises InputError that names the field, what was expected and what was found."""
    return parse_config(read_object(path), str(path))


def parse_config(config: Mapping[str, Any], name: str) -> ModelConfig:
    """The same for the parsed JSON object; `name` stands for the file in messages."""
    text = Section(_text_section(config, name), name)
    _check_architecture(config, text)
    # A multimodal config has this one at its root as well.
    tied = config.get("tie_word_embeddings", False)
    if tied is not False:
        raise text.refuse("tie_word_embeddings", "false (the GGUF has a head of its own)", tied)
    text.check_constants(TEXT_CONSTANTS)
    _check_rope_scaling(text)
    sparse = _sparse_section(text)
    sparse.check_constants(SPARSE_CONSTANTS)
    n_layer = text.integer("num_hidden_layers", 1, MAX_LAYERS)
    n_dense = _leading_dense(text, sparse, n_layer)
    heads = text.integer("num_attention_heads", 1, MAX_HEADS)
    kv_heads = text.integer("num_key_value_heads", 1, MAX_HEADS)
    if heads % kv_heads:
        raise text.refuse("num_attention_heads", f"a multiple of num_key_value_heads {kv_heads}", heads)
    head_dim = text.integer("head_dim", 1, MAX_HEAD_DIM)
    if heads * head_dim > MAX_DIM:
        raise text.refuse("num_attention_heads", f"heads * head_dim of at most {MAX_DIM}", heads * head_dim)
    index_heads = sparse.integer("sparse_num_index_heads", 1, MAX_HEADS)
    if index_heads != kv_heads:
        raise sparse.refuse("sparse_num_index_heads", f"num_key_value_heads {kv_heads}", index_heads)
    index_dim = sparse.integer("sparse_index_dim", 1, MAX_HEAD_DIM)
    top_k = sparse.integer("sparse_topk_blocks", 1, MAX_TOP_K)
    local = sparse.integer("sparse_local_block", 1, MAX_TOP_K)
    if local > top_k:
        raise sparse.refuse("sparse_local_block", f"at most sparse_topk_blocks {top_k}", local)
    block_size = sparse.integer("sparse_block_size", *BLOCK_SIZES)
    if block_size & (block_size - 1):
        raise sparse.refuse("sparse_block_size", "a power of two", block_size)
    n_expert = text.integer("num_local_experts", 1, MAX_EXPERTS)
    result = ModelConfig(
        n_layer=n_layer,
        n_dense=n_dense,
        hidden=text.integer("hidden_size", 1, MAX_DIM),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=_rotary_dim(text, head_dim, index_dim),
        rope_theta=text.positive("rope_theta"),
        rms_eps=text.positive("rms_norm_eps"),
        vocab=text.integer("vocab_size", 1, MAX_VOCAB),
        context=text.integer("max_position_embeddings", 1, 2**31 - 1),
        dense_ff=text.integer("dense_intermediate_size", 1, MAX_DIM),
        expert_ff=text.integer("intermediate_size", 1, MAX_DIM),
        n_shared=text.integer("n_shared_experts", 1, MAX_EXPERTS),
        n_expert=n_expert,
        n_expert_used=text.integer("num_experts_per_tok", 1, n_expert),
        expert_scale=text.positive("routed_scaling_factor"),
        index_dim=index_dim,
        top_k=top_k,
        block_size=block_size,
        local_blocks=local,
    )
    shared = text.integer("shared_intermediate_size", 1, MAX_DIM)
    if shared != result.shared_ff:
        raise text.refuse(
            "shared_intermediate_size", f"intermediate_size * n_shared_experts = {result.shared_ff}", shared
        )
    return result


class Section:
    """One object of config.json with checked access."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values = values
        self.name = name

    def refuse(self, key: str, expected: str, found: object) -> InputError:
        return InputError(f"{self.name}: {key}: expected {expected}, found {_shown(found)}")

    def _get(self, key: str, expected: str) -> object:
        if key not in self.values:
            raise InputError(f"{self.name}: {key} is missing, expected {expected}")
        return self.values[key]

    def integer(self, key: str, low: int, high: int) -> int:
        expected = f"an integer from {low} to {high}"
        value = self._get(key, expected)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.refuse(key, expected, value)
        return value

    def positive(self, key: str) -> float:
        expected = "a positive number that float32 holds"
        value = self._get(key, expected)
        if not is_number(value) or not 2.0**-126 <= value < 2.0**128:
            raise self.refuse(key, expected, value)
        return float(value)

    def check_constants(self, constants: Mapping[str, bool | int | float | str]) -> None:
        for key, expected in constants.items():
            found = self.values.get(key, expected)
            same_kind = isinstance(found, bool) == isinstance(expected, bool)
            if not same_kind or found != expected:
                raise self.refuse(key, f"{_shown(expected)} (a GGUF of this architecture holds no other)", found)

    def flags(self, key: str, n: int) -> list[bool]:
        expected = f"a list of {n} times 0 or 1, one for each layer"
        value = self._get(key, expected)
        if not isinstance(value, list) or len(value) != n or not all(v in (0, 1) for v in value):
            raise self.refuse(key, expected, value)
        return [bool(v) for v in value]


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: object) -> str:
    text = {True: "true", False: "false"}.get(value, repr(value)) if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _text_section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise InputError(f"{name}: text_config: expected an object, found {_shown(text)}")
    return text


def _check_architecture(config: Mapping[str, Any], text: Section) -> None:
    found = config.get("architectures", text.values.get("architectures"))
    if not isinstance(found, list) or not any(name in ARCHITECTURES for name in found if isinstance(name, str)):
        raise text.refuse("architectures", f"one of {', '.join(ARCHITECTURES)}", found)


def _sparse_section(text: Section) -> Section:
    key = "sparse_attention_config"
    values = text.values.get(key)
    if not isinstance(values, dict):
        raise text.refuse(key, "an object (a GGUF without an indexer cannot run)", values)
    return Section(values, f"{text.name}: {key}")


def _check_rope_scaling(text: Section) -> None:
    for key in ("rope_scaling", "rope_parameters"):
        value = text.values.get(key)
        if value is None:
            continue
        kind = value.get("rope_type", value.get("type")) if isinstance(value, dict) else value
        if kind not in (None, "default", "none") or not isinstance(value, dict):
            raise text.refuse(key, "no scaling (this architecture has none)", value)
        theta = value.get("rope_theta", text.values.get("rope_theta"))
        if theta != text.values.get("rope_theta", theta):
            raise text.refuse(f"{key}.rope_theta", f"rope_theta {_shown(text.values['rope_theta'])}", theta)


def _rotary_dim(text: Section, head_dim: int, index_dim: int) -> int:
    rotary = text.integer("rotary_dim", 2, MAX_HEAD_DIM)
    factor = text.values.get("partial_rotary_factor")
    if factor is not None and (not is_number(factor) or round(factor * head_dim) != rotary):
        raise text.refuse("partial_rotary_factor", f"rotary_dim / head_dim = {rotary}/{head_dim}", factor)
    if rotary % 2 or rotary > head_dim:
        raise text.refuse("rotary_dim", f"an even number up to head_dim {head_dim}", rotary)
    if rotary > index_dim:
        raise text.refuse("rotary_dim", f"at most sparse_index_dim {index_dim}", rotary)
    return rotary


def _leading_dense(text: Section, sparse: Section, n_layer: int) -> int:
    """Number of leading dense layers. Readers of the file take every layer after them as MoE and sparse."""
    moe = text.flags("moe_layer_freq", n_layer)
    n_dense = moe.index(True) if True in moe else n_layer
    if not all(moe[n_dense:]):
        layer = n_dense + moe[n_dense:].index(False)
        raise text.refuse("moe_layer_freq", "dense layers only before the first MoE layer", f"layer {layer} dense")
    # Absent, the sparse plan is that of moe_layer_freq, and the indexer tensors of every MoE layer must be there.
    if sparse.values.get("sparse_attention_freq") is not None:
        _check_plan(sparse, "sparse_attention_freq", sparse.flags("sparse_attention_freq", n_layer), moe)
    if text.values.get("layer_types") is not None:
        _check_plan(text, "layer_types", _layer_types(text, n_layer), moe)
    if n_dense == n_layer:
        raise text.refuse("moe_layer_freq", "at least one MoE layer with sparse attention", "none")
    if sparse.values.get("sparse_disable_index_value") is not None:
        disabled = sparse.flags("sparse_disable_index_value", n_layer)
        if not all(disabled[n_dense:]):
            layer = n_dense + disabled[n_dense:].index(False)
            raise sparse.refuse("sparse_disable_index_value", "1 in every sparse layer", f"0 in layer {layer}")
    return n_dense


def _check_plan(section: Section, key: str, sparse: list[bool], moe: list[bool]) -> None:
    for layer, (is_sparse, is_moe) in enumerate(zip(sparse, moe, strict=True)):
        if is_sparse != is_moe:
            raise section.refuse(
                key,
                "sparse attention in exactly the MoE layers (a GGUF has one plan for both)",
                f"layer {layer} {'MoE' if is_moe else 'dense'} with {'sparse' if is_sparse else 'full'} attention",
            )


def _layer_types(text: Section, n_layer: int) -> list[bool]:
    value = text.values["layer_types"]
    if not isinstance(value, list) or len(value) != n_layer or not all(isinstance(v, str) for v in value):
        raise text.refuse("layer_types", f"a list of {n_layer} names", value)
    return ["sparse" in v for v in value]
