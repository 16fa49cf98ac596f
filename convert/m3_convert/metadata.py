"""The metadata keys of the GGUF file: those that llama.cpp's converter writes for this architecture, in its order, then
`tokenizer.huggingface.json` and, under `m3.`, how the types were chosen. Readers pass over keys they do not know.
Those of a GGUF file that is converted once more are carried over, but for the ones that tell of its types.

    m3.recipe_name, m3.recipe, m3.recipe_sha256   name and text of the recipe, SHA-256 of that text
    m3.rules                                      each --rule as PATTERN=TYPE, in order; they go before the recipe
    m3.indexer_lossy                              true: index projections were rounded under --allow-lossy-indexer
    m3.requantized                                true: tensors were rounded twice under --allow-requantize
    m3.dequantized                                TENSOR=TYPE for each that holds values of a type below Q8_0 in F32,
                                                  F16, BF16 or Q8_0: a later conversion treats it as if it had that type
    m3.split.id                                   in each of several files: see `split`
"""

import dataclasses
import struct
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import gguf
from gguf import GGUFValueType, GGUFWriter
from gguf.gguf_writer import GGUFValue

from m3_convert.checkpoint import Checkpoint
from m3_convert.config import ModelConfig
from m3_convert.gguf_source import DEQUANTIZED, LOSSY_INDEXER, REQUANTIZED, GgufSource
from m3_convert.json_file import read_object
from m3_convert.plan import Plan
from m3_convert.vocabulary import Vocabulary, load_vocabulary
from m3_runtime.errors import InputError

ARCHITECTURE: Final = "minimax-m3"
PRE_TOKENIZER: Final = "minimax-m2"  #: llama.cpp's name for the pattern that M2 and M3 share

U32, F32, BOOL = GGUFValueType.UINT32, GGUFValueType.FLOAT32, GGUFValueType.BOOL

#: Key to value with its GGUF type, in the order of the file.
Metadata = Mapping[str, GGUFValue]

_RECIPE_NAME, _RECIPE, _RECIPE_SHA256, _RULES = "m3.recipe_name", "m3.recipe", "m3.recipe_sha256", "m3.rules"
_IMATRIX_FILE, _IMATRIX_DATASET = "quantize.imatrix.file", "quantize.imatrix.dataset"
_IMATRIX_ENTRIES, _IMATRIX_CHUNKS = "quantize.imatrix.entries_count", "quantize.imatrix.chunks_count"

# What a conversion decides anew; the plan knows what the source says of losses.
_CHOICE_KEYS: Final = frozenset(
    (
        _RECIPE_NAME,
        _RECIPE,
        _RECIPE_SHA256,
        _RULES,
        LOSSY_INDEXER,
        REQUANTIZED,
        DEQUANTIZED,
        _IMATRIX_FILE,
        _IMATRIX_DATASET,
        _IMATRIX_ENTRIES,
        _IMATRIX_CHUNKS,
    )
)


def plan_metadata(plan: Plan) -> tuple[Metadata, tuple[str, ...]]:
    """All keys of the file, and warnings. Raises InputError for values that GGUF cannot hold, and for broken files of a
    checkpoint folder."""
    if isinstance(plan.source, GgufSource):
        return carried_metadata(plan, plan.source), ()
    vocabulary = load_vocabulary(plan.source.folder, plan.source.config)
    return build_metadata(plan, plan.source, vocabulary), vocabulary.warnings


def template_notes(metadata: Metadata) -> tuple[str, ...]:
    """What there is to say of a file without a chat template."""
    if gguf.Keys.Tokenizer.CHAT_TEMPLATE in metadata:
        return ()
    return ("the source has no chat template, and the file will have none: m3-run takes it with --raw only",)


