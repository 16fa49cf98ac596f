"""The checkpoint that all other tests convert and run: is it what the release looks like, and always the same?"""

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from tokenizers import Tokenizer

from checkpoint_tensors import TEXT_PREFIX, Tensor, make_tensors, mxfp8_dequantize, mxfp8_quantize, write_safetensors
from make_checkpoint import SPECIAL_TOKENS, TEXT, VISIBLE_TOKENS, CheckpointSpec, make_checkpoint

HERE = Path(__file__).resolve().parent
SHARED = Path(os.environ.get("M3_SHARED", HERE.parents[1] / "shared"))
SMALL = CheckpointSpec(layers=3, dense=1, hidden=64, heads=4, kv_heads=2, experts=4, top=2, inter=32, vocab=512)


def read_headers(folder):
    """(dtype, shape) of each tensor, by safetensors' own reader."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                part = file.get_slice(name)
                found[name] = (part.get_dtype(), tuple(part.get_shape()))
    return found


def test_the_same_options_make_the_same_bytes(tmp_path):
    for folder in (tmp_path / "a", tmp_path / "b"):
        make_checkpoint(folder, SMALL)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_the_weights_never_change():
    """Golden vectors and other tests rely on them, on every machine and NumPy version."""
    digest = hashlib.sha256()
    for name, tensor in make_tensors(SMALL).items():
        digest.update(name.encode() + tensor.data)
    assert digest.hexdigest() == "4334ad6bcdb56f1e40b6d501800d3fa2272f0f0e083f2f288245e5378e5232e0"


def test_files_and_index_agree(tmp_path):
    make_checkpoint(tmp_path, CheckpointSpec(shard_mb=2.0, order="shuffled"))
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".safetensors"} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 5
    assert set(index["weight_map"].values()) == {path.name for path in shards}
    assert set(index["weight_map"]) == set(read_headers(tmp_path)) == set(make_tensors(CheckpointSpec()))
    experts = {shard for name, shard in index["weight_map"].items() if ".layers.3.block_sparse_moe.experts." in name}
    assert len(experts) > 2, "experts of one layer lie in different shards"
    for path in shards:
        assert path.stat().st_size < 2.1e6


def test_shapes_and_dtypes_are_those_of_the_release(tmp_path):
    make_checkpoint(tmp_path)
    found = read_headers(tmp_path)
    layer = TEXT_PREFIX + "model.layers.4."
    assert found[layer + "self_attn.q_proj.weight"] == ("BF16", (1024, 256))
    assert found[layer + "self_attn.index_k_proj.weight"] == ("BF16", (128, 256))
    assert found[layer + "self_attn.index_q_norm.weight"] == ("BF16", (128,))
    assert found[layer + "block_sparse_moe.gate.weight"] == ("F32", (8, 256))
    assert found[layer + "block_sparse_moe.e_score_correction_bias"] == ("F32", (8,))
    assert found[layer + "block_sparse_moe.experts.7.w2.weight"] == ("BF16", (256, 128))
    assert found["vision_tower.vision_model.embeddings.patch_embedding.weight"] == ("F32", (80, 3, 2, 14, 14))
    assert TEXT_PREFIX + "model.layers.1.self_attn.index_q_proj.weight" not in found  # a dense layer
    assert found[TEXT_PREFIX + "model.layers.1.mlp.gate_proj.weight"] == ("BF16", (512, 256))


def test_without_prefix_and_vision_the_values_stay():
    whole = make_tensors(SMALL)
    bare = make_tensors(CheckpointSpec(**{**vars(SMALL), "prefix": False, "vision": False}))
    assert bare == {
        name.removeprefix(TEXT_PREFIX): tensor for name, tensor in whole.items() if name.startswith(TEXT_PREFIX)
    }


def test_mxfp8_covers_the_text_linears():
    spec = CheckpointSpec(**{**vars(SMALL), "mxfp8": True, "mxfp8_skip": "layers.2.self_attn"})
    tensors, plain = make_tensors(spec), make_tensors(SMALL)
    scales = {name.removesuffix("_scale_inv") for name in tensors if name.endswith("_scale_inv")}
    assert {name for name, tensor in tensors.items() if tensor.dtype == "F8_E4M3"} == scales
    assert TEXT_PREFIX + "model.layers.1.self_attn.index_q_proj.weight" in scales
    assert not [name for name in scales if re.search(r"layers\.2\.self_attn|lm_head|embed|norm|\.gate\.|vision", name)]
    for name in scales:
        rows, columns = tensors[name].shape
        codes = np.frombuffer(tensors[name].data, np.uint8).reshape(rows, columns)
        bytes_ = np.frombuffer(tensors[name + "_scale_inv"].data, np.uint8).reshape(rows, columns // 32)
        exact = (np.frombuffer(plain[name].data, "<u2").astype(np.uint32) << 16).view(np.float32)
        error = np.abs(mxfp8_dequantize(codes, bytes_).ravel() - exact)
        assert error.max() < 0.13 * np.abs(exact).max()  # 448 stands for all up to 512


def test_mxfp8_numbers():
    row = np.zeros((1, 64), np.float32)
    row[0, :5] = 448, -448, 1, 0.0, 2.0**-9
    row[0, 32:36] = 0.75, -0.75, 0.0625, 0.0
    codes, scales = mxfp8_quantize(row)
    assert scales.tolist() == [[127, 118]]  # 2^0, and 2^-9 as 0.75 has exponent -1
    assert codes[0, :5].tolist() == [0x7E, 0xFE, 0x38, 0x00, 0x01]
    assert codes[0, 32:36].tolist() == [0x7C, 0xFC, 0x60, 0x00]
    assert np.array_equal(mxfp8_dequantize(codes, scales), row)


def test_tied_scores(tmp_path):
    tensors = make_tensors(CheckpointSpec(**{**vars(SMALL), "tie": True}))
    names = [name for name in tensors if name.endswith("index_q_proj.weight")]
    assert len(names) == 2
    assert all(not any(tensors[name].data) for name in names)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"heads": 6}, "kv_heads"),
        ({"dense": 5}, "dense"),
        ({"rotary": 192}, "rotary"),
        ({"top": 9}, "top"),
        ({"vocab": 300}, "vocab"),
        ({"vocab": 100_000}, "vocab"),
        ({"hidden": 100, "mxfp8": True}, "32"),
    ],
)
def test_impossible_options(tmp_path, options, expected):
    with pytest.raises(ValueError, match=expected):
        make_checkpoint(tmp_path / "out", CheckpointSpec(**options))
    assert not (tmp_path / "out").exists()


def test_the_script(tmp_path):
    script = HERE / "make_checkpoint.py"
    out = tmp_path / "made"
    run = [sys.executable, script, out, "--layers", "2", "--dense", "1", "--no-vision", "--order", "shuffled"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((out / "config.json").read_text())["text_config"]["num_hidden_layers"] == 2
    failed = subprocess.run([sys.executable, script, out, "--top", "99"], capture_output=True, text=True)
    assert failed.returncode == 2
    assert len(failed.stderr.splitlines()) == 1


def test_safetensors_layout(tmp_path):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"b": Tensor("U8", (3,), b"abc"), "a": Tensor("F32", (1,), bytes(4))})
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    assert data[8 + length :] == bytes(4) + b"abc"  # the wide type first


# ---------------------------------------------------------------------------------------------- tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(folder, SMALL)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_named_tokens_stand_at_the_top_in_the_order_of_the_release(tokenizer):
    first = SMALL.first_special
    assert len(SPECIAL_TOKENS) == 61
    assert [tokenizer.token_to_id(token) - first for token in SPECIAL_TOKENS] == list(range(61))
    release = {"]!p~[": 0, "]~b]": 19, "[e~[": 20, "]!d~[": 21, "]<]image[>[": 25, "]~!b[": 34, "<think>": 50,
               "<tool_call>": 52, "]<]minimax[>[": 58, "<mm:think>": 59, "</mm:think>": 60}  # fmt: skip
    assert {token: tokenizer.token_to_id(token) - first for token in release} == release
    added = json.loads(tokenizer.to_str())["added_tokens"]
    assert {token["content"] for token in added if not token["special"]} == VISIBLE_TOKENS
    assert tokenizer.id_to_token(first + 61) is None


def test_the_tokenizer_returns_every_text(tokenizer):
    text = TEXT.read_text(encoding="utf-8")
    encoded = tokenizer.encode(text)
    assert len(encoded.ids) < 0.6 * len(text.encode()), "it has learned nothing"
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    turn = tokenizer.encode("]~b]ai\n<mm:think>2024 🙂</mm:think>你好[e~[\n")
    assert tokenizer.decode(turn.ids, skip_special_tokens=False) == "]~b]ai\n<mm:think>2024 🙂</mm:think>你好[e~[\n"
    assert turn.ids[0] == SMALL.first_special + 19


# ---------------------------------------------------------------------------------------------- chat template

TOOLS = [{"type": "function", "function": {"name": "tide", "description": "高 tide", "parameters": {"type": "object"}}}]
ARGUMENTS = {"n": 1, "ok": True, "no": None, "at": [1, {"x": "y"}], "o": {"k": []}}
CALL = {
    "role": "assistant",
    "content": "let me",
    "reasoning_content": "hm",
    "tool_calls": [
        {
            "function": {
                "name": "tide",
                "arguments": {"n": 1, "ok": True, "no": None, "at": [1, {"x": "y"}], "o": {"k": []}},
            }
        },
        {"name": "stop", "arguments": {}},
    ],
}
USER = {"role": "user", "content": "hi"}
CONVERSATIONS = {
    "empty": [],
    "one question": [USER],
    "system": [{"role": "system", "content": "be brief"}, USER],
    "root and developer": [{"role": "root", "content": "R"}, {"role": "developer", "content": "D"}, USER],
    "turns": [
        USER,
        {"role": "assistant", "content": "plain"},
        USER,
        {"role": "assistant", "content": "<mm:think>\nwhy\n</mm:think>\nbecause"},
        USER,
        {"role": "assistant", "content": "z", "reasoning_content": "r"},
        USER,
    ],
    "tools": [
        USER,
        CALL,
        {"role": "tool", "content": "t1"},
        {"role": "tool", "content": [{"type": "text", "text": "t2"}]},
        {"role": "assistant", "content": "done"},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, "b"]}],
}


def refuse(message):
    raise ValueError(message)


def load_template(path):
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, ensure_ascii=True: json.dumps(value, ensure_ascii=ensure_ascii)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(path.read_text(encoding="utf-8"))


def after_developer_turn(text):
    """System and developer texts are the template's own; everything after them is the format."""
    return text[text.index("[e~[\n", text.index("]~b]developer\n")) :]


