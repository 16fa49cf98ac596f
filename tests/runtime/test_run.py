"""The command m3-run on real files: answers, reports, options, bad input."""

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m3_runtime import Model, command, memory
from m3_runtime.cli import NAME, app
from m3_runtime.sampler import Sampler, SamplerOptions
from m3_runtime.text import ChatTokenizer
from tiny_model import TINY, convert

Runner = Callable[..., tuple[int, str, str]]


@pytest.fixture
def m3_run(capsys: pytest.CaptureFixture[str]) -> Runner:
    """Runs m3-run in this process: exit code, stdout, stderr."""

    def runner(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()  # what making the files has printed
        with pytest.raises(SystemExit) as exit_:
            command.run(app, NAME, [str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert isinstance(exit_.value.code, int)
        return int(exit_.value.code), out, err

    return runner


@pytest.fixture
def refused(m3_run: Runner) -> Callable[..., str]:
    """Runs m3-run on bad input: the one line on stderr, after the right exit code and no output."""

    def runner(code: int, *arguments: object) -> str:
        found, out, err = m3_run(*arguments)
        assert (found, out) == (code, ""), err
        assert err.startswith("m3-run: ") and err.endswith("\n") and err.count("\n") == 1, err
        return err.removeprefix("m3-run: ").rstrip("\n")

    return runner


def patched(source: Path, out: Path, *changes: tuple[bytes, bytes]) -> Path:
    """A copy of a file with bytes replaced by others of the same length."""
    data = source.read_bytes()
    for old, new in changes:
        assert len(old) == len(new) and old in data
        data = data.replace(old, new)
    out.write_bytes(data)
    return out


def changed_checkpoint(source: Path, out: Path, **files: dict[str, Any] | str | None) -> Path:
    """A checkpoint folder with fields of JSON files changed, text files replaced or (None) removed."""
    shutil.copytree(source, out)
    for name, change in files.items():
        path = next(p for p in out.iterdir() if p.stem == name)
        if change is None:
            path.unlink()
        elif isinstance(change, str):
            path.write_text(change, encoding="utf-8")
        else:
            path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change), encoding="utf-8")
    return out


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


# ---------------------------------------------------------------------------------------------- answers


def test_one_answer(m3_run: Runner, tiny_gguf: Path):
    code, out, err = m3_run(tiny_gguf, "-p", "Hello", "-n", 8, "--seed", 1)
    assert code == 0
    assert out.endswith("\n") and len(out) > 1
    assert "]~b]" not in out and "[e~[" not in out
    status = err.splitlines()[0]
    for part in (
        f"m3-run: {tiny_gguf}: F32 ",
        "attention sparse (top 3 of blocks of 32)",
        "context 4096",
        "K/V f16 ",
        "index keys f32 ",
        "scratch ",
        "cpu ",
        " threads",
        "seed 1",
    ):
        assert part in status


def greedy(path: Path, text: str, n: int, **options: Any) -> tuple[list[int], ChatTokenizer]:
    """The best n tokens after `text`, or less if one is an end token; and the tokenizer."""
    with Model(path) as model, model.session(context=1024, **options) as session:
        tokenizer = ChatTokenizer(model.gguf.metadata)
        ids: list[int] = []
        logits = session.eval(tokenizer.encode(text))
        while True:
            logits[tokenizer.unused_ids()] = -np.inf
            ids.append(int(np.argmax(logits)))
            if len(ids) == n or ids[-1] in tokenizer.end_ids:
                return ids, tokenizer
            logits = session.eval(ids[-1:])


def test_the_answer_is_what_the_engine_says(m3_run: Runner, tiny_gguf: Path, tmp_path: Path):
    """Greedy, without the template, against a loop of its own."""
    text = "The tide turns every six hours.\n\n"
    ids, tokenizer = greedy(tiny_gguf, text, 12)
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes(text.encode())
    code, out, _ = m3_run(tiny_gguf, "--raw", "-f", prompt, "-n", 12, "--temperature", 0, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["tokens"]["prompt"] == len(tokenizer.encode(text))
    assert report["tokens"]["answer"] == len(ids)
    assert report["answer"] == tokenizer.decode(ids)


def tokenizer_of(path: Path) -> ChatTokenizer:
    with Model(path) as model:
        return ChatTokenizer(model.gguf.metadata)


def test_the_report(m3_run: Runner, tiny_q8_gguf: Path):
    code, out, err = m3_run(
        tiny_q8_gguf, "-p", "Hi", "-n", 5, "--json", "--seed", 7, "--threads", 2, "--isa", "scalar", "--kv-type", "f32"
    )  # fmt: skip
    report = json.loads(out)
    assert code == 0
    assert "attention sparse" in err
    assert report["finish_reason"] in ("length", "stop")
    assert isinstance(report["answer"], str) and isinstance(report["thinking"], str) and report["tool_calls"] == []
    assert (report["attention"], report["top_k_blocks"], report["block_size"]) == ("sparse", 3, 32)
    assert report["tokens"]["answer"] == 5
    assert report["tokens"]["context"] == 4096
    timings = report["timings"]
    assert timings["prefill_tokens"] == report["tokens"]["prompt"]
    assert timings["decode_tokens"] == 4
    assert timings["load_s"] > 0 and timings["prefill_tokens_per_s"] > 0 and timings["decode_tokens_per_s"] > 0
    used = report["memory"]
    with Model(tiny_q8_gguf) as model:
        plan = model.memory(context=4096, kv_type="f32", threads=2)
        assert used["weights_bytes"] == model.weight_bytes
        assert sum(report["weight_types"].values()) == model.weight_bytes
    assert (used["kv_bytes"], used["index_bytes"]) == (plan.kv_bytes, plan.index_bytes)
    assert used["scratch_bytes"] == plan.scratch_bytes
    assert used["peak_rss_bytes"] > 10**7
    assert set(report["weight_types"]) == {"Q8_0", "F32"}
    assert (report["seed"], report["threads"], report["isa"], report["device"]) == (7, 2, "scalar", "cpu")
    assert report["msa"] is None  # a choice of kernels that only a GPU has
    assert (report["kv_type"], report["index_type"]) == ("f32", "f32")
    assert report["sampling"] == {
        "temperature": 1.0,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "repeat_last_n": 64,
    }
    assert report["model"] == "Tiny"
    assert report["file"] == str(tiny_q8_gguf)
    assert re.fullmatch(r"\d+\.\d+\.\d+", report["version"])


def test_the_same_seed_gives_the_same_answer(m3_run: Runner, tiny_gguf: Path):
    def answer(*options: object) -> str:
        return json.loads(m3_run(tiny_gguf, "-p", "Hi", "-n", 12, "--json", *options)[1])["answer"]

    assert answer("--seed", 3) == answer("--seed", 3, "--threads", 1)
    assert answer("--seed", 3) != answer("--seed", 4)


def test_a_seed_that_nobody_gave_is_shown_and_reproduces(m3_run: Runner, tiny_gguf: Path):
    first = json.loads(m3_run(tiny_gguf, "-p", "Hi", "-n", 8, "--json")[1])
    again = json.loads(m3_run(tiny_gguf, "-p", "Hi", "-n", 8, "--json", "--seed", first["seed"])[1])
    assert first["answer"] + first["thinking"] == again["answer"] + again["thinking"]


def test_sampling_options_and_the_files_defaults(m3_run: Runner, tiny_checkpoint: Path, tmp_path: Path):
    defaults = {"temperature": 0.5, "top_p": 0.9, "top_k": 5}
    folder = changed_checkpoint(tiny_checkpoint, tmp_path / "c", generation_config=defaults)
    path = convert(folder, tmp_path / "m.gguf", "--type", "f32")
    given = ("--top-k", 7, "--min-p", 0.1, "--repeat-penalty", 1.5)
    report = json.loads(m3_run(path, "-p", "Hi", "-n", 2, "--json", *given)[1])
    assert report["sampling"] == {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repeat_penalty": 1.5,
        "repeat_last_n": 64,
    }


def test_the_prompt_of_a_file_and_of_standard_input(
    m3_run: Runner, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options = ("-n", 6, "--seed", 1)
    expected = m3_run(tiny_gguf, "-p", "Grüße, 天!", *options)[1]
    for text in ("Grüße, 天!", "Grüße, 天!\n", "Grüße, 天!\r\n"):
        (tmp_path / "p.txt").write_bytes(text.encode())
        assert m3_run(tiny_gguf, "-f", tmp_path / "p.txt", *options)[1] == expected
    stdin(monkeypatch, "Grüße, 天!\n".encode())
    assert m3_run(tiny_gguf, "-f", "-", *options)[1] == expected
    stdin(monkeypatch, "Grüße, 天!\n\n".encode())
    assert m3_run(tiny_gguf, "-f", "-", *options)[1] != expected


@pytest.mark.parametrize("mode", ["enabled", "disabled", "adaptive"])
def test_thinking(m3_run: Runner, tiny_gguf: Path, mode: str):
    report = json.loads(m3_run(tiny_gguf, "-p", "Hi", "-n", 4, "--json", "--seed", 2, "--thinking", mode)[1])
    assert bool(report["thinking"]) is (mode == "enabled")
    assert bool(report["answer"]) is (mode != "enabled")


def test_thinking_is_not_on_stdout(m3_run: Runner, tiny_gguf: Path):
    _, out, err = m3_run(tiny_gguf, "-p", "Hi", "-n", 4, "--seed", 2, "--thinking", "enabled")
    assert out == ""
    assert len(err.splitlines()) >= 2


def test_the_system_message_is_in_the_prompt(m3_run: Runner, tiny_gguf: Path):
    def tokens(*options: object) -> int:
        return json.loads(m3_run(tiny_gguf, "-p", "Hi", "-n", 1, "--json", *options)[1])["tokens"]["prompt"]

    tokenizer = tokenizer_of(tiny_gguf)
    difference = len(tokenizer.encode("Be very brief.")) - len(tokenizer.encode("You are a helpful assistant."))
    assert tokens("--system", "Be very brief.") - tokens() == difference


def test_every_end_token_of_the_checkpoint_ends_the_answer(m3_run: Runner, tiny_checkpoint: Path, tmp_path: Path):
    """a list of ends in generation_config.json, the second of which the greedy answer contains."""
    path = convert(tiny_checkpoint, tmp_path / "a.gguf", "--type", "f32")
    ids, tokenizer = greedy(path, "Hi", 10)
    third = next(id for id in ids[2:] if id not in ids[:2])
    ends = {"eos_token_id": [TINY.first_special + 20, third]}
    folder = changed_checkpoint(tiny_checkpoint, tmp_path / "c", generation_config=ends)
    other = convert(folder, tmp_path / "b.gguf", "--type", "f32")
    report = json.loads(m3_run(other, "-p", "Hi", "--raw", "-n", 10, "--temperature", 0, "--json")[1])
    assert report["finish_reason"] == "stop"
    assert report["tokens"]["answer"] == ids.index(third) + 1
    assert report["answer"] == tokenizer.decode(ids[: ids.index(third)])


def test_the_answer_ends_with_the_context(m3_run: Runner, tiny_gguf: Path):
    prompt = json.loads(m3_run(tiny_gguf, "-p", "Hi", "-n", 1, "--json")[1])["tokens"]["prompt"]
    code, _, err = m3_run(tiny_gguf, "-p", "Hi", "--context", prompt + 4, "--seed", 1)
    assert code == 0
    assert f"context full: {prompt + 4}/{prompt + 4} tokens, the answer is cut" in err
    report = json.loads(m3_run(tiny_gguf, "-p", "Hi", "--context", prompt + 4, "--seed", 1, "--json")[1])
    assert (report["finish_reason"], report["tokens"]["answer"]) == ("context", 5)


def test_dense_attention_is_said_wherever_the_mode_shows(m3_run: Runner, tiny_gguf: Path):
    code, out, err = m3_run(tiny_gguf, "-p", "Hi", "-n", 2, "--attention", "dense", "--json")
    assert code == 0
    assert json.loads(out)["attention"] == "dense"
    assert "attention dense;" in err.splitlines()[0]
    assert err.count("out of distribution") == 1
    assert "dense" not in m3_run(tiny_gguf, "-p", "Hi", "-n", 2)[2]


def test_sparse_and_dense_read_different_tokens(m3_run: Runner, tiny_gguf: Path):
    """Beyond top_k blocks the two answers differ, and each is that of the engine's mode."""
    text = "The tide turns every six hours, and the ferry waits for it. " * 12
    answers = {}
    for mode in ("sparse", "dense"):
        ids, tokenizer = greedy(tiny_gguf, text, 12, attention=mode, kv_type="f32")
        assert len(tokenizer.encode(text)) > TINY.top_k * TINY.block
        options = ("--raw", "-p", text, "-n", 12, "--temperature", 0, "--kv-type", "f32", "--json")
        report = json.loads(m3_run(tiny_gguf, "--attention", mode, *options)[1])
        assert report["answer"] == tokenizer.decode(ids)
        answers[mode] = ids
    assert answers["sparse"] != answers["dense"]


def test_unused_ids_are_banned(m3_run: Runner, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[list[int]] = []

    class Spy(Sampler):
        def __init__(self, options: SamplerOptions, seed: int, banned: Collection[int] = ()) -> None:
            seen.append(sorted(banned))
            super().__init__(options, seed, banned)

    monkeypatch.setattr("m3_runtime.run.Sampler", Spy)
    assert m3_run(tiny_gguf, "-p", "Hi", "-n", 1)[0] == 0
    assert seen == [[1021, 1022, 1023]]


def test_require_sparse(m3_run: Runner, refused: Callable[..., str], tiny_gguf: Path):
    assert m3_run(tiny_gguf, "-p", "Hi", "-n", 1, "--require-sparse")[0] == 0
    message = refused(2, tiny_gguf, "-p", "Hi", "--require-sparse", "--attention", "dense")
    assert message == "--require-sparse: the run would be dense, because of --attention dense"


@pytest.mark.parametrize(("kv_type", "index_type"), [("f32", "bf16"), ("f16", "f32"), ("q8_0", "q4_0")])
def test_cache_types(m3_run: Runner, tiny_gguf: Path, kv_type: str, index_type: str):
    code, _, err = m3_run(tiny_gguf, "-p", "Hi", "-n", 1, "--kv-type", kv_type, "--index-type", index_type)
    assert code == 0
    assert f"K/V {kv_type} " in err and f"index keys {index_type} " in err


def test_raw_needs_no_chat_template(m3_run: Runner, tiny_checkpoint: Path, tmp_path: Path, refused: Callable[..., str]):
    folder = changed_checkpoint(tiny_checkpoint, tmp_path / "c", chat_template=None)
    path = convert(folder, tmp_path / "m.gguf", "--type", "f32")
    message = refused(2, path, "-p", "Hi")
    assert (
        message == "tokenizer.chat_template: the file has no chat template; only --raw with -p or -f works without one"
    )
    assert m3_run(path, "-p", "Hi", "-n", 2, "--raw")[0] == 0


def test_a_tokenizer_without_its_json(m3_run: Runner, tiny_gguf: Path, tmp_path: Path):
    """A file of llama.cpp has tokens and merges only: same ids, hence the same answer."""
    other = patched(tiny_gguf, tmp_path / "m.gguf", (b"tokenizer.huggingface.json", b"tokenizer.huggingface.jsox"))
    options = ("-p", "Hello, wörld 123!", "-n", 6, "--seed", 1)
    assert m3_run(other, *options)[1] == m3_run(tiny_gguf, *options)[1]


# ---------------------------------------------------------------------------------------------- chat through a pipe


def test_a_chat_through_a_pipe(m3_run: Runner, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch):
    stdin(monkeypatch, b"Hello\n\nAgain\n/stats\n")
    code, out, err = m3_run(tiny_gguf, "-n", 5, "--seed", 1, "--thinking", "disabled")
    assert code == 0
    assert out.strip()
    assert "> " not in out
    reused = re.search(r"last prompt: (\d+) tokens at [\d.]+ tok/s, (\d+) reused", err)
    assert reused is not None
    assert int(reused[2]) > int(reused[1])
    assert err.count("attention sparse") == 2  # the status at the start, and /stats


def test_a_chat_whose_message_is_too_long(m3_run: Runner, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch):
    """three turns in a context that holds one of them."""
    stdin(monkeypatch, b"Hello\n" + b"long " * 300 + b"\n/new\nAgain\n")
    code, out, err = m3_run(tiny_gguf, "-n", 4, "--context", 128, "--seed", 1, "--thinking", "disabled")
    assert code == 2
    assert re.search(
        r"m3-run: context full: the prompt has \d{3} tokens, the context holds 128; the chat goes on without this",
        err,
    )
    assert out.strip()


# ---------------------------------------------------------------------------------------------- bad input


def test_a_prompt_longer_than_the_context(refused: Callable[..., str], tiny_gguf: Path):
    assert re.fullmatch(
        r"the prompt has \d+ tokens, --context holds 20", refused(2, tiny_gguf, "-p", "Hi", "--context", 20)
    )
    message = refused(2, tiny_gguf, "-p", "word " * 5000)
    assert re.fullmatch(r"the prompt has \d{4,} tokens, the file's context holds 4096", message)


def test_a_context_beyond_the_files(refused: Callable[..., str], tiny_gguf: Path):
    assert refused(2, tiny_gguf, "-p", "Hi", "--context", 4097) == "--context 4097: the file's context is 4096"


def test_no_memory(refused: Callable[..., str], tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 1_000_000)
    message = refused(4, tiny_gguf, "-p", "Hi", "--context", 2048)
    assert re.fullmatch(r"not enough memory: a context of 2048 tokens takes [\d.]+ MB, 1\.0 MB are free", message)
    message = refused(4, tiny_gguf, "-p", "Hi")
    assert "not enough memory: a context of " in message
    monkeypatch.setattr(memory, "address_space_left", lambda: 1_000)
    assert "MB to map, the limit on address space leaves 1.0 kB" in refused(4, tiny_gguf, "-p", "Hi")


def test_weights_beyond_the_memory_are_said(m3_run: Runner, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch):
    with Model(tiny_gguf) as model:
        session = model.memory(context=512).total
        room = session + model.weight_bytes // 2
    monkeypatch.setattr(memory, "available_memory", lambda: room)
    code, _, err = m3_run(tiny_gguf, "-p", "Hi", "-n", 1, "--context", 512)
    assert code == 0
    assert "weights will be read from the disk again and again" in err


def test_files_that_are_no_model(refused: Callable[..., str], tiny_gguf: Path, tiny_checkpoint: Path, tmp_path: Path):
    def broken(name: str, data: bytes) -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    whole = tiny_gguf.read_bytes()
    assert "No such file" in refused(2, tmp_path / "absent.gguf", "-p", "Hi")
    assert "truncated" in refused(2, broken("empty.gguf", b""), "-p", "Hi")
    assert "t.gguf" in refused(2, broken("t.gguf", b"This is no GGUF file but a text." * 10), "-p", "Hi")
    assert "blk." in refused(2, broken("cut.gguf", whole[: len(whole) // 2]), "-p", "Hi")
    message = refused(2, tiny_checkpoint, "-p", "Hi")
    assert (
        message == f"{tiny_checkpoint}: is a folder; m3-run reads a GGUF file, which m3-convert makes of a checkpoint"
    )


def test_another_architecture(refused: Callable[..., str], tiny_gguf: Path, tmp_path: Path):
    at = b"general.architecture" + (8).to_bytes(4, "little") + (10).to_bytes(8, "little")
    path = patched(tiny_gguf, tmp_path / "m.gguf", (at + b"minimax-m3", at + b"minimax-m2"))
    message = refused(2, path, "-p", "Hi")
    assert "minimax-m2" in message and "minimax-m3" in message


def test_old_exports_are_named(refused: Callable[..., str], tiny_gguf: Path, tmp_path: Path):
    """a file without the indexer says so, and nothing about memory."""
    path = patched(
        tiny_gguf, tmp_path / "m.gguf", (b"attention.indexer.", b"attention.absents."), (b".indexer.", b".absents.")
    )
    message = refused(2, path, "-p", "Hi")
    assert "minimax-m3.attention.indexer." in message and "MSA" in message
    assert "memory" not in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([(b"minimax-m2", b"minimax-mX")], "tokenizer.ggml.pre: expected 'minimax-m2', found 'minimax-mX'"),
        ([(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz")], "tokenizer.ggml.tokens"),
        ([(b"ggml.merges", b"ggml.mergez"), (b"huggingface", b"huggingfacf")], "tokenizer.ggml.merges: expected"),
        ([(b'"type":"ByteLevel"', b'"type":"ByteLevex"')], "tokenizer.huggingface.json: "),
        ([(b"{%- set document", b"{%- sot document")], "chat template, line "),
        ([(b"{%- set document", b"{{ x.__class__ }}"[:16])], "chat template"),
    ],
)  # fmt: skip
def test_a_broken_tokenizer_or_template(
    refused: Callable[..., str], tiny_gguf: Path, tmp_path: Path, changes: list[tuple[bytes, bytes]], message: str
):
    data = tiny_gguf.read_bytes()
    usable = [(old, new) for old, new in changes if old in data]
    if len(usable) < len(changes):  # the library writes JSON with or without spaces
        usable = [(old.replace(b":", b": "), new.replace(b":", b": ")) for old, new in changes]
    assert message in refused(2, patched(tiny_gguf, tmp_path / "m.gguf", *usable), "-p", "Hi")


def test_a_template_that_walks_to_the_os_is_blocked(refused: Callable[..., str], tiny_checkpoint: Path, tmp_path: Path):
    """A template that reaches for the operating system is an error, and nothing runs."""
    marker = tmp_path / "ran"
    template = f"{{{{ cycler.__init__.__globals__.os.mkdir('{marker}') }}}}{{{{ messages[0].content }}}}"
    folder = changed_checkpoint(tiny_checkpoint, tmp_path / "c", chat_template=template)
    path = convert(folder, tmp_path / "m.gguf", "--type", "f32")
    assert "the sandbox forbids the attribute '__init__'" in refused(2, path, "-p", "Hi")
    assert not marker.exists()


def test_weights_that_are_not_finite(m3_run: Runner, tiny_gguf: Path, tmp_path: Path):
    """a NaN in a layer stops the run with the layer's number, in one line."""
    with Model(tiny_gguf) as model:
        (tensor,) = [tensor for tensor in model.gguf.tensors if tensor.name == "blk.1.attn_v.weight"]
    path = tmp_path / "nan.gguf"
    data = bytearray(tiny_gguf.read_bytes())
    data[tensor.offset : tensor.offset + 4] = np.float32(np.nan).tobytes()
    path.write_bytes(data)
    code, out, err = m3_run(path, "-p", "Hi", "-n", 4)
    assert (code, out) == (2, "")
    assert "layer 1" in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-p", "a", "-f", "-"], "-p and -f are both given, expected one of them"),
        (["--json"], "--json needs a prompt: -p or -f"),
        (["--raw"], "--raw needs a prompt: -p or -f"),
        (["-p", "a", "--raw", "--system", "x"], "--system needs the chat template, which --raw leaves out"),
        (["-p", "a", "--raw", "--thinking", "enabled"], "--thinking needs the chat template, which --raw leaves out"),
        (["-p", "", "--raw"], "-p: the prompt is empty"),
        (["-p", ""], "-p: the prompt is empty"),
        (["-f", os.devnull], "-f /dev/null: the prompt is empty"),
        (["-p", "a\udcff"], "-p: invalid UTF-8 at byte offset 1 (byte 0xff): invalid start byte"),
        (["-f", "/no/such/file"], "-f /no/such/file: No such file or directory"),
        (["-p", "a", "--temperature", "-1"], "temperature: -1.0, expected a number from 0 to 1000"),
        (["-p", "a", "--temperature", "nan"], "temperature: nan, expected a number from 0 to 1000"),
        (["-p", "a", "--top-p", "0"], "top_p: 0.0, expected a number above 0, at most 1"),
        (["-p", "a", "--top-k", "-1"], "top_k: -1, expected a whole number, 0 or more"),
        (["-p", "a", "--min-p", "2"], "min_p: 2.0, expected a number from 0 to 1"),
        (["-p", "a", "--repeat-penalty", "0"], "repeat_penalty: 0.0, expected a number from 0.001 to 1000"),
        (["-p", "a", "--seed", "-1"], "'--seed'"),
        (["-p", "a", "-n", "0"], "'-n'"),
        (["-p", "a", "-n", "x"], "'-n'"),
        (["-p", "a", "--context", "0"], "'--context'"),
        (["-p", "a", "--threads", "-1"], "--threads is -1, expected 0 (all cores) to "),
        (["-p", "a", "--threads", "100000"], "--threads is 100000, expected 0 (all cores) to "),
        (["-p", "a", "--device", "tpu"], "--device is 'tpu', expected one of auto, cpu, cuda"),
        (["-p", "a", "--isa", "mmx"], "--isa is 'mmx', expected one of auto, scalar, avx2, avx512, neon"),
        (["-p", "a", "--attention", "flash"], "--attention is 'flash', expected one of sparse, dense"),
        (["-p", "a", "--kv-type", "q5_1"], "--kv-type is 'q5_1', expected one of f32, f16, bf16, q8_0, q4_0"),
        (["-p", "a", "--index-type", "int8"], "--index-type is 'int8', expected one of f32, f16, bf16, q8_0, q4_0"),
        (["-p", "a", "--thinking", "yes"], "'--thinking'"),
        (["-p", "a", "--nosuch"], "No such option: --nosuch"),
        (["-p", "a", "other.gguf"], "other.gguf"),
    ],
)
def test_options_that_are_wrong(refused: Callable[..., str], tiny_gguf: Path, options: list[str], message: str):
    assert message in refused(2, tiny_gguf, *options)


def test_a_prompt_that_is_no_utf8(
    refused: Callable[..., str], tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "p.txt"
    path.write_bytes("é".encode() + b"abc\xe2\x28\xa1")
    expected = "invalid UTF-8 at byte offset 5 (byte 0xe2): invalid continuation byte"
    assert refused(2, tiny_gguf, "-f", path) == f"-f {path}: {expected}"
    stdin(monkeypatch, path.read_bytes())
    assert refused(2, tiny_gguf, "-f", "-") == f"-f -: {expected}"


def test_no_model_at_all(refused: Callable[..., str]):
    assert "MODEL.gguf" in refused(2)


# ---------------------------------------------------------------------------------------------- help

OPTIONS = """
    -p --prompt -f --file -n --max-tokens --context --device --threads --json --system --raw --thinking --temperature
    --top-k --top-p --min-p --repeat-penalty --seed --attention --require-sparse --kv-type --index-type --isa
    --on-full --keep --plain --version
""".split()  # noqa: SIM905 (a list that is read)


def test_every_option_is_documented(m3_run: Runner):
    code, out, _ = m3_run("--help")
    assert code == 0
    lines = out.splitlines()
    for option in OPTIONS:
        (at,) = [i for i, line in enumerate(lines) if re.search(rf"^ +(-\w, )?{option}[ ,]", line)]
        text = " ".join(lines[at : at + 2])
        assert re.search(r"  [A-Z-][\w-]+ ", text), f"no text beside {option}: {text}"
    assert {*re.findall(r"(?<![\w-])--?[a-z][\w-]*", out)} >= {*OPTIONS, "--help"}
    assert "Exit codes: 0 done; 2 " in out
    for values in (
        "auto|cpu|cuda",
        "enabled|disabled|adaptive",
        "stop|shift",
        "sparse|dense",
        "f32|f16|bf16|q8_0|q4_0",
        "scalar|avx2|avx512|neon",
    ):
        assert values in out
    assert "out of" in out and "distribution" in out
