"""m3-run as a process: on a terminal (pty), with Ctrl-C, with a reader that leaves, with limited memory."""

import json
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from terminal import COMMAND, SECONDS, Terminal, environment

DOWN_TO_A_LINE = "\x1b\r"  #: Alt-Enter
UP = "\x1b[A"


@pytest.fixture
def terminal(tiny_gguf: Path, tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tiny_gguf, "--temperature", 0, "--thinking", "enabled", "-n", 3000, state=tmp_path)
    yield terminal
    terminal.close()


def test_a_chat_on_a_terminal(terminal: Terminal):
    """Dimmed thinking, Ctrl-C stops the answer, the chat goes on with what it holds, Ctrl-D leaves."""
    terminal.ready()
    assert "attention sparse (top 3 of blocks of 32)" in terminal.shown
    at = terminal.send("Hello\r")
    terminal.wait_for("\x1b[2m", at)
    at = terminal.send("ahead\x03")  # what is typed meanwhile is not shown, and Ctrl-C drops it
    terminal.ready(terminal.wait_for("(stopped)\n", at))
    assert "ahead" not in terminal.shown
    at = terminal.wait_for("0 reused", terminal.send("/stats\r"))
    terminal.ready(at)
    at = terminal.send("Go on\r")
    terminal.wait_for("\x1b[2m", at)
    at = terminal.send("\x03")
    terminal.ready(terminal.wait_for("(stopped)\n", at))
    at = terminal.wait_for(" reused", terminal.send("/stats\r"))
    assert " 0 reused" not in terminal.shown[at - 20 :]
    terminal.ready(at)
    # An answer that is stopped while it is drawn as Markdown: the cursor is shown again.
    terminal.ready(terminal.wait_for("(the model is told not to think; ", terminal.send("/thinking off\r")))
    terminal.ready(terminal.wait_for("(system message set; ", terminal.send("/system Be brief.\r")))
    at = terminal.send("And?\r")
    terminal.wait_for("\x1b[2K", terminal.wait_for("\x1b[?2004l", at))
    at = terminal.send("\x03")
    terminal.ready(terminal.wait_for("(stopped)\n", at))
    drawn = terminal.shown[at:]
    assert drawn.rfind("\x1b[?25h") > drawn.rfind("\x1b[?25l", 0, drawn.index("(stopped)"))
    terminal.send("\x04")
    assert terminal.leave() == 0
    assert "Traceback" not in terminal.shown


def test_ctrl_c_twice_at_the_prompt_leaves(terminal: Terminal):
    terminal.ready()
    terminal.wait_for_line("> half a mess", terminal.send("half a mess"))
    at = terminal.wait_for("(Ctrl-C again leaves, and so does /quit)", terminal.send("\x03"))
    terminal.ready(at)
    terminal.send("\x03")
    assert terminal.leave() == 0
    assert "Traceback" not in terminal.shown


def test_editing(terminal: Terminal, tmp_path: Path):
    """Lines are edited, completed and remembered; pasted ones stay together; a character may come in pieces."""
    terminal.ready()
    # Ctrl-A goes to the start of the line.
    terminal.send("hist\x01/\r")
    terminal.ready(terminal.wait_for("m3-run: /hist: no such command, /help lists them"))
    at = terminal.send("/cont\t\r")
    terminal.ready(terminal.wait_for("(--on-full stop)", at))
    at = terminal.send("\x1b[200~/system one\r\ntwo\x1b[201~")
    terminal.send(f"{DOWN_TO_A_LINE}three")
    terminal.send_bytes(b" \xe2\x82")
    terminal.send_bytes(b"\xac\r")
    terminal.ready(terminal.wait_for("(system message set)", at))
    at = terminal.send(4 * UP + "\r")  # through the three lines of the last message
    terminal.ready(terminal.wait_for("(--on-full stop)", at))
    at = terminal.send("/system\r")
    terminal.ready(terminal.wait_for("one\ntwo\nthree \u20ac\n", at))
    terminal.send("/quit\r")
    assert terminal.leave() == 0
    history = tmp_path / "m3-gguf" / "history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "+/system one\n+two\n+three \u20ac\n" in history.read_text()


def test_the_terminal_is_as_it_was_after_sigterm(terminal: Terminal):
    before = terminal.attributes
    terminal.ready()
    assert terminal.attributes != before
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.leave() == 130
    assert terminal.attributes == before
    assert "Traceback" not in terminal.shown


def test_a_dumb_terminal_gets_no_escape_sequences(tiny_gguf: Path, tmp_path: Path):
    terminal = Terminal(tiny_gguf, "--seed", 1, "--thinking", "enabled", "-n", 6, term="dumb", state=tmp_path)
    try:
        terminal.wait_for("> ")
        at = terminal.send("Hello\n")
        terminal.wait_for("> ", terminal.wait_for("(cut after 6 tokens, the limit of -n)", at))
        at = terminal.send("/context\n")
        terminal.wait_for("> ", terminal.wait_for("tokens of this conversation", at))
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
    assert err.count(b"\n") == 1


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
