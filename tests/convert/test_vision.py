"""The vision file: names, shapes, values and keys as llama.cpp reads them, and what is refused before it is written."""

import json
import shutil
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from numpy.typing import NDArray

from checkpoint_tensors import Tensor, make_tensors
from make_checkpoint import PREPROCESSOR_CONFIG as PREPROCESSOR
from make_checkpoint import CheckpointSpec

TOWER = "vision_tower.vision_model."
PATCH = f"{TOWER}embeddings.patch_embedding.weight"


def values_of(tensor: Tensor) -> NDArray[np.float32]:
    if tensor.dtype == "F32":
        return np.frombuffer(tensor.data, "<f4").reshape(tensor.shape)
    bits = np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16
    return bits.view(np.float32).reshape(tensor.shape)


def read(path: Path) -> dict[str, Any]:
    return {t.name: t for t in GGUFReader(path).tensors}


def floats(tensor: Any) -> NDArray[np.float32]:
    assert tensor.tensor_type.name == "F32", tensor.name
    array: NDArray[np.float32] = np.asarray(tensor.data)
    return array


def expected(spec: CheckpointSpec) -> dict[str, NDArray[np.float32]]:
    """What an F32 file holds, written down apart from the converter."""
    source = {name: values_of(t) for name, t in make_tensors(spec).items() if not name.startswith("language_model.")}
    out = {}
    for part in ("weight", "bias"):
        out[f"mm.1.{part}"] = source[f"multi_modal_projector.linear_1.{part}"]
        out[f"mm.2.{part}"] = source[f"multi_modal_projector.linear_2.{part}"]
        out[f"mm.merger.fc1.{part}"] = source[f"patch_merge_mlp.linear_1.{part}"]
        out[f"mm.merger.fc2.{part}"] = source[f"patch_merge_mlp.linear_2.{part}"]
        out[f"v.pre_ln.{part}"] = source[f"{TOWER}pre_layrnorm.{part}"]
        for i in range(spec.vit_layers):
            for to, name in (
                ("ln1", "layer_norm1"),
                ("ln2", "layer_norm2"),
                ("ffn_up", "mlp.fc1"),
                ("ffn_down", "mlp.fc2"),
                ("attn_q", "self_attn.q_proj"),
                ("attn_k", "self_attn.k_proj"),
                ("attn_v", "self_attn.v_proj"),
                ("attn_out", "self_attn.out_proj"),
            ):
                value = source[f"{TOWER}encoder.layers.{i}.{name}.{part}"]
                if to in ("attn_q", "attn_k"):  # T H W, T H W, rest of each head of 80 -> T T, H H, W W, rest
                    heads = value.reshape(-1, 80, *value.shape[1:])
                    t, h, w, t2, h2, w2, rest = np.split(heads, [13, 26, 39, 52, 65, 78], axis=1)
                    value = np.concatenate([t, t2, h, h2, w, w2, rest], axis=1).reshape(value.shape)
                out[f"v.blk.{i}.{to}.{part}"] = value
    out["v.patch_embd.weight"] = source[PATCH][:, :, 0]
    out["v.patch_embd.weight.1"] = source[PATCH][:, :, 1]
    return out


def test_every_tensor_of_an_f32_file(m3_convert, make_folder, small, tmp_path) -> None:
    """Two heads and two layers, in shards that part weights from their biases."""
    spec = replace(small, vit_hidden=160, vit_layers=2, order="shuffled", shard_mb=0.05)
    out = tmp_path / "mmproj.gguf"
    assert m3_convert(make_folder(spec), "--vision-only", out, "--vision-type", "f32").code == 0
    found, wanted = read(out), expected(spec)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert np.array_equal(floats(found[name]).reshape(-1), value.reshape(-1)), name
        assert found[name].shape.tolist() == list(value.shape[::-1]), name
    assert not list(tmp_path.glob("*.part")) and not list(tmp_path.glob("*.journal"))


def test_names_follow_the_order_of_other_writers(m3_convert, pristine, tmp_path, small) -> None:
    out = tmp_path / "mmproj.gguf"
    assert m3_convert(pristine, "--vision-only", out).code == 0
    names = list(read(out))
    assert len(names) == 12 + 16 * small.vit_layers
    assert names[:2] == ["mm.1.bias", "mm.1.weight"] and names[6:8] == ["mm.merger.fc2.bias", "mm.merger.fc2.weight"]
    assert names[8:12] == ["v.patch_embd.weight", "v.patch_embd.weight.1", "v.blk.0.ln1.bias", "v.blk.0.ln1.weight"]
    assert names[-2:] == ["v.pre_ln.bias", "v.pre_ln.weight"]


