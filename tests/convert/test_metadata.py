"""The header: keys in llama.cpp's order with its types, tokenizer, tensor order; read back with the `gguf` library."""

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from checkpoint_tensors import write_json
from m3_convert.checkpoint import load_checkpoint
from m3_convert.gguf_file import check_header, header_bytes
from m3_convert.metadata import plan_metadata
from m3_convert.plan import FILE_TYPES, plan_conversion
from m3_convert.precision import choose
from m3_convert.vocabulary import load_vocabulary
from m3_runtime.errors import InputError
from m3_runtime.quantize import TensorType
from make_checkpoint import SPECIAL_TOKENS, VISIBLE_TOKENS

# What llama.cpp's converter writes for an M3 checkpoint (keys, order, value types), then the key that is ours.
KEYS = [
    ("general.architecture", "STRING", "minimax-m3"),
    ("general.type", "STRING", "model"),
    ("general.sampling.top_k", "INT32", 40),
    ("general.sampling.top_p", "FLOAT32", np.float32(0.95)),
    ("general.sampling.temp", "FLOAT32", 1.0),
    ("general.name", "STRING", "Source"),
    ("general.size_label", "STRING", "4x202K"),
    ("minimax-m3.block_count", "UINT32", 3),
    ("minimax-m3.context_length", "UINT32", 1048576),
    ("minimax-m3.embedding_length", "UINT32", 64),
    ("minimax-m3.feed_forward_length", "UINT32", 96),
    ("minimax-m3.attention.head_count", "UINT32", 4),
    ("minimax-m3.attention.head_count_kv", "UINT32", 2),
    ("minimax-m3.rope.freq_base", "FLOAT32", 5e6),
    ("minimax-m3.attention.layer_norm_rms_epsilon", "FLOAT32", np.float32(1e-6)),
    ("minimax-m3.expert_count", "UINT32", 4),
    ("minimax-m3.expert_used_count", "UINT32", 2),
    ("minimax-m3.expert_gating_func", "UINT32", 2),
    ("minimax-m3.attention.key_length", "UINT32", 32),
    ("minimax-m3.attention.value_length", "UINT32", 32),
    ("general.file_type", "UINT32", 32),
    ("minimax-m3.expert_feed_forward_length", "UINT32", 32),
    ("minimax-m3.rope.dimension_count", "UINT32", 16),
    ("minimax-m3.expert_shared_count", "UINT32", 1),
    ("minimax-m3.expert_weights_scale", "FLOAT32", 2.0),
    ("minimax-m3.expert_weights_norm", "BOOL", True),
    ("minimax-m3.attention.indexer.head_count", "UINT32", 2),
    ("minimax-m3.attention.indexer.key_length", "UINT32", 48),
    ("minimax-m3.attention.indexer.top_k", "UINT32", 3),
    ("minimax-m3.attention.indexer.block_size", "UINT32", 16),
    ("minimax-m3.attention.indexer.local_blocks", "UINT32", 2),
    ("minimax-m3.leading_dense_block_count", "UINT32", 1),
    ("general.quantization_version", "UINT32", 2),
    ("tokenizer.ggml.model", "STRING", "gpt2"),
    ("tokenizer.ggml.pre", "STRING", "minimax-m2"),
    ("tokenizer.ggml.tokens", "ARRAY STRING", None),
    ("tokenizer.ggml.token_type", "ARRAY INT32", None),
    ("tokenizer.ggml.merges", "ARRAY STRING", None),
    ("tokenizer.ggml.bos_token_id", "UINT32", 448 + SPECIAL_TOKENS.index("]~!b[")),
    ("tokenizer.ggml.eos_token_id", "UINT32", 448 + SPECIAL_TOKENS.index("[e~[")),
    ("tokenizer.ggml.unknown_token_id", "UINT32", 448 + SPECIAL_TOKENS.index("]!d~[")),
    ("tokenizer.chat_template", "STRING", None),
    ("tokenizer.huggingface.json", "STRING", None),
]

DENSE = ["attn_norm", "ffn_down", "ffn_gate", "ffn_up", "ffn_norm"]
ATTENTION = ["attn_k_norm", "attn_k", "attn_output", "attn_q_norm", "attn_q", "attn_v"]
INDEXER = ["indexer.k_norm", "indexer.k_proj", "indexer.q_norm", "indexer.q_proj"]
EXPERTS = ["ffn_gate_exps", "ffn_down_exps", "ffn_up_exps", "ffn_down_shexp", "ffn_gate_shexp", "ffn_up_shexp"]


