"""Checkpoints on the Hugging Face Hub."""

import errno
from pathlib import Path

from m3_runtime.errors import InputError, MachineError

HUB_FILES = ("*.json", "*.jinja", "*.safetensors", "README.md")


def download(hub_id: str) -> Path:
    """The folder of a checkpoint, downloaded where it is not yet.

    Raises InputError for an id that cannot be downloaded, MachineError if the disk fills up.
    """
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
