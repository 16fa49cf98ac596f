"""Where the shards of a source come from: they lie on this machine, or are fetched when they are needed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from m3_runtime.errors import InputError

if TYPE_CHECKING:
    from m3_convert.checkpoint import SourceTensor


class Shards(Protocol):
    """Access to the files that the tensors of a source lie in, by the paths that the tensors name."""

    def identity(self, shard: Path) -> list[int | str]:
        """What changes when the content of the shard does; the shard need not have been fetched.

        Raises InputError for a shard that is not there any more.
        """
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
