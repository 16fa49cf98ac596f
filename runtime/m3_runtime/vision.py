"""Images to tokens: the Python face of the vision tower of `m3.h`.

from m3_runtime.vision import VisionTower
with VisionTower("m3-mmproj.gguf") as tower:
    tokens = tower.encode(pixels, grids)
"""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from m3_runtime.choices import DEVICES, ISAS, chosen
from m3_runtime.errors import CancelledError, InputError
from m3_runtime.interrupts import hold_signals
from m3_runtime.native import call, ffi, lib, size_of

Floats: TypeAlias = NDArray[np.float32]
Grid: TypeAlias = tuple[int, int, int]  #: patches in time (of two frames each; 1 for an image), height and width

_POLL: Final = 0.1  #: seconds; the delay of Ctrl-C


@dataclass(frozen=True)
class VisionHparams:
    """Dimensions of a vision file; the fields are those of `m3_vision_hparams`."""

    n_layer: int
    n_embd: int
    n_head: int
    head_dim: int
    n_rot: int
    n_ff: int
    n_projector: int
    n_merger: int
    n_out: int
    patch_size: int
    merge: int
    frames: int
    rope_theta: float
    eps: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def patch_values(self) -> int:
        """Numbers that make a patch: three channels of each frame."""
        return 3 * self.frames * self.patch_size**2


class VisionTower:
    """The vision half of a model, from a vision file (m3-convert --vision). Use it as a context manager.

    path: the file, mapped read-only. device: "cpu" or "auto", which is the same; isa: instruction set of the CPU.
    InputError names what is wrong with the file, MachineError what the machine or the device lacks.
    """

    def __init__(self, path: str | os.PathLike[str], *, device: str = "auto", isa: str = "auto") -> None:
        options = ffi.new("m3_vision_options *")
        options.struct_size = size_of("m3_vision_options")
        options.device = getattr(lib, f"M3_DEVICE_{chosen('device', device, DEVICES).upper()}")
        options.isa = getattr(lib, f"M3_ISA_{chosen('isa', isa, ISAS).upper()}")
        out = ffi.new("m3_vision **")
        call(lib.m3_vision_open, os.fsencode(path), options, out)
        self._pointer = out[0]
        self._caller = threading.Lock()
        self.path = os.fspath(path)
        self.hparams = _hparams(lib.m3_vision_dimensions(self._pointer))

    def encode(self, pixels: ArrayLike, grids: Sequence[Grid], *, threads: int = 0) -> list[Floats]:
        """Tokens of each image, float32 [t * h * w / 4, n_out].

        pixels: float32 [all patches, patch_values], as `image.patches` gives them: of one image after the other, in it
        in the order of squares of 2 x 2 patches. grids: (t, h, w) of each. threads: 0 takes all cores.
        InputError for shapes that do not fit together, NotFiniteError if a layer computes NaN.
        """
        h = self.hparams
        values = np.ascontiguousarray(pixels, np.float32)
        if values.ndim != 2 or values.shape[1] != h.patch_values:
            raise InputError(f"pixels of shape {values.shape}, expected [patches, {h.patch_values}]")
        try:
            array = ffi.new("m3_vision_grid[]", [tuple(map(int, grid)) for grid in grids])
            tokens = [int(t) * int(height) * int(width) // h.merge**2 for t, height, width in grids]
        except (OverflowError, TypeError, ValueError) as error:
            raise InputError(f"grids: expected (t, h, w) of each image: {error}") from None
        # What the engine would refuse must not be allocated first.
        fits = min(tokens, default=0) > 0 and sum(tokens) * h.merge**2 == len(values)
        out = np.empty((sum(tokens) if fits else 0, h.n_out), np.float32)
        batch = ffi.new("m3_vision_batch *")
        source, target = ffi.from_buffer("float[]", values), ffi.from_buffer("float[]", out, require_writable=True)
        batch.struct_size, batch.n_threads, batch.n_images = size_of("m3_vision_batch"), threads, len(array)
        batch.grids, batch.pixels, batch.pixels_count = array, source, values.size
        batch.out, batch.out_count = target, out.size
        self._run(batch)
        return np.split(out, np.cumsum(tokens)[:-1])

    def _run(self, batch: Any) -> None:
        pointer = self._open_pointer()
        with hold_signals() as held:
            if not self._caller.acquire(blocking=False):
                raise InputError("the vision tower is in use on another thread")
            try:
                # On a thread of its own, so that this one can hear Ctrl-C.
                with ThreadPoolExecutor(1, thread_name_prefix="m3-vision") as worker:
                    future = worker.submit(call, lib.m3_vision_encode, pointer, batch)
                    while not wait((future,), _POLL).done:
                        if held.pending:
                            # Again each time: a cancellation before the work has begun is lost.
                            lib.m3_vision_cancel(pointer)
                    future.result()
                if held.pending:
                    raise CancelledError("the encoding of images was cancelled")
            finally:
                self._caller.release()

    def cancel(self) -> None:
        """Asks a running `encode`, which is on another thread, to stop with CancelledError."""
        lib.m3_vision_cancel(self._open_pointer())

    def _open_pointer(self) -> Any:
        if self._pointer == ffi.NULL:
            raise InputError("the vision tower is closed")
        return self._pointer

    def close(self) -> None:
        """Frees the tower, when a running `encode` has ended. A second call does nothing."""
        with hold_signals(), self._caller:
            pointer, self._pointer = self._pointer, ffi.NULL
            lib.m3_vision_close(pointer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _hparams(pointer: Any) -> VisionHparams:
    values = {field.name: getattr(pointer, field.name) for field in fields(VisionHparams)}
    return VisionHparams(**{**values, "mean": tuple(pointer.mean), "std": tuple(pointer.std)})
