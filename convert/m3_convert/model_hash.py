"""SHA-256 of the files of a model, computed beside the check: hundreds of gigabytes take minutes to read."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from m3_convert.background import in_background
from m3_convert.checkpoint import listed
from m3_convert.layered_model import LayeredModel
from m3_runtime.errors import InputError

_PIECE: Final = 1 << 20


def start_hash(side: LayeredModel) -> Future[str]:
    """Begins to read the files that describe a model; the result is a hexadecimal digest, or InputError."""
    return in_background(files_sha256, side.origin.described_by)


def hash_of(side: LayeredModel) -> str:
    """Which files the hash is that of, in words."""
    names = [path.name for path in side.origin.described_by]
    if side.kind == "checkpoint":
        return " and ".join(names)
    return "the file" if len(names) == 1 else f"the {len(names)} files in order: {listed(names)}"


def files_sha256(paths: Sequence[Path]) -> str:
    """Of the files, one after the other as if they were one."""
    digest = hashlib.sha256()
    piece = bytearray(_PIECE)
    for path in paths:
        try:
            with path.open("rb", buffering=0) as file:
                while n := file.readinto(piece):
                    digest.update(memoryview(piece)[:n])
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    return digest.hexdigest()
