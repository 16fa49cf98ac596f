"""One model on its way through its layers: the hidden states of all tokens, and the weights of one layer at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from m3_convert.layered_model import LayeredModel
from m3_runtime.engine import Session, SessionOptions
from m3_runtime.errors import M3Error

CHUNK = 512  #: rows evaluated together

# Work that reading and converting a layer of a checkpoint counts as, beside 1 for evaluating it. The pages of a mapped
# file are read while it is evaluated.
_READ_SHARE = 0.5

Advance = Callable[[float], None]  #: told the work done since its last call, in row-layers


@dataclass(frozen=True)
class WalkOptions:
    """How models are evaluated; the defaults are those of m3-run."""

    kv_type: str = "f16"
    index_type: str = "f32"
    threads: int = 0  #: 0 takes all cores; the result does not depend on it


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a walk takes at its peak, on top of what the process holds before it."""

    own: int  #: memory of the process
    mapped: int  #: pages of a GGUF file, which the kernel can take back

    @property
    def total(self) -> int:
        return self.own + self.mapped


def session_options(layer: int, n_tokens: int, options: WalkOptions, record: Sequence[str]) -> SessionOptions:
    """A session of one layer for sequences of `n_tokens` tokens. record: see `SessionOptions`."""
    return SessionOptions(
        context=n_tokens,
        kv_type=options.kv_type,
        index_type=options.index_type,
        threads=options.threads,
        chunk=CHUNK,
        layers=(layer, 1),
        record=record,
    )


def read_share(side: LayeredModel) -> float:
    """Work of binding a layer, for each row, beside 1 for evaluating it."""
    return 0.0 if side.mapped else _READ_SHARE


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

    def layer(
        self,
        layer: int,
        *,
        record: Sequence[str],
        visit: Callable[[int, Session], None] = lambda _first, _session: None,
        finish: Callable[[Session], None] = lambda _session: None,
    ) -> None:
        """Takes the states of all tokens through a layer.

        visit: gets the first row and the session after each CHUNK of rows or less. finish: gets the session at the end.
        record: see `SessionOptions`. Errors get the name of the model in front.
        """
        n = len(self.ids)
        per_byte = n * read_share(self.side) / self.side.layer_bytes(layer)
        options = session_options(layer, self.context, self.options, record)
        try:
            with (
                self.side.bound(layer, lambda n_bytes: self.advance(n_bytes * per_byte)) as model,
                model.session(**options) as session,
            ):
                for start in range(0, n, self.context):
                    session.rewind(0)
                    self._sequence(layer, range(start, min(start + self.context, n)), session, visit)
                finish(session)
        except M3Error as error:
            if str(error).startswith(self.side.name):
                raise
            raise type(error)(f"{self.side.name}: {error}") from error

    def _sequence(self, layer: int, rows: range, session: Session, visit: Callable[[int, Session], None]) -> None:
        source = self.ids if layer == 0 else self.states
        for first in rows[::CHUNK]:
            end = min(first + CHUNK, rows.stop)
            self.states[first:end] = session.forward([(0, source[first:end])], output="hidden")
            visit(first, session)
            self.advance(end - first)
