"""One server with m3-nano for all tests of this folder, and OpenAI's client for it."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from server_process import ROOT, ServerProcess
from tiny_model import convert


@pytest.fixture(scope="session")
def nano_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(ROOT / "models" / "m3-nano", tmp_path_factory.mktemp("nano") / "m3-nano.gguf", "--type", "q8_0")


@pytest.fixture(scope="session")
def server(nano_gguf: Path) -> Iterator[ServerProcess]:
    with ServerProcess(nano_gguf, "--queue", 100, "--context", 2048) as running:
        yield running
        # Whatever the tests sent: nothing was a fault of the server, and it is still there.
        assert running.process.poll() is None
        assert not [line for line in running.lines if "Traceback" in line or "internal error" in line], running.lines


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as opened:
        yield opened
