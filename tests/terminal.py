"""m3-run on a terminal of its own, and what a person would see there."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pyte

COMMAND = [sys.executable, "-m", "m3_runtime.cli"]
RUNTIME = Path(__file__).resolve().parents[1] / "runtime"
SECONDS = 60  #: the most that anything here may take on a busy machine
COLUMNS, LINES = 100, 200  # high enough that nothing scrolls away

_READY = "\x1b[?2004h"  # the line editor switches bracketed paste on when it waits for a line


def environment(**changes: str) -> dict[str, str]:
    plain = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "TERM", "PYTHONIOENCODING")}
    return plain | {"PYTHONPATH": str(RUNTIME), "PYTHONUTF8": "1", "TERM": "xterm"} | changes


class Terminal:
    """m3-run with a terminal of its own for input, output and errors."""

    def __init__(self, *arguments: object, state: Path, term: str = "xterm", folder: Path | None = None) -> None:
        """state: the folder for the history. folder: where the command runs."""
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=folder,
            env=environment(TERM=term, XDG_STATE_HOME=str(state)),
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,
        )
        self._slave = slave
        self._screen = pyte.Screen(COLUMNS, LINES)
        self._emulator = pyte.ByteStream(self._screen)
        self.shown = ""  #: everything so far, with \n for the terminal's \r\n

    @property
    def attributes(self) -> list[object]:
        """How the terminal treats input and output."""
        return termios.tcgetattr(self._slave)

    @property
    def screen(self) -> str:
        """What a person sees, without spaces at the ends of lines and empty lines below."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip("\n")

    def wait_for(self, text: str, after: int = 0) -> int:
        """Reads until `text` is shown past the position `after`; the position behind it."""
        end = time.monotonic() + SECONDS
        while text not in self.shown[after:]:
            assert time.monotonic() < end and self._read(), f"no {text!r} in {self.shown[after:]!r}"
        return self.shown.index(text, after) + len(text)

    def ready(self, after: int = 0) -> int:
        """Waits until the next line can be typed."""
        return self.wait_for(_READY, after)

    def wait_for_line(self, text: str, after: int = 0) -> None:
        """Reads until the last line on the screen is `text`."""
        end = time.monotonic() + SECONDS
        while self.screen.rpartition("\n")[2] != text:
            assert time.monotonic() < end and self._read(), f"no {text!r} at the end of {self.screen!r}"

    def send(self, text: str) -> int:
        """Types `text`; the position that the screen had."""
        return self.send_bytes(text.encode())

    def send_bytes(self, data: bytes) -> int:
        at = len(self.shown)
        os.write(self._master, data)
        return at

    def leave(self) -> int:
        """The exit code, after the program has ended by itself."""
        end = time.monotonic() + SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < end, f"it goes on after {self.shown!r}"
            self._read(0.02)
        while self._read(0):
            pass
        return self.process.wait(SECONDS)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._slave)
        os.close(self._master)

    def _read(self, seconds: float = SECONDS) -> bool:
        """False if nothing came."""
        ready, _, _ = select.select([self._master], [], [], seconds)
        if not ready:
            assert seconds < SECONDS, f"nothing for {seconds} s after {self.shown!r}"
            return False
        data = os.read(self._master, 65536)
        self._emulator.feed(data)
        self.shown += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)