def header(folder: Path, default: str = "auto", *rules: str, name: str | None = None) -> bytes:
    plan = plan_conversion(load_checkpoint(folder, name), choose(default, rules=rules))
    return header_bytes(plan, plan_metadata(plan)[0])


@pytest.fixture
def read(tmp_path: Path, m3_convert):
    """read(folder, *options) -> the converted file as the `gguf` library reads it."""

    def call(folder: Path, *options: str) -> gguf.GGUFReader:
        outcome = m3_convert(folder, tmp_path / "read.gguf", *options)
        assert outcome.code == 0, outcome.err
        return gguf.GGUFReader(tmp_path / "read.gguf")

    return call


def value(reader: gguf.GGUFReader, key: str) -> Any:
    return reader.fields[key].contents()


def test_keys_order_types_and_values(make_folder, read) -> None:
    fields = [f for f in read(make_folder()).fields.values() if not f.name.startswith("GGUF.")]
    assert [(f.name, " ".join(t.name for t in f.types)) for f in fields] == [(name, kind) for name, kind, _ in KEYS]
    for field, (name, _, expected) in zip(fields, KEYS, strict=True):
        if expected is not None:
            assert field.contents() == expected, name


def test_tensor_order_and_shapes(make_folder, read) -> None:
    tensors = read(make_folder()).tensors
    names = ["output.weight", "token_embd.weight"]
    names += [f"blk.0.{n}.weight" for n in DENSE + ATTENTION]
    for i in (1, 2):
        names += [f"blk.{i}.exp_probs_b.bias", f"blk.{i}.ffn_gate_inp.weight"]
        names += [f"blk.{i}.{n}.weight" for n in ["attn_norm", "ffn_norm", *INDEXER, *ATTENTION, *EXPERTS]]
    assert [t.name for t in tensors] == [*names, "output_norm.weight"]
    shapes = {t.name: tuple(map(int, t.shape)) for t in tensors}
    assert shapes["token_embd.weight"] == (64, 512)
    assert shapes["blk.0.attn_output.weight"] == (128, 64)
    assert shapes["blk.1.ffn_down_exps.weight"] == (32, 64, 4)
    assert shapes["blk.1.ffn_gate_exps.weight"] == (64, 32, 4)
    assert shapes["blk.1.indexer.q_proj.weight"] == (64, 96)
    assert shapes["blk.1.indexer.k_norm.weight"] == (48,)


@pytest.mark.parametrize(
    ("default", "rules", "expected"),
    [
        ("f32", (), 0),
        ("f16", (), 1),
        ("q8_0", (), 7),
        ("bf16", (), 32),
        ("auto", (), 32),
        ("bf16", ("*_exps.weight=q8_0",), 32),
        ("auto", ("*_exps.weight=q8_0", "output.weight=q8_0", "token_embd.weight=q8_0"), 7),
    ],
)
def test_file_type(make_folder, read, default: str, rules: tuple[str, ...], expected: int) -> None:
    options = [option for rule in rules for option in ("--rule", rule)]
    assert value(read(make_folder(), "--type", default, *options), "general.file_type") == expected


def test_every_type_has_a_file_type_of_its_own() -> None:
    assert set(FILE_TYPES) == set(TensorType)
    for type_, number in FILE_TYPES.items():
        name = gguf.LlamaFileType(number).name
        assert name.removeprefix("ALL_").removeprefix("MOSTLY_").removesuffix("_MOE") in (type_.name, f"{type_.name}_S")


