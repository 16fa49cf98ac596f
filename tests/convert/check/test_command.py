"""m3-check-selection as a command: help, the page, progress, Ctrl-C."""

import errno
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from convert.check.small_check import EXAMPLE
from m3_convert import check_cli, walk_progress


def test_help(m3_check_selection):
    run = m3_check_selection("--help")
    assert run.code == 0
    for part in (
        "REFERENCE",
        "CANDIDATE",
        "--text",
        "--context",
        "--min-overlap",
        "--max-mass-lost",
        "--max-kld",
        "--isolate",
        "--attribute",
        "--selection-only",
        "--candidate-attention",
        "--report",
        "--state",
        "--json",
        "Exit codes",
        "70 a bug",
        "not the mean",
    ):
        assert part in " ".join(run.out.split())


def test_a_page_is_written_too(tiny_gguf, coarse_index, m3_check_selection, tmp_path):
    page = tmp_path / "report.html"
    page.write_text("<!DOCTYPE html>of an earlier check")
    run = m3_check_selection(tiny_gguf, coarse_index, *EXAMPLE, "--no-thresholds", "--json", "--report", page)
    assert run.code == 0 and "Selection changed" in page.read_text(encoding="utf-8")
    assert run.json["candidate"]["sha256"] in page.read_text(encoding="utf-8")
    assert list(tmp_path.glob("*")) == [page]


def test_a_page_that_cannot_be_written_is_refused_before_the_work(
    tiny_gguf, tiny_q8_gguf, coarse_index, m3_check_selection, tmp_path, monkeypatch
):
    monkeypatch.setattr(check_cli, "run_check", lambda _: pytest.fail("it was checked"))
    closed = tmp_path / "closed.html"
    closed.write_text("<!doctype html>")
    opened = Path.open

    def refuse(path, *mode):  # as for anyone but root with mode 000
        if path.name == closed.name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *mode)

    monkeypatch.setattr(Path, "open", refuse)
    for page, message in (
        (tmp_path / "absent" / "x.html", "absent does not exist"),
        (tmp_path, "expected a file name for the report, found a folder"),
        (Path("/dev/null"), "expected a file, found a device or pipe"),
        (coarse_index, "is part of the source"),
        (tiny_q8_gguf, "is there already and is no HTML page"),
        (tmp_path / ("x" * 300), "File name too long"),
        (closed, "is there already and cannot be read: expected an HTML page"),
    ):
        run = m3_check_selection(tiny_gguf, coarse_index, *EXAMPLE, "--report", page)
        assert (run.code, run.out) == (2, "") and message in run.error and str(page) in run.error


def test_progress_lines(tiny_gguf, tiny_checkpoint, m3_check_selection, monkeypatch):
    monkeypatch.setattr(walk_progress, "LINE_SECONDS", 0.0)
    run = m3_check_selection(tiny_checkpoint, tiny_gguf, *EXAMPLE)
    lines = [line for line in run.err.splitlines() if line.endswith(" left")]
    assert lines[0].startswith("m3-check-selection: layer 1 of 3, ")
    assert any(line.startswith("m3-check-selection: layer 3 of 3, ") for line in lines)
    assert lines[-1].startswith("m3-check-selection: logits, 99%, 0.0 s left")
    shares = [int(line.split(", ")[1].removesuffix("%")) for line in lines]
    assert shares == sorted(shares) and len(shares) > 6


def test_progress_bar(tmp_path):
    with (tmp_path / "screen").open("w+", encoding="utf-8") as file:
        stream = SimpleNamespace(isatty=lambda: True, write=file.write, flush=file.flush, encoding="utf-8")
        with walk_progress.walk_progress("check", walk_progress.layer_stages(60, 120.0), stream) as advance:
            for _ in range(120):
                advance(1.0)
        file.seek(0)
        shown = file.read()
    assert "layer 60 of 60" in shown and "100%" in shown and "left" in shown


def test_ctrl_c(tiny_checkpoint, tiny_gguf):
    command = [sys.executable, "-m", "m3_convert.check_cli", str(tiny_checkpoint), str(tiny_gguf), "--context", "4096"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        assert "of memory at the peak" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.stdout.read() == ""
    assert process.returncode == 130
    assert rest.splitlines()[-1] == "m3-check-selection: interrupted" and "Traceback" not in rest
