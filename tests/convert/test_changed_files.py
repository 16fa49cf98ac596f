"""Files that are shortened or written over while a command has them mapped."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from convert.conftest import runner
from m3_convert.walker import Walker
from m3_runtime import engine
from m3_runtime.cli import NAME, app

# The commands with the file shortened when the model has been opened.
HOOKS = {
    "m3-run": ("m3_runtime", "m3_runtime.engine.Model.session"),
    "m3-bench": ("m3_runtime", "m3_runtime.engine.Model.session"),
    "m3-check-selection": ("m3_convert", "m3_convert.walker.Walker.layer"),
    "m3-imatrix": ("m3_convert", "m3_convert.walker.Walker.layer"),
    "m3-convert": ("m3_convert", "m3_convert.gguf_source._metadata"),
}
CODE = """
import importlib, os, pkgutil, sys
package, place, path, command = sys.argv[1:5]
sys.argv[1:5] = []
owner, name = place.rsplit(".", 1)
owner = pkgutil.resolve_name(owner)
inner = getattr(owner, name)
def shorten(*arguments, **options):
    os.truncate(path, 0)
    return inner(*arguments, **options)
setattr(owner, name, shorten)
getattr(importlib.import_module(package + ".start"), command.replace("-", "_"))()
"""


def run(command: str, path: Path, arguments: list[object], code: str = CODE) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", code, *HOOKS[command], path, command, *arguments]
    environment = {**os.environ, "XDG_CACHE_HOME": str(path.parent)}
    return subprocess.run(list(map(str, line)), capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.parametrize("command", HOOKS)
def test_a_file_that_is_shortened_is_named(command: str, tiny_gguf: Path, tmp_path: Path):
    path, text = tmp_path / "a model.gguf", tmp_path / "text"
    shutil.copy(tiny_gguf, path)
    text.write_text("some words\n" * 40)
    arguments: dict[str, list[object]] = {
        "m3-run": [path, "-p", "Hi", "-n", 2],
        "m3-bench": [path, "--depth", 0, "-p", 1, "-n", 1, "--json"],
        "m3-check-selection": [tiny_gguf, path, "--context", 150, "--json"],
        "m3-imatrix": [path, tmp_path / "out", "--text", text],
        "m3-convert": [path, tmp_path / "out"],
    }
    done = run(command, path, arguments[command])
    assert (done.returncode, done.stdout) == (2, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"{command}: {path}: changed while it was in use: byte ")
    assert last.endswith(" was expected, the file has 0")
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith("out")] == []


def test_another_bus_error_ends_as_ever(tiny_gguf: Path, tmp_path: Path):
    path = shutil.copy(tiny_gguf, tmp_path / "a.gguf")
    code = CODE.replace("os.truncate(path, 0)", f"os.kill(os.getpid(), {int(signal.SIGBUS)})")
    done = run("m3-run", path, [path, "-p", "Hi", "-n", 2], code)
    assert done.returncode == -signal.SIGBUS


def write_over(path: Path) -> None:
    """All values NaN, in place: the file keeps its size, and who has it mapped sees it."""
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)


@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_a_check_of_a_file_that_is_written_over(
    side: str, tiny_gguf: Path, tiny_q8_gguf: Path, m3_check_selection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = Path(shutil.copy(tiny_gguf, tmp_path / "a.gguf"))
    forward = Walker.layer

    def layer(self, number, **more):
        if number == 1:
            write_over(path)
        forward(self, number, **more)

    monkeypatch.setattr(Walker, "layer", layer)
    sides = (path, tiny_q8_gguf) if side == "reference" else (tiny_q8_gguf, path)
    done = m3_check_selection(*sides, "--context", 150, "--attribute", "--group", "experts", "--state", tmp_path / "s")
    assert (done.code, done.out) == (2, "")
    assert done.error == f"m3-check-selection: {path}: changed while it was in use"
    assert list((tmp_path / "s").glob("*")) == []


def test_importance_of_a_file_that_is_written_over(
    tiny_gguf: Path, m3_imatrix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Finite values too: the sums would be those of no model."""
    path, text = Path(shutil.copy(tiny_gguf, tmp_path / "a.gguf")), tmp_path / "text"
    text.write_text("some words\n" * 40)
    forward = Walker.layer
    monkeypatch.setattr(Walker, "layer", lambda self, n, **more: (forward(self, n, **more), os.utime(path, (1, 1))))
    done = m3_imatrix(path, tmp_path / "out", "--text", text)
    assert (done.code, done.error) == (2, f"m3-imatrix: {path}: changed while it was in use")
    assert not (tmp_path / "out").exists()


def test_a_run_of_a_file_that_is_written_over(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = Path(shutil.copy(tiny_gguf, tmp_path / "a.gguf"))
    session = engine.Model.session
    monkeypatch.setattr(engine.Model, "session", lambda self, **more: (write_over(path), session(self, **more))[1])
    done = runner(app, NAME, capsys)(path, "-p", "Hi", "-n", 2)
    assert done.code == 2
    assert done.error.startswith(f"m3-run: {path}: changed while it was in use, and then: ")
