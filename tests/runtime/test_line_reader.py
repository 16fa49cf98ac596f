"""Where messages come from: the history file, pipes, terminals. test_terminal.py has the editing."""

import io
import sys
from pathlib import Path

import pytest

from m3_runtime.errors import InputError
from m3_runtime.line_editor import MAX_HISTORY_BYTES, PrivateHistory
from m3_runtime.line_reader import EditingReader, PipeReader, history_file


def test_the_history_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = history_file()
    assert path == tmp_path / "state" / "m3-gguf" / "history"
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    path.write_text("\n# then\n+kept\n")
    path.chmod(0o644)
    assert history_file().stat().st_mode & 0o777 == 0o600
    assert path.read_text() == "\n# then\n+kept\n"


def test_without_a_state_folder_it_is_below_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", value)
        assert history_file() == tmp_path / ".local" / "state" / "m3-gguf" / "history"


def test_a_history_that_cannot_be_kept_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "m3-gguf").write_text("no folder")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with Path("/dev/null").open("w") as nowhere:
        reader = EditingReader(nowhere, (), ())
    assert reader.warning == f"no history is kept: {tmp_path / 'm3-gguf'}: File exists"


def test_what_cannot_be_written_is_not_kept_and_ends_nothing(tmp_path: Path):
    path = tmp_path / "history"
    path.touch()
    history = PrivateHistory(path)
    history.append_string("a\ud800b")
    assert "+a?b\n" in path.read_text()
    path.unlink()
    path.mkdir()
    history.append_string("c")
    assert history.get_strings()[-1] == "c"


def test_an_old_history_is_cut_at_an_entry(tmp_path: Path):
    path = tmp_path / "history"
    entry = "\n# 2026-01-01 00:00:00\n+line one\n+line two\n"
    path.write_text(entry * (MAX_HISTORY_BYTES // len(entry) + 2))
    strings = list(PrivateHistory(path).load_history_strings())
    assert MAX_HISTORY_BYTES // 3 < path.stat().st_size <= MAX_HISTORY_BYTES // 2
    assert set(strings) == {"line one\nline two"}


def test_lines_of_a_pipe(monkeypatch: pytest.MonkeyPatch):
    data = "eins\r\nzw\u00f6i\n\nno break".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    reader = PipeReader()
    assert [reader.read() for _ in range(5)] == ["eins", "zw\u00f6i", "", "no break", None]


def test_a_line_of_a_pipe_that_is_no_utf8_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ok\nab\xffc\nok\n")))
    reader = PipeReader()
    assert reader.read() == "ok"
    with pytest.raises(InputError, match=r"^input, line 2: invalid UTF-8 at byte offset 2 \(byte 0xff\)"):
        reader.read()
    assert reader.read() == "ok"
