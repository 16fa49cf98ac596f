"""The checkpoint on the Hub, and small steps on the way from there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from convert.hub.small_hub import ID, OPTIONS, PIECE
from hub_endpoint import HubEndpoint
from m3_convert import cli, hub_failure, hub_shards, part_file, temporary_shards
from make_checkpoint import CheckpointSpec, make_checkpoint


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_failure, "PAUSES", (0.01,) * 5)
    monkeypatch.setattr(hub_shards, "HEADER_GUESS", 4096)
    monkeypatch.setattr(part_file, "RECORD_BYTES", 20_000)
    monkeypatch.setattr(temporary_shards, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(cli, "check_header", lambda *_: None)  # a third of the time, and tested elsewhere


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 10 shards, all text. Not to be changed."""
    place = tmp_path_factory.mktemp("hub") / "checkpoint"
    spec = CheckpointSpec(
        layers=3, dense=1, hidden=64, heads=4, kv_heads=2, head_dim=32, rotary=16, index_dim=48, experts=4, top=2,
        inter=32, shared_inter=32, dense_inter=96, vocab=512, block=16, top_k=3, local=2, shard_mb=0.05, vision=False,
    )  # fmt: skip
    make_checkpoint(place, spec)
    return place


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where files go, the working folder: what is left there is what a command left."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work" / "out.gguf"


@pytest.fixture(scope="session")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What a conversion of the folder gives."""
    target = tmp_path_factory.mktemp("expected") / "out.gguf"
    # The name of the model is in the file.
    named = target.parent / ID
    shutil.copytree(folder, named)
    command = [sys.executable, "-c", "from m3_convert.cli import main; main()", named, target, *OPTIONS]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return target.read_bytes()


@pytest.fixture
def repository(hub: HubEndpoint, folder: Path) -> HubEndpoint:
    """The checkpoint on the Hub."""
    hub.add(ID, folder)
    return hub
