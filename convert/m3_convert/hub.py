"""Repositories on the Hugging Face Hub: one commit, its files, and what of it is in the cache.

huggingface_hub is imported where it is used: that takes a second and is needed for ids on the Hub only.
"""

import hashlib
import logging
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from m3_convert.background import in_order
from m3_convert.hub_failure import error_text, hub_error, is_transient, retried
from m3_runtime.errors import InputError

CONFIG_NAME: Final = "config.json"
SMALL_FILES: Final = ("*.json", "*.jinja", "README.md")  #: everything of a checkpoint but its weights
REQUESTS: Final = 8  #: at once
_LOOKS: Final = 3  #: for a commit that does not move while it is looked at


@dataclass(frozen=True)
class RepositoryFile:
    """A file of a repository."""

    name: str
    size: int  #: bytes
    digest: str  #: hexadecimal: SHA-256, or for a file outside of large file storage the SHA-1 of its Git blob

    def hasher(self) -> "hashlib._Hash":
        """What gives `digest` when it has got all bytes of the file."""
        if len(self.digest) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


@dataclass(frozen=True)
class Repository:
    """A repository at one commit."""

    id: str
    commit: str
    files: Mapping[str, RepositoryFile]  #: by name, without those in folders
    snapshot: Path  #: folder of the commit in the cache; holds the small files, and the shards that are there
    unreachable: str = ""  #: why the Hub cannot be asked; `files` are then those in the cache

    def cached(self, name: str) -> Path | None:
        """The file in the cache, if it is there."""
        path = self.snapshot / name
        return path if path.is_file() else None


class _UnreachableError(Exception):
    """The Hub cannot be asked: there is no network, or it is not to be used."""


def open_repository(hub_id: str) -> Repository:
    """The newest commit of a repository. Its small files are downloaded, and nothing else.

    If the Hub cannot be reached, or must not be (HF_HUB_OFFLINE), it is the commit that the cache has.
    Raises InputError with what to do for a repository that is not there or may not be read, and for one that is not in
    the cache of a machine without a network; MachineError if the disk fills up.
    """
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what it tries again it says in several lines
    disable_progress_bars()
    warnings.filterwarnings("ignore", module=r"huggingface_hub\b")  # of little disk space, which is looked at here too
    try:
        for _ in range(_LOOKS):
            commit, files = _listing(hub_id)
            if CONFIG_NAME not in files:
                raise InputError(f"{hub_id}: expected a checkpoint, found no {CONFIG_NAME} in the repository")
            snapshot = _get_small_files(hub_id, files)
            if snapshot.name == commit:
                return Repository(hub_id, commit, files, snapshot)
    except _UnreachableError as error:
        return _cached_repository(hub_id, str(error))
    raise InputError(f"{hub_id}: its commits change faster than they can be read")


def _listing(hub_id: str) -> tuple[str, dict[str, RepositoryFile]]:
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    api, timeout = HfApi(), float(constants.HF_HUB_ETAG_TIMEOUT)
    try:
        info = retried(lambda: api.model_info(hub_id, files_metadata=True, timeout=timeout), again=2)
    except OfflineModeIsEnabled as error:
        raise _UnreachableError("HF_HUB_OFFLINE is set") from error
    except Exception as error:
        if is_transient(error):
            raise _UnreachableError(f"the Hub cannot be reached: {error_text(error)}") from error
        raise hub_error(hub_id, error) from error
    files = {}
    for entry in info.siblings or ():
        name, digest = entry.rfilename, entry.lfs.sha256 if entry.lfs else entry.blob_id
        if "/" in name:
            continue
        # It becomes part of file names.
        if entry.size is None or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", digest or ""):
            raise InputError(f"{hub_id}/{name}: expected size and digest from the Hub, found {entry.size} and {digest}")
        files[name] = RepositoryFile(name, entry.size, digest or "")
    if info.sha is None:
        raise InputError(f"{hub_id}: the Hub names no commit of it")
    return info.sha, files


def _get_small_files(hub_id: str, files: Iterable[str]) -> Path:
    """Downloads them, and returns the folder of their snapshot."""
    from huggingface_hub import hf_hub_download

    try:
        # This one by its branch, so that the cache will know the commit of the branch without a network.
        snapshot = Path(retried(lambda: hf_hub_download(hub_id, CONFIG_NAME))).parent

        def get(name: str) -> str:
            return retried(lambda: hf_hub_download(hub_id, name, revision=snapshot.name))

        small = [name for name in files if any(fnmatchcase(name, pattern) for pattern in SMALL_FILES)]
        for _ in in_order(get, small, REQUESTS):
            pass
    except Exception as error:
        raise hub_error(hub_id, error) from error
    return snapshot


def _cached_repository(hub_id: str, why: str) -> Repository:
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(hub_id, CONFIG_NAME)
    if not isinstance(config, str):
        raise InputError(f"{hub_id}: no such folder, and {why}; the cache does not have it")
    snapshot = Path(config).parent
    files = {}
    for path in snapshot.iterdir():
        if path.is_file():
            # The cache keeps a file under its digest and links to it.
            digest = path.readlink().name if path.is_symlink() else path.name
            files[path.name] = RepositoryFile(path.name, path.stat().st_size, digest)
    return Repository(hub_id, snapshot.name, files, snapshot, why)
