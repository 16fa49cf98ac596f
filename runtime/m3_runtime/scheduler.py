"""Continuous batching: many requests at once on one session.

A thread evaluates batches: one token of every sequence that decodes, and a piece of every prompt that is not evaluated
yet, so that a long prompt keeps nobody waiting. What a request gets does not depend on its neighbors: rows see their
own sequence only, and each request has its own sampler (on a GPU up to the rounding that m3.h describes at
M3_SESSION_EXACT).
"""

import math
import sys
import threading
import time
import traceback
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from m3_runtime.errors import CancelledError, ContextError, ExitCode, InputError, M3Error, NotFiniteError
from m3_runtime.prefix_cache import Match, PagedSession, PrefixCache, Slot, common_prefix
from m3_runtime.request import End, EndReason, Request, Token

Logits = npt.NDArray[np.float32]


class BusyError(M3Error):
    """The queue is full."""

    exit_code = ExitCode.MACHINE


class ClosedError(M3Error):
    """The scheduler takes no more requests."""

    exit_code = ExitCode.MACHINE


class BatchSession(PagedSession, Protocol):
    """The part of `m3_runtime.engine.Session` that the scheduler uses."""

    def eval_batch(
        self,
        parts: Sequence[tuple[int, npt.NDArray[np.int32]]],
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> Logits: ...


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Limits of a scheduler."""

    sequences: int  #: of the session; those that no request works on keep what they hold as cached prefixes
    context: int  #: tokens that a sequence can hold
    block_size: int  #: tokens of a page
    parallel: int  #: requests at work at once, at most `sequences`
    queue: int  #: requests that wait beside them
    chunk: int = 512  #: most tokens of prompts in one batch
    pause: float = 0.25  #: seconds that prompts may keep decoding sequences waiting for


@dataclass
class Totals:
    """What a scheduler has done so far."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    evaluated_tokens: int = 0  #: rows of all batches
    batches: int = 0
    preemptions: int = 0  #: requests that gave their pages back and were evaluated again later
    ends: dict[EndReason, int] = field(default_factory=lambda: dict.fromkeys(EndReason, 0))


class Job:
    """A request that was submitted."""

    def __init__(self, request: Request, scheduler: "Scheduler") -> None:
        self.request = request
        self.history = array("i", request.ids)  #: prompt and reply
        self.slot: Slot | None = None
        self.cached: int | None = None  #: tokens that were there when it began
        self.cancelled = False
        self.start = time.monotonic()
        self.begun: float | None = None
        self.first: float | None = None
        self._scheduler = scheduler

    def cancel(self) -> None:
        """Stops computing for it. From any thread; a request that has ended stays as it is."""
        self.cancelled = True
        self._scheduler._wake()

    @property
    def n_prompt(self) -> int:
        return len(self.request.ids)

    @property
    def n_generated(self) -> int:
        return len(self.history) - self.n_prompt

    @property
    def rest(self) -> int:
        """Tokens that are not evaluated yet."""
        return len(self.history) - (len(self.slot.ids) if self.slot else 0)

    @property
    def decodes(self) -> bool:
        return self.n_generated > 0 and self.rest == 1

    def is_late(self, now: float) -> bool:
        return self.request.seconds is not None and now - self.start > self.request.seconds


class Scheduler:
    """Runs requests on a session, which it has for itself until it is closed. Use it as a context manager."""

    def __init__(self, session: BatchSession, options: SchedulerOptions) -> None:
        """session: all its sequences are empty. Its pool of pages must hold one full sequence."""
        self._session = session
        self.options = options
        self.totals = Totals()
        self.cache = PrefixCache(session, options.sequences, options.block_size)
        if not 1 <= options.parallel <= options.sequences:
            raise InputError(f"parallel: {options.parallel}, expected 1 to {options.sequences}, the sequences")
        needed, total = -(-options.context // options.block_size), session.pages()[1]
        if total < needed:
            raise InputError(f"pages: {total}, expected {needed} or more: one sequence of {options.context} tokens")
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._lock = threading.Lock()  # of what follows and of _waiting
        self._changed = threading.Condition(self._lock)
        self._closing = False
        self.failure: Exception | None = None  #: what ended the thread, if anything did
        self._seconds_per_token = 0.0
        self._request_seconds = 1.0  # of a request at work, a moving mean
        self._thread = threading.Thread(target=self._run, name="m3-scheduler", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------------------------------- from any thread

    def submit(self, request: Request) -> Job:
        """Queues a request. Its listener hears `finished` once, whatever comes.

        Raises BusyError if the queue is full, ClosedError, and ContextError or InputError if the request can never run.
        """
        context, n = self.options.context, len(request.ids)
        if not n:
            raise InputError("the prompt has no tokens, expected at least one")
        if n >= context or n + (request.max_tokens or 0) > context:
            wanted = "" if request.max_tokens is None else f" and {request.max_tokens} are asked for"
            raise ContextError(f"the prompt has {n} tokens{wanted}, the context holds {context}")
        job = Job(request, self)
        with self._lock:
            self.check_open()
            self._waiting.append(job)
            self._changed.notify()
        return job

    def check_open(self) -> None:
        """Raises BusyError or ClosedError if a request would be refused now, whatever it is."""
        if self.failure:
            raise ClosedError(f"the scheduler has ended: {type(self.failure).__name__}")
        if self._closing:
            raise ClosedError("no more requests are taken")
        if len(self._waiting) >= self.options.queue + self.options.parallel - len(self._running):
            raise BusyError(f"{len(self._running)} requests are at work and {len(self._waiting)} wait")

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def retry_after(self) -> int:
        """Seconds after which a request that was refused may find room, 1 to 60."""
        return max(1, min(60, math.ceil(self._request_seconds * (1 + self.waiting) / self.options.parallel)))

    def stop(self) -> None:
        """Cancels what runs and waits, and takes nothing more. Does not wait for that."""
        with self._lock:
            self._closing = True
            self._changed.notify()

    def close(self) -> None:
        """Stops, and ends the thread. A second call does nothing."""
        self.stop()
        self._thread.join()

    def __enter__(self) -> "Scheduler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        with self._lock:
            self._changed.notify()

    # -------------------------------------------------------------------------------------- on the scheduler's thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._end_unwanted()
                self._admit()
                if not self._step():
                    with self._lock:
                        if not self._waiting and not self._closing:
                            self._changed.wait()
        except Exception as error:
            self.failure = error
            print(f"m3-serve: the scheduler has ended: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            traceback.print_exc()
        with self._lock:
            self._closing = True
        for job in (*self._running, *self._waiting):
            self._end(job, EndReason.ERROR if self.failure else EndReason.CANCELLED, self.failure)

    def _end_unwanted(self) -> None:
        now = time.monotonic()
        with self._lock:
            jobs = [*self._running, *self._waiting]
        for job in jobs:
            if job.cancelled:
                self._end(job, EndReason.CANCELLED)
            elif job.is_late(now):
                self._end(job, EndReason.TIME)

    def _admit(self) -> None:
        """Gives sequences to jobs that wait, in their order."""
        with self._lock:
            jobs = list(self._waiting)
        for job in jobs:
            if len(self._running) >= self.options.parallel:
                return
            match = self.cache.match(job.history)
            if self._is_being_evaluated(job, match):
                continue
            slot = self.cache.take(match)
            if slot is None:
                return
            job.slot = slot
            if job.cached is None:
                job.cached, job.begun = len(slot.ids), time.monotonic()
                self.totals.prompt_tokens += job.n_prompt
                self.totals.cached_tokens += job.cached
            # A preempted job comes back only where there is room for what it had, else it would go again at once.
            if self._running and not self.cache.make_room(self.cache.pages_for(slot, job.rest)):
                job.slot = None
                self.cache.release(slot)
                return
            with self._lock:
                self._waiting.remove(job)
                self._running.append(job)

    def _is_being_evaluated(self, job: Job, match: Match | None) -> bool:
        """Whether another job is at work on a longer common beginning, so that it pays to wait for it."""
        wanted = np.frombuffer(job.history, np.int32)[:-1]
        least = (match.length if match else 0) + self.options.block_size
        for other in self._running:
            if other.rest > 1 and other.n_prompt >= least:
                common = common_prefix(np.frombuffer(other.history, np.int32), wanted)
                if common >= least and common > len(other.history) - other.rest:
                    return True
        return False

    def _step(self) -> bool:
        """Evaluates one batch. False if there is nothing to do."""
        parts = self._plan()
        if not parts:
            return False
        start = time.monotonic()
        try:
            logits = self._evaluate(parts)
        except CancelledError:
            return True
        except NotFiniteError:
            self._step_each(parts)
            return True
        except M3Error as error:
            for job, _ in parts:
                self._end(job, EndReason.ERROR, error)
            return True
        n_rows = sum(n for _, n in parts)
        seconds = (time.monotonic() - start) / n_rows
        self._seconds_per_token += (seconds - self._seconds_per_token) * (0.3 if self._seconds_per_token else 1.0)
        self.totals.batches += 1
        self.totals.evaluated_tokens += n_rows
        for (job, n), row in zip(parts, logits, strict=True):
            self._advance(job, n, row)
        return True

    def _step_each(self, parts: list[tuple[Job, int]]) -> None:
        """One after the other, so that only those whose numbers are broken end."""
        for job, n in parts:
            try:
                row = self._evaluate([(job, n)])[0]
            except CancelledError:
                continue
            except M3Error as error:
                self._end(job, EndReason.ERROR, error)
            else:
                self._advance(job, n, row)

    def _plan(self) -> list[tuple[Job, int]]:
        """Jobs with the number of tokens that they have in the next batch."""
        decoding = [(job, 1) for job in self._running if job.decodes]
        prefilling = [job for job in self._running if not job.decodes]
        budget = self.options.chunk
        if self._seconds_per_token:
            # Without one that decodes only those wait who come meanwhile, and larger batches cost less a token.
            seconds, least = (self.options.pause, 16) if decoding else (16 * self.options.pause, 64)
            budget = max(least, min(budget, int(seconds / self._seconds_per_token)))
        parts = decoding
        # The shortest first: what they leave of their share is for the others.
        for left, job in zip(range(len(prefilling), 0, -1), sorted(prefilling, key=lambda job: job.rest), strict=True):
            n = min(job.rest, max(1, budget // left))
            budget -= n
            parts = [*parts, (job, n)]
        return self._with_room(parts)

    def _with_room(self, parts: list[tuple[Job, int]]) -> list[tuple[Job, int]]:
        """Those for which there are pages. The job that began last gives its pages back where there are too few."""
        while parts and not self.cache.make_room(sum(self.cache.pages_for(_slot(job), n) for job, n in parts)):
            if len(self._running) == 1:
                break  # the whole pool is its own, and holds a full sequence
            last = self._running[-1]
            self._preempt(last)
            parts = [part for part in parts if part[0] is not last]
        return parts

    def _preempt(self, job: Job) -> None:
        self.cache.drop(_slot(job))
        job.slot = None
        self.totals.preemptions += 1
        with self._lock:
            self._running.remove(job)
            self._waiting.appendleft(job)

    def _evaluate(self, parts: list[tuple[Job, int]]) -> Logits:
        jobs = [job for job, _ in parts]

        def check(done: int, total: int) -> None:
            if self._closing or all(job.cancelled for job in jobs):
                raise CancelledError("nobody waits for the batch")

        spans = []
        for job, n in parts:
            slot = _slot(job)
            done = len(slot.ids)
            spans.append((slot.seq, np.array(job.history[done : done + n], np.int32)))
        return self._session.eval_batch(spans, progress=check)

    def _advance(self, job: Job, n: int, logits: Logits) -> None:
        """After an evaluation: the next token, if the whole prompt is there."""
        slot = _slot(job)
        done = len(slot.ids)
        self.cache.append(slot, job.history[done : done + n])
        if job.rest or job.cancelled:
            return
        try:
            reason = self._next_token(job, logits)
        except M3Error as error:
            self._end(job, EndReason.ERROR, error)
        except Exception as error:  # of a listener: it ends this request, not all of them
            traceback.print_exc()
            self._end(job, EndReason.ERROR, error)
        else:
            if reason:
                self._end(job, reason)

    def _next_token(self, job: Job, logits: Logits) -> EndReason | None:
        request = job.request
        allowed = request.constraint.allowed() if request.constraint else None
        id = request.sampler.sample(logits, job.history, n_prompt=job.n_prompt, allowed=allowed)
        if job.first is None:
            job.first = time.monotonic()
        job.history.append(id)
        self.totals.generated_tokens += 1
        if id in request.end_ids:
            return EndReason.END_TOKEN
        if request.constraint:
            request.constraint.accept(id)
        if request.listener.token(_with_logprobs(id, logits, request.top_logprobs)):
            return EndReason.LISTENER
        if request.max_tokens is not None and job.n_generated >= request.max_tokens:
            return EndReason.MAX_TOKENS
        return EndReason.CONTEXT if len(job.history) > self.options.context else None

    def _end(self, job: Job, reason: EndReason, error: Exception | None = None) -> None:
        with self._lock:
            if job in self._running:
                self._running.remove(job)
            if job in self._waiting:
                self._waiting.remove(job)
        if job.slot:
            self.cache.release(job.slot)
            job.slot = None
        self.totals.ends[reason] += 1
        now = time.monotonic()
        begun = job.begun or now
        first = job.first or now
        if job.begun:
            self._request_seconds += (now - begun - self._request_seconds) * 0.1
        end = End(
            reason=reason,
            error=error,
            prompt_tokens=job.n_prompt,
            cached_tokens=job.cached or 0,
            generated_tokens=job.n_generated,
            queue_seconds=begun - job.start,
            prefill_seconds=first - begun,
            decode_seconds=now - first,
        )
        try:
            job.request.listener.finished(end)
        except Exception:
            traceback.print_exc()


def _slot(job: Job) -> Slot:
    assert job.slot is not None
    return job.slot


def _with_logprobs(id: int, logits: Logits, n_top: int | None) -> Token:
    if n_top is None:
        return Token(id)
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= math.log(np.exp(scores).sum())
    best: tuple[tuple[int, float], ...] = ()
    if n_top:
        n = min(n_top, len(scores))
        cut = np.partition(scores, -n)[-n]
        among = np.flatnonzero(scores >= cut)
        order = among[np.argsort(-scores[among], kind="stable")][:n]
        best = tuple((int(i), float(scores[i])) for i in order)
    return Token(id, float(scores[id]), best)
