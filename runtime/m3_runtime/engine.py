"""Models and sessions: the Python face of `m3.h`, where shapes and meanings are documented in full.

from m3_runtime import Model
with Model("m3.gguf") as model, model.session(context=4096) as session:
    logits = session.eval(ids)
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from m3_runtime.choices import ATTENTIONS, DEVICES, EXPERTS_ON, INDEX_SCANS, ISAS, chosen
from m3_runtime.errors import CancelledError, InputError, MachineError
from m3_runtime.gguf_reader import GGUF, Tensor
from m3_runtime.interrupts import HeldSignals, hold_signals
from m3_runtime.model_digest import model_digest
from m3_runtime.native import call, ffi, lib, size_of, text
from m3_runtime.placement import Plan
from m3_runtime.quantize import TensorType, type_name

__all__ = ["GGUF", "Hparams", "Memory", "Model", "Plan", "Session", "SessionOptions", "Tensor"]

Floats: TypeAlias = NDArray[np.float32]
Progress: TypeAlias = Callable[[int, int], None]  #: called with row-layers done and in all


def _numbers(names: Sequence[str], kind: str) -> dict[str, int]:
    """The engine's numbers of names of `choices`."""
    return {name: getattr(lib, f"M3_{kind}_{name.upper()}") for name in names}


_DEVICES = _numbers(DEVICES, "DEVICE")
_EXPERTS_ON = _numbers(EXPERTS_ON, "EXPERTS")
_ISAS = _numbers(ISAS, "ISA")
_ATTENTION = _numbers(ATTENTIONS, "ATTENTION")
_INDEX_SCAN = _numbers(INDEX_SCANS, "INDEX_SCAN")
_LOADS = {True: lib.M3_LOAD_MAP, False: lib.M3_LOAD_READ}
_RECORD = {
    "blocks": lib.M3_RECORD_BLOCKS,
    "scores": lib.M3_RECORD_SCORES,
    "importance": lib.M3_RECORD_IMPORTANCE,
    "mass": lib.M3_RECORD_MASS,
}
_OUTPUT = {"last": lib.M3_OUTPUT_LAST, "all": lib.M3_OUTPUT_ALL, "hidden": lib.M3_OUTPUT_HIDDEN}

#: Seconds between looks at the progress of an evaluation, and the delay of Ctrl-C.
_POLL = 0.1


def _choose(table: dict[str, int], value: str, what: str) -> int:
    return table[chosen(what, value, tuple(table))]


@dataclass(frozen=True)
class Hparams:
    """Dimensions of a model; the fields are those of `m3_hparams`."""

    n_layer: int
    n_dense_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_rot: int
    n_ff: int
    n_ff_expert: int
    n_ff_shared: int
    n_expert: int
    n_expert_used: int
    n_vocab: int
    n_index_head: int
    index_dim: int
    top_k: int
    block_size: int
    local_blocks: int
    context_train: int
    rope_theta: float
    rms_eps: float
    expert_scale: float
    swiglu_alpha: float
    swiglu_limit: float


@dataclass(frozen=True)
class Memory:
    """Bytes that a session takes; cache pages cost memory when first written."""

    kv_bytes: int
    index_bytes: int
    scratch_bytes: int

    @property
    def total(self) -> int:
        return self.kv_bytes + self.index_bytes + self.scratch_bytes


class SessionOptions(TypedDict, total=False):
    """Options of `Model.session`."""

    context: int  #: tokens that one sequence can hold, default 4096
    sequences: int  #: default 1
    kv_type: str  #: one of CACHE_TYPES, default "f16"
    index_type: str  #: one of CACHE_TYPES, default "f32"
    attention: str  #: "sparse" (default) or "dense"
    index_scan: str  #: "auto" (default), "full" or "low_bit"; block lists are the same
    exact: bool  #: float32 everywhere and no bit that hangs on chunks, on a GPU too (M3_SESSION_EXACT); default False
    threads: int  #: 0 (default) takes all cores
    chunk: int  #: rows evaluated together, 0 (default) is 512
    layers: tuple[int, int] | None  #: (first, count) of a layer window; (n_layer, 0): output norm and head; None: all
    record: Sequence[str]  #: any of "blocks", "scores", "importance", "mass"
    poison: bool  #: fill fresh pages with NaN (for tests)
    page_seed: int  #: take pages in shuffled order (for tests)
    pages: int  #: of the pool that the sequences share, 0 (default): enough for all to be full, which is the most


