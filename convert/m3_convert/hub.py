"""Where a checkpoint comes from: a folder on this machine, or an id on the Hugging Face Hub."""

import errno
import re
from dataclasses import dataclass
from pathlib import Path

from m3_runtime.errors import InputError, MachineError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ("*.json", "*.jinja", "*.safetensors", "README.md")


@dataclass(frozen=True)
class Source:
    """A checkpoint folder on this machine and the name of the model."""

    folder: Path
    name: str | None  #: the id on the Hub; None for a folder, whose own name counts


def resolve_source(source: str) -> Source:
    """The folder that SOURCE of m3-convert names, downloaded first if it is an id on the Hub ("owner/name").

    A path that exists is never looked up on the Hub. Raises InputError for a file, for neither a path nor an id, and
    for an id that cannot be downloaded; MachineError if the disk fills up.
    """
    path = Path(source)
    if path.is_dir():
        return Source(path, None)
    if path.exists():
        kind = "a GGUF file" if path.suffix == ".gguf" or _starts_with_gguf(path) else "a file"
        raise InputError(f"{source}: is {kind}; m3-convert reads checkpoint folders and ids on the Hub (owner/name)")
    if not HUB_ID.fullmatch(source):
        raise InputError(f"{source}: no such folder, and not an id on the Hub (owner/name)")
    return Source(_download(source), source)


def _starts_with_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _download(hub_id: str) -> Path:
    # Imported here: it takes a second and is needed for Hub ids only.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(HUB_FILES)))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise MachineError(f"{hub_id}: the disk is full: {error}") from error
        raise InputError(f"{hub_id}: no such folder, and the Hub gave: {error}") from error
    except (
        Exception
    ) as error:  # the HTTP library behind huggingface-hub, and with it its exceptions, changes by version
        raise InputError(f"{hub_id}: no such folder, and the Hub gave: {type(error).__name__}: {error}") from error
