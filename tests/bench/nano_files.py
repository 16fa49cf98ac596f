"""Files of m3-nano for measurements: by m3-convert, by llama.cpp's quantizer, with and without importance.

Importance is collected over a part of the held-out documents, the same wherever there is one; the others, and the text
that ships with m3-check-selection, are for measuring.
"""

import json
import os
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from quantize import NANO
from tokenizers import Tokenizer

from m3_convert.imatrix import ImportanceMatrix
from m3_runtime.errors import ExitCode

sys.path[:0] = [str(NANO / "train"), str(Path(__file__).resolve().parents[1])]

from documents import Filler  # noqa: E402
from rows import HELD_OUT  # noqa: E402
from vocabulary import read_ids  # noqa: E402

CALIBRATION_SHARE = 4  #: one document of so many is for calibration
CALIBRATION_TOKENS = 1024  #: of each of these, at most

# Runs in the other Python. The matrix is an array of {name, values, number of values} that ends with a name of NULL.
_QUANTIZE = """
import ctypes, sys
import llama_cpp as llama
import numpy as np
source, out, kind, matrix = sys.argv[1:5]
parameters = llama.llama_model_quantize_default_params()
parameters.ftype = getattr(llama, "LLAMA_FTYPE_MOSTLY_" + kind)
held = []
if matrix:
    class Entry(ctypes.Structure):
        _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("size", ctypes.c_size_t)]
    with np.load(matrix) as file:
        held = [(name.encode(), np.ascontiguousarray(file[name])) for name in file.files]
    entries = (Entry * (len(held) + 1))(*[Entry(n, a.ctypes.data, a.size) for n, a in held], Entry(None, None, 0))
    kind_of_pointer = dict(llama.llama_model_quantize_params._fields_)["imatrix"]
    parameters.imatrix = ctypes.cast(entries, kind_of_pointer)
sys.exit(llama.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(parameters)))
"""


def held_out_documents() -> list[NDArray[np.int32]]:
    """Token ids of the documents that m3-nano was not trained on."""
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    stream = read_ids(NANO / HELD_OUT)
    return np.split(stream, np.flatnonzero(stream == Filler(tokenizer, stream).opening)[1:])


def calibration_text() -> str:
    """The beginnings of every CALIBRATION_SHARE-th of the held-out documents, from the first on."""
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    parts = [document[:CALIBRATION_TOKENS].tolist() for document in held_out_documents()[::CALIBRATION_SHARE]]
    return "\n".join(tokenizer.decode(ids) for ids in parts)


class NanoFiles:
    """Makes files in a folder, and checks them. llama: a Python that has llama-cpp-python, for `quantize` alone."""

    def __init__(self, folder: Path, *, llama: str = "", threads: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._llama, self._threads = llama, str(threads)

    @cached_property
    def text(self) -> Path:
        """What importance is collected over."""
        path = self.folder / "calibration.txt"
        path.write_text(calibration_text(), encoding="utf-8")
        return path

    @cached_property
    def matrix(self) -> Path:
        """The importance matrix."""
        path = self.folder / "nano.imatrix.gguf"
        self._run("imatrix_cli", NANO, path, "--text", self.text)
        return path

    @cached_property
    def f32(self) -> Path:
        return self.convert("nano-f32.gguf", "--type", "f32")

    def convert(self, name: str, *options: object, source: Path = NANO) -> Path:
        out = self.folder / name
        self._run("cli", source, out, *options)
        return out

    def quantize(self, kind: str, *, importance: bool = False) -> Path:
        """What llama.cpp makes of the F32 file. kind: its name for a mixture of types, as in "Q4_K_M"."""
        out = self.folder / f"llama-{kind}{'-i' if importance else ''}.gguf"
        line = [self._llama, "-c", _QUANTIZE, str(self.f32), str(out), kind, str(self._means) if importance else ""]
        done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
        if done.returncode:
            sys.exit(f"llama.cpp, {kind}: {done.stderr[-2000:]}")
        return out

    def check(self, candidate: Path, *options: object, reference: Path = NANO) -> dict[str, Any]:
        """The JSON report of m3-check-selection on the text that ships with it, whatever its verdict."""
        found = self._run("check_cli", reference, candidate, *options, "--json", accept=(ExitCode.FELL_SHORT,))
        report: dict[str, Any] = json.loads(found)
        return report

    @cached_property
    def _means(self) -> Path:
        """The same matrix as arrays, as llama.cpp's library takes it."""
        entries = ImportanceMatrix.load(self.matrix).entries
        means = {name: entry.sums / np.maximum(entry.counts, 1)[:, None] for name, entry in entries.items()}
        path = self.folder / "means.npz"
        np.savez(path, **{name: mean.astype(np.float32).ravel() for name, mean in means.items()})
        return path

    def _run(self, command: str, *arguments: object, accept: tuple[int, ...] = ()) -> str:
        line = [sys.executable, "-m", f"m3_convert.{command}", *map(str, arguments), "--threads", self._threads]
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode and done.returncode not in accept:
            sys.exit(f"{' '.join(line[2:])}: {done.stderr}")
        return done.stdout