def carried_metadata(plan: Plan, source: GgufSource) -> Metadata:
    """The keys of a GGUF file, with those that tell of its types made anew if any of them changes."""
    if plan.keeps_bytes:
        lossy = {LOSSY_INDEXER: GGUFValue(True, BOOL)} if plan.lossy_indexer else {}
        return MappingProxyType({**source.metadata, **lossy})
    writer = GGUFWriter(None, ARCHITECTURE)
    for key, value in source.metadata.items():
        if key not in _CHOICE_KEYS:
            writer.kv_data[0][key] = value
    for key, number in (("file_type", plan.file_type), ("quantization_version", gguf.GGML_QUANT_VERSION)):
        writer.kv_data[0][f"general.{key}"] = GGUFValue(number, U32)  # where it stood, if it did
    _add_choice(writer, plan)
    (metadata,) = writer.kv_data
    check_values(metadata)
    return MappingProxyType(metadata)


def build_metadata(plan: Plan, checkpoint: Checkpoint, vocabulary: Vocabulary) -> Metadata:
    """All keys of a file made from a checkpoint. Raises InputError as `plan_metadata` does."""
    # A writer without a file: the key table of the library is what is wanted, so that names and types are its own.
    writer = GGUFWriter(None, ARCHITECTURE)
    writer.add_type(gguf.GGUFType.MODEL)
    add_general(writer, plan, checkpoint)
    for key, value, kind in _model_keys(checkpoint.config, plan.file_type):
        writer.add_key_value(key if key.startswith("general.") else f"{ARCHITECTURE}.{key}", value, kind)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_vocabulary(writer, vocabulary)
    _add_choice(writer, plan)
    (metadata,) = writer.kv_data
    check_values(metadata)
    return MappingProxyType(metadata)


def _model_keys(config: ModelConfig, file_type: int) -> list[tuple[str, Any, GGUFValueType]]:
    return [
        ("block_count", config.n_layer, U32),
        ("context_length", config.context, U32),
        ("embedding_length", config.hidden, U32),
        ("feed_forward_length", config.dense_ff, U32),
        ("attention.head_count", config.heads, U32),
        ("attention.head_count_kv", config.kv_heads, U32),
        ("rope.freq_base", config.rope_theta, F32),
        ("attention.layer_norm_rms_epsilon", config.rms_eps, F32),
        ("expert_count", config.n_expert, U32),
        ("expert_used_count", config.n_expert_used, U32),
        ("expert_gating_func", int(gguf.ExpertGatingFuncType.SIGMOID), U32),
        ("attention.key_length", config.head_dim, U32),
        ("attention.value_length", config.head_dim, U32),
        ("general.file_type", file_type, U32),
        ("expert_feed_forward_length", config.expert_ff, U32),
        ("rope.dimension_count", config.rotary_dim, U32),
        ("expert_shared_count", config.n_shared, U32),
        ("expert_weights_scale", config.expert_scale, F32),
        ("expert_weights_norm", True, BOOL),
        ("attention.indexer.head_count", config.kv_heads, U32),
        ("attention.indexer.key_length", config.index_dim, U32),
        ("attention.indexer.top_k", config.top_k, U32),
        ("attention.indexer.block_size", config.block_size, U32),
        ("attention.indexer.local_blocks", config.local_blocks, U32),
        ("leading_dense_block_count", config.n_dense, U32),
    ]


def add_general(writer: GGUFWriter, plan: Plan, checkpoint: Checkpoint) -> None:
    """Sampling, name, size label and what the model card says: the rules of the gguf library, shared with llama.cpp."""
    folder = checkpoint.folder
    config = read_object(folder / "config.json")
    if (folder / "generation_config.json").exists():
        read_object(folder / "generation_config.json")  # the library would pass over a broken one
    counts = parameter_counts(plan)
    try:
        card = gguf.Metadata.load_model_card(folder)
        # The name alone stands for the folder: that of a Hub download is a commit hash.
        name = Path(checkpoint.name.rpartition("/")[2])
        general = gguf.Metadata.apply_metadata_heuristic(gguf.Metadata(), card, config, name, counts[0])
        sampling = gguf.Metadata.load(model_path=folder)
    except Exception as error:  # a model card is YAML of any shape, and the library checks little of it
        raise InputError(
            f"{folder / 'README.md'}: model card cannot be read: {type(error).__name__}: {error}"
        ) from error
    for item in dataclasses.fields(general):
        if item.name.startswith("sampling_"):
            setattr(general, item.name, getattr(sampling, item.name))
    general.name = general.name or checkpoint.name
    general.size_label = general.size_label or gguf.size_label(*counts)
    general.set_gguf_meta_model(writer)


