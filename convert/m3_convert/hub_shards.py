"""Shards on the Hub: planned from their headers, and downloaded into the Hub's cache, each when it is needed."""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from m3_convert.background import in_order
from m3_convert.checkpoint import Checkpoint, CheckpointFiles, SourceTensor, load_files, read_shard_header
from m3_convert.decode import SourceLostError
from m3_convert.disk_room import Room
from m3_convert.hub import REQUESTS, Repository, RepositoryFile
from m3_convert.hub_failure import error_text, hub_error, retried
from m3_convert.hub_file import HubFile, RangeError
from m3_convert.progress import DownloadLines, Downloads
from m3_runtime.command import one_line
from m3_runtime.errors import InputError, MachineError
from m3_runtime.quantities import format_bytes

HEADER_GUESS: Final = 1 << 17  #: bytes that hold most headers
MAX_HEADER: Final = 100_000_000  #: bytes; what the safetensors library allows


def load_repository(repository: Repository) -> Checkpoint:
    """The checkpoint of a repository: nothing but the headers of its shards is read, over the network where the cache
    does not have them.

    Raises InputError as `load_checkpoint` does, and for what the Hub does not give.
    """
    shards = HubShards(repository)
    files = CheckpointFiles(
        path=Path(repository.id),
        folder=repository.snapshot,
        names=repository.files.keys(),
        headers=shards.read_headers,
        elsewhere=repository.unreachable,
    )
    checkpoint = load_files(files, repository.id, shards)
    warnings = list(checkpoint.warnings)
    if repository.unreachable:
        warnings.append(f"{repository.id}: {repository.unreachable}; this is commit {repository.commit} of the cache")
    return replace(checkpoint, hub_id=repository.id, warnings=tuple(warnings))


class HubShards:
    """The shards of a repository, named by paths OWNER/NAME/SHARD, which do not exist.

    downloads: where downloads are shown.
    """

    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        self.downloads: Downloads = DownloadLines()
        self._headers: dict[str, list[SourceTensor]] = {}
        self._expected = 0
        self._numbers: dict[Path, int] = {}

    # -------------------------------------------------------------------------------------------- planning

    def read_headers(self, names: Sequence[str]) -> Iterator[list[SourceTensor]]:
        """The tensors of each of these shards."""
        for name, header in zip(names, in_order(self._read_header, names, REQUESTS), strict=True):
            self._headers[name] = header
            yield header

    def identity(self, shard: Path) -> list[int | str]:
        file = self.file(shard)
        return [file.size, file.digest]

    def content_hash(self, tensors: Sequence[SourceTensor]) -> str:
        """Of the digests of the shards, which the Hub tells: not what a copy on this machine gives."""
        digests = {tensor.shard.name: self.file(tensor.shard).digest for tensor in tensors}
        return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()

    def size(self, shard: Path) -> int:
        return self.file(shard).size

    def peek(self, tensors: Sequence[SourceTensor]) -> Mapping[str, bytes]:
        far = [tensor for tensor in tensors if self.cached(tensor.shard) is None]

        def read(tensor: SourceTensor) -> bytes:
            return bytes(self._read_range(self.file(tensor.shard), tensor.offset, tensor.n_bytes))

        return {tensor.name: data for tensor, data in zip(far, in_order(read, far, REQUESTS), strict=True)}

    def file(self, shard: Path) -> RepositoryFile:
        return self.repository.files[shard.name]

    def cached(self, shard: Path) -> Path | None:
        """The shard in the Hub's cache, if it is there."""
        return self.repository.cached(shard.name)

    def all(self) -> list[Path]:
        """All shards of the checkpoint."""
        return [Path(self.repository.id) / name for name in self._headers]

    def missing(self, shards: Iterable[Path]) -> list[Path]:
        """Those that the cache does not have."""
        return [shard for shard in shards if self.cached(shard) is None]

    def room(self, shards: Sequence[Path]) -> Room:
        """What it takes to fetch these shards into the cache."""
        missing = self.missing(shards)
        n_bytes = sum(map(self.size, missing))
        return Room(self.repository.snapshot, n_bytes, f"{len(missing)} shards in the Hub's cache")

    # -------------------------------------------------------------------------------------------- fetching

    def expect(self, n: int) -> None:
        """So many shards will be downloaded: they are counted when they are shown."""
        self._expected = n
        self._numbers.clear()

    def fetch(self, shard: Path) -> Path:
        path = self.cached(shard)
        if path is None:
            path = self._download(shard)
        self.check_header(shard, path)
        return path

    def release(self, shard: Path) -> None:
        """Nothing to do: the cache keeps it."""

    def shown(self, shard: Path, done: int = 0) -> AbstractContextManager[Callable[[int], None]]:
        """Shows the download of a shard, of which `done` bytes are there; see `Downloads.shown`."""
        file, name = self.file(shard), one_line(shard.name)
        number = self._numbers.setdefault(shard, len(self._numbers) + 1)
        count = f", shard {number} of {self._expected}" if number <= self._expected else ""
        left = f", {format_bytes(file.size - done)} of it left" if done else ""
        text = f"{name}: {format_bytes(file.size)} from the Hub{left}{count}"
        return self.downloads.shown(text, name, file.size, done)

    def check_header(self, shard: Path, path: Path) -> None:
        """Raises SourceLostError if the file is not the shard that was planned with."""
        try:
            header = read_shard_header(path, shard)
        except InputError as error:
            raise SourceLostError(str(error)) from error
        if header != self._headers[shard.name]:
            raise SourceLostError(f"{path}: its header is not the one that {shard} had when the conversion was planned")

    def _download(self, shard: Path) -> Path:
        file, repository = self.file(shard), self.repository
        with self.shown(shard) as advance:
            bar = _bar_class(advance)
            for again in (False, True):
                path = _to_cache(repository, file, bar, again=again)
                found = _digest(file, path)
                if found == file.digest:
                    return path
                if not again:
                    self.downloads.note(f"{wrong_digest(shard, file, found)}; it is downloaded once more")
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise SourceLostError(f"{wrong_digest(shard, file, found)}, twice")

    def _read_header(self, name: str) -> list[SourceTensor]:
        file = self.repository.files[name]
        shard = Path(self.repository.id) / name
        path = self.cached(shard)
        if path is not None:
            size = path.stat().st_size
            if size != file.size:
                raise InputError(f"{path}: expected {file.size} bytes, found {size}: remove it from the Hub's cache")
            return read_shard_header(path, shard)
        start = self._read_range(file, 0, min(file.size, HEADER_GUESS))
        n = 8 + int.from_bytes(start[:8], "little")
        if len(start) < n <= min(file.size, MAX_HEADER):
            start += self._read_range(file, len(start), n - len(start))
        # A file of the right size that is all hole but for its header: the library judges it as it would the shard.
        with tempfile.NamedTemporaryFile() as hollow:
            hollow.write(start[: min(n, len(start))])
            hollow.truncate(file.size)
            hollow.flush()
            return read_shard_header(Path(hollow.name), shard)

    def _read_range(self, file: RepositoryFile, start: int, n: int) -> bytearray:
        try:
            return HubFile(self.repository, file).read(start, n)
        except Exception as error:
            raise download_error(f"{self.repository.id}/{file.name}", error) from error


