"""Where a check is: written after a layer, so that an interrupted check of many hours goes on from there.

One file in a folder of its own, whose name is a hash of what was asked for: the names of models and text, and the
options. In the file stands a hash of all that the result depends on, their content and this program too: what was asked
for before one of them changed is of no use, and is removed when the same is asked for again. The file appears whole or
not at all, and is removed when the check is done.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from m3_convert.comparison import LayerComparison
from m3_convert.whole_file import own_part, whole_file
from m3_runtime.quantities import format_bytes

SAVE_SECONDS = 60.0  #: of work that an interruption may cost, or one layer if that takes longer
FORMAT: Final = 3

_NAME: Final = "state.npz"
_ABOUT: Final = "about"

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Snapshot:
    """Where a check is after `layer` layers."""

    layer: int
    arrays: Arrays
    about: dict[str, Any]  #: what JSON holds


def default_folder() -> Path:
    """The folder that holds those of the checks: below $XDG_CACHE_HOME, or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "m3-gguf" / "check"


def prepare_folder(parent: Path) -> None:
    """Makes the folder that holds those of the checks. Raises OSError if nothing can be written there."""
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=parent):
        pass


def state_folder(parent: Path, question: Mapping[str, Any]) -> Path:
    """The folder of what `question`, values of JSON, asks for."""
    return parent / basis_hash(question)


def basis_hash(basis: Mapping[str, Any]) -> str:
    """Of values of JSON."""
    content = json.dumps({"format": FORMAT, **basis}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


class WalkState:
    """The file of a check. folder: None keeps nothing. basis: hash of what the result depends on. note: is told, for
    people, why a state is lost."""

    def __init__(
        self, folder: Path | None = None, basis: str = "", note: Callable[[str], None] = lambda _: None
    ) -> None:
        self.folder = folder
        self._basis = basis
        self.snapshot: Snapshot | None = None  #: what an earlier run left
        self.layer = 0  #: layers done that the file holds, 0 if there is none
        self._note = note
        self._last = time.monotonic()
        self._broken = False

    def load(self) -> None:
        """Reads what an earlier run left; removes it if it is of no use any more."""
        if self.folder is None:
            return
        path = self.folder / _NAME
        try:
            # Opened here, since NumPy leaves a damaged file open.
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                arrays: Arrays = {name: file[name] for name in file.files}
            about = json.loads(str(arrays.pop(_ABOUT)))
            if about.pop("check") != self.folder.name:
                raise ValueError("it is that of another check")
            if about.pop("basis") != self._basis:
                self.remove()
                self._note(
                    f"note: {self.folder}: removed what an earlier run had saved; models, text or program have changed "
                    "since, and the check starts anew"
                )
                return
            self.snapshot = Snapshot(int(about.pop("layer")), arrays, about)
            self.layer = self.snapshot.layer
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            self._note(f"{path}: the saved state cannot be read, the check starts anew: {error}")

    def due(self) -> bool:
        """True if enough has been done since the last save to make one worth its while."""
        return self.folder is not None and not self._broken and time.monotonic() - self._last >= SAVE_SECONDS

    def save(self, snapshot: Snapshot) -> None:
        """Replaces what the file holds. A disk that cannot take it costs the state, not the check."""
        if self.folder is None:
            return
        path = self.folder / _NAME
        content: dict[str, Any] = dict(snapshot.arrays)
        content[_ABOUT] = json.dumps(
            {"check": self.folder.name, "basis": self._basis, "layer": snapshot.layer, **snapshot.about}
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_file(path, own_part(path)) as part, part.open("wb") as file:
                np.savez(file, **content)
        except OSError as error:
            self._broken = True
            size = format_bytes(sum(array.nbytes for array in snapshot.arrays.values()))
            self._note(
                f"note: {path}: {size} cannot be saved: {error.strerror or error}; if it is interrupted, the check "
                + (f"goes on from layer {self.layer + 1}" if self.layer else "starts anew")
            )
            return
        self.layer = snapshot.layer
        self._last = time.monotonic()

    def remove(self) -> None:
        """The check is done, or shall start anew."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.layer = 0


def comparison_arrays(comparison: LayerComparison, prefix: str) -> Arrays:
    """All that a comparison has counted, by name behind `prefix`."""
    return {
        f"{prefix}.{part.name}.{field.name}": getattr(tally, field.name)
        for part in fields(comparison)
        for tally in (getattr(comparison, part.name),)
        for field in fields(tally)
        if isinstance(getattr(tally, field.name), np.ndarray)
    }


def restore_comparison(comparison: LayerComparison, prefix: str, arrays: Arrays) -> None:
    """Puts what `comparison_arrays` gave into a new comparison. Raises KeyError and ValueError if it does not fit."""
    for name, array in comparison_arrays(comparison, prefix).items():
        array[...] = arrays[name]
