"""Every source tensor is used exactly once, left out by name, or an error."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from checkpoint_tensors import Tensor, make_tensors
from m3_convert.checkpoint import load_checkpoint
from m3_convert.plan import Plan, plan_conversion
from m3_runtime.errors import InputError

TEXT = "language_model."
LAYER = TEXT + "model.layers.1."
EXPERT = LAYER + "block_sparse_moe.experts.2.w1.weight"


def plan_of(folder: Path) -> Plan:
    return plan_conversion(load_checkpoint(folder))


def zeros(shape: tuple[int, ...], dtype: str = "BF16", size: int = 2) -> Tensor:
    return Tensor(dtype, shape, bytes(size * int(np.prod(shape))))


def test_sources_partition_the_checkpoint(make_folder, small) -> None:
    plan = plan_of(make_folder())
    used = [m.tensor.name for t in plan.tensors for m in t.matrices]
    assert len(used) == len(set(used))
    assert set(used) | set(plan.left_out) == set(make_tensors(small))
    assert not set(used) & set(plan.left_out)
    assert plan.left_out and all(n.startswith(("vision_tower.", "multi_modal_", "patch_merge_")) for n in plan.left_out)


def test_sources_of_some_tensors(make_folder) -> None:
    plan = plan_of(make_folder())
    sources = {t.name: [m.tensor.name for m in t.matrices] for t in plan.tensors}
    assert sources["output.weight"] == [TEXT + "lm_head.weight"]
    assert sources["token_embd.weight"] == [TEXT + "model.embed_tokens.weight"]
    assert sources["blk.0.ffn_down.weight"] == [TEXT + "model.layers.0.mlp.down_proj.weight"]
    moe = LAYER + "block_sparse_moe."
    for kind, source in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
        stacked = sources[f"blk.1.ffn_{kind}_exps.weight"]
        assert stacked == [f"{moe}experts.{e}.{source}.weight" for e in range(4)]
    assert sources["blk.1.exp_probs_b.bias"] == [moe + "e_score_correction_bias"]
    assert sources["blk.1.indexer.q_proj.weight"] == [LAYER + "self_attn.index_q_proj.weight"]


def test_a_text_only_export_without_prefix_and_vision(make_folder, small) -> None:
    with_prefix = plan_of(make_folder())
    plan = plan_of(make_folder(replace(small, prefix=False, vision=False), name="text"))
    assert plan.left_out == ()
    assert [(t.name, t.shape, t.type) for t in plan.tensors] == [(t.name, t.shape, t.type) for t in with_prefix.tensors]
    assert plan.tensor("output.weight").source == "lm_head.weight"


def test_missing_tensors(make_folder) -> None:
    def change(tensors) -> None:
        for e in range(4):
            for w in ("w1", "w2"):
                del tensors[f"{LAYER}block_sparse_moe.experts.{e}.{w}.weight"]

    with pytest.raises(InputError, match=rf"8 tensors missing: {LAYER}block.* and 3 more \(8 in all\)"):
        plan_of(make_folder(tensors=change))


@pytest.mark.parametrize(
    "name",
    [
        "mtp.layers.0.input_layernorm.weight",
        TEXT + "mtp.norm.weight",
        LAYER + "self_attn.index_v_proj.weight",
        LAYER + "self_attn.index_q_proj.bias",
        LAYER + "self_attn.q_proj.bias",
        LAYER + "mlp.gate_proj.weight",
        TEXT + "model.layers.3.input_layernorm.weight",
        LAYER + "block_sparse_moe.experts.4.w1.weight",
        LAYER + "self_attn.q_proj.weight_scale",
        "model.embed_tokens.weight",
        "extra",
    ],
)
def test_extra_tensors(make_folder, name: str) -> None:
    folder = make_folder(tensors=lambda t: t.update({name: zeros((64,))}))
    with pytest.raises(InputError, match=f"1 tensors that a model of this config does not have: {name}"):
        plan_of(folder)


@pytest.mark.parametrize("shape", [(64, 32), (31, 64), (32, 64, 1), (2048,)])
def test_misshaped_expert(make_folder, shape: tuple[int, ...]) -> None:
    folder = make_folder(tensors=lambda t: t.update({EXPERT: zeros(shape)}))
    with pytest.raises(InputError, match=rf"1 tensors of another shape: {EXPERT} \(expected \[32, 64\], found \["):
        plan_of(folder)


@pytest.mark.parametrize(("dtype", "size"), [("I64", 8), ("U8", 1), ("F8_E5M2", 1)])
def test_weights_of_an_unknown_kind(make_folder, dtype: str, size: int) -> None:
    folder = make_folder(tensors=lambda t: t.update({EXPERT: zeros((32, 64), dtype, size)}))
    with pytest.raises(InputError, match=rf"expected BF16, F16, F32, F8_E4M3 weights, found {EXPERT} \({dtype}\)"):
        plan_of(folder)


def test_fp8_without_scale(make_folder) -> None:
    folder = make_folder(tensors=lambda t: t.update({EXPERT: zeros((32, 64), "F8_E4M3", 1)}))
    with pytest.raises(InputError, match=rf"1 FP8 tensors without a _scale_inv scale: {EXPERT}$"):
        plan_of(folder)


def test_scale_without_fp8(make_folder) -> None:
    scale = {EXPERT + "_scale_inv": zeros((32, 2), "U8", 1)}
    with pytest.raises(InputError, match=rf"1 scales without an FP8 tensor: {EXPERT}_scale_inv \(the tensor is BF16\)"):
        plan_of(make_folder(tensors=lambda t: t.update(scale)))


def test_scale_whose_tensor_is_gone(make_folder) -> None:
    scale = {"layers.9.x.weight_scale_inv": zeros((32, 2), "U8", 1)}
    with pytest.raises(InputError, match=r"1 scales without their tensor: layers\.9\.x\.weight_scale_inv"):
        plan_of(make_folder(tensors=lambda t: t.update(scale)))


@pytest.mark.parametrize(
    ("shape", "dtype", "size"), [((32, 1), "U8", 1), ((2, 32), "U8", 1), ((32, 2), "F32", 4), ((1, 1), "BF16", 2)]
)
def test_scale_of_another_form(make_folder, shape: tuple[int, ...], dtype: str, size: int) -> None:
    def change(tensors) -> None:
        tensors[EXPERT] = zeros((32, 64), "F8_E4M3", 1)
        tensors[EXPERT + "_scale_inv"] = zeros(shape, dtype, size)

    with pytest.raises(
        InputError, match=rf"{EXPERT}_scale_inv: expected U8 or F8_E8M0 of shape \[32, 2\].* found {dtype}"
    ):
        plan_of(make_folder(tensors=change))


def test_mixed_checkpoint_lists_every_source_type(make_folder, small) -> None:
    """One attention layer in BF16, the rest MXFP8, no index_v_proj: converts; the plan says what each tensor was."""
    spec = replace(small, mxfp8=True, mxfp8_skip="layers.1.self_attn.", index_dim=32)
    plan = plan_of(make_folder(spec))
    types = {t.name: (t.source_type, t.type.name) for t in plan.tensors}
    assert types["blk.1.attn_q.weight"] == ("BF16", "BF16")
    assert types["blk.2.attn_q.weight"] == ("F8_E4M3", "BF16")
    assert types["blk.1.indexer.q_proj.weight"] == ("BF16", "F32")
    assert types["blk.2.indexer.q_proj.weight"] == ("F8_E4M3", "F32")
    assert types["blk.1.ffn_up_exps.weight"] == ("F8_E4M3", "BF16")
    assert types["blk.1.ffn_gate_inp.weight"] == ("F32", "F32")


def test_experts_of_one_tensor_may_differ_in_type(make_folder) -> None:
    def f32(tensors) -> None:
        tensors[EXPERT] = zeros((32, 64), "F32", 4)

    tensor = plan_of(make_folder(tensors=f32)).tensor("blk.1.ffn_gate_exps.weight")
    assert (tensor.source_type, tensor.type.name) == ("BF16+F32", "F32")
