"""Where the bytes of a model's tensors come from: pages of GGUF files, or a checkpoint, converted on the way."""

import mmap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from m3_convert.encode import Encoder
from m3_convert.plan import Plan
from m3_runtime.engine import Tensor
from m3_runtime.errors import InputError

#: Part of a tensor, -1 for all of it or the number of an expert, and its bytes as they stand in a GGUF file.
Part = tuple[int, Any]


class Weights(Protocol):
    """Where the bytes of tensors come from."""

    mapped: bool  #: True if the kernel can take back their memory at any time
    n_bytes: int  #: of the files they lie in

    def parts(self, tensor: str) -> Iterator[Part]:
        """The bytes of a tensor, whole or expert by expert."""
        ...

    def release(self, tensors: Sequence[str]) -> None:
        """Called when the engine has let go of these tensors."""
        ...

    def close(self) -> None: ...


class MappedWeights:
    """Tensors of GGUF files, mapped read-only; only the pages of bound layers stay in the memory of the process."""

    mapped = True

    def __init__(self, paths: Sequence[str], tensors: Sequence[Tensor]) -> None:
        self._ranges = {t.name: (t.file, t.offset, t.n_bytes) for t in tensors}
        self._maps: list[mmap.mmap] = []
        for path in paths:
            try:
                with Path(path).open("rb") as file:
                    self._maps.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
            except OSError as error:
                self.close()
                raise InputError(f"{path}: cannot be mapped: {error.strerror}") from error
        self.n_bytes = sum(map(len, self._maps))

    def parts(self, tensor: str) -> Iterator[Part]:
        file, offset, n_bytes = self._ranges[tensor]
        # Page faults read in small pieces; on a cold disk one large request is many times as fast.
        self._advise(tensor, mmap.MADV_WILLNEED)
        yield -1, memoryview(self._maps[file])[offset : offset + n_bytes]

    def release(self, tensors: Sequence[str]) -> None:
        for tensor in tensors:
            self._advise(tensor, mmap.MADV_DONTNEED)

    def _advise(self, tensor: str, advice: int) -> None:
        file, offset, n_bytes = self._ranges[tensor]
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._maps[file].madvise(advice, start, offset + n_bytes - start)

    def close(self) -> None:
        # After an error its traceback may still hold views of the mapping, which then goes with them.
        for mapped in self._maps:
            with suppress(BufferError):
                mapped.close()


class CheckpointWeights:
    """Tensors of a checkpoint, converted when asked for."""

    mapped = False

    def __init__(self, plan: Plan, threads: int) -> None:
        self._tensors = {t.name: t for t in plan.tensors}
        self._open = ExitStack()
        self._encoder = self._open.enter_context(Encoder(threads, shards=plan.source.shards))
        shards = {t.shard for tensor in plan.tensors for m in tensor.matrices for t in m.sources}
        self.n_bytes = sum(map(plan.source.shards.size, shards))

    def parts(self, tensor: str) -> Iterator[Part]:
        for matrix in self._encoder.matrices(self._tensors[tensor]):
            yield matrix.expert, matrix.data

    def release(self, tensors: Sequence[str]) -> None:
        """Nothing to do: what was bound was freed with its last reference."""

    def close(self) -> None:
        self._open.close()