def test_keys(m3_convert, pristine, tmp_path, small) -> None:
    out = tmp_path / "mmproj.gguf"
    assert m3_convert(pristine, "--vision-only", out).code == 0
    fields = {key: field.contents() for key, field in GGUFReader(out).fields.items() if not key.startswith(("GGUF.",))}
    general = {key: fields.pop(key) for key in list(fields) if key.startswith("general.")}
    assert general["general.architecture"] == "clip" and general["general.type"] == "mmproj"
    assert general["general.file_type"] == 32 and general["general.sampling.top_k"] == 40
    mean, std = fields.pop("clip.vision.image_mean"), fields.pop("clip.vision.image_std")
    assert np.allclose(mean, PREPROCESSOR["image_mean"]) and np.allclose(std, PREPROCESSOR["image_std"])
    assert fields.pop("clip.vision.attention.layer_norm_epsilon") == pytest.approx(1e-5)
    assert fields == {
        "clip.has_vision_encoder": True,
        "clip.vision.projection_dim": small.hidden,
        "clip.vision.image_size": 2016,
        "clip.vision.patch_size": 14,
        "clip.vision.embedding_length": 80,
        "clip.vision.feed_forward_length": 320,
        "clip.vision.block_count": small.vit_layers,
        "clip.vision.attention.head_count": 1,
        "clip.projector_type": "minimax_m3",
        "clip.use_gelu": True,
        "clip.vision.spatial_merge_size": 2,
    }


@pytest.mark.parametrize(
    ("type_", "linear", "narrow"),
    [("auto", "BF16", "BF16"), ("bf16", "BF16", "BF16"), ("f16", "F16", "F16"), ("q8_0", "Q8_0", "F16")],
)
def test_types(m3_convert, pristine, tmp_path, type_: str, linear: str, narrow: str) -> None:
    """Linear layers get the type; rows of 80, which Q8_0 does not divide, fall back to F16 and the command says so."""
    out = tmp_path / "mmproj.gguf"
    outcome = m3_convert(pristine, "--vision-only", out, "--vision-type", type_, "--json")
    assert outcome.code == 0
    for name, tensor in read(out).items():
        weight = name.endswith(".weight") and not name.startswith("v.pre_ln") and ".ln" not in name
        want = (narrow if tensor.shape[0] % 32 else linear) if weight and "patch_embd" not in name else "F32"
        assert tensor.tensor_type.name == want, name
    notes = outcome.json["notes"]
    assert bool(notes) == (type_ == "q8_0")
    assert not notes or notes["mm.1.weight"] == "F16 instead of Q8_0: rows of 80 are not a multiple of 32"


def test_q8_0_values(m3_convert, make_folder, small, tmp_path) -> None:
    """The permuted rows of q, of a width that Q8_0 divides."""
    spec = replace(small, vit_hidden=160, vit_layers=1)
    out = tmp_path / "mmproj.gguf"
    assert m3_convert(make_folder(spec), "--vision-only", out, "--vision-type", "q8_0").code == 0
    raw = np.asarray(read(out)["v.blk.0.attn_q.weight"].data).reshape(160, 5, 34)
    scale = raw[..., :2].copy().view(np.float16).astype(np.float32)
    found = (raw[..., 2:].copy().view(np.int8) * scale).reshape(160, 160)
    wanted = expected(spec)["v.blk.0.attn_q.weight"]
    assert np.abs(found - wanted).max() < np.abs(wanted).max() / 127


def test_beside_the_text_model(m3_convert, pristine, tmp_path) -> None:
    """One run, two files; each is the one that a run of its own gives."""
    text, sight = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    outcome = m3_convert(pristine, text, "--type", "f32", "--vision", sight, "--json")
    assert outcome.code == 0
    assert outcome.json["left_out"] == 0 and outcome.json["tensors"] == 54
    assert outcome.json["vision"]["file"] == str(sight) and outcome.json["vision"]["tensors"] == 60
    alone = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    assert m3_convert(pristine, alone[0], "--type", "f32").code == 0
    assert m3_convert(pristine, "--vision-only", alone[1]).code == 0
    assert text.read_bytes() == alone[0].read_bytes() and sight.read_bytes() == alone[1].read_bytes()
    line = m3_convert(pristine, text, "--type", "f32", "--vision", sight).out.strip().splitlines()
    assert len(line) == 2 and "left out" not in line[0] and line[1].startswith(f"{sight}: 60 tensors, ")