def test_alignment_and_offsets(make_folder, read) -> None:
    reader = read(make_folder(), "--type", "q8_0")
    assert "general.alignment" not in reader.fields
    end = reader.data_offset
    for tensor in reader.tensors:
        assert tensor.data_offset == end and end % 32 == 0
        end += -(-tensor.n_bytes // 32) * 32
    assert end == Path(reader.data.filename).stat().st_size


def test_vocabulary(make_folder, read) -> None:
    folder = make_folder()
    reader = read(folder)
    source = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens, types = value(reader, "tokenizer.ggml.tokens"), value(reader, "tokenizer.ggml.token_type")
    assert len(tokens) == len(types) == 512
    assert tokens[:448] == [source.id_to_token(i) for i in range(448)]
    assert tokens[448:509] == list(SPECIAL_TOKENS)
    assert tokens[509:] == ["[PAD509]", "[PAD510]", "[PAD511]"]
    assert types[:448] == [1] * 448
    assert types[448:509] == [4 if t in VISIBLE_TOKENS else 3 for t in SPECIAL_TOKENS]
    assert types[509:] == [5, 5, 5]
    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    assert value(reader, "tokenizer.ggml.merges") == [" ".join(pair) for pair in merges]


def test_texts_are_those_of_the_folder(make_folder, read) -> None:
    folder = make_folder()
    reader = read(folder)
    for key, file in (
        ("tokenizer.huggingface.json", "tokenizer.json"),
        ("tokenizer.chat_template", "chat_template.jinja"),
    ):
        assert value(reader, key).encode() == (folder / file).read_bytes()


def change_json(path: Path, **fields: Any) -> None:
    content = json.loads(path.read_text())
    for key, new in fields.items():
        if new is None:
            content.pop(key, None)
        else:
            content[key] = new
    write_json(path, content)


def test_every_end_token_of_generation_config(make_folder, read) -> None:
    """tokenizer_config.json names the end token; others of generation_config.json follow as eot and eom."""
    folder = make_folder()
    end = 448 + SPECIAL_TOKENS.index("[e~[")
    change_json(folder / "generation_config.json", eos_token_id=[end, 500, 501])
    reader = read(folder)
    assert value(reader, "tokenizer.ggml.eos_token_id") == end
    assert value(reader, "tokenizer.ggml.eot_token_id") == 500
    assert value(reader, "tokenizer.ggml.eom_token_id") == 501
    change_json(folder / "generation_config.json", eos_token_id=[500, 501, 502])
    with pytest.raises(InputError, match="eos_token_id: expected at most three different end tokens"):
        header(folder)


def test_end_token_of_generation_config_alone(make_folder, read) -> None:
    folder = make_folder()
    change_json(folder / "tokenizer_config.json", eos_token=None)
    assert value(read(folder), "tokenizer.ggml.eos_token_id") == 448 + SPECIAL_TOKENS.index("[e~[")


def test_without_generation_config(make_folder, read) -> None:
    folder = make_folder()
    (folder / "generation_config.json").unlink()
    keys = list(read(folder).fields)
    assert not any(key.startswith("general.sampling") for key in keys)
    assert "tokenizer.ggml.eos_token_id" in keys


def test_chat_template_inside_tokenizer_config(make_folder, read) -> None:
    folder = make_folder()
    text = (folder / "chat_template.jinja").read_text()
    change_json(folder / "tokenizer_config.json", chat_template=text)
    (folder / "chat_template.jinja").unlink()
    assert value(read(folder), "tokenizer.chat_template") == text


def test_a_source_without_a_chat_template_is_noted(make_folder, m3_convert, tmp_path) -> None:
    folder, note = make_folder(), "the source has no chat template, and the file will have none: m3-run takes it with"
    assert "chat template" not in m3_convert(folder, "--dry-run").err
    (folder / "chat_template.jinja").unlink()
    out = tmp_path / "out.gguf"
    for source, arguments in ((folder, ("--dry-run",)), (folder, (out,)), (out, ("--type", "q8_0", "--dry-run"))):
        outcome = m3_convert(source, *arguments, "--json")
        assert outcome.code == 0 and f"m3-convert: note: {note}" in outcome.err
        assert [warning for warning in outcome.json["warnings"] if warning.startswith(note)]


def test_named_chat_templates_come_in_a_fixed_order(make_folder, read) -> None:
    folder = make_folder()
    (folder / "chat_template.jinja").unlink()
    names = ["default", *(f"tool_{i}" for i in range(6))]
    change_json(folder / "tokenizer_config.json", chat_template=[{"name": n, "template": f"<{n}>"} for n in names])
    reader = read(folder)
    assert value(reader, "tokenizer.chat_template") == "<default>"
    assert value(reader, "tokenizer.chat_templates") == names[1:]
    assert value(reader, "tokenizer.chat_template.tool_3") == "<tool_3>"


def test_another_pre_tokenizer_is_a_note_and_no_obstacle(make_folder, m3_convert, tmp_path) -> None:
    folder = make_folder()
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+|\W+"
    write_json(path, content)
    outcome = m3_convert(folder, tmp_path / "out.gguf")
    assert outcome.code == 0
    assert "note:" in outcome.err and "its pre-tokenizer pattern is not that of MiniMax-M3" in outcome.err


def test_names_follow_the_rules_of_the_gguf_library(make_folder) -> None:
    folder = make_folder()
    metadata = lambda name: gguf_general(header(folder, name=name))  # noqa: E731
    assert metadata("MiniMaxAI/MiniMax-M3")["general.name"] == "MiniMax M3"
    found = metadata("MiniMax-M3-Chat-v2")
    assert (found["general.basename"], found["general.finetune"], found["general.version"]) == (
        "MiniMax-M3",
        "Chat",
        "v2",
    )


def gguf_general(content: bytes) -> dict[str, Any]:
    """The string keys of `general.` in a header."""
    found, position = {}, 24
    while len(found) < 12:
        (n,) = struct.unpack_from("<Q", content, position)
        key = content[position + 8 : position + 8 + n].decode()
        position += 8 + n
        (kind,) = struct.unpack_from("<I", content, position)
        position += 4
        if not key.startswith("general."):
            break
        if kind == 8:
            (n,) = struct.unpack_from("<Q", content, position)
            found[key] = content[position + 8 : position + 8 + n].decode()
            position += 8 + n
        else:
            position += 4
    return found


def test_model_card(make_folder, read) -> None:
    folder = make_folder()
    (folder / "README.md").write_text("---\nlicense: mit\ntags:\n- moe\nbase_model: MiniMaxAI/MiniMax-M3\n---\n# x\n")
    reader = read(folder)
    assert value(reader, "general.license") == "mit"
    assert value(reader, "general.tags") == ["moe"]
    assert value(reader, "general.base_model.0.name") == "MiniMax M3"


BROKEN: list[tuple[str, Any, str]] = [
    ("tokenizer.json", None, "tokenizer.json: cannot be read"),
    ("tokenizer.json", b"{", "tokenizer.json: is not valid JSON"),
    ("tokenizer.json", b"{}", "expected a byte-level BPE tokenizer, found model None"),
    (
        "tokenizer.json",
        {"model": {"type": "Unigram", "vocab": []}},
        "expected a byte-level BPE tokenizer, found model 'Unigram'",
    ),
    ("tokenizer.json", {"model": {"type": "BPE"}, "decoder": {"type": "ByteLevel"}}, "is not a tokenizer"),
    ("tokenizer_config.json", None, "tokenizer_config.json: cannot be read"),
    ("tokenizer_config.json", b"[]", "tokenizer_config.json: expected a JSON object"),
    ("generation_config.json", b"nope", "generation_config.json: is not valid JSON"),
    ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id: expected ids from 0 to 511, found 'x'"),
    ("generation_config.json", {"eos_token_id": 512}, "eos_token_id: expected ids from 0 to 511, found 512"),
    ("generation_config.json", {"top_k": "many"}, "metadata general.sampling.top_k: expected INT32, found 'many'"),
    ("generation_config.json", {"temperature": 1e300}, "metadata general.sampling.temp: expected FLOAT32, found 1e"),
    ("chat_template.jinja", b"\xff", "chat_template.jinja: is not UTF-8 text"),
    ("README.md", b"---\na: [\n---\n", "README.md: model card cannot be read"),
]


@pytest.mark.parametrize(("file", "content", "message"), BROKEN)
def test_broken_files_of_the_tokenizer(make_folder, file: str, content: Any, message: str) -> None:
    folder = make_folder()
    path = folder / file
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(InputError, match=message):
        header(folder)


def test_tokens_beyond_the_vocabulary(make_folder) -> None:
    folder = make_folder()
    config = replace(load_checkpoint(folder).config, vocab=508)
    with pytest.raises(InputError, match="token '</mm:think>' has id 508, expected less than vocab_size 508"):
        load_vocabulary(folder, config)


def test_ids_of_added_tokens_that_the_library_would_not_give(make_folder) -> None:
    folder = make_folder()
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"][-1]["id"] = 511
    write_json(path, content)
    with pytest.raises(
        InputError, match="added token '</mm:think>' has id 511, where the tokenizer puts another token"
    ):
        header(folder)


def test_two_chat_templates_that_differ(make_folder) -> None:
    folder = make_folder()
    change_json(folder / "tokenizer_config.json", chat_template="another")
    with pytest.raises(InputError, match="hold chat templates that differ"):
        header(folder)


def test_the_engine_judges_the_header_before_anything_is_written(make_folder) -> None:
    content = header(make_folder())
    check_header(content, "x.gguf")
    broken = content.replace(b"minimax-m3.attention.indexer.top_k", b"minimax-m3.attention.indexer.top_x")
    with pytest.raises(InputError, match=r"x\.gguf.*indexer"):
        check_header(broken, "x.gguf")


def test_a_header_that_the_engine_refuses_is_not_written(make_folder, m3_convert, tmp_path, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise InputError("out.gguf: refused by the engine")

    monkeypatch.setattr("m3_convert.gguf_file.Model.from_header", refuse)
    outcome = m3_convert(make_folder(), tmp_path / "out.gguf")
    assert outcome.code == 2 and outcome.error == "m3-convert: out.gguf: refused by the engine"
    assert not list(tmp_path.glob("out.gguf*"))
