"""config.json: dimensions as they stand, and refusal of what a GGUF of this architecture cannot express."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from m3_convert.config import TEXT_CONSTANTS, ModelConfig, parse_config
from m3_runtime.errors import InputError
from make_checkpoint import make_config

Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def config(small) -> dict[str, Any]:
    return make_config(small)


def text(**fields: Any) -> Change:
    return lambda c: c["text_config"].update(fields)


def sparse(**fields: Any) -> Change:
    return lambda c: c["text_config"]["sparse_attention_config"].update(fields)


def without(key: str, section: str = "text") -> Change:
    def change(c: dict[str, Any]) -> None:
        values = c["text_config"] if section == "text" else c["text_config"]["sparse_attention_config"]
        del values[key]

    return change


def test_dimensions_come_from_the_file(config) -> None:
    assert parse_config(config, "config.json") == ModelConfig(
        n_layer=3,
        n_dense=1,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=32,
        rotary_dim=16,
        rope_theta=5e6,
        rms_eps=1e-6,
        vocab=512,
        context=1048576,
        dense_ff=96,
        expert_ff=32,
        n_shared=1,
        n_expert=4,
        n_expert_used=2,
        expert_scale=2.0,
        index_dim=48,
        top_k=3,
        block_size=16,
        local_blocks=2,
    )


def test_a_text_only_config_has_its_fields_at_the_root(config) -> None:
    expected = parse_config(config, "config.json")
    root = {**config["text_config"], "architectures": ["MiniMaxM3SparseForCausalLM"]}
    assert parse_config(root, "config.json") == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # constants of the activation
        (text(swiglu_alpha=1.0), "swiglu_alpha: expected 1.702 .*, found 1.0"),
        (text(swiglu_limit=8.0), "swiglu_limit: expected 7.0 .*, found 8.0"),
        (text(swiglu_limit=None), "swiglu_limit: expected 7.0 .*, found None"),
        (text(hidden_act="silu"), "hidden_act: expected 'swigluoai'"),
        # norms, attention, head
        (text(use_gemma_norm=False), "use_gemma_norm: expected true .*, found false"),
        (text(use_qk_norm=False), "use_qk_norm: expected true"),
        (text(qk_norm_type="per_layer"), "qk_norm_type: expected 'per_head'"),
        (text(attention_output_gate=True), "attention_output_gate: expected false"),
        (text(tie_word_embeddings=True), "tie_word_embeddings: expected false"),
        (lambda c: c.update(tie_word_embeddings=True), "tie_word_embeddings: expected false"),
        (text(rope_scaling={"rope_type": "yarn", "factor": 4}), "rope_scaling: expected no scaling"),
        (text(rope_parameters={"rope_type": "linear", "factor": 2}), "rope_parameters: expected no scaling"),
        (text(rope_parameters={"rope_type": "default", "rope_theta": 1e4}), "rope_theta: expected rope_theta 5000000"),
        (text(partial_rotary_factor=0.25), "partial_rotary_factor: expected rotary_dim / head_dim = 16/32, found 0.25"),
        (text(rotary_dim=15, partial_rotary_factor=None), "rotary_dim: expected an even number up to head_dim 32"),
        (text(rotary_dim=64, partial_rotary_factor=2.0), "rotary_dim: expected an even number up to head_dim 32"),
        (sparse(sparse_index_dim=8), "rotary_dim: expected at most sparse_index_dim 8, found 16"),
        (text(num_attention_heads=5), "num_attention_heads: expected a multiple of num_key_value_heads 2, found 5"),
        (
            text(num_attention_heads=1024, head_dim=1024),
            "num_attention_heads: expected heads . head_dim of at most|rotary",
        ),
        # router and experts
        (text(scoring_func="softmax"), "scoring_func: expected 'sigmoid'"),
        (text(use_routing_bias=False), "use_routing_bias: expected true"),
        (text(num_experts_per_tok=5), "num_experts_per_tok: expected an integer from 1 to 4, found 5"),
        (text(n_shared_experts=0), "n_shared_experts: expected an integer from 1"),
        (
            text(shared_intermediate_size=48),
            r"shared_intermediate_size: expected intermediate_size \* n_shared_experts = 32",
        ),
        # selection
        (sparse(sparse_score_type="mean"), "sparse_score_type: expected 'max'"),
        (sparse(sparse_init_block=1), "sparse_init_block: expected 0 .*, found 1"),
        (sparse(use_sparse_attention=False), "use_sparse_attention: expected true"),
        (sparse(sparse_num_index_heads=4), "sparse_num_index_heads: expected num_key_value_heads 2, found 4"),
        (sparse(sparse_local_block=4), "sparse_local_block: expected at most sparse_topk_blocks 3, found 4"),
        (sparse(sparse_local_block=0), "sparse_local_block: expected an integer from 1"),
        (sparse(sparse_block_size=48), "sparse_block_size: expected a power of two, found 48"),
        (sparse(sparse_block_size=8), "sparse_block_size: expected an integer from 16 to 1024, found 8"),
        (sparse(sparse_block_size=2048), "sparse_block_size: expected an integer from 16 to 1024, found 2048"),
        (
            sparse(sparse_disable_index_value=[0, 1, 0]),
            "sparse_disable_index_value: expected 1 .*, found '0 in layer 2'",
        ),
        (text(sparse_attention_config=None), "sparse_attention_config: expected an object"),
        # another architecture, other kinds of values
        (lambda c: c.update(architectures=["LlamaForCausalLM"]), r"architectures: expected one of MiniMaxM3.*\['Llama"),
        (lambda c: c.update(architectures="MiniMaxM3SparseForCausalLM"), "architectures: expected one of"),
        (lambda c: c.update(text_config=3), "text_config: expected an object, found 3"),
        (text(hidden_size="64"), "hidden_size: expected an integer from 1 to 1048576, found '64'"),
        (text(hidden_size=64.0), "hidden_size: expected an integer"),
        (text(hidden_size=True), "hidden_size: expected an integer"),
        (text(hidden_size=1 << 40), "hidden_size: expected an integer from 1 to 1048576"),
        (text(vocab_size=0), "vocab_size: expected an integer from 1"),
        (text(rope_theta=-1), "rope_theta: expected a positive number"),
        (text(rms_norm_eps=float("nan")), "rms_norm_eps: expected a positive number"),
        (text(routed_scaling_factor=1e300), "routed_scaling_factor: expected a positive number that float32 holds"),
        (without("hidden_size"), "hidden_size is missing, expected an integer"),
        (without("moe_layer_freq"), "moe_layer_freq is missing"),
        (without("sparse_topk_blocks", "sparse"), "sparse_attention_config: sparse_topk_blocks is missing"),
        (text(moe_layer_freq=[0, 1]), "moe_layer_freq: expected a list of 3 times 0 or 1"),
        (text(moe_layer_freq=[0, 1, 2]), "moe_layer_freq: expected a list of 3 times 0 or 1"),
        (text(moe_layer_freq=[1, 0, 1]), "moe_layer_freq: expected dense layers only before .*, found 'layer 1 dense'"),
    ],
)
def test_refused_by_name(config, change: Change, message: str) -> None:
    change(config)
    with pytest.raises(InputError, match=message) as error:
        parse_config(config, "config.json")
    assert str(error.value).startswith("config.json: ")
    assert "\n" not in str(error.value)


def test_the_plan_of_sparse_layers(config) -> None:
    """Given as a list or left out it is taken; all zero, or other than the MoE plan, it is refused and not guessed."""
    expected = parse_config(config, "config.json")
    plan = config["text_config"]["sparse_attention_config"]
    assert plan["sparse_attention_freq"] == [0, 1, 1]
    del plan["sparse_attention_freq"]
    assert parse_config(config, "config.json") == expected
    plan["sparse_attention_freq"] = [0, 0, 0]
    with pytest.raises(InputError, match=r"sparse_attention_freq: .* found 'layer 1 MoE with full attention'"):
        parse_config(config, "config.json")
    plan["sparse_attention_freq"] = [0, 1, 0]
    with pytest.raises(InputError, match=r"sparse_attention_freq: .* found 'layer 2 MoE with full attention'"):
        parse_config(config, "config.json")
    plan["sparse_attention_freq"] = [1, 1, 1]
    with pytest.raises(InputError, match=r"sparse_attention_freq: .* found 'layer 0 dense with sparse attention'"):
        parse_config(config, "config.json")
    plan["sparse_attention_freq"] = config["text_config"]["moe_layer_freq"] = [0, 0, 0]
    with pytest.raises(InputError, match="moe_layer_freq: expected at least one MoE layer with sparse attention"):
        parse_config(config, "config.json")


def test_layer_types_must_agree(config) -> None:
    config["text_config"]["layer_types"] = ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]
    assert parse_config(config, "config.json").n_dense == 1
    config["text_config"]["layer_types"][2] = "full_attention"
    with pytest.raises(InputError, match=r"layer_types: .* found 'layer 2 MoE with full attention'"):
        parse_config(config, "config.json")
    config["text_config"]["layer_types"] = "sparse"
    with pytest.raises(InputError, match="layer_types: expected a list of 3 names"):
        parse_config(config, "config.json")


@pytest.mark.parametrize(
    "key",
    [*TEXT_CONSTANTS, "partial_rotary_factor"],
)
def test_absent_constants_have_the_value_of_the_architecture(config, key: str) -> None:
    expected = parse_config(config, "config.json")
    del config["text_config"][key]
    assert parse_config(config, "config.json") == expected


def test_the_command_refuses_before_it_writes(make_folder, m3_convert, tmp_path) -> None:
    folder = make_folder(config=text(swiglu_alpha=1.0))
    outcome = m3_convert(folder, tmp_path / "out.gguf")
    assert outcome.code == 2
    assert "swiglu_alpha: expected 1.702" in outcome.error
    assert not list(tmp_path.glob("out.gguf*"))


def test_a_long_value_is_cut_in_the_message(config) -> None:
    config["text_config"]["hidden_size"] = ["x" * 500]
    with pytest.raises(InputError) as error:
        parse_config(json.loads(json.dumps(config)), "config.json")
    assert len(str(error.value)) < 250
