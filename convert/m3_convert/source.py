"""What a conversion or a check reads: a checkpoint folder, a GGUF file or a folder of one, an id on the Hub."""

import re
from pathlib import Path
from typing import TypeAlias

from m3_convert.checkpoint import Checkpoint, listed, load_checkpoint
from m3_convert.gguf_source import GgufSource, load_gguf
from m3_convert.hub import open_repository
from m3_convert.hub_shards import load_repository
from m3_runtime.errors import InputError
from m3_runtime.gguf_reader import gguf_files

Source: TypeAlias = Checkpoint | GgufSource

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def open_source(text: str) -> Source:
    """The source of that path or id on the Hub ("owner/name"); a path that exists is never looked up on the Hub.

    No weights are downloaded. Raises InputError naming what is wrong with it, MachineError if the disk fills up.
    """
    path = Path(text)
    if not text or not path.exists():
        if not HUB_ID.fullmatch(text) or path.suffix == ".gguf":
            raise InputError(
                f"{text}: expected a checkpoint folder, a GGUF file or an id on the Hub (owner/name), found nothing"
            )
        return load_repository(open_repository(text))
    # Folders of GGUF files come with a config.json at times, checkpoints with a split model beside them.
    if path.is_dir() and (any(path.glob("*.safetensors")) or not gguf_files(path)):
        if not (path / "config.json").exists() and (found := sorted(file.name for file in path.glob("*.gguf"))):
            raise InputError(f"{path}: expected a checkpoint folder, found GGUF files: name one of {listed(found)}")
        return load_checkpoint(path)
    return load_gguf(path)
