"""Makes a small random MiniMax-M3 checkpoint in the layout of the release: `python tests/make_checkpoint.py OUT`.

Names, dtypes, field order of config.json, tokenizer and chat format are those of MiniMaxAI/MiniMax-M3 (with
`--mxfp8` those of its MXFP8 release); every constant that the release fixes keeps its value, every dimension is an
option. The result depends on the options only.

The scales are chosen so that a test can see every part of the model: activations stay near 1, attention logits have a
standard deviation near 2, about one feed-forward lane in 200 reaches the SwiGLU clamp, the router's bias changes its
choice, and norms are clearly not 1.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from checkpoint_tensors import Order, Tensor, make_tensors, write_json, write_shards

HERE = Path(__file__).resolve().parent
TEXT = HERE.parent / "convert" / "m3_convert" / "text.txt"

# Named tokens at the top of the vocabulary, in the release's id order (200000 + i there).
# fmt: off
SPECIAL_TOKENS = (
    "]!p~[", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<reponame>", "<filename>", "<gh_stars>",
    "<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>", "<jupyter_code>",
    "<jupyter_output>", "<empty_output>", "<commit_before>", "<commit_msg>", "<commit_after>", "]~b]", "[e~[",
    "]!d~[", "<function_call>", "<code_interpreter>", "]<]speech[>[", "]<]image[>[", "]<]video[>[",
    "]<]start of speech[>[", "]<]end of speech[>[", "]<]start of image[>[", "]<]end of image[>[",
    "]<]start of video[>[", "]<]end of video[>[", "]<]vision pad[>[", "]~!b[", "<jupyter_error>", "<add_file>",
    "<delete_file>", "<rename_file>", "<edit_file>", "<commit_message>", "<empty_source_file>", "<repo_struct>",
    "<code_context>", "<file_content>", "<source_files>", "<pr_start>", "<review_comment>", "<filepath>",
    "<file_sep>", "<think>", "</think>", "<tool_call>", "</tool_call>", "]<]frame[>[", "]<]start of frame[>[",
    "]<]end of frame[>[", "<|content_altered_placeholder|>", "]<]minimax[>[", "<mm:think>", "</mm:think>",
)
# fmt: on
# Visible in decoded text: added tokens that are not "special" (GGUF token type 4 instead of 3).
VISIBLE_TOKENS = frozenset(
    ("<think>", "</think>", "<tool_call>", "</tool_call>", "]<]minimax[>[", "<mm:think>", "</mm:think>")
)
TOP_IDS = 64  #: ids after the byte-pair vocabulary: the named tokens and three that no token has

_WORD_END = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PRE_TOKENIZER_PATTERN = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _WORD_END,
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _WORD_END,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """What to make. Widths in elements, `top_k` and `local` in blocks, `shard_mb` in 10^6 bytes.

    Raises ValueError for dimensions that no M3-shaped model has.
    """

    layers: int = 5
    dense: int = 2  #: leading layers with full attention and a dense MLP
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4  #: also the number of index heads
    head_dim: int = 128
    rotary: int = 64
    index_dim: int = 128
    experts: int = 8
    top: int = 4  #: experts per token
    inter: int = 128  #: width of a routed expert
    shared_inter: int = 128
    dense_inter: int = 512
    vocab: int = 1024
    block: int = 128
    top_k: int = 3
    local: int = 1
    context: int = 1048576
    theta: float = 5e6
    vit_hidden: int = 80  #: a multiple of the vision head size, 80
    vit_layers: int = 3
    mxfp8: bool = False  #: text linears as E4M3 with one scale byte per 32 columns
    mxfp8_skip: str = ""  #: with mxfp8, names that contain this stay BF16
    shard_mb: float = 8.0
    seed: int = 7
    prefix: bool = True  #: text tensors start with "language_model."
    vision: bool = True  #: with a vision part
    tie: bool = False  #: index_q_proj is zero: all block scores are equal
    order: Order = "sequential"  #: of tensors over shards

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.rotary > min(self.head_dim, self.index_dim) or self.rotary % 2:
            raise ValueError(f"rotary {self.rotary} is odd or above head_dim or index_dim")
        if not 0 <= self.dense < self.layers:
            raise ValueError(f"dense {self.dense} is not below layers {self.layers}")
        if self.top > self.experts:
            raise ValueError(f"top {self.top} is above experts {self.experts}")
        if self.vit_hidden % 80:
            raise ValueError(f"vit_hidden {self.vit_hidden} is not a multiple of 80")
        if self.vocab < 256 + TOP_IDS:
            raise ValueError(f"vocab {self.vocab} is below {256 + TOP_IDS}, the bytes and the named tokens")

    @property
    def first_special(self) -> int:
        """Id of the first named token."""
        return self.vocab - TOP_IDS


def make_config(spec: CheckpointSpec) -> dict[str, Any]:
    """config.json, fields in the release's order."""
    per_layer = [0] * spec.dense + [1] * (spec.layers - spec.dense)
    text: dict[str, Any] = {
        "hidden_size": spec.hidden,
        "intermediate_size": spec.inter,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.context,
        "rms_norm_eps": 1e-06,
        "use_gemma_norm": True,
        "attention_output_gate": False,
        "rope_theta": int(spec.theta) if spec.theta == int(spec.theta) else spec.theta,
        "rotary_dim": spec.rotary,
        "partial_rotary_factor": spec.rotary / spec.head_dim,
        "hidden_act": "swigluoai",
        "use_qk_norm": True,
        "tie_word_embeddings": False,
        "dense_intermediate_size": spec.dense_inter,
        "shared_intermediate_size": spec.shared_inter,
        "num_local_experts": spec.experts,
        "num_experts_per_tok": spec.top,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "moe_layer_freq": per_layer,
        "qk_norm_type": "per_head",
        "num_mtp_modules": 7,
        "num_nextn_predict_layers": 1,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "routed_scaling_factor": 2.0,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": spec.index_dim,
            "sparse_num_index_heads": spec.kv_heads,
            "sparse_topk_blocks": spec.top_k,
            "sparse_block_size": spec.block,
            "sparse_disable_index_value": per_layer,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": spec.local,
            "sparse_attention_freq": per_layer,
        },
        "architectures": ["MiniMaxM3SparseForCausalLM"],
    }
    if spec.mxfp8:
        text = {"dtype": "bfloat16", **text, "num_mtp_modules": 1}
        del text["num_nextn_predict_layers"]
    compression = {"image_token_compression_method": "patch_merge", "spatial_merge_size": 2, "temporal_patch_size": 2}
    vision = {
        "hidden_size": spec.vit_hidden,
        "num_attention_heads": spec.vit_hidden // 80,
        "num_hidden_layers": spec.vit_layers,
        "intermediate_size": 4 * spec.vit_hidden,
        "patch_size": 14,
        "image_size": 2016,
        "projection_dim": spec.hidden,
        "position_embedding_type": "rope",
        "rope_mode": "3d",
        "rope_theta": 10000.0,
        "attention_dropout": 0.0,
        "hidden_act": "gelu",
        "initializer_factor": 1.0,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-05,
        "model_type": "clip_vision_model",
        "num_channels": 3,
        "vocab_size": 32000,
        "img_token_compression_config": compression,
        "vision_segment_max_frames": 4,
    }
    sides = range(336, 2017, 336)
    config: dict[str, Any] = {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "text_config": text,
        "vision_config": vision,
        "img_token_compression_config": compression,
        "image_grid_pinpoints": str([(height, width) for height in sides for width in sides]),
        "image_seq_length": 576,
        "image_token_index": spec.first_special + SPECIAL_TOKENS.index("]<]image[>["),
        "video_token_index": spec.first_special + SPECIAL_TOKENS.index("]<]video[>["),
        "multimodal_projector_bias": True,
        "num_reward_heads": 0,
        "process_image_mode": "dynamic_res",
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.52.4",
        "projector_hidden_size": spec.hidden,
    }
    if spec.mxfp8:
        # The release's list lacks the "language_model." prefix of all but the routers, and is kept so.
        routers = [f"language_model.model.layers.{i}.block_sparse_moe.gate" for i in range(spec.dense, spec.layers)]
        unquantized = ["lm_head", "model.embed_tokens", "vision_tower", "multi_modal_projector", "patch_merge_mlp"]
        config["quantization_config"] = {
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, 32],
            "ignored_layers": unquantized + sorted(routers),
        }
    return config


