"""The text of a check, and whether it gave any query a choice."""

import hashlib
import io
import os
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import pytest

from convert.check.small_check import EXAMPLE, FIRST
from m3_convert import comparable, text_sample
from m3_convert.text_sample import load_text, sample_text
from m3_runtime import Model, NothingTestedError
from m3_runtime.errors import InputError
from m3_runtime.text import ChatTokenizer

NOTHING_TESTED = 3


def test_without_a_choice_nothing_is_tested(tiny_gguf, coarse_index, m3_check_selection):
    run = m3_check_selection(tiny_gguf, coarse_index, "--context", FIRST)
    assert (run.code, run.out) == (NOTHING_TESTED, "")
    assert "no query had a choice of blocks: 96 tokens" in run.error and "3 * 32 = 96 tokens" in run.error


def test_one_token_more_tests_one_query(tiny_gguf, coarse_index, m3_check_selection):
    run = m3_check_selection(tiny_gguf, coarse_index, "--context", FIRST + 1, "--json", "--no-thresholds")
    assert run.code == 0
    assert run.json["tested"] == {"queries": 1, "first_position": FIRST, "lists": 4}
    assert run.json["buckets"] == [{"first": FIRST, "last": FIRST, "queries": 1}]


def test_a_short_text_tests_nothing(tiny_gguf, m3_check_selection, tmp_path):
    for content in ("", "a few words"):
        (tmp_path / "text").write_text(content)
        run = m3_check_selection(tiny_gguf, tiny_gguf, "--text", tmp_path / "text", "--min-overlap", 0)
        assert run.code == NOTHING_TESTED, content


def test_only_local_blocks_test_nothing(make_folder, small, m3_check_selection):
    folder = make_folder(replace(small, local=3, top_k=3))
    run = m3_check_selection(folder, folder, *EXAMPLE)
    assert run.code == NOTHING_TESTED and "all 3 blocks that a query reads are local ones" in run.error


def test_a_model_without_sparse_layers_tests_nothing(tiny_gguf):
    with Model(tiny_gguf) as model:
        dense = replace(model.hparams, n_dense_layer=model.hparams.n_layer)
    with pytest.raises(NothingTestedError, match="all 3 layers of the model are dense"):
        comparable.check_choice(dense, 4096)


def test_the_text_of_the_report(tiny_gguf, m3_check_selection, tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. " * 8, encoding="utf-8")
    with Model(tiny_gguf) as model:
        n = len(ChatTokenizer(model.gguf.metadata).encode(text.read_text(encoding="utf-8")))
    assert FIRST < n < 500
    raw = text.read_bytes()
    expected = {"name": str(text), "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    run = m3_check_selection(tiny_gguf, tiny_gguf, "--text", text, "--threads", 1, "--json")
    assert run.json["text"] == {**expected, "tokens": n, "whole": True, "wanted": None}
    run = m3_check_selection(tiny_gguf, tiny_gguf, "--text", text, "--context", n - 1, "--threads", 1, "--json")
    assert run.json["text"] == {**expected, "tokens": n - 1, "whole": False, "wanted": n - 1}
    run = m3_check_selection(tiny_gguf, tiny_gguf, "--text", text, "--context", 4000, "--threads", 1)
    assert f"all {n} tokens (fewer than the 4,000 asked for)" in run.out


def test_the_built_in_text(tiny_gguf, m3_check_selection):
    raw = files("m3_convert").joinpath("text.txt").read_bytes()
    report = m3_check_selection(tiny_gguf, tiny_gguf, *EXAMPLE, "--json").json
    assert report["text"]["name"] == "built-in text"
    assert report["text"]["sha256"] == hashlib.sha256(raw).hexdigest()


def test_a_text_that_is_not_utf_8(tiny_gguf, m3_check_selection, tmp_path):
    (tmp_path / "latin").write_bytes(b"abc\xe9 " + b"x" * 5000)
    run = m3_check_selection(tiny_gguf, tiny_gguf, "--text", tmp_path / "latin")
    assert (run.code, run.out) == (2, "")
    assert "expected UTF-8, found byte 0xe9 at offset 3" in run.error
    run = m3_check_selection(tiny_gguf, tiny_gguf, "--text", tmp_path / "absent")
    assert run.code == 2 and "absent: the text cannot be read: No such file" in run.error


@pytest.fixture
def book():
    return ("Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. " * 8).encode()


def given(monkeypatch, content, terminal=False):
    """Standard input with this content."""
    stream = SimpleNamespace(isatty=lambda: terminal, buffer=io.BytesIO(content))
    monkeypatch.setattr(text_sample.sys, "stdin", stream)


def test_the_text_of_standard_input(tiny_gguf, m3_check_selection, monkeypatch, book):
    given(monkeypatch, book)
    text = m3_check_selection(tiny_gguf, tiny_gguf, "--text", "-", "--threads", 1, "--json").json["text"]
    assert (text["name"], text["sha256"]) == ("standard input", hashlib.sha256(book).hexdigest())
    given(monkeypatch, b"", terminal=True)
    run = m3_check_selection(tiny_gguf, tiny_gguf, "--text", "-")
    assert (run.code, run.out) == (2, "")
    assert "standard input: expected a text from a file or a pipe, found a terminal" in run.error


def test_the_text_of_a_command_of_the_shell(book):
    """bash hands m3-check-selection --text <(command) the name of an open pipe."""
    read, write = os.pipe()
    os.write(write, book)
    os.close(write)
    text = load_text(Path(f"/dev/fd/{read}"))
    os.close(read)
    assert text.content == book.decode() and text.name == f"/dev/fd/{read}"


def test_a_pipe_that_does_not_end(monkeypatch, book):
    monkeypatch.setattr(text_sample, "STREAM_BYTES", len(book))
    given(monkeypatch, book)
    assert load_text(Path("-")).n_bytes == len(book)
    given(monkeypatch, book + b".")
    with pytest.raises(InputError, match=r"^standard input: expected at most .* from a pipe, found more; give a file$"):
        load_text(Path("-"))


def test_a_pipe_that_nobody_writes_to(tiny_gguf, m3_check_selection, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a named pipe"), (Path("/dev/zero"), "a device")):
        run = m3_check_selection(tiny_gguf, tiny_gguf, "--text", path)
        assert (run.code, run.out) == (2, "")
        assert f"{path}: expected a text in a file (- is standard input), found {kind}" in run.error


def test_no_more_text_is_tokenized_than_needed(tiny_gguf):
    with Model(tiny_gguf) as model:
        tokenizer = ChatTokenizer(model.gguf.metadata)
    text = load_text(None)
    sample = sample_text(text, tokenizer, 50)
    assert sample.ids == tokenizer.encode(text.content)[:50] and not sample.whole
    seen = []

    def encode(part):  # one token for 100 characters
        seen.append(len(part))
        return list(range(len(part) // 100))

    found = sample_text(replace(text, content="x" * 10000), SimpleNamespace(encode=encode), 10)
    assert found.ids == list(range(10)) and not found.whole
    assert seen == [320, 1280]
    whole = sample_text(replace(text, content="x" * 900), SimpleNamespace(encode=encode), 10)
    assert whole.ids == list(range(9)) and whole.whole