def download_error(name: str, error: Exception) -> InputError | MachineError:
    """The error of a shard that could not be downloaded."""
    known = hub_error(name, error)
    if isinstance(known, MachineError):
        return known
    if isinstance(error, RangeError):
        return SourceLostError(f"{name}: {error}")
    return SourceLostError(f"{name}: cannot be downloaded, the Hub gave: {error_text(error)}")


def wrong_digest(shard: Path, file: RepositoryFile, found: str) -> str:
    """What to say of a shard that arrived damaged."""
    kind = "SHA-256" if len(file.digest) == 64 else "Git blob"
    return one_line(f"{shard}: {kind} {found} was downloaded, expected {file.digest}")


def _to_cache(repository: Repository, file: RepositoryFile, bar: type[Any], *, again: bool) -> Path:
    from huggingface_hub import hf_hub_download

    def attempt() -> str:
        return hf_hub_download(
            repository.id, file.name, revision=repository.commit, force_download=again, tqdm_class=bar
        )

    try:
        return Path(retried(attempt))
    except Exception as error:
        raise download_error(f"{repository.id}/{file.name}", error) from error


def _bar_class(advance: Callable[[int], None]) -> type[Any]:
    """A class for huggingface_hub to use in place of tqdm's, which passes on what arrives."""

    class Bar:
        count = 0  # of all bars: the next one begins anew

        def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
            advance(initial - Bar.count)
            Bar.count = initial

        def update(self, n: float | None = 1) -> None:
            advance(int(n or 0))
            Bar.count += int(n or 0)

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        def close(self) -> None:
            """There is nothing to close."""

        def nothing(self, *_: Any, **__: Any) -> None:
            """What else a bar shows. With `update_transfer` there is one bar for network and disk, not two."""

        refresh = set_postfix_str = update_transfer = set_transfer_postfix_str = nothing

    return Bar


def _digest(file: RepositoryFile, path: Path) -> str:
    hasher = file.hasher()
    with path.open("rb") as opened:
        while data := opened.read(1 << 20):
            hasher.update(data)
    return hasher.hexdigest()