def make_tokenizer(spec: CheckpointSpec) -> Tokenizer:
    """Byte-level BPE with M3's pre-tokenizer, trained on m3_convert's own text, and the named tokens above it.

    Raises ValueError if the text is too short for the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.first_special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT.read_text(encoding="utf-8")], trainer)
    if tokenizer.get_vocab_size() != spec.first_special:
        limit = tokenizer.get_vocab_size() + TOP_IDS
        raise ValueError(f"vocab {spec.vocab} is more than the text of the tokenizer gives, at most {limit}")
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=token not in VISIBLE_TOKENS) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def _tokenizer_config(spec: CheckpointSpec) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        str(spec.first_special + i): {"content": token, **flags, "special": token not in VISIBLE_TOKENS}
        for i, token in enumerate(SPECIAL_TOKENS)
    }
    return {
        "added_tokens_decoder": added,
        "add_prefix_space": False,
        "bos_token": "]~!b[",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[e~[",
        "unk_token": "]!d~[",
        "model_max_length": 40960000,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


@dataclass(frozen=True)
class Sampling:
    """How generation_config.json says replies are drawn; the release's numbers by default."""

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 40


def _generation_config(spec: CheckpointSpec, sampling: Sampling) -> dict[str, Any]:
    return {
        # Not the bos_token of tokenizer_config.json: the release has the same contradiction.
        "bos_token_id": spec.first_special + SPECIAL_TOKENS.index("]~b]"),
        "do_sample": True,
        "eos_token_id": spec.first_special + SPECIAL_TOKENS.index("[e~["),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "transformers_version": "4.46.1",
    }


