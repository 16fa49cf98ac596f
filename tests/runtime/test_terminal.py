"""m3-run as a process: on a terminal (pty), with Ctrl-C, with a reader that leaves, with limited memory."""

import fcntl
import json
import os
import pty
import resource
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "m3_runtime.cli"]
RUNTIME = Path(__file__).resolve().parents[2] / "runtime"
SECONDS = 60  #: the most that anything here may take on a busy machine
# A Ctrl-C that comes while Python sets up its line editor is seen with the next key only, so give it time.
LINE_EDITOR_SECONDS = 0.5


def environment(**changes: str) -> dict[str, str]:
    plain = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "TERM", "PYTHONIOENCODING")}
    return plain | {"PYTHONPATH": str(RUNTIME), "PYTHONUTF8": "1", "TERM": "xterm"} | changes


class Terminal:
    """m3-run with a terminal of its own for input, output and errors."""

    def __init__(self, *arguments: object, term: str = "xterm") -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(TERM=term),
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,
        )
        os.close(slave)
        self.shown = ""  #: everything so far, with \n for the terminal's \r\n

    def wait_for(self, text: str, after: int = 0) -> int:
        """Reads until `text` is shown past the position `after`; the position behind it."""
        end = time.monotonic() + SECONDS
        while text not in self.shown[after:]:
            assert time.monotonic() < end and self._read(), f"no {text!r} in {self.shown[after:]!r}"
        return self.shown.index(text, after) + len(text)

    def send(self, text: str) -> int:
        """Types `text`; the position that the screen had."""
        at = len(self.shown)
        os.write(self._master, text.encode())
        return at

    def leave(self) -> int:
        """The exit code, after the program has ended by itself."""
        while self._read():
            pass
        return self.process.wait(SECONDS)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)

    def _read(self) -> bool:
        """False at the end."""
        ready, _, _ = select.select([self._master], [], [], SECONDS)
        assert ready, f"nothing for {SECONDS} s after {self.shown!r}"
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other side is closed
            return False
        self.shown += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)


@pytest.fixture
def terminal(tiny_gguf: Path) -> Iterator[Terminal]:
    terminal = Terminal(tiny_gguf, "--temperature", 0, "--thinking", "enabled", "-n", 3000)
    yield terminal
    terminal.close()


def test_a_chat_on_a_terminal(terminal: Terminal):
    """Dimmed thinking, Ctrl-C stops the answer, the chat goes on with what it holds, Ctrl-D leaves."""
    at = terminal.wait_for("> ")
    assert "attention sparse (top 3 of blocks of 32)" in terminal.shown
    terminal.send("Hello\n")
    terminal.wait_for("\x1b[2m", at)
    at = terminal.send("\x03")
    at = terminal.wait_for("(stopped)\n", at)
    terminal.wait_for("> ", at)
    at = terminal.send("/stats\n")
    at = terminal.wait_for("0 reused", at)
    terminal.wait_for("> ", at)
    at = terminal.send("Go on\n")
    terminal.wait_for("\x1b[2m", at)
    at = terminal.send("\x03")
    terminal.wait_for("> ", terminal.wait_for("(stopped)\n", at))
    at = terminal.send("/stats\n")
    at = terminal.wait_for(" reused", at)
    assert " 0 reused" not in terminal.shown[at - 20 :]
    terminal.wait_for("> ", at)
    terminal.send("\x04")
    assert terminal.leave() == 0
    assert "Traceback" not in terminal.shown


def test_ctrl_c_twice_at_the_prompt_leaves(terminal: Terminal):
    terminal.wait_for("> ")
    terminal.wait_for("half a mess", terminal.send("half a mess"))
    time.sleep(LINE_EDITOR_SECONDS)
    at = terminal.send("\x03")
    at = terminal.wait_for("(Ctrl-C again leaves, and so does /quit)", at)
    terminal.wait_for("> ", at)
    time.sleep(LINE_EDITOR_SECONDS)
    terminal.send("\x03")
    assert terminal.leave() == 0
    assert "Traceback" not in terminal.shown


def test_a_dumb_terminal_gets_no_escape_sequences(tiny_gguf: Path):
    terminal = Terminal(tiny_gguf, "--seed", 1, "--thinking", "enabled", "-n", 6, term="dumb")
    try:
        terminal.wait_for("> ")
        at = terminal.send("Hello\n")
        terminal.wait_for("> ", terminal.wait_for("(cut after 6 tokens, the limit of -n)", at))
        terminal.send("/quit\n")
        assert terminal.leave() == 0
        assert "\x1b" not in terminal.shown
    finally:
        terminal.close()


def start(*arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_ctrl_c_ends_one_answer_with_130(tiny_gguf: Path, options: tuple[str, ...]):
    with start(tiny_gguf, "-p", "Hello", "--temperature", 0, "--thinking", "disabled", *options) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stderr.readline()  # the status: the model is loaded
        if not options:
            process.stdout.read(1)
        else:
            time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert err.decode().splitlines()[-1] == "m3-run: interrupted"
    assert b"Traceback" not in err
    assert (b'"finish_reason": "interrupted"' in out) is bool(options)


def test_a_reader_that_leaves_is_no_error(tiny_gguf: Path):
    with start(tiny_gguf, "-p", "Hello", "--temperature", 0, "--thinking", "disabled") as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(SECONDS) == 0
    assert err.count(b"\n") == 3  # the status and the plan


def test_a_limit_on_address_space(tiny_gguf: Path, tmp_path: Path):
    """A file that cannot be mapped is refused by its size, before it is opened."""
    big = tmp_path / "big.gguf"
    with big.open("wb") as file:
        file.truncate(8 << 30)

    def run(path: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, str(path), "-p", "Hi", "-n", "1"],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)),
        )

    assert run(tiny_gguf).returncode == 0
    refused = run(big)
    assert (refused.returncode, refused.stdout) == (4, "")
    assert refused.stderr.startswith(f"m3-run: {big}: 8.6 GB to map, the limit on address space leaves ")
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_an_encoding_without_the_characters_does_not_end_the_run(tiny_gguf: Path, options: tuple[str, ...]):
    process = subprocess.run(
        [*COMMAND, str(tiny_gguf), "-p", "Hi", "-n", "30", "--seed", "1", "--thinking", "disabled", *options],
        env=environment(PYTHONIOENCODING="ascii"),
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )
    assert process.returncode == 0
    assert process.stdout.isascii()
    if options:
        assert not json.loads(process.stdout)["answer"].isascii()  # nothing is lost in a report