def parameter_counts(plan: Plan) -> tuple[int, int, int, int]:
    """Parameters in all, outside the experts, of one expert, and the number of experts."""
    total = shared = expert = experts = 0
    for tensor in plan.tensors:
        elements = prod(tensor.shape)
        total += elements
        if tensor.stacked:
            experts = tensor.shape[0]
            expert += elements // experts
        else:
            shared += elements
    return total, shared, expert, experts


def _add_choice(writer: GGUFWriter, plan: Plan) -> None:
    recipe = plan.choice.recipe
    if recipe:
        writer.add_string(_RECIPE_NAME, recipe.name)
        writer.add_string(_RECIPE, recipe.text)
        writer.add_string(_RECIPE_SHA256, recipe.sha256)
    if plan.choice.rules:
        writer.add_array(_RULES, [str(rule) for rule in plan.choice.rules])
    if plan.lossy_indexer:
        writer.add_bool(LOSSY_INDEXER, True)
    if plan.requantized:
        writer.add_bool(REQUANTIZED, True)
    if plan.dequantized:
        writer.add_array(DEQUANTIZED, [f"{name}={type_}" for name, type_ in plan.dequantized.items()])
    if (matrix := plan.importance) is not None:  # keys of llama.cpp
        writer.add_string(_IMATRIX_FILE, Path(matrix.name).name)
        writer.add_string(_IMATRIX_DATASET, ", ".join(matrix.datasets))
        writer.add_uint32(_IMATRIX_ENTRIES, len(matrix.entries))
        writer.add_uint32(_IMATRIX_CHUNKS, matrix.chunk_count)


def _add_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.token_types)
    writer.add_token_merges(vocabulary.merges)
    add_id: dict[str, Callable[[int], None]] = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "unk": writer.add_unk_token_id,
        "sep": writer.add_sep_token_id,
        "pad": writer.add_pad_token_id,
        "mask": writer.add_mask_token_id,
        "eot": writer.add_eot_token_id,
        "eom": writer.add_eom_token_id,
    }
    for kind, token_id in vocabulary.special_ids.items():
        if kind in add_id:  # "cls" has no key
            add_id[kind](token_id)
    add_flag: dict[str, Callable[[bool], None]] = {
        "bos": writer.add_add_bos_token,
        "eos": writer.add_add_eos_token,
        "sep": writer.add_add_sep_token,
    }
    for kind, flag in vocabulary.add_flags.items():
        if kind in add_flag:
            add_flag[kind](flag)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)
        names = writer.kv_data[0].get(gguf.Keys.Tokenizer.CHAT_TEMPLATES)
        if names is not None:  # the library lists them in the order of a set, which changes from run to run
            names.value.sort()
    writer.add_string(gguf.Keys.Tokenizer.HF_JSON, vocabulary.tokenizer_json)


_RANGES = {U32: "I", GGUFValueType.INT32: "i", F32: "f"}


def check_values(metadata: Mapping[str, GGUFValue]) -> None:
    """Numbers come from JSON files of the checkpoint as well; the library would fail on them without the key's name."""
    for key, value in metadata.items():
        code = _RANGES.get(value.type)
        if code is None:
            continue
        try:
            struct.pack(f"<{code}", value.value)
        except (struct.error, OverflowError, TypeError) as error:
            raise InputError(f"metadata {key}: expected {value.type.name}, found {value.value!r}: {error}") from error
