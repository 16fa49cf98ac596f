"""In which order the shards of a source are read, and from when on each is needed no more."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from m3_convert.gguf_file import OutputFile


@dataclass(frozen=True)
class ShardOrder:
    """The reads of a conversion in their order: at which byte of the output a matrix ends, and where it is read from.

    Bytes are counted over all files of the output, as the journal does.
    """

    reads: tuple[tuple[int, tuple[Path, ...]], ...]

    @classmethod
    def of(cls, files: Sequence[OutputFile]) -> "ShardOrder":
        """The order in which these files are written."""
        reads = []
        begin = 0
        for file in files:
            for tensor in file.tensors:
                start, size = begin + len(file.header) + tensor.offset, tensor.n_bytes // len(tensor.matrices)
                for i, matrix in enumerate(tensor.matrices):
                    shards = tuple(dict.fromkeys(source.shard for source in matrix.sources))
                    reads.append((start + (i + 1) * size, shards))
            begin += file.n_bytes
        return cls(tuple(reads))

    def after(self, done: int) -> "ShardOrder":
        """What is left to be read when `done` bytes are on the disk."""
        return ShardOrder(tuple(read for read in self.reads if read[0] > done))

    @cached_property
    def shards(self) -> tuple[Path, ...]:
        """Every shard once, in the order of their first use."""
        return tuple(dict.fromkeys(shard for _, shards in self.reads for shard in shards))

    @cached_property
    def ends(self) -> dict[Path, int]:
        """The byte of the output from which on a shard is needed no more."""
        return {shard: end for end, shards in self.reads for shard in shards}

    def peak(self, size: Callable[[Path], int], *, ahead: bool) -> int:
        """Bytes of shards that are there at a time, at most, if each is let go when it is needed no more.

        size: of a shard; 0 for those that do not count. ahead: the next one that counts is there already.
        """
        counted = [shard for shard in self.shards if size(shard)]
        first: dict[Path, int] = {}
        for end, shards in self.reads:
            for shard in shards:
                first.setdefault(shard, end)
        peak = 0
        for i, shard in enumerate(counted):
            live = sum(size(other) for other in counted[: i + 1] if self.ends[other] >= first[shard])
            following = size(counted[i + 1]) if ahead and i + 1 < len(counted) else 0
            peak = max(peak, live + following)
        return peak


class ReleasePoints:
    """Lets go of shards when the journal says that what was made of them is on the disk.

    eager: letting go frees room, so that a record should be made as soon as a shard is needed no more.
    """

    def __init__(self, order: ShardOrder, release: Callable[[Path], None], *, eager: bool) -> None:
        self._left = sorted((end, shard) for shard, end in order.ends.items())
        self._release = release
        self._eager = eager

    def due(self, written: int) -> bool:
        """Whether a record is wanted when so many bytes are written."""
        return self._eager and bool(self._left) and self._left[0][0] <= written

    def recorded(self, done: int) -> None:
        """The journal says that `done` bytes are on the disk."""
        while self._left and self._left[0][0] <= done:
            self._release(self._left.pop(0)[1])