def test_a_whole_conversation():
    text = load_template(HERE / "chat_template.jinja").render(
        messages=CONVERSATIONS["tools"], tools=TOOLS, add_generation_prompt=True, thinking_mode="enabled"
    )
    assert text.startswith("]~!b[]~b]system\n")
    assert '<tools>\n<tool>{"name": "tide", "description": "高 tide"' in text
    ns = "]<]minimax[>["
    assert after_developer_turn(text) == (
        "[e~[\n]~b]user\nhi[e~[\n]~b]ai\n<mm:think>hm</mm:think>let me"
        f'{ns}<tool_call>\n{ns}<invoke name="tide">{ns}<n>1{ns}</n>{ns}<ok>true{ns}</ok>'
        f"{ns}<at>{ns}<item>1{ns}</item>{ns}<item>{ns}<x>y{ns}</x>{ns}</item>{ns}</at>{ns}<o>{ns}<k>{ns}</k>{ns}</o>"
        f'{ns}</invoke>\n{ns}<invoke name="stop">{ns}</invoke>\n{ns}</tool_call>[e~[\n'
        "]~b]tool\n<response>t1</response>\n<response>t2</response>[e~[\n"
        "]~b]ai\n</mm:think>done[e~[\n]~b]ai\n<mm:think>"
    )