def _session_options(options: SessionOptions) -> Any:
    unknown = set(options) - set(SessionOptions.__annotations__)
    if unknown:
        raise InputError(f"session option '{min(unknown)}' is not known")
    o = ffi.new("m3_session_options *")
    first, count = options.get("layers") or (0, 0)
    o.struct_size = size_of("m3_session_options")
    try:
        o.context = options.get("context", 4096)
        o.sequences = options.get("sequences", 1)
        o.n_threads = options.get("threads", 0)
        o.chunk = options.get("chunk", 0)
        o.layer_first, o.layer_count = first, count
        o.page_seed = options.get("page_seed", 0)
        o.pages = options.get("pages", 0)
    except (OverflowError, TypeError) as error:
        raise InputError(f"a session option is not a number of its range: {error}") from None
    o.kv_type = TensorType.parse(options.get("kv_type", "f16"))
    o.index_type = TensorType.parse(options.get("index_type", "f32"))
    o.attention = _choose(_ATTENTION, options.get("attention", "sparse"), "attention")
    o.index_scan = _choose(_INDEX_SCAN, options.get("index_scan", "auto"), "index_scan")
    o.record = sum(_choose(_RECORD, name, "record") for name in set(options.get("record", ())))
    o.flags = (lib.M3_SESSION_POISON if options.get("poison", False) else 0) | (
        lib.M3_SESSION_EXACT if options.get("exact", False) else 0
    )
    return o


def _evaluate(pointer: Any, batch: Any, buffers: object) -> None:
    """What the worker runs. `buffers` are those that the batch points to, alive as long as it runs."""
    call(lib.m3_session_eval, pointer, batch)


