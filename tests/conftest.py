"""Small files that several tests read: made once for a run, in a temporary folder."""

from pathlib import Path

import pytest

from m3_convert.cli import NAME as CONVERT
from m3_convert.cli import app as convert_app
from m3_runtime import command
from make_checkpoint import CheckpointSpec, make_checkpoint

# Small enough for a chat in a test: sparse from position 96, one layer of each kind and one more sparse one.
TINY = CheckpointSpec(
    layers=3,
    dense=1,
    hidden=128,
    heads=4,
    kv_heads=2,
    head_dim=64,
    rotary=32,
    index_dim=64,
    experts=4,
    top=2,
    inter=64,
    shared_inter=64,
    dense_inter=128,
    block=32,
    context=4096,
    vit_layers=1,
)


def convert(checkpoint: Path, out: Path, *options: str) -> Path:
    """Runs m3-convert; fails the test if it does not exit with 0."""
    with pytest.raises(SystemExit) as exit_:
        command.run(convert_app, CONVERT, [str(checkpoint), str(out), *options])
    assert exit_.value.code == 0
    return out


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