@pytest.mark.parametrize(
    ("messages", "mode", "expected"),
    [
        ([{"role": "tool", "content": "x"}], "adaptive", "without a tool call"),
        ([{"role": "robot", "content": "x"}], "adaptive", "robot"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "adaptive", "audio"),
        ([USER], "loud", "loud"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{}"}]}],
            "adaptive",
            "object",
        ),
    ],
)
def test_what_the_template_refuses(messages, mode, expected):
    with pytest.raises(ValueError, match=expected):
        load_template(HERE / "chat_template.jinja").render(messages=messages, thinking_mode=mode)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_format_is_that_of_the_release(name):
    path = SHARED / "oracle" / "chat_template.jinja"
    if not path.exists():
        pytest.skip("the release's template is not here (M3_SHARED)")
    ours, theirs = load_template(HERE / "chat_template.jinja"), load_template(path)
    modes = ({}, *({"thinking_mode": mode} for mode in ("enabled", "disabled", "adaptive")))
    for mode, prompt, tools in itertools.product(modes, (False, True), (None, TOOLS)):
        options = {"messages": CONVERSATIONS[name], "add_generation_prompt": prompt, "tools": tools, **mode}
        assert after_developer_turn(ours.render(**options)) == after_developer_turn(theirs.render(**options))
