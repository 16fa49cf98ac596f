"""Tensor data of the file against values computed here from the checkpoint."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from checkpoint_tensors import Tensor, make_tensors, mxfp8_dequantize
from m3_convert.checkpoint import load_checkpoint
from m3_convert.encode import Encoder
from m3_convert.plan import plan_conversion
from m3_convert.precision import TypeChoice
from m3_runtime.quantize import TensorType
from make_checkpoint import CheckpointSpec

LAYER = "language_model.model.layers.1."
NORM = LAYER + "self_attn.index_q_norm.weight"
EXPERT = LAYER + "block_sparse_moe.experts.2.w1.weight"
Values = npt.NDArray[np.float32]


def bf16(values: npt.ArrayLike, dtype: str = "BF16") -> Tensor:
    """A tensor whose values the dtype holds exactly."""
    array = np.asarray(values, np.float32)
    if dtype == "BF16":
        assert not (array.view(np.uint32) & 0xFFFF).any()
        return Tensor(dtype, array.shape, (array.view(np.uint32) >> 16).astype("<u2").tobytes())
    return Tensor(dtype, array.shape, array.astype({"F16": "<f2", "F32": "<f4"}[dtype]).tobytes())


def values_of(tensors: dict[str, Tensor], name: str) -> Values:
    tensor = tensors[name]
    if tensor.dtype == "F8_E4M3":
        scale = tensors[name + "_scale_inv"]
        codes = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape)
        return mxfp8_dequantize(codes, np.frombuffer(scale.data, np.uint8).reshape(scale.shape))
    raw = np.frombuffer(tensor.data, {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}[tensor.dtype])
    if tensor.dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
    return raw.astype(np.float32).reshape(tensor.shape)


def expected_values(spec: CheckpointSpec, tensors: dict[str, Tensor]) -> dict[str, Values]:
    """GGUF name -> values, written out from the documented schema and not from the converter's table."""
    get = lambda name: values_of(tensors, f"language_model.{name}")  # noqa: E731
    one = np.float32(1)
    found = {
        "output.weight": get("lm_head.weight"),
        "token_embd.weight": get("model.embed_tokens.weight"),
        "output_norm.weight": get("model.norm.weight") + one,
    }
    for i in range(spec.layers):
        a, b = f"model.layers.{i}.", f"blk.{i}."
        found[b + "attn_norm.weight"] = get(a + "input_layernorm.weight") + one
        found[b + "ffn_norm.weight"] = get(a + "post_attention_layernorm.weight") + one
        for x, y in (("q", "q"), ("k", "k"), ("v", "v"), ("output", "o")):
            found[f"{b}attn_{x}.weight"] = get(f"{a}self_attn.{y}_proj.weight")
        for x in "qk":
            found[f"{b}attn_{x}_norm.weight"] = get(f"{a}self_attn.{x}_norm.weight") + one
        if i < spec.dense:
            for x in ("gate", "up", "down"):
                found[f"{b}ffn_{x}.weight"] = get(f"{a}mlp.{x}_proj.weight")
            continue
        for x in "qk":
            found[f"{b}indexer.{x}_proj.weight"] = get(f"{a}self_attn.index_{x}_proj.weight")
            found[f"{b}indexer.{x}_norm.weight"] = get(f"{a}self_attn.index_{x}_norm.weight") + one
        moe = a + "block_sparse_moe."
        found[b + "ffn_gate_inp.weight"] = get(moe + "gate.weight")
        found[b + "exp_probs_b.bias"] = get(moe + "e_score_correction_bias")
        for x, y in (("gate", "w1"), ("down", "w2"), ("up", "w3")):
            stack = [get(f"{moe}experts.{e}.{y}.weight") for e in range(spec.experts)]
            found[f"{b}ffn_{x}_exps.weight"] = np.stack(stack)
            found[f"{b}ffn_{x}_shexp.weight"] = get(f"{moe}shared_experts.{x}_proj.weight")
    return found


