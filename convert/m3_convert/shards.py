"""Where the shards of a source come from: they lie on this machine, or are fetched when they are needed.

A source (`source`) has the shards it was opened with: LocalShards here, or `hub_shards` for the Hub. A conversion with
--discard-source reads through `temporary_shards` in their place (see `supply`). `decode.SourceReader` reads from any.
"""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from m3_runtime.errors import InputError

if TYPE_CHECKING:
    from m3_convert.checkpoint import SourceTensor

SAMPLE_BYTES: Final = 64


class Shards(Protocol):
    """Access to the files that the tensors of a source lie in, by the paths that the tensors name."""

    def identity(self, shard: Path) -> list[int | str]:
        """What changes when the content of the shard does; the shard need not have been fetched.

        Raises InputError for a shard that is not there any more.
        """
        ...

    def content_hash(self, tensors: Sequence["SourceTensor"]) -> str:
        """A hash of what the tensors hold, or of enough of it to tell models of one shape apart. It is the same for
        copies of them. Raises InputError as `identity` does."""
        ...

    def size(self, shard: Path) -> int:
        """Bytes of the shard, which need not have been fetched. Raises InputError as `identity` does."""
        ...

    def peek(self, tensors: Sequence["SourceTensor"]) -> Mapping[str, bytes]:
        """The bytes of small tensors, by name, of those whose shards would have to be fetched first.

        Raises InputError if they cannot be read.
        """
        ...

    def fetch(self, shard: Path) -> Path:
        """The file to read the shard from. May take long and be interrupted. Raises SourceLostError if it fails,
        MachineError if the disk is full."""
        ...

    def release(self, shard: Path) -> None:
        """Nothing will be read from the shard any more."""
        ...


class LocalShards:
    """Shards that lie where they are named and stay there."""

    def identity(self, shard: Path) -> list[int | str]:
        try:
            status = shard.stat()
        except OSError as error:
            raise InputError(f"{shard}: shard cannot be read: {error.strerror}") from error
        return [status.st_size, status.st_mtime_ns]

    def content_hash(self, tensors: Sequence["SourceTensor"]) -> str:
        """Of the first bytes of every tensor: all of 800 GB would take an hour to read."""
        digest, by_shard = hashlib.sha256(), defaultdict[Path, list["SourceTensor"]](list)
        for tensor in tensors:
            by_shard[tensor.shard].append(tensor)
        samples: dict[str, bytes] = {}
        for shard, its in by_shard.items():
            try:
                with shard.open("rb") as file:
                    for tensor in sorted(its, key=lambda t: t.offset):
                        file.seek(tensor.offset)
                        samples[tensor.name] = file.read(min(tensor.n_bytes, SAMPLE_BYTES))
            except OSError as error:
                raise InputError(f"{shard}: shard cannot be read: {error.strerror}") from error
        for name in sorted(samples):
            digest.update(name.encode() + b"\0" + samples[name])
        return digest.hexdigest()

    def size(self, shard: Path) -> int:
        try:
            return shard.stat().st_size
        except OSError as error:
            raise InputError(f"{shard}: shard cannot be read: {error.strerror}") from error

    def peek(self, tensors: Sequence["SourceTensor"]) -> Mapping[str, bytes]:
        """Nothing has to be fetched."""
        return {}

    def fetch(self, shard: Path) -> Path:
        return shard

    def release(self, shard: Path) -> None:
        """Nothing to do."""
