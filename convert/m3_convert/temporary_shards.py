"""Shards on the Hub that stay only while they are needed (--discard-source): in OUT.gguf.source, beside the output.

    NAME.DIGEST         a shard, whole and checked
    NAME.DIGEST.part    the beginning of one

While one is read, the next is downloaded.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from m3_convert.background import StoppedError, in_background, in_order
from m3_convert.checkpoint import SourceTensor, listed
from m3_convert.decode import SourceLostError
from m3_convert.disk_room import DISK_FULL, Room
from m3_convert.hub_file import HubFile
from m3_convert.hub_shards import HubShards, download_error, wrong_digest
from m3_convert.part_file import write_all
from m3_convert.shard_order import ShardOrder
from m3_runtime.errors import MachineError
from m3_runtime.quantities import format_bytes

FOLDER_SUFFIX: Final = ".source"
PIECE_BYTES: Final = 1 << 25  #: of a request: smaller ones meet the Hub's limit on requests, larger ones take memory
CONNECTIONS: Final = 4  #: at once, for one shard
_PATIENCE: Final = 2.0  #: seconds that threads get to end


@dataclass(frozen=True)
class _Download:
    """One that is running, or has run, in another thread."""

    result: Future[Path]
    stop: threading.Event

    @property
    def failed(self) -> bool:
        return self.result.done() and self.result.exception() is not None


class TemporaryShards:
    """Shards of `hub`: those that its cache does not have are downloaded to `folder`, and deleted when released.

    order: what will be read; shards that it does not name are not needed. ahead: whether the next one is downloaded
    while one is read.
    """

    def __init__(self, hub: HubShards, folder: Path, order: ShardOrder, *, ahead: bool = True) -> None:
        self.hub, self.folder, self.ahead = hub, folder, ahead
        self._order = order
        self._downloads: dict[Path, _Download] = {}

    def identity(self, shard: Path) -> list[int | str]:
        return self.hub.identity(shard)

    def content_hash(self, tensors: Sequence[SourceTensor]) -> str:
        return self.hub.content_hash(tensors)

    def size(self, shard: Path) -> int:
        return self.hub.size(shard)

    def peek(self, tensors: Sequence[SourceTensor]) -> Mapping[str, bytes]:
        return self.hub.peek(tensors)

    def fetch(self, shard: Path) -> Path:
        path = self.hub.cached(shard)
        if path is None:
            download = self._downloads.get(shard)
            if download is None or download.failed:  # what failed ahead of time may succeed now that it is needed
                download = self._start(shard)
            path = download.result.result()
        self.hub.check_header(shard, path)
        if self.ahead:
            self._start_next(shard)
        return path

    def release(self, shard: Path) -> None:
        self._downloads.pop(shard, None)
        self._remove(shard)

    # -------------------------------------------------------------------------------------------- the folder

    def room(self) -> Room:
        """What it takes to have the shards here that are needed at a time, beyond what is here already."""
        missing = self.hub.missing(self._order.shards)
        here = sum(_allocated(path) for shard in missing for path in self._paths(shard))
        peak = self._order.peak(lambda shard: self.size(shard) if shard in missing else 0, ahead=self.ahead)
        return Room(self.folder, peak - here, "shards of the source")

    def incomplete(self) -> list[Path]:
        """Shards of which something is still to be downloaded."""
        return [shard for shard in self.hub.missing(self._order.shards) if not self._is_whole(shard)]

    def adopt(self) -> None:
        """Removes what an earlier run left and is not needed any more. The rest is used."""
        for shard in self.hub.all():
            if shard not in self._order.ends:
                self._remove(shard)

    def close(self) -> None:
        """Ends what runs in other threads. What has arrived stays."""
        for download in self._downloads.values():
            download.stop.set()
        wait([download.result for download in self._downloads.values()], _PATIENCE)

    def kept(self) -> list[str]:
        """What there is to say of what the next run will find."""
        n_bytes = sum(_allocated(path) for shard in self._order.shards for path in self._paths(shard))
        if not n_bytes:
            return []
        return [f"{self.folder}: {format_bytes(n_bytes)} of the source are kept for the same command"]

    def remove(self) -> list[str]:
        """Removes the folder. Returns what there is to say if something is left of it."""
        for shard in self.hub.all():
            self._remove(shard)
        try:
            self.folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError as error:
            others = listed(sorted(path.name for path in self.folder.iterdir())) if self.folder.is_dir() else ""
            return [f"{self.folder}: not removed: {error.strerror}{others and ': ' + others}"]
        return []

    def _paths(self, shard: Path) -> tuple[Path, Path]:
        """Where the whole shard lies, and where its beginning does."""
        name = f"{shard.name}.{self.hub.file(shard).digest[:16]}"
        return self.folder / name, self.folder / f"{name}.part"

    def _remove(self, shard: Path) -> None:
        for path in self._paths(shard):
            path.unlink(missing_ok=True)

    def _is_whole(self, shard: Path) -> bool:
        path, _ = self._paths(shard)
        return path.is_file() and path.stat().st_size == self.size(shard)

    # -------------------------------------------------------------------------------------------- downloads

    def _start(self, shard: Path) -> _Download:
        stop = threading.Event()
        download = _Download(in_background(lambda s: self._get(s, stop), shard), stop)
        self._downloads[shard] = download
        return download

    def _start_next(self, shard: Path) -> None:
        later = self._order.shards[self._order.shards.index(shard) + 1 :]
        following = next(iter(self.hub.missing(later)), None)
        if following is not None and following not in self._downloads:
            self._start(following)

    def _get(self, shard: Path, stop: threading.Event) -> Path:
        """The shard, downloaded as far as it is not here."""
        path, part = self._paths(shard)
        if self._is_whole(shard):
            return path
        try:
            self.folder.mkdir(exist_ok=True)
            for again in (False, True):
                found = self._fill(shard, part, stop)
                if found == self.hub.file(shard).digest:
                    part.replace(path)
                    return path
                part.unlink()
                wrong = wrong_digest(shard, self.hub.file(shard), found)
                if not again:
                    self.hub.downloads.note(f"{wrong}; it is downloaded once more")
        except OSError as error:
            if error.errno in DISK_FULL:
                raise MachineError(f"{part}: the disk is full: {error.strerror}") from error
            raise SourceLostError(f"{part}: cannot be written: {error.strerror}") from error
        finally:
            stop.set()  # for the connections that are still at work
        raise SourceLostError(f"{wrong}, twice")

    def _fill(self, shard: Path, part: Path, stop: threading.Event) -> str:
        """Completes the file that is begun at `part`, and returns the digest of all of it."""
        file = self.hub.file(shard)
        hasher = file.hasher()
        opened = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            at = 0
            while data := os.read(opened, 1 << 20):
                hasher.update(data)
                at += len(data)
                if stop.is_set():
                    raise StoppedError
            with self.hub.shown(shard, at) as advance:
                read = self._reader(shard, stop, advance)
                for piece in in_order(read, range(at, file.size, PIECE_BYTES), CONNECTIONS, stop):
                    write_all(opened, memoryview(piece))
                    hasher.update(piece)
            os.fsync(opened)
        finally:
            os.close(opened)
        return hasher.hexdigest()

    def _reader(self, shard: Path, stop: threading.Event, advance: Callable[[int], None]) -> Callable[[int], bytearray]:
        file, lock = self.hub.file(shard), threading.Lock()
        source = HubFile(self.hub.repository, file)

        def arrived(n: int) -> None:
            with lock:
                advance(n)

        def read(start: int) -> bytearray:
            try:
                return source.read(start, min(PIECE_BYTES, file.size - start), stop=stop, advance=arrived)
            except StoppedError:
                raise
            except Exception as error:
                raise download_error(str(shard), error) from error

        return read


def _allocated(path: Path) -> int:
    """Bytes on the disk."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0