class Model:
    """Weights of one model, shared by its sessions. Use it as a context manager.

    path: as for `GGUF`, mapped read-only. device: "cpu", "cuda", or "auto": the GPU if library, driver and machine have
    what it needs. isa: instruction set of the CPU kernels. mmap: the CPU uses the weights where the file is mapped; if
    False, `load` or the first session reads them into memory. experts_on: where a model on a GPU computes its routed
    experts: "gpu"; "cpu", from the mapped file; "auto": layer by layer on the GPU as far as `place` or the first
    session finds room. InputError names what is wrong with the file, MachineError what a device lacks.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        device: str = "auto",
        isa: str = "auto",
        mmap: bool = True,
        experts_on: str = "auto",
    ) -> None:
        out = ffi.new("m3_model **")
        call(lib.m3_model_open, os.fsencode(path), self._options(device, isa, experts_on, mmap), out)
        self.mmap = mmap
        self._take(out[0], os.fspath(path))

    @classmethod
    def from_header(
        cls, header: bytes, name: str, *, device: str = "auto", isa: str = "auto", experts_on: str = "auto"
    ) -> Self:
        """A model that knows shapes and types but has no data: `bind` gives it some, a layer at a time.

        header: a GGUF header without tensor data. name: stands for the file in messages. experts_on: "auto" is "gpu".
        """
        self = cls.__new__(cls)
        self.mmap = True
        out = ffi.new("m3_model **")
        options = cls._options(device, isa, experts_on)
        call(lib.m3_model_open_header, header, len(header), os.fsencode(name), options, out)
        self._take(out[0], name)
        return self

    @staticmethod
    def _options(device: str, isa: str, experts_on: str, mmap: bool = True) -> Any:
        options = ffi.new("m3_model_options *")
        options.struct_size = size_of("m3_model_options")
        options.device = _choose(_DEVICES, device, "device")
        options.isa = _choose(_ISAS, isa, "isa")
        options.load = _LOADS[mmap]
        options.experts_on = _choose(_EXPERTS_ON, experts_on, "experts_on")
        return options

    def _take(self, pointer: Any, path: str) -> None:
        """Becomes the owner of an open m3_model."""
        try:
            self._fill(pointer, path)
        except InputError:
            lib.m3_model_close(pointer)
            raise

    def _fill(self, pointer: Any, path: str) -> None:
        self._pointer = pointer
        self._sessions: list[Session] = []
        self._bound: dict[tuple[str, int], Any] = {}
        self.path = path
        raw = lib.m3_model_hparams(pointer)
        self.hparams = Hparams(**{field.name: getattr(raw, field.name) for field in fields(Hparams)})
        self.gguf = GGUF._borrow(lib.m3_model_gguf(pointer), path)
        self.backend_name = text(lib.m3_model_backend_name(pointer))  #: "cpu" or "cuda"
        self.device_name = text(lib.m3_model_device_name(pointer))  #: of the GPU, or the instruction set
        self.isa_name = text(lib.m3_model_isa_name(pointer))

    @cached_property
    def digest(self) -> str:
        """Tells this model from others; see `model_digest`."""
        self._open_pointer()
        return model_digest(self.gguf)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.n_bytes for t in self.gguf.tensors)

    @property
    def bytes_by_type(self) -> dict[str, int]:
        """Bytes of the weights by the name of their type, most first."""
        sizes: Counter[str] = Counter()
        for tensor in self.gguf.tensors:
            sizes[type_name(tensor.type)] += tensor.n_bytes
        return dict(sizes.most_common())

    @property
    def slow_types(self) -> list[str]:
        """Types of weights that the CPU multiplies by plain code, without vector instructions; most bytes first."""
        pointer = self._open_pointer()
        types = {type_name(tensor.type): tensor.type for tensor in self.gguf.tensors}
        return [t for t in self.bytes_by_type if text(lib.m3_model_product_path(pointer, types[t])) == "plain"]

    def _open_pointer(self) -> Any:
        if self._pointer == ffi.NULL:
            raise InputError(f"{self.path}: the model is closed")
        return self._pointer

    def bind(self, tensor: str, data: Any, expert: int = -1) -> None:
        """Gives data (a C-contiguous buffer in the tensor's type) to a weight of a header-only model.

        expert: one matrix of a stacked tensor, -1 for the whole. The buffer is kept, not copied.
        """
        view = ffi.from_buffer(data)
        call(lib.m3_model_bind, self._open_pointer(), tensor.encode(), expert, view, ffi.sizeof(view))
        self._bound[tensor, expert] = view

    def unbind_layer(self, layer: int) -> None:
        """Forgets the data of a layer, or of the tensors outside the layers for -1."""
        call(lib.m3_model_unbind_layer, self._open_pointer(), layer)
        if layer < 0:
            mine = [key for key in self._bound if not key[0].startswith("blk.")]
        else:
            mine = [key for key in self._bound if key[0].startswith(f"blk.{layer}.")]
        for key in mine:
            del self._bound[key]

    def device_memory(self) -> tuple[int, int] | None:
        """Bytes of the GPU that are free and there in all; None on the CPU."""
        left, total = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        call(lib.m3_model_device_memory, self._open_pointer(), left, total)
        return (left[0], total[0]) if total[0] else None

    def load(self, *, progress: Progress | None = None) -> None:
        """Brings the weights of all layers to the GPU, or without mmap to memory, as the first session would.

        Experts that `place` left to the CPU stay in the file.

        progress: called with bytes brought and in all. Ctrl-C stops it. MachineError if they do not fit.
        """
        pointer = self._open_pointer()
        with hold_signals() as held, ThreadPoolExecutor(max_workers=1, thread_name_prefix="m3-load") as worker:
            future = worker.submit(call, lib.m3_model_load, pointer, 0, 0)
            try:
                while not wait((future,), _POLL).done:
                    if held.pending:
                        lib.m3_model_cancel_load(pointer)
                    elif progress:
                        progress(*self.load_progress())
                future.result()
            except BaseException:
                while not future.done():
                    lib.m3_model_cancel_load(pointer)
                    wait((future,), _POLL)
                raise

    def load_progress(self) -> tuple[int, int]:
        """Bytes brought and to bring by the running load or the last one."""
        done, total = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        lib.m3_model_load_progress(self._open_pointer(), done, total)
        return done[0], total[0]

    def memory(self, **options: Unpack[SessionOptions]) -> Memory:
        """What a session with these options would take."""
        out = ffi.new("m3_memory *")
        call(lib.m3_session_memory, self._open_pointer(), _session_options(options), out)
        return Memory(out.kv_bytes, out.index_bytes, out.scratch_bytes)

    def plan(self, **options: Unpack[SessionOptions]) -> Plan:
        """What a session with these options would need on each device, weights included."""
        out = ffi.new("m3_plan *")
        call(lib.m3_session_plan, self._open_pointer(), _session_options(options), out)
        return Plan(
            device=self.backend_name,
            device_name=self.device_name,
            weights_bytes=out.weight_bytes,
            experts_bytes=out.expert_bytes,
            cpu_experts_bytes=out.cpu_expert_bytes,
            loaded_bytes=out.loaded_bytes,
            kv_bytes=out.kv_bytes,
            index_bytes=out.index_bytes,
            scratch_bytes=out.scratch_bytes,
            host_bytes=out.host_bytes,
            pinned_bytes=out.pinned_bytes,
            expert_layers=out.expert_layers,
            cpu_expert_layers=out.cpu_expert_layers,
            free_bytes=out.free_bytes if out.total_bytes else None,
            total_bytes=out.total_bytes if out.total_bytes else None,
            mapped=self.mmap,
        )

    def place(self, **options: Unpack[SessionOptions]) -> None:
        """Decides where experts are computed as `plan` says for a session with these options, and for good.

        The first session does it too; `load` without a session or a call of this brings all experts to the GPU.
        """
        call(lib.m3_model_place, self._open_pointer(), _session_options(options))

    def experts_on(self, layer: int) -> str | None:
        """Where the routed experts of a layer are computed: "gpu" or "cpu"; None if undecided or in a dense layer."""
        number = lib.m3_model_experts_on(self._open_pointer(), layer)
        return None if number == lib.M3_EXPERTS_AUTO else next(k for k, v in _EXPERTS_ON.items() if v == number)

    def msa(self, **options: Unpack[SessionOptions]) -> str:
        """Which kernels select blocks and attend in such a session on a GPU: "hopper", or what is plain and why.

        Empty on the CPU, which has one way.
        """
        out = ffi.new("char[128]")
        call(lib.m3_session_msa, self._open_pointer(), _session_options(options), out, ffi.sizeof(out))
        return text(out)

    def session(self, **options: Unpack[SessionOptions]) -> "Session":
        """Opens a session with empty sequences; MachineError if the memory is not there."""
        session = Session(self, options)
        self._sessions.append(session)
        return session

    def _forget(self, session: "Session") -> None:
        self._sessions.remove(session)

    def close(self) -> None:
        """Closes the sessions and the file."""
        for session in list(self._sessions):
            session.close()
        self.gguf.close()
        if self._pointer != ffi.NULL:
            lib.m3_model_close(self._pointer)
        self._pointer = ffi.NULL
        self._bound.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Session:
    """One paged cache with its sequences. Use it as a context manager.

    Evaluations run on a thread of the session, so that Ctrl-C stops them: KeyboardInterrupt (or what else a signal
    handler raises) comes out of the evaluation once the sequence has the length it had.
    """

    def __init__(self, model: Model, options: SessionOptions) -> None:
        out = ffi.new("m3_session **")
        self._pointer = ffi.NULL
        call(lib.m3_session_open, model._open_pointer(), _session_options(options), out)
        self._pointer = out[0]
        self._model = model
        self._window_first = (options.get("layers") or (0, 0))[0]
        self._shifted: dict[int, int] = {}
        self.options: SessionOptions = options.copy()  #: what it was opened with
        self._rows = 0
        self._caller = threading.Lock()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="m3-session")
        try:
            with hold_signals():
                self._worker.submit(int).result()  # starts the thread
        except RuntimeError as error:
            lib.m3_session_close(self._pointer)
            self._pointer = ffi.NULL
            raise MachineError(f"no thread can be started: {error}") from None

    def _open_pointer(self) -> Any:
        if self._pointer == ffi.NULL:
            raise InputError("the session is closed")
        return self._pointer

    def eval(
        self,
        ids: ArrayLike,
        seq: int = 0,
        *,
        all_logits: bool = False,
        embeddings: ArrayLike | None = None,
        progress: Progress | None = None,
    ) -> Floats:
        """Appends ids (int32 [n], n >= 1) to a sequence. embeddings: see `forward`.

        Returns logits of the last position, float32 [n_vocab], or of all, float32 [n, n_vocab], if all_logits.
        ContextError if they do not fit, NotFiniteError if a layer computes NaN; the sequence is then unchanged.
        """
        output: Literal["all", "last"] = "all" if all_logits else "last"
        out = self.forward([(seq, ids)], output=output, embeddings=embeddings, progress=progress)
        return out if all_logits else out[0]

    def eval_batch(self, parts: Sequence[tuple[int, ArrayLike]], *, progress: Progress | None = None) -> Floats:
        """Appends ids to several sequences at once: (seq, ids) pairs, a sequence once. float32 [parts, n_vocab]."""
        return self.forward(parts, output="last", progress=progress)

    def forward(
        self,
        parts: Sequence[tuple[int, ArrayLike]],
        *,
        output: Literal["last", "all", "hidden"] = "last",
        blocks: ArrayLike | None = None,
        embeddings: ArrayLike | None = None,
        progress: Progress | None = None,
    ) -> Floats:
        """Runs the layer window over rows of several sequences: (seq, rows) pairs.

        rows: ids int32 [n] if the window starts at layer 0, else hidden states float32 [n, n_embd]. Returns logits
        ("last": [parts, n_vocab], "all": [all rows, n_vocab]; the window must end with the last layer) or
        hidden states ("hidden": [all rows, n_embd]).
        blocks: int32 [sparse layers of the window, all rows, index_heads, top_k], lists to read instead of the selected
        ones, as `selected_blocks` gives them.
        embeddings: float32 [rows of id -1, n_embd], what these rows enter with in place of an embedding of the
        vocabulary: the tokens of images.
        """
        pointer, h = self._open_pointer(), self._model.hparams
        lowest = 0 if embeddings is None else -1
        rows = [self._as_rows(part, lowest) for _, part in parts]
        joined = np.concatenate(rows) if rows else np.empty(0, np.int32)
        n = len(joined)
        shape = (len(parts) if output == "last" else n, h.n_embd if output == "hidden" else h.n_vocab)
        out = np.empty(shape, np.float32)
        lengths = [(seq, len(part)) for (seq, _), part in zip(parts, rows, strict=True)]
        batch, keep = self._batch(lengths, joined, out, _choose(_OUTPUT, output, "output"))
        if blocks is not None:
            lists = np.ascontiguousarray(blocks, np.int32)
            batch.blocks, batch.blocks_count = ffi.from_buffer("int32_t[]", lists), lists.size
            keep.append(lists)
        if embeddings is not None:
            given = self._as_embeddings(embeddings)
            batch.embeddings, batch.embeddings_count = ffi.from_buffer("float[]", given), given.size
            keep.append(given)
        with self._exclusively() as held:
            before = [(seq, int(lib.m3_session_length(pointer, seq))) for seq, _ in parts]
            # The buffers travel with the work, which outlives an exception of `progress` until it is cancelled.
            future = self._worker.submit(_evaluate, pointer, batch, (out, joined, keep))
            try:
                self._wait(future, held, progress)
                if held.pending:  # it came when all was done
                    raise CancelledError("the evaluation was cancelled")
            except BaseException:
                self._drain(future)
                for seq, length in before:
                    if lib.m3_session_length(pointer, seq) > length:
                        self._rewind(length, seq)
                raise
        self._rows = n
        return out

    @contextmanager
    def _exclusively(self) -> Iterator[HeldSignals]:
        """One caller at a time: a session is not made for more, and the engine does not look."""
        with hold_signals() as held:
            if not self._caller.acquire(blocking=False):
                raise InputError("the session is in use on another thread")
            try:
                yield held
            finally:
                self._caller.release()

    def _as_embeddings(self, embeddings: ArrayLike) -> Floats:
        given = np.ascontiguousarray(embeddings, np.float32)
        if given.ndim != 2 or given.shape[1] != self._model.hparams.n_embd:
            raise InputError(f"embeddings of shape {given.shape}, expected [n, {self._model.hparams.n_embd}]")
        return given

    def _as_rows(self, part: ArrayLike, lowest: int = 0) -> NDArray[Any]:
        if self._window_first:
            rows = np.ascontiguousarray(part, np.float32)
            if rows.ndim != 2 or rows.shape[1] != self._model.hparams.n_embd:
                raise InputError(f"hidden states of shape {rows.shape}, expected [n, {self._model.hparams.n_embd}]")
            return rows
        ids = np.asarray(part)
        if ids.ndim != 1 or not (np.issubdtype(ids.dtype, np.integer) or ids.size == 0):
            raise InputError(f"ids are {ids.dtype} of shape {ids.shape}, expected integers of shape [n]")
        if ids.size and (ids.min() < lowest or ids.max() >= self._model.hparams.n_vocab):
            bad = ids[(ids < lowest) | (ids >= self._model.hparams.n_vocab)][0]
            raise InputError(f"token id {bad}, expected {lowest} to {self._model.hparams.n_vocab - 1}")
        return np.ascontiguousarray(ids, np.int32)

    def _batch(
        self, lengths: list[tuple[int, int]], joined: NDArray[Any], out: Floats, kind: int
    ) -> tuple[Any, list[Any]]:
        """The m3_batch of rows given as (seq, n) spans, and what must stay alive while it is used."""
        spans = ffi.new("m3_span[]", lengths)
        batch = ffi.new("m3_batch *")
        batch.struct_size, batch.output = size_of("m3_batch"), kind
        batch.n_tokens, batch.n_spans, batch.spans = len(joined), len(lengths), spans
        source = ffi.from_buffer("float[]" if self._window_first else "int32_t[]", joined)
        if self._window_first:
            batch.hidden = source
        else:
            batch.ids = source
        target = ffi.from_buffer("float[]", out, require_writable=True)
        batch.out, batch.out_count = target, out.size
        return batch, [spans, source, target]

    def _wait(self, future: Future[None], held: HeldSignals, progress: Progress | None) -> None:
        while not wait((future,), _POLL).done:
            if held.pending:
                # Again each time: a cancellation before the evaluation has begun is lost.
                lib.m3_session_cancel(self._pointer)
            elif progress:
                progress(*self.progress())
        future.result()

    def _drain(self, future: Future[Any]) -> None:
        """Cancels evaluations until one that nobody wants any more has ended."""
        while not future.done():
            lib.m3_session_cancel(self._pointer)
            wait((future,), _POLL)

    def cancel(self) -> None:
        """Asks a running evaluation, which is on another thread, to stop with CancelledError."""
        lib.m3_session_cancel(self._open_pointer())

    def progress(self) -> tuple[int, int]:
        """Row-layers done and in all of the running evaluation or the last one."""
        done, total = ffi.new("int64_t *"), ffi.new("int64_t *")
        lib.m3_session_progress(self._open_pointer(), done, total)
        return done[0], total[0]

    def length(self, seq: int = 0) -> int:
        """Tokens that a sequence holds."""
        length = int(lib.m3_session_length(self._open_pointer(), seq))
        if length < 0:
            raise InputError(f"sequence {seq} is not one of the session's")
        return length

    def rewind(self, length: int, seq: int = 0) -> None:
        """Keeps the first `length` tokens."""
        with self._exclusively():
            self._rewind(length, seq)

    def _rewind(self, length: int, seq: int) -> None:
        call(lib.m3_session_rewind, self._open_pointer(), seq, length)
        if length <= self._shifted.get(seq, length):
            self._shifted.pop(seq, None)

    def fork(self, src: int, dst: int) -> None:
        """Makes dst a copy of src that shares its pages until one of them writes."""
        with self._exclusively():
            call(lib.m3_session_fork, self._open_pointer(), src, dst)
            self._shifted.pop(dst, None)
            if src in self._shifted:
                self._shifted[dst] = self._shifted[src]

    def drop(self, first_block: int, n_blocks: int, seq: int = 0) -> None:
        """Drops whole blocks and moves what stands behind them down, with its keys turned to the new positions.

        What a shift gives and what it cannot give is said in m3.h. ContextError if the pool has too few pages to copy
        shared ones to. See `shifted_from`.
        """
        with self._exclusively():
            pointer = self._open_pointer()
            block_size = self._model.hparams.block_size
            # On the session's thread, whose OpenMP threads are there.
            self._worker.submit(call, lib.m3_session_drop, pointer, seq, first_block, n_blocks).result()
            first = first_block * block_size
            if first < lib.m3_session_length(pointer, seq):
                self._shifted[seq] = min(first, self._shifted.get(seq, first))
            else:
                self._rewind(first, seq)

    def shifted_from(self, seq: int = 0) -> int | None:
        """Position of the first token whose keys and values were computed when text that was dropped stood before it.

        None if there is none: then the sequence is what an evaluation of its tokens gives. What is to be reused as the
        prefix of another text ends before it.
        """
        self.length(seq)
        return self._shifted.get(seq)

    @property
    def model(self) -> Model:
        return self._model

    @property
    def page_bytes(self) -> int:
        """Bytes of an exported page; see m3_session_page_bytes."""
        return int(lib.m3_session_page_bytes(self._open_pointer()))

    def export_page(self, block: int, seq: int = 0, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """The bytes of a block of a sequence, uint8 [page_bytes]; zeros where no token stands. Written to `out`."""
        with self._exclusively():
            pointer = self._open_pointer()
            page = np.empty(self.page_bytes, np.uint8) if out is None else out
            target = ffi.from_buffer(page, require_writable=True)
            call(lib.m3_session_export, pointer, seq, block, target, ffi.sizeof(target))
        return page

    def import_page(self, page: NDArray[np.uint8], n_tokens: int, seq: int = 0) -> None:
        """Appends the first n_tokens of an exported page to a sequence, whose length is a whole number of blocks.

        The page comes from a session of the same model, types and layers, which nothing here checks. ContextError if
        the sequence or the pool is full.
        """
        with self._exclusively():
            source = ffi.from_buffer(page)
            call(lib.m3_session_import, self._open_pointer(), seq, n_tokens, source, ffi.sizeof(source))

    def mark_shifted(self, position: int, seq: int = 0) -> None:
        """What `shifted_from` shall tell of a sequence whose pages were imported."""
        if not 0 <= position < self.length(seq):
            raise InputError(f"position {position} is not one of the {self.length(seq)} of sequence {seq}")
        self._shifted[seq] = position

    def pages(self) -> tuple[int, int]:
        """Pages in use and in all."""
        used, total = ffi.new("int64_t *"), ffi.new("int64_t *")
        lib.m3_session_pages(self._open_pointer(), used, total)
        return used[0], total[0]

    def index_scan_work(self) -> tuple[int, int]:
        """Blocks that low-bit index scans bounded in all evaluations, and how many of these were scored exactly.

        A block counts once a row and layer. (0, 0) while every scan was full.
        """
        bounded, rescored = ffi.new("int64_t *"), ffi.new("int64_t *")
        lib.m3_session_scan(self._open_pointer(), bounded, rescored)
        return bounded[0], rescored[0]

    def selected_blocks(self, layer: int) -> NDArray[np.int32]:
        """Block lists of the last evaluation: int32 [n_ids, index_heads, top_k], ascending, -1 padded at the end.

        Needs record=("blocks",); InputError on a dense layer.
        """
        h = self._model.hparams
        out = np.empty((self._rows, h.n_index_head, h.top_k), np.int32)
        target = ffi.from_buffer("int32_t[]", out, require_writable=True)
        call(lib.m3_session_blocks, self._open_pointer(), layer, target, out.size)
        return out

    def block_scores(self, layer: int) -> Floats:
        """Block scores of the last evaluation, before local blocks are forced: float32 [n_ids, index_heads, n_blocks].

        -inf for blocks that a row cannot see. Needs record=("scores",); InputError on a dense layer.
        """
        h, n_blocks = self._model.hparams, int(lib.m3_session_n_blocks(self._open_pointer()))
        out = np.empty((self._rows, h.n_index_head, n_blocks), np.float32)
        target = ffi.from_buffer("float[]", out, require_writable=True)
        call(lib.m3_session_block_scores, self._open_pointer(), layer, target, out.size)
        return out

    def attention_mass(self, layer: int) -> Floats:
        """Share of its softmax that each query head gave to each block of its list in the last evaluation.

        float32 [n_ids, n_head, top_k]; query head i reads the list of index head i // (n_head / index_heads); 0 for
        padding. Needs record=("mass",); InputError on a dense layer.
        """
        h = self._model.hparams
        out = np.empty((self._rows, h.n_head, h.top_k), np.float32)
        target = ffi.from_buffer("float[]", out, require_writable=True)
        call(lib.m3_session_mass, self._open_pointer(), layer, target, out.size)
        return out

    def importance(self, tensor: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """What a weight matrix was multiplied with in all evaluations of the session, after record=("importance",).

        Returns the sums of squares of the input columns, float64 [n_matrix, n_in], and the numbers of input rows, int64
        [n_matrix]; n_matrix is 1, or the number of experts of a stacked tensor. Neither depends on how rows were cut
        into evaluations. InputError for a tensor that is no such matrix or not in the layer window.
        """
        pointer = self._open_pointer()
        ne = next((t.ne for t in self._model.gguf.tensors if t.name == tensor), (0,))
        sums = np.empty((ne[2] if len(ne) > 2 else 1, ne[0]), np.float64)
        counts = np.empty(len(sums), np.int64)
        held = (
            ffi.from_buffer("double[]", sums, require_writable=True),
            ffi.from_buffer("int64_t[]", counts, require_writable=True),
        )
        out = ffi.new("m3_importance *")
        out.struct_size, (out.n_matrix, out.n_in) = size_of("m3_importance"), sums.shape
        out.sums, out.counts = held
        call(lib.m3_session_importance, pointer, tensor.encode(), out)
        return sums, counts

    def close(self) -> None:
        """Cancels what still runs and frees the cache. A second call does nothing."""
        if self._pointer == ffi.NULL:
            return
        with hold_signals():
            # The worker takes one thing after the other: when this is done, so is all before it.
            self._drain(self._worker.submit(int))
            self._worker.shutdown(wait=False)
            pointer, self._pointer = self._pointer, ffi.NULL
            lib.m3_session_close(pointer)
            self._model._forget(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
