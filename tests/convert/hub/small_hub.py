"""A checkpoint of ten small shards on a Hub on this machine, for the tests of this folder."""

import shutil
from collections.abc import Callable
from pathlib import Path

from hub_endpoint import HubEndpoint

ID = "MiniMaxAI/MiniMax-M3"
DISCARD = "--discard-source"
OPTIONS = ("--type", "q8_0")
PIECE = 15_000  #: bytes of a request here, so that a shard takes several


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def middle(folder: Path, name: str) -> int:
    return (folder / name).stat().st_size // 2


def names(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


def cached(hub: HubEndpoint) -> set[str]:
    return {path.name for path in hub.cache.glob("models--*/snapshots/*/*.safetensors")}


def changed(folder: Path, to: Path, change: Callable[[Path], None]) -> Path:
    shutil.copytree(folder, to)
    change(to)
    return to
