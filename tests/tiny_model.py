"""The model of the fixtures `tiny_checkpoint`, `tiny_gguf` and `tiny_q8_gguf`, and how a checkpoint becomes a file."""

from pathlib import Path

import pytest

from m3_convert.cli import NAME, app
from m3_runtime import command
from make_checkpoint import CheckpointSpec

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
    _run([str(checkpoint), str(out), *options])
    return out


def convert_vision(checkpoint: Path, out: Path, *options: str) -> Path:
    """The same for the vision part."""
    _run([str(checkpoint), "--vision-only", str(out), *options])
    return out


def _run(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        command.run(app, NAME, arguments)
    assert exit_.value.code == 0