def test_plan_without_writing(m3_convert, pristine, tmp_path) -> None:
    sight = tmp_path / "mmproj.gguf"
    plan = m3_convert(pristine, "--vision", sight, "--dry-run", "--json").json
    vision = {t["name"]: t for t in plan["vision"]["tensors"]}
    assert plan["left_out"] == [] and len(vision) == 60
    assert vision["v.patch_embd.weight.1"] == {
        **vision["v.patch_embd.weight.1"],
        "ne": [14, 14, 3, 80],
        "source": PATCH,
        "type": "F32",
        "bytes": 4 * 14 * 14 * 3 * 80,
    }
    assert "v.blk.2.attn_q.bias" in m3_convert(pristine, "--vision-only", sight, "--dry-run").out
    said = m3_convert(pristine, "--vision", sight, "--explain", "v.blk.0.attn_q.weight", "--vision-type", "q8_0").out
    assert said.startswith("v.blk.0.attn_q.weight: F16 by --vision-type q8_0; F16 instead of Q8_0")
    assert not sight.exists()


def test_the_file_is_replaced_in_one_step(m3_convert, make_folder, tmp_path) -> None:
    """A NaN deep in the file: what stood there before stands there after, and nothing is left beside it."""

    def spoil(tensors: dict[str, Tensor]) -> None:
        name = f"{TOWER}encoder.layers.2.self_attn.k_proj.bias"
        tensors[name] = replace(tensors[name], data=tensors[name].data[:-2] + struct.pack("<H", 0x7FC0))

    out = tmp_path / "mmproj.gguf"
    out.write_bytes(b"before")
    outcome = m3_convert(make_folder(tensors=spoil), "--vision-only", out)
    assert outcome.code == 2
    assert outcome.error.startswith("m3-convert: v.blk.2.attn_k.bias (vision_tower.vision_model.encoder.layers.2.self")
    assert "1 values are NaN or infinite" in outcome.error
    assert out.read_bytes() == b"before" and sorted(p.name for p in tmp_path.iterdir()) == ["mmproj.gguf", "source"]


def drop(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def put(name: str, dtype: str, shape: tuple[int, ...]) -> Any:
    size = {"BF16": 2, "F8_E4M3": 1}[dtype]
    return lambda tensors: tensors.update({name: Tensor(dtype, shape, bytes(size * int(np.prod(shape))))})


def without_vision(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if not name.startswith("language_model.")]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(f"{TOWER}pre_layrnorm.bias"), f"1 vision tensors missing: {TOWER}pre_layrnorm.bias"),
        (
            put(f"{TOWER}post_layernorm.weight", "BF16", (80,)),
            f"1 vision tensors that a model of this config does not have: {TOWER}post_layernorm.weight",
        ),
        (
            put(f"{TOWER}encoder.layers.3.layer_norm1.bias", "BF16", (80,)),
            f"1 vision tensors that a model of this config does not have: {TOWER}encoder.layers.3.layer_norm1.bias",
        ),
        (
            put(PATCH, "BF16", (80, 3, 14, 14)),
            f"1 vision tensors of another shape: {PATCH} (expected [80, 3, 2, 14, 14], found [80, 3, 14, 14])",
        ),
        (
            put("multi_modal_projector.linear_1.weight", "F8_E4M3", (64, 80)),
            "expected BF16, F16, F32 vision weights, found multi_modal_projector.linear_1.weight (F8_E4M3)",
        ),
        (
            without_vision,
            "expected a vision part (vision_tower., multi_modal_projector., patch_merge_mlp.), found text",
        ),
    ],
)
def test_refused_tensors(m3_convert, make_folder, tmp_path, change: Any, message: str) -> None:
    """By name, before anything is written; the text model beside it is not written either."""
    folder = make_folder(tensors=change)
    outcome = m3_convert(folder, tmp_path / "model.gguf", "--vision", tmp_path / "mmproj.gguf")
    assert outcome.code == 2 and message in outcome.error
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def setter(*keys: str, to: object) -> Any:
    def change(config: dict[str, Any]) -> None:
        for key in keys[:-1]:
            config = config[key]
        config[keys[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (setter("vision_config", to=None), "vision_config: expected an object (a model without a vision part"),
        (setter("vision_config", "rope_theta", to=5e5), "vision_config: rope_theta: expected 10000.0"),
        (setter("vision_config", "rope_mode", to="2d"), "rope_mode: expected '3d'"),
        (setter("vision_config", "hidden_act", to="quick_gelu"), "hidden_act: expected 'gelu'"),
        (setter("vision_config", "num_channels", to=1), "num_channels: expected 3"),
        (setter("vision_config", "num_attention_heads", to=3), "hidden_size: expected 3 heads of an even number"),
        (setter("vision_config", "patch_size", to=16), "preprocessor_config.json: patch_size: expected 16"),
        (setter("vision_config", "layer_norm_eps", to=0), "layer_norm_eps: expected a positive number"),
        (
            setter("vision_config", "img_token_compression_config", "temporal_patch_size", to=4),
            "img_token_compression_config: temporal_patch_size: expected 2",
        ),
        (setter("img_token_compression_config", "spatial_merge_size", to=4), "spatial_merge_size: expected 2"),
        (setter("projector_hidden_act", to="relu"), "projector_hidden_act: expected 'gelu'"),
        (setter("vision_feature_layer", to=-2), "vision_feature_layer: expected -1"),
        (setter("projector_hidden_size", to="wide"), "projector_hidden_size: expected an integer from 1 to"),
    ],
)
def test_refused_configs(m3_convert, make_folder, tmp_path, change: Any, message: str) -> None:
    outcome = m3_convert(make_folder(config=change), "--vision-only", tmp_path / "mmproj.gguf")
    assert outcome.code == 2 and message in outcome.error
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_mean": [0.5, 0.5]}, "image_mean: expected 3 numbers from 0 to 1"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std: expected 3 numbers above 0 to 1"),
        ({"image_std": [0.5, float("nan"), 0.5]}, "image_std: expected 3 numbers above 0 to 1"),
        ({"resample": 2}, "resample: expected 3"),
        ({"merge_size": 4}, "merge_size: expected 2"),
    ],
)
def test_refused_preprocessor(m3_convert, make_folder, tmp_path, change: Mapping[str, object], message: str) -> None:
    folder = make_folder()
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    outcome = m3_convert(folder, "--vision-only", tmp_path / "mmproj.gguf")
    assert outcome.code == 2 and message in outcome.error
    path.unlink()
    outcome = m3_convert(folder, "--vision-only", tmp_path / "mmproj.gguf")
    assert outcome.code == 2 and "preprocessor_config.json: is missing, expected image_mean" in outcome.error