PREPROCESSOR_CONFIG = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": [672, 672],
    "resample": 3,
    "image_processor_type": "MiniMaxM3VLImageProcessor",
    "processor_class": "MiniMaxM3VLProcessor",
}


@dataclass(frozen=True)
class CheckpointParts:
    """What a checkpoint is made of besides its dimensions.

    tokenizer: the text of tokenizer.json; tensors: all that `make_tensors` names; template: the text of
    chat_template.jinja.
    """

    tokenizer: str
    tensors: dict[str, Tensor]
    template: str
    sampling: Sampling = Sampling()


def write_checkpoint(out: Path, spec: CheckpointSpec, parts: CheckpointParts) -> None:
    """Writes a whole checkpoint into the folder `out`, made if absent; shards of an earlier one are removed."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.safetensors"):
        old.unlink()
    write_json(out / "config.json", make_config(spec))
    write_json(out / "generation_config.json", _generation_config(spec, parts.sampling))
    (out / "tokenizer.json").write_text(parts.tokenizer, encoding="utf-8")
    write_json(out / "tokenizer_config.json", _tokenizer_config(spec))
    (out / "chat_template.jinja").write_text(parts.template, encoding="utf-8")
    if spec.vision:
        write_json(out / "preprocessor_config.json", PREPROCESSOR_CONFIG)
    write_shards(out, parts.tensors, spec.shard_mb, spec.order)


def make_checkpoint(out: Path, spec: CheckpointSpec | None = None) -> None:
    """`write_checkpoint` with random weights and a tokenizer made for it."""
    spec = spec or CheckpointSpec()
    template = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
    parts = CheckpointParts(make_tokenizer(spec).to_str(pretty=True), make_tensors(spec), template)
    write_checkpoint(out, spec, parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the command line, makes the checkpoint, prints one line; 2 for options that make no model."""
    parser = argparse.ArgumentParser(description="Makes a small MiniMax-M3 checkpoint with random weights.")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the checkpoint")
    for field in dataclasses.fields(CheckpointSpec):
        option = "--" + field.name.replace("_", "-")
        if field.type is bool:
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=field.default)
        elif field.type == Order:
            parser.add_argument(option, choices=get_args(Order), default=field.default)
        else:
            parser.add_argument(option, type=type(field.default), default=field.default, help=f"({field.default})")
    options = vars(parser.parse_args(arguments))
    out: Path = options.pop("out")
    try:
        make_checkpoint(out, CheckpointSpec(**options))
    except ValueError as error:
        print(f"make_checkpoint: {error}", file=sys.stderr)
        return 2
    shards = sorted(out.glob("*.safetensors"))
    print(f"{out}: {len(shards)} shards, {sum(path.stat().st_size for path in shards) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
