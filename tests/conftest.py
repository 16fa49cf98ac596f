"""Small files that several tests read: made once for a run, in a temporary folder. And a Hub on this machine."""

import atexit
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hub_endpoint import HubEndpoint
from make_checkpoint import make_checkpoint
from tiny_model import TINY, convert, convert_vision

# huggingface_hub reads these when it is imported: from here on no test can reach the real Hub.
ENDPOINT = HubEndpoint()
os.environ.update(ENDPOINT.environment)
atexit.register(ENDPOINT.remove)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the golden vectors run: cpu (default) or cuda")


@pytest.fixture
def hub() -> Iterator[HubEndpoint]:
    """An empty Hub, which every command in this process and its children will ask."""
    ENDPOINT.reset()
    ENDPOINT.start()
    yield ENDPOINT
    ENDPOINT.stop()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder of the dimensions TINY."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(folder, TINY)
    return folder


@pytest.fixture(scope="session")
def tiny_gguf(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It as F32."""
    return convert(tiny_checkpoint, tmp_path_factory.mktemp("gguf") / "tiny-f32.gguf", "--type", "f32")


@pytest.fixture(scope="session")
def tiny_q8_gguf(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It as Q8_0."""
    return convert(tiny_checkpoint, tmp_path_factory.mktemp("gguf") / "tiny-q8_0.gguf", "--type", "q8_0")


@pytest.fixture(scope="session")
def tiny_mmproj(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its vision file as F32."""
    out = tmp_path_factory.mktemp("gguf") / "tiny-mmproj.gguf"
    return convert_vision(tiny_checkpoint, out, "--vision-type", "f32")
