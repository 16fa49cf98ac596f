"""Where the shards of a source come from: they lie on this machine, or are fetched when they are needed."""

from pathlib import Path
from typing import Protocol

from m3_runtime.errors import InputError


class Shards(Protocol):
    """Access to the files that the tensors of a source lie in, by the paths that the tensors name."""

    def identity(self, shard: Path) -> list[int | str]:
        """What changes when the content of the shard does; the shard need not have been fetched.

        Raises InputError for a shard that is not there any more.
        """
        ...

    def fetch(self, shard: Path) -> Path:
        """The file to read the shard from. May take long and be interrupted. Raises SourceLostError if it fails."""
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

    def fetch(self, shard: Path) -> Path:
        return shard

    def release(self, shard: Path) -> None:
        """Nothing to do."""
