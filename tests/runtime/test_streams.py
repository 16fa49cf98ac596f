"""Commands as processes whose streams are closed, full or left by their reader, and that are ended early."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMANDS = {
    "m3-run": "from m3_runtime.start import m3_run as main",
    "m3-convert": "from m3_convert.start import m3_convert as main",
    "m3-check-selection": "from m3_convert.start import m3_check_selection as main",
}


def shell(command: str, arguments: list[object], redirect: str) -> subprocess.CompletedProcess[bytes]:
    code = f"{COMMANDS[command]}; main()"
    line = f'exec "$0" -c "$1" "${{@:2}}" {redirect}'
    return subprocess.run(
        ["bash", "-c", line, sys.executable, code, *map(str, arguments)], capture_output=True, timeout=120
    )


def lines(data: bytes) -> list[str]:
    return data.decode().splitlines()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_stdout_is_the_machines_fault(command: str, tiny_gguf: Path, tiny_checkpoint: Path):
    arguments: dict[str, list[object]] = {
        "m3-run": [tiny_gguf, "-p", "Hi", "-n", 2],
        "m3-convert": [tiny_checkpoint, "--dry-run"],
        "m3-check-selection": [tiny_gguf, tiny_gguf, "--context", 150],
    }
    run = shell(command, arguments[command], "> /dev/full")
    assert run.returncode == 4
    assert lines(run.stderr)[-1] == f"{command}: the output cannot be written: No space left on device"


@pytest.mark.parametrize("redirect", [">&-", "2>&-", "<&-"])
def test_closed_streams_change_nothing(redirect: str, tiny_gguf: Path, tiny_checkpoint: Path, tmp_path: Path):
    out = tmp_path / "out.gguf"
    assert shell("m3-convert", [tiny_checkpoint, out, "--type", "f32"], redirect).returncode == 0
    assert out.read_bytes() == tiny_gguf.read_bytes()
    assert shell("m3-run", [tiny_gguf, "-p", "Hi", "-n", 2], redirect).returncode == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_json_that_would_be_lost_is_refused_before_the_work(command: str, tiny_gguf: Path, tiny_checkpoint: Path):
    arguments: dict[str, list[object]] = {
        "m3-run": [tiny_gguf, "-p", "Hi", "-n", 2, "--json"],
        "m3-convert": [tiny_checkpoint, "--dry-run", "--json"],
        "m3-check-selection": [tiny_gguf, tiny_gguf, "--context", 150, "--json"],
    }
    run = shell(command, arguments[command], ">&-")
    assert run.returncode == 2
    assert lines(run.stderr) == [f"{command}: --json: standard output is closed"]


@pytest.mark.parametrize(("threshold", "code"), [(0.1, 0), (1, 1)])
def test_the_verdict_stands_when_the_reader_leaves(threshold: float, code: int, tiny_gguf: Path, tiny_q8_gguf: Path):
    arguments = [tiny_gguf, tiny_q8_gguf, "--context", 600, "--no-thresholds", "--min-overlap", threshold]
    run = shell("m3-check-selection", arguments, "2> /dev/null > >(exec true)")
    assert run.returncode == code


@pytest.mark.parametrize("redirect", ["2> >(exec true)", "2> /dev/full"])
def test_a_stderr_that_nobody_reads_changes_nothing(
    redirect: str, tiny_gguf: Path, tiny_q8_gguf: Path, tiny_checkpoint: Path, tmp_path: Path
):
    """Least of all a verdict: an exit code of 0 would say that the check passed."""
    arguments: list[object] = [tiny_gguf, tiny_q8_gguf, "--context", 600, "--no-thresholds", "--min-overlap", 1]
    run = shell("m3-check-selection", arguments, redirect)
    assert run.returncode == 1 and b"Fell short" in run.stdout
    assert shell("m3-check-selection", [tiny_gguf, tmp_path], redirect).returncode == 2
    out = tmp_path / "out.gguf"
    assert shell("m3-convert", [tiny_checkpoint, out, "--type", "f32"], redirect).returncode == 0
    assert out.read_bytes() == tiny_gguf.read_bytes()


def test_a_name_that_is_too_long_is_bad_input(tiny_checkpoint: Path, tmp_path: Path):
    run = shell("m3-convert", [tiny_checkpoint, tmp_path / ("a" * 300)], "")
    assert run.returncode == 2 and lines(run.stderr)[-1].endswith("File name too long")


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_while_the_command_loads(command: str):
    code = f"{COMMANDS[command]}; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        time.sleep(0.2)
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=60)
    # Before the entry point is there Python itself answers; it may also have finished already.
    assert run.returncode in (0, 130, -signal.SIGINT)
    assert run.returncode != 130 or lines(err) == [f"{command}: interrupted"]


def test_sigterm_ends_an_answer_like_ctrl_c(tiny_gguf: Path):
    code = f"{COMMANDS['m3-run']}; main()"
    arguments = [sys.executable, "-c", code, str(tiny_gguf), "-p", "Hello", "--temperature", "0"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stderr is not None
        run.stderr.readline()
        os.read(run.stdout.fileno(), 1)
        run.send_signal(signal.SIGTERM)
        _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert lines(err) == ["m3-run: interrupted"]