def read_values(path: Path) -> dict[str, tuple[str, Values]]:
    """GGUF name -> (type, values)."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.dequantize(np.asarray(tensor.data), tensor.tensor_type)
        found[tensor.name] = (tensor.tensor_type.name, values.reshape(tuple(map(int, tensor.shape))[::-1]))
    return found


@pytest.fixture
def converted(m3_convert, tmp_path: Path) -> Callable[..., dict[str, tuple[str, Values]]]:
    def call(folder: Path, *options: str) -> dict[str, tuple[str, Values]]:
        outcome = m3_convert(folder, tmp_path / "out.gguf", *options)
        assert outcome.code == 0, outcome.err
        return read_values(tmp_path / "out.gguf")

    return call


@pytest.fixture
def refused(m3_convert, tmp_path: Path) -> Callable[..., str]:
    """refused(folder, *options) -> the error; nothing may be left under any name."""

    def call(folder: Path, *options: str) -> str:
        outcome = m3_convert(folder, tmp_path / "out.gguf", *options)
        assert outcome.code == 2
        assert not list(tmp_path.glob("out.gguf*"))
        return outcome.error

    return call


@pytest.mark.parametrize("form", ["bf16", "mxfp8", "shuffled", "no prefix"])
@pytest.mark.parametrize("default", ["f32", "bf16", "auto"])
def test_exact_in_f32_and_bf16(make_folder, converted, small, form: str, default: str) -> None:
    changes = {"bf16": {}, "mxfp8": {"mxfp8": True}, "shuffled": {"order": "shuffled"}, "no prefix": {"prefix": False}}
    spec = replace(small, index_dim=32, **changes[form])
    found = converted(make_folder(spec), "--type", default)
    expected = expected_values(spec, make_tensors(replace(spec, prefix=True)))
    assert set(found) == set(expected)
    for name, (_, values) in found.items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)


def test_f16_is_the_nearest(make_folder, converted, small) -> None:
    found = converted(make_folder(), "--type", "f16")
    for name, expected in expected_values(small, make_tensors(small)).items():
        kind, values = found[name]
        np.testing.assert_array_equal(
            values, expected.astype(np.float16 if kind == "F16" else np.float32), err_msg=name
        )


def test_q8_0_is_that_of_the_gguf_library(make_folder, converted, small, tmp_path) -> None:
    converted(make_folder(), "--type", "q8_0")
    expected = expected_values(small, make_tensors(small))
    kinds = set()
    for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors:
        kinds.add(tensor.tensor_type.name)
        data = gguf.quantize(expected[tensor.name], tensor.tensor_type)
        assert np.asarray(tensor.data).tobytes() == data.tobytes(), tensor.name
    assert kinds == {"Q8_0", "F32"}


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_sources_in_f16_and_f32_keep_their_precision(make_folder, converted, small, dtype: str) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if name.startswith("language_model.") and tensors[name].dtype == "BF16":
                tensors[name] = bf16(values_of(tensors, name).astype(np.float16), dtype)

    found = converted(make_folder(tensors=change))
    source = make_tensors(small)
    change(source)
    for name, expected in expected_values(small, source).items():
        kind, values = found[name]
        assert kind == ("F32" if expected.ndim == 1 or "inp" in name or "indexer" in name else dtype), name
        np.testing.assert_array_equal(values, expected, err_msg=name)


def test_bytes_do_not_depend_on_threads(make_folder, m3_convert, tmp_path) -> None:
    folder = make_folder()
    for threads in ("1", "2", "7"):
        assert m3_convert(folder, tmp_path / f"{threads}.gguf", "--type", "q8_0", "--threads", threads).code == 0
    assert (
        (tmp_path / "1.gguf").read_bytes() == (tmp_path / "2.gguf").read_bytes() == (tmp_path / "7.gguf").read_bytes()
    )


def test_matrices_are_the_slabs_put_together(make_folder, monkeypatch) -> None:
    monkeypatch.setattr("m3_convert.encode.SLAB_ELEMENTS", 300)
    plan = plan_conversion(load_checkpoint(make_folder()), TypeChoice(TensorType.Q8_0))
    with Encoder(2) as encoder:
        for tensor in plan.tensors:
            slabs = [slab for index in range(len(tensor.matrices)) for slab in encoder.slabs(tensor, index)]
            matrices = list(encoder.matrices(tensor))
            assert [m.expert for m in matrices] == (list(range(4)) if tensor.stacked else [-1])
            assert b"".join(s.tobytes() for s in slabs) == b"".join(m.data.tobytes() for m in matrices)
            assert max(len(s) * tensor.shape[-1] for s in slabs) <= max(300, tensor.shape[-1])
            assert sum(m.data.size for m in matrices) == tensor.n_bytes


# ------------------------------------------------------------------------------------------------ norms


def test_norms_get_one_added_in_float32(make_folder, converted) -> None:
    w = np.zeros(48, np.float32)
    w[:4] = [0.00390625, -0.9375, 2.0**-20, -0.99609375]  # 1 + w of the first and third is not a bfloat16
    name, found = "blk.1.indexer.q_norm.weight", converted(make_folder(tensors=lambda t: t.update({NORM: bf16(w)})))
    assert found[name][1].tolist() == (np.float32(1) + w).tolist()
    assert found[name][1][0] == 1.00390625 and found[name][1][2] == np.float32(1 + 2.0**-20)


def test_norms_of_zero_are_stored_as_one(make_folder, converted) -> None:
    def zero(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.startswith("language_model.") and name.endswith("norm.weight"):
                tensors[name] = Tensor(tensor.dtype, tensor.shape, bytes(len(tensor.data)))

    found = converted(make_folder(tensors=zero))
    norms = [name for name in found if name.endswith("norm.weight")]
    assert len(norms) == 3 * 4 + 2 * 2 + 1
    assert all((found[name][1] == 1).all() for name in norms)


def test_norms_that_already_hold_the_sum(make_folder, refused) -> None:
    def shift(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if name.startswith("language_model.") and name.endswith("norm.weight"):
                tensors[name] = bf16(values_of(tensors, name) + np.float32(1), "F32")

    error = refused(make_folder(tensors=shift))
    assert "the 17 norms of the checkpoint already hold 1 + w" in error and "the GGUF would hold 2 + w" in error


def test_freshly_made_norms_of_one(make_folder, refused) -> None:
    def ones(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.startswith("language_model.") and name.endswith("norm.weight"):
                tensors[name] = bf16(np.ones(tensor.shape))

    assert "already hold 1 + w" in refused(make_folder(tensors=ones))


# ------------------------------------------------------------------------------------------------ broken values


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("default", ["auto", "f32", "f16", "q8_0"])
def test_nan_or_infinity_in_an_expert(make_folder, refused, bad: float, default: str) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        w = np.zeros((32, 64), np.float32)
        w[5, 9] = w[5, 10] = w[31, 63] = bad
        tensors[EXPERT] = bf16(w, "F32" if np.isnan(bad) else "BF16")

    error = refused(make_folder(tensors=change), "--type", default)
    assert f"blk.1.ffn_gate_exps.weight, expert 2 ({EXPERT}): 3 values are NaN or infinite" in error
    assert "the first in row 5, column 9" in error


@pytest.mark.parametrize(
    ("name", "dtype"), [(NORM, "BF16"), (LAYER + "block_sparse_moe.e_score_correction_bias", "F32")]
)
def test_nan_in_a_vector(make_folder, refused, name: str, dtype: str) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        w = values_of(tensors, name).copy()
        w[3] = np.inf
        tensors[name] = bf16(w, dtype)

    assert f"({name}): 1 values are NaN or infinite, the first in row 0, column 3" in refused(
        make_folder(tensors=change)
    )


def test_the_count_covers_all_slabs(make_folder, refused, monkeypatch) -> None:
    monkeypatch.setattr("m3_convert.encode.SLAB_ELEMENTS", 300)

    def change(tensors: dict[str, Tensor]) -> None:
        w = values_of(tensors, "language_model.lm_head.weight").copy()
        w[100:300, 7] = np.inf
        tensors["language_model.lm_head.weight"] = bf16(w)

    error = refused(make_folder(tensors=change))
    assert "output.weight (language_model.lm_head.weight): 200 values are NaN or infinite" in error
    assert "the first in row 100, column 7" in error


def fp8(codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8], dtype: str = "U8") -> dict[str, Tensor]:
    return {
        EXPERT: Tensor("F8_E4M3", codes.shape, codes.tobytes()),
        EXPERT + "_scale_inv": Tensor(dtype, scales.shape, scales.tobytes()),
    }


CODES = np.full((32, 64), 0x38, np.uint8)  # 1.0
SCALES = np.full((32, 2), 120, np.uint8)


@pytest.mark.parametrize("dtype", ["U8", "F8_E8M0"])
def test_scales_under_both_dtypes(make_folder, converted, dtype: str) -> None:
    scales = SCALES.copy()
    scales[:, 1] = 127
    kind, values = converted(make_folder(tensors=lambda t: t.update(fp8(CODES, scales, dtype))))[
        "blk.1.ffn_gate_exps.weight"
    ]
    assert kind == "BF16"
    assert (values[2][:, :32] == 1 / 128).all() and (values[2][:, 32:] == 1).all()


def test_magnitudes_off_by_powers_of_two(make_folder, refused) -> None:
    error = refused(make_folder(tensors=lambda t: t.update(fp8(CODES, np.full((32, 2), 134, np.uint8)))))
    assert f"expert 2 ({EXPERT}): mean magnitude 128, expected at most 10 in FP8 weights" in error


def test_nan_scales(make_folder, refused) -> None:
    scales = SCALES.copy()
    scales[7:9] = 255
    error = refused(make_folder(tensors=lambda t: t.update(fp8(CODES, scales))))
    assert f"expert 2 ({EXPERT}): 4 NaN scales in {EXPERT}_scale_inv, the first in row 7" in error


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_codes(make_folder, refused, code: int) -> None:
    codes = CODES.copy()
    codes[31, 0] = code
    error = refused(make_folder(tensors=lambda t: t.update(fp8(codes, SCALES))))
    assert "1 values are NaN or infinite, the first in row 31, column 0" in error


def test_scales_beyond_float32(make_folder, refused) -> None:
    scales = SCALES.copy()
    scales[3, 1] = 254
    codes = np.full((32, 64), 0x40, np.uint8)  # 2.0: 2^128 is beyond float32
    error = refused(make_folder(tensors=lambda t: t.update(fp8(codes, scales))))
    assert "32 values are NaN or infinite, the first in row 3, column 32" in error


@pytest.mark.parametrize("default", ["auto", "bf16"])
def test_fp8_values_that_bf16_cannot_hold(make_folder, refused, default: str) -> None:
    scales = SCALES.copy()
    scales[4, 0] = 0
    codes = np.full((32, 64), 0x01, np.uint8)  # 2^-9, times 2^-127
    error = refused(make_folder(tensors=lambda t: t.update(fp8(codes, scales))), "--type", default)
    assert "32 FP8 values are too small for BF16 to hold exactly, the first in row 4, column 0; F32 holds them" in error


def test_fp8_values_that_only_f32_holds(make_folder, converted) -> None:
    scales = SCALES.copy()
    scales[4, 0] = 0
    codes = np.full((32, 64), 0x01, np.uint8)
    found = converted(make_folder(tensors=lambda t: t.update(fp8(codes, scales))), "--type", "f32")
    assert found["blk.1.ffn_gate_exps.weight"][1][2, 4, 0] == np.float32(2.0**-136)


def test_overflow_of_f16(make_folder, refused, converted) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        w = np.zeros((32, 64), np.float32)
        w[6, 1], w[6, 2], w[9, 3] = 99840.0, -99840.0, 65536.0
        tensors[EXPERT] = bf16(w)

    folder = make_folder(tensors=change)
    error = refused(folder, "--type", "f16")
    assert f"expert 2 ({EXPERT}): 3 values overflow F16, the first in row 6, column 1" in error
    kind, values = converted(folder)["blk.1.ffn_gate_exps.weight"]
    assert kind == "BF16" and values[2, 6, 1] == 99840


@pytest.mark.parametrize(("value", "fits"), [(65504.0, True), (65519.0, True), (65520.0, False), (-65520.0, False)])
def test_the_border_of_f16(make_folder, m3_convert, tmp_path, value: float, fits: bool) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        w = np.zeros((32, 64), np.float32)
        w[0, 0] = value
        tensors[EXPERT] = bf16(w, "F32")

    outcome = m3_convert(make_folder(tensors=change), tmp_path / "out.gguf", "--type", "f16")
    assert (outcome.code == 0) == fits
    assert fits or "1 values overflow F16" in outcome.error


@pytest.mark.parametrize(("kind", "reach"), [("q4_0", 8), ("q4_1", 1), ("q5_0", 16), ("q5_1", 1), ("q8_0", 127)])
def test_overflow_is_counted_in_rows_of_the_tensor(make_folder, refused, monkeypatch, kind: str, reach: int) -> None:
    monkeypatch.setattr("m3_convert.encode.SLAB_ELEMENTS", 300)

    def change(tensors: dict[str, Tensor]) -> None:
        w = np.zeros((32, 64), np.float32)
        w[20, 1], w[30, 2], w[31, 3] = 65536.0 * reach, -65536.0 * reach, 65504.0 * reach
        tensors[EXPERT] = bf16(w, "F32")

    error = refused(make_folder(tensors=change), "--type", kind)
    assert f"expert 2 ({EXPERT}): 2 values overflow {kind.upper()}, the first in row 20, column 1" in error


def test_overflow_of_a_q8_0_scale(make_folder, refused) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        w = np.zeros((32, 64), np.float32)
        w[2, 40] = 1e7
        tensors[EXPERT] = bf16(w, "F32")

    error = refused(make_folder(tensors=change), "--type", "q8_0")
    assert "1 values overflow Q8_0, the first in row 2, column 40" in error


def test_overflow_of_bf16(make_folder, refused) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        w = np.zeros((32, 64), np.float32)
        w[2, 40] = 3.4e38  # nearer to 2^128 than to the largest bfloat16
        tensors[EXPERT] = bf16(w, "F32")

    error = refused(make_folder(tensors=change), "--type", "bf16")
    assert error.endswith("1 values overflow BF16, the first in row 2, column 40; F32 holds them")


# ------------------------------------------------------------------------------------------------ router


def test_the_router_chooses_the_same_experts(make_folder, converted, small) -> None:
    found = converted(make_folder(), "--type", "q8_0")
    source = make_tensors(small)
    hidden = np.random.default_rng(3).standard_normal((1000, 64)).astype(np.float32)
    for i in (1, 2):
        moe = f"language_model.model.layers.{i}.block_sparse_moe."

        def chosen(gate: Values, bias: Values) -> list[frozenset[int]]:
            scores = 1 / (1 + np.exp(-(hidden @ gate.T))) + bias
            return [frozenset(row) for row in np.argsort(-scores, axis=1)[:, :2].tolist()]

        ours = chosen(found[f"blk.{i}.ffn_gate_inp.weight"][1], found[f"blk.{i}.exp_probs_b.bias"][1])
        theirs = chosen(values_of(source, moe + "gate.weight"), values_of(source, moe + "e_score_correction_bias"))
        assert ours == theirs and len(set(ours)) > 3
