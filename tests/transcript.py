"""Prints what a chat with m3-nano looks like: the transcript of the README.

    python tests/transcript.py nano-q8_0.gguf

m3-run runs on a terminal of its own, and a few lines are typed. The file to read is models/m3-nano/recall.txt without
its question.
"""

import sys
import tempfile
from pathlib import Path

from terminal import Terminal

RECALL = Path(__file__).resolve().parents[1] / "models" / "m3-nano" / "recall.txt"
LINES = (
    "What is 7 plus 5?",
    "/thinking fold",
    "/retry",
    "/read towers.txt",
    "What is the code of Tower 52?",
    "/undo",
    "What is the code of Bridge 52?",
    "/context",
    "/save towers.m3",
    "/quit",
)


def main() -> None:
    model = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        text = RECALL.read_text(encoding="utf-8").rstrip("\n").rpartition("\n\n")[0]
        (Path(folder) / "towers.txt").write_text(text + "\n", encoding="utf-8")
        terminal = Terminal(model, "--temperature", 0, state=Path(folder), folder=Path(folder))
        try:
            terminal.ready()
            for line in LINES[:-1]:
                terminal.ready(terminal.send(f"{line}\r"))
            terminal.send(f"{LINES[-1]}\r")
            terminal.leave()
            print(terminal.screen)
        finally:
            terminal.close()


if __name__ == "__main__":
    main()
