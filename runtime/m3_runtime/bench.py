"""Speed of a model at depth: prefill and decode behind a cache that holds so many tokens already."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from m3_runtime import memory
from m3_runtime.engine import Model, Session, SessionOptions
from m3_runtime.errors import InputError
from m3_runtime.native import default_threads, version
from m3_runtime.placement import Plan

#: Called with what is being done ("prefill at 4096"), and with steps done and in all (see `Session.eval`).
Progress = Callable[[str, int, int], None]

USUAL_DEPTHS = (0, 2048, 8192)  #: of those that fit in the context
_WARM_TOKENS = 64  #: of the prefill that comes before the measured ones at a depth


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is measured, and how."""

    model: Path
    depths: Sequence[int] | None  #: tokens in the cache before what is measured, ascending, each once; None: the usual
    prefill: int  #: tokens of a measured prefill; 0: none is measured
    decode: int  #: tokens of a measured decode, one by one; 0: none is measured
    repeats: int  #: measured runs of each, at least 1
    device: str
    isa: str
    threads: int
    attention: str
    kv_type: str
    index_type: str
    index_scan: str
    exact: bool
    chunk: int  #: as in `SessionOptions`
    seed: int  #: of the token ids
    mmap: bool  #: as for `Model`
    experts_on: str  #: as for `Model`


@dataclass(frozen=True)
class Measurement:
    """Runs of one kind at one depth."""

    test: str  #: "fill" (the prefill that grew the cache, measured once), "prefill" or "decode"
    depth: int  #: tokens in the cache before
    tokens: int  #: of each run
    seconds: list[float]  #: of each run, in the order of the runs

    @property
    def rate(self) -> float:
        """Tokens a second of the median run."""
        return self.tokens / statistics.median(self.seconds)

    @property
    def spread(self) -> float | None:
        """Half the way from the fastest run to the slowest, over the median; None of a single run."""
        if len(self.seconds) < 2:
            return None
        return (max(self.seconds) - min(self.seconds)) / 2 / statistics.median(self.seconds)

    def as_json(self) -> dict[str, Any]:
        rates = [self.tokens / s for s in self.seconds]
        return {
            "test": self.test,
            "depth": self.depth,
            "tokens": self.tokens,
            "tokens_per_s": round(self.rate, 3),
            "slowest": round(min(rates), 3),
            "fastest": round(max(rates), 3),
            "seconds": [round(s, 6) for s in self.seconds],
        }


class Bench:
    """One run of the bench with an open model. Raises InputError if the file's context does not hold a depth, and
    MachineError if memory does not hold the session."""

    def __init__(self, options: BenchOptions, model: Model) -> None:
        self._options = options
        self._model = model
        self.load_seconds = 0.0  #: what opening and loading took, for the report
        trained, measured = model.hparams.context_train, max(options.prefill, options.decode)
        usual = [depth for depth in USUAL_DEPTHS if depth + measured <= trained]
        self._depths = (usual or [0]) if options.depths is None else options.depths
        context = max(self._depths) + measured
        if context > trained:
            raise InputError(
                f"--depth {max(self._depths)}: with the measured tokens that is {context}, "
                f"the context of {model.path} holds {trained}"
            )
        self._context = context
        self._session_options: SessionOptions = {
            "context": context,
            "kv_type": options.kv_type,
            "index_type": options.index_type,
            "index_scan": options.index_scan,
            "exact": options.exact,
            "attention": options.attention,
            "threads": options.threads,
            "chunk": options.chunk,
        }
        self.plan: Plan = model.plan(**self._session_options)
        self.plan.check(context, memory.session_room(0 if options.mmap else model.weight_bytes))
        model.place(**self._session_options)
        # Any ids do: the work depends on how many tokens there are. Random ones choose other experts each.
        self._ids: npt.NDArray[np.int32] = np.random.default_rng(options.seed).integers(
            0, model.hparams.n_vocab, context, dtype=np.int32
        )

    def run(self, each: Callable[[Measurement], None], progress: Progress) -> list[Measurement]:
        """Measures all depths in ascending order; `each` gets every measurement when it is there.

        The cache grows from depth to depth by prefill, and is cut back to the depth after every run.
        """
        done: list[Measurement] = []

        def add(measurement: Measurement) -> None:
            done.append(measurement)
            each(measurement)

        options = self._options
        with self._model.session(**self._session_options) as session:
            for depth in self._depths:
                before = session.length()
                if depth > before:
                    seconds = self._timed(session, before, depth, f"fill to {depth}", progress)
                    add(Measurement("fill", before, depth - before, [seconds]))
                if options.prefill:
                    add(self._prefill(session, depth, progress))
                if options.decode:
                    add(self._decode(session, depth, progress))
        return done

    def _prefill(self, session: Session, depth: int, progress: Progress) -> Measurement:
        n = self._options.prefill
        what = f"prefill at {depth}"
        self._timed(session, depth, depth + min(n, _WARM_TOKENS), what, progress)
        seconds = []
        for _ in range(self._options.repeats):
            session.rewind(depth)
            seconds.append(self._timed(session, depth, depth + n, what, progress))
        session.rewind(depth)
        return Measurement("prefill", depth, n, seconds)

    def _decode(self, session: Session, depth: int, progress: Progress) -> Measurement:
        n, repeats = self._options.decode, self._options.repeats
        what = f"decode at {depth}"
        self._timed(session, depth, depth + 1, what, progress)
        seconds = []
        for run in range(repeats):
            session.rewind(depth)
            start = time.perf_counter()
            for i in range(depth, depth + n):
                session.eval(self._ids[i : i + 1])
            seconds.append(time.perf_counter() - start)
            progress(what, run + 1, repeats)
        session.rewind(depth)
        return Measurement("decode", depth, n, seconds)

    def _timed(self, session: Session, first: int, end: int, what: str, progress: Progress) -> float:
        start = time.perf_counter()
        session.eval(self._ids[first:end], progress=lambda done, total: progress(what, done, total))
        return time.perf_counter() - start

    def report(self, measurements: Sequence[Measurement]) -> dict[str, Any]:
        """What --json prints; README documents the keys."""
        options, model = self._options, self._model
        return {
            "version": version(),
            "file": model.path,
            "weight_types": model.bytes_by_type,
            "slow": model.slow_types,
            "device": model.backend_name,
            "isa": model.isa_name,
            "threads": options.threads or default_threads(),
            "attention": options.attention,
            "kv_type": options.kv_type,
            "index_type": options.index_type,
            "index_scan": options.index_scan,
            "msa": self._model.msa(**self._session_options) or None,
            "context": self._context,
            "mmap": options.mmap,
            "load_s": round(self.load_seconds, 4),
            "memory": {
                "weights_bytes": model.weight_bytes,
                "kv_bytes": self.plan.kv_bytes,
                "index_bytes": self.plan.index_bytes,
                "scratch_bytes": self.plan.scratch_bytes,
                "peak_rss_bytes": memory.peak_resident_bytes(),
            },
            "plan": self.plan.as_json(),
            "measurements": [m.as_json() for m in measurements],
        }