def test_arguments(m3_convert, pristine, tiny_gguf, tmp_path) -> None:
    out, sight = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"

    def error(*arguments: object) -> str:
        outcome = m3_convert(*arguments)
        assert outcome.code == 2 and not sight.exists() and not out.exists()
        return outcome.error.removeprefix("m3-convert: ")

    alone = "does not go with --vision-only, which writes the vision file alone"
    assert error(pristine, out, "--vision-only", sight) == f"OUT.gguf {alone}"
    assert error(pristine, "--vision-only", sight, "--type", "q8_0") == f"--type {alone}"
    assert error(pristine, "--vision-only", sight, "--vision", sight) == f"--vision {alone}"
    assert error(pristine, out, "--vision-type", "f16").startswith("--vision-type is for --vision and --vision-only")
    types = "expected auto or one of f32, f16, bf16, q8_0, found 'q4_k'"
    assert error(pristine, "--vision-only", sight, "--vision-type", "q4_k") == f"--vision-type: {types}"
    assert error(pristine, out, "--vision", out) == f"{out}: expected another file than OUT.gguf for the vision part"
    assert "found GGUF: it holds text only" in error(tiny_gguf, "--vision-only", sight)
    assert "is part of the source" in error(pristine, "--vision-only", pristine / "config.json")
    recipe = tmp_path / "own.toml"
    recipe.write_text('[default]\ntype = "f16"\n')
    assert "is part of the source or another input" in error(pristine, out, "--recipe", recipe, "--vision", recipe)
    assert "its folder" in error(pristine, out, "--vision", tmp_path / "absent" / "mmproj.gguf")
    assert error(pristine, out, "--vision", sight, "--max-size", "1M", "--text", "x").startswith(
        "--vision does not go with --target-overlap and --max-size"
    )


@pytest.mark.parametrize("discard", [False, True], ids=["cached", "discarded"])
def test_from_the_hub(hub, m3_convert, pristine, tmp_path, discard: bool) -> None:
    """Only the shards of the vision part are downloaded for it; the bytes are those that a folder gives."""
    identifier = "MiniMaxAI/MiniMax-M3"
    hub.add(identifier, pristine)
    options = ["--discard-source"] if discard else []
    out, named = tmp_path / "mmproj.gguf", tmp_path / "MiniMax-M3"
    outcome = m3_convert(identifier, "--vision-only", out, *options)
    assert outcome.code == 0, outcome.err
    sizes = {shard.name: shard.stat().st_size for shard in pristine.glob("*.safetensors")}
    index = json.loads((pristine / "model.safetensors.index.json").read_text())["weight_map"]
    used = {shard for name, shard in index.items() if not name.startswith("language_model.")}
    assert used < set(sizes) and f"{len(used)} of {len(used)} shards to download" in outcome.err
    shutil.copytree(pristine, named)
    assert m3_convert(named, "--vision-only", tmp_path / "folder.gguf").code == 0
    # The name of the model is in the file: that of the folder is the last part of the id.
    assert out.read_bytes() == (tmp_path / "folder.gguf").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["MiniMax-M3", "folder.gguf", "mmproj.gguf"]
