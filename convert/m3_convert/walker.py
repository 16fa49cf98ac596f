"""One model on its way through its layers: the hidden states of all tokens, and the weights of one layer at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from m3_convert.layered_model import LayeredModel
from m3_runtime.engine import Hparams, Model, Session, SessionOptions
from m3_runtime.errors import M3Error, MachineError
from m3_runtime.quantities import format_bytes

Floats = npt.NDArray[np.float32]
Lists = npt.NDArray[np.int32]

CHUNK = 512  #: rows evaluated together

# Work that reading and converting a layer of a checkpoint counts as, beside 1 for evaluating it. The pages of a mapped
# file are read while it is evaluated.
_READ_SHARE = 0.5

Advance = Callable[[float], None]  #: told the work done since its last call, in row-layers

Visit = Callable[[slice, Session], None]


@dataclass(frozen=True)
class WalkOptions:
    """How models are evaluated; the defaults are those of m3-run."""

    kv_type: str = "f16"
    index_type: str = "f32"
    threads: int = 0  #: 0 takes all cores; the result does not depend on it
    attention: str = "sparse"

    @property
    def selects(self) -> bool:
        """False if all visible blocks are read."""
        return self.attention == "sparse"


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a walk takes at its peak, on top of what the process holds before it."""

    own: int  #: memory of the process
    mapped: int  #: pages of a GGUF file beside that, which the kernel can take back

    @property
    def total(self) -> int:
        return self.own + self.mapped


def check_memory(estimate: MemoryEstimate, room: int | None, what: str, advice: str) -> None:
    """Raises MachineError if a walk does not fit in `room` bytes (None: unknown).

    what: takes the memory, as in "the check". advice: what takes less, as in "a smaller --context takes less".
    """
    if room is not None and estimate.own > room:
        raise MachineError(
            f"not enough memory: {what} takes {format_bytes(estimate.own)}, {format_bytes(room)} are free; {advice}"
        )


def session_options(layer: int, n_tokens: int, options: WalkOptions, record: Sequence[str]) -> SessionOptions:
    """A session of one layer for sequences of `n_tokens` tokens. record: see `SessionOptions`."""
    return SessionOptions(
        context=n_tokens,
        kv_type=options.kv_type,
        index_type=options.index_type,
        attention=options.attention,
        exact=True,
        threads=options.threads,
        chunk=CHUNK,
        layers=(layer, 1),
        record=record,
    )


def head_options(hparams: Hparams, rows: int, options: WalkOptions) -> SessionOptions:
    """A session of output norm and head, for up to `rows` hidden states at a time."""
    return SessionOptions(context=rows, exact=True, threads=options.threads, chunk=rows, layers=(hparams.n_layer, 0))


def read_share(side: LayeredModel) -> float:
    """Work of binding a layer, for each row, beside 1 for evaluating it."""
    return 0.0 if side.mapped else _READ_SHARE


def head_share(h: Hparams) -> float:
    """Work of output norm and head for a row, beside 1 for a layer: by the weights that a row is multiplied with."""
    attention = 2 * h.n_embd * h.head_dim * (h.n_head + h.n_head_kv)
    experts = 3 * h.n_embd * (h.n_expert_used * h.n_ff_expert + h.n_ff_shared)
    return h.n_embd * h.n_vocab / max(attention + experts, 1)


class Walker:
    """The hidden states of all tokens of a model, and what takes them through a layer.

    ids: int32 [n]. context: tokens of a sequence; every `context` tokens a new one begins, which sees nothing of those
    before; None: all are one.
    """

    def __init__(
        self,
        side: LayeredModel,
        ids: npt.NDArray[np.int32],
        options: WalkOptions,
        advance: Advance,
        context: int | None = None,
    ) -> None:
        self.side = side
        self.ids = ids
        self.options = options
        self.advance = advance
        self.context = min(context or len(ids), len(ids))
        self.states = np.empty((len(ids), side.hparams.n_embd), np.float32)

    @contextmanager
    def bound(self, layer: int) -> Iterator[Model]:
        """The model with the weights of a layer. Errors get the name of the model in front."""
        per_byte = len(self.ids) * read_share(self.side) / self.side.layer_bytes(layer)
        with named_errors(self.side), self.side.bound(layer, lambda n: self.advance(n * per_byte)) as model:
            yield model

    def layer(
        self,
        layer: int,
        *,
        record: Sequence[str],
        visit: Visit = lambda _rows, _session: None,
        finish: Callable[[Session], None] = lambda _session: None,
    ) -> None:
        """Takes the states of all tokens through a layer.

        visit: gets the rows and the session after each CHUNK of rows or less. finish: gets the session at the end.
        record: see `SessionOptions`. Errors get the name of the model in front.
        """
        with self.bound(layer) as model:
            self.through(model, layer, record=record, visit=visit, finish=finish)

    def through(
        self,
        model: Model,
        layer: int,
        *,
        record: Sequence[str],
        visit: Visit = lambda _rows, _session: None,
        finish: Callable[[Session], None] = lambda _session: None,
    ) -> None:
        """The same with weights that are bound already."""
        with self._session(model, layer, record) as session:
            for rows, out in self._forward(session, self.ids if layer == 0 else self.states):
                self.states[rows] = out
                visit(rows, session)
            finish(session)

    def read(self, layer: int, lists: Lists) -> None:
        """Takes the states through a sparse layer that reads these lists, int32 [n, index_heads, top_k]."""
        with self.bound(layer) as model, self._session(model, layer, ()) as session:
            source = self.ids if layer == 0 else self.states
            for rows, out in self._forward(session, source, lists):
                self.states[rows] = out

    def probe(self, model: Model, layer: int, states: Floats, visit: Visit) -> None:
        """What a bound layer selects if `states`, float32 [n, n_embd], enter it; what leaves it is dropped."""
        with self._session(model, layer, ("blocks",)) as session:
            for rows, _ in self._forward(session, self.ids if layer == 0 else states):
                visit(rows, session)

    def _session(self, model: Model, layer: int, record: Sequence[str]) -> Session:
        return model.session(**session_options(layer, self.context, self.options, record))

    def _forward(
        self, session: Session, source: Floats | npt.NDArray[np.int32], lists: Lists | None = None
    ) -> Iterator[tuple[slice, Floats]]:
        n = len(self.ids)
        for start in range(0, n, self.context):
            session.rewind(0)
            end = min(start + self.context, n)
            for first in range(start, end, CHUNK):
                rows = slice(first, min(first + CHUNK, end))
                blocks = None if lists is None else lists[None, rows]
                yield rows, session.forward([(0, source[rows])], output="hidden", blocks=blocks)
                self.advance(rows.stop - rows.start)


@contextmanager
def named_errors(side: LayeredModel) -> Iterator[None]:
    """Puts the name of the model in front of errors that do not begin with it."""
    try:
        yield
    except M3Error as error:
        if str(error).startswith(side.name):
            raise
        raise type(error)(f"{side.name}: {error}") from error
