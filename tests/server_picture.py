"""Makes the README's picture of the page that m3-serve shows: python tests/server_picture.py MODEL.gguf OUT.png."""

import sys
import tempfile
from pathlib import Path

from browser import Browser
from server_process import ServerProcess

QUESTIONS = ("What is 7 plus 5?", "What is the capital of France?")
IDLE = "!running && document.querySelectorAll('.message.assistant').length === "


def main(model: Path, out: Path) -> None:
    with ServerProcess(model) as server, tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as browser:
        browser.open(f"{server.url}/", width=720, height=680)
        browser.value("document.getElementById('temperature').value = '0'")
        for n, question in enumerate(QUESTIONS, start=1):
            browser.write(question)
            browser.press("Enter", "\r")
            browser.wait_for(IDLE + str(n))
        browser.value("document.querySelector('details.thinking').open = true")
        out.parent.mkdir(exist_ok=True)
        out.write_bytes(browser.picture(whole=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
