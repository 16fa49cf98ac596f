"""Many requests at once on one session: the same replies as alone, prefixes reused, nothing left behind."""

import gc
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from m3_runtime.engine import Model
from m3_runtime.errors import ContextError, InputError, NotFiniteError
from m3_runtime.prefix_cache import PrefixCache
from m3_runtime.request import End, EndReason, Request, Token
from m3_runtime.sampler import Adjustment, Sampler, SamplerOptions
from m3_runtime.scheduler import BusyError, ClosedError, Scheduler, SchedulerOptions

CONTEXT, BLOCK = 512, 32
GREEDY = SamplerOptions(temperature=0)
DRAWN = SamplerOptions(temperature=1.0, top_k=0, top_p=1.0)


@dataclass
class Heard:
    """A listener that keeps what it hears."""

    stop_after: int | None = None
    tokens: list[Token] = field(default_factory=list)
    end: End | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)

    def token(self, token: Token) -> bool:
        self.tokens.append(token)
        self.began.set()
        return len(self.tokens) == self.stop_after

    def finished(self, end: End) -> None:
        assert self.end is None
        self.end = end
        self.ended.set()

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def wait(self) -> End:
        assert self.ended.wait(60)
        assert self.end is not None
        return self.end


def request(ids: Sequence[int], heard: Heard, options: SamplerOptions = GREEDY, seed: int = 0, **fields) -> Request:
    return Request(ids=ids, sampler=Sampler(options, seed), listener=heard, **fields)


def options(**fields) -> SchedulerOptions:
    values = {"sequences": 8, "context": CONTEXT, "block_size": BLOCK, "parallel": 6, "queue": 100, "chunk": 64}
    return SchedulerOptions(**{**values, **fields})


@pytest.fixture(scope="module")
def model(tiny_gguf: Path):
    with Model(tiny_gguf, device="cpu") as opened:
        yield opened


def prompt(n: int, seed: int = 0) -> list[int]:
    return [int(id) for id in np.random.default_rng(seed).integers(0, 256, n)]


def alone(
    model: Model, ids: Sequence[int], n: int, options: SamplerOptions, seed: int
) -> tuple[list[int], list[bytes]]:
    """Ids and the bits of the logits of a run by itself, the prompt in one piece."""
    sampler, written, rows = Sampler(options, seed), [], []
    with model.session(context=CONTEXT, threads=1) as session:
        logits = session.eval(ids)
        for _ in range(n):
            rows.append(logits.tobytes())
            written.append(sampler.sample(logits, [*ids, *written]))
            logits = session.eval(written[-1:])
    return written, rows


class Recording:
    """A session that keeps the logits of every row that is asked for, by sequence."""

    def __init__(self, session) -> None:
        self._session = session
        self.rows: list[bytes] = []
        self.batches: list[list[int]] = []

    def __getattr__(self, name: str):
        return getattr(self._session, name)

    def eval_batch(self, parts, *, progress=None):
        self.batches.append([len(ids) for _, ids in parts])
        logits = self._session.eval_batch(parts, progress=progress)
        self.rows += [row.tobytes() for row in logits]
        return logits


# ------------------------------------------------------------------------------------------- independence of neighbors


def test_neighbors_change_no_bit(model):
    """Greedy and drawn, prompts of many lengths and with common beginnings, more of them than sequences."""
    common = prompt(100, 7)
    prompts = [common[: 40 + 7 * i] + prompt(3 + 11 * i, i) for i in range(10)]
    lone = [alone(model, ids, 12, DRAWN if i % 2 else GREEDY, i) for i, ids in enumerate(prompts)]
    with model.session(context=CONTEXT, sequences=8, threads=1) as session:
        recording = Recording(session)
        with Scheduler(recording, options()) as scheduler:
            heard = [Heard() for _ in prompts]
            for i, ids in enumerate(prompts):
                scheduler.submit(request(ids, heard[i], DRAWN if i % 2 else GREEDY, i, max_tokens=12))
            ends = [one.wait() for one in heard]
        assert [one.ids for one in heard] == [ids for ids, _ in lone]
        seen = set(recording.rows)
        for _, rows in lone:
            assert all(row in seen for row in rows)
        assert max(len(batch) for batch in recording.batches) > 3  # they were together
        assert {end.reason for end in ends} == {EndReason.MAX_TOKENS}
        assert scheduler.totals.cached_tokens > 100


def test_a_long_prompt_does_not_keep_others_waiting(model):
    with model.session(context=CONTEXT, sequences=8, threads=1) as session:
        recording = Recording(session)
        with Scheduler(recording, options(chunk=32)) as scheduler:
            short, long = Heard(), Heard()
            scheduler.submit(request(prompt(5), short, max_tokens=40))
            assert short.began.wait(60)
            scheduler.submit(request(prompt(400, 1), long, max_tokens=1))
            long.wait()
            short.wait()
    mixed = [batch for batch in recording.batches if len(batch) == 2]
    assert len(mixed) >= 12 and all(sorted(batch)[0] == 1 and max(batch) <= 32 for batch in mixed)


# ------------------------------------------------------------------------------------------------------ prefix reuse


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 100])
def test_a_common_beginning_is_not_evaluated_again(model, length):
    """Also where it ends inside a block, after the first request has ended and while it is at work."""
    first, second = prompt(130, 1), [*prompt(130, 1)[:length], 300, *prompt(20, 2)]
    expected, _ = alone(model, second, 6, GREEDY, 0)
    with (
        model.session(context=CONTEXT, sequences=4, threads=1) as session,
        Scheduler(session, options(sequences=4, parallel=3)) as scheduler,
    ):
        running = Heard()
        scheduler.submit(request(first, running, max_tokens=300))
        assert running.began.wait(60)
        beside = Heard()
        scheduler.submit(request(second, beside, max_tokens=6))
        assert beside.wait().cached_tokens == length
        assert running.end is None
        running.wait()
        after = Heard()
        scheduler.submit(request(second, after, max_tokens=6))
        assert after.wait().cached_tokens == len(second) - 1
        assert beside.ids == after.ids == expected


def test_a_conversation_evaluates_only_what_is_new(model):
    with (
        model.session(context=CONTEXT, sequences=4, threads=1) as session,
        Scheduler(session, options(sequences=4, parallel=2)) as scheduler,
    ):
        ids = prompt(50)
        for turn in range(5):
            before = scheduler.totals.evaluated_tokens
            heard = Heard()
            scheduler.submit(request(ids, heard, max_tokens=10))
            end = heard.wait()
            # The last token that was sampled has not been evaluated when the reply ends.
            assert end.cached_tokens == (0 if turn == 0 else len(ids) - 20 - 1)
            assert scheduler.totals.evaluated_tokens - before == len(ids) - end.cached_tokens + 9
            ids = [*ids, *heard.ids, *prompt(20, turn + 10)]


def test_requests_with_the_same_beginning_wait_for_the_first(model):
    shared = prompt(200, 3)
    with model.session(context=CONTEXT, sequences=8, threads=1) as session, Scheduler(session, options()) as scheduler:
        heard = [Heard() for _ in range(5)]
        for i, one in enumerate(heard):
            scheduler.submit(request([*shared, i], one, max_tokens=2))
        ends = [one.wait() for one in heard]
        cached = sorted(end.cached_tokens for end in ends)
        assert cached[0] == 0 and cached[1] > 200 - BLOCK  # less than a block is not worth a wait
        assert scheduler.totals.evaluated_tokens < 220 + 4 * BLOCK


# ------------------------------------------------------------------------------------------------ pages and sequences


class FakeSession:
    """Sequences with counted pages, and logits that hang on the tokens alone. A page is short where the real one is."""

    def __init__(self, sequences: int, pages: int, block: int = 4, n_vocab: int = 32) -> None:
        self.held: list[list[int]] = [[] for _ in range(sequences)]
        self.tables: list[list[int]] = [[] for _ in range(sequences)]
        self.total, self.block, self.n_vocab = pages, block, n_vocab
        self.uses: dict[int, int] = {}
        self.next = 0
        self.broken: set[int] = set()  #: ids whose evaluation computes NaN
        self.seconds = 0.0

    def pages(self) -> tuple[int, int]:
        return len(self.uses), self.total

    def length(self, seq: int = 0) -> int:
        return len(self.held[seq])

    def _drop(self, page: int) -> None:
        self.uses[page] -= 1
        if not self.uses[page]:
            del self.uses[page]

    def _new(self) -> int:
        if len(self.uses) >= self.total:
            raise ContextError("the cache is full")
        self.next += 1
        self.uses[self.next] = 1
        return self.next

    def rewind(self, length: int, seq: int = 0) -> None:
        assert 0 <= length <= len(self.held[seq])
        del self.held[seq][length:]
        while len(self.tables[seq]) > -(-length // self.block):
            self._drop(self.tables[seq].pop())

    def fork(self, src: int, dst: int) -> None:
        assert src != dst
        self.rewind(0, dst)
        self.held[dst], self.tables[dst] = self.held[src][:], self.tables[src][:]
        for page in self.tables[dst]:
            self.uses[page] += 1

    def eval_batch(self, parts, *, progress=None):
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            time.sleep(0.001)
            progress(0, 1)
        assert len({seq for seq, _ in parts}) == len(parts)
        if self.broken & {int(id) for _, ids in parts for id in ids}:
            raise NotFiniteError("layer 3: NaN")
        out = np.zeros((len(parts), self.n_vocab), np.float32)
        for row, (seq, ids) in zip(out, parts, strict=True):
            table, length = self.tables[seq], len(self.held[seq])
            if length % self.block and self.uses[table[-1]] > 1:
                fresh = self._new()
                self._drop(table.pop())
                table.append(fresh)
            self.held[seq] += [int(id) for id in ids]
            while len(table) < -(-len(self.held[seq]) // self.block):
                table.append(self._new())
            row[(sum(self.held[seq]) + len(self.held[seq])) % self.n_vocab] = 9
        return out


def expected_of_fake(ids: Sequence[int], n: int, n_vocab: int = 32) -> list[int]:
    held = list(ids)
    for _ in range(n):
        held.append((sum(held) + len(held)) % n_vocab)
    return held[len(ids) :]


def test_ten_thousand_requests_leave_nothing_behind():
    """Of all kinds: finished, stopped by the listener, cancelled, out of time, preempted for lack of pages."""
    session = FakeSession(sequences=6, pages=18)
    small = SchedulerOptions(sequences=6, context=64, block_size=4, parallel=4, queue=50, chunk=16)
    random = np.random.default_rng(5)
    threads = threading.active_count()
    with Scheduler(session, small) as scheduler:
        open_ones: list[tuple[Heard, list[int], int, int]] = []
        objects = 0

        def settle(keep: int) -> None:
            while len(open_ones) > keep:
                heard, ids, n, kind = open_ones.pop(0)
                end = heard.wait()
                expected = expected_of_fake(ids, n)
                assert heard.ids == expected[: len(heard.ids)]
                if kind < 7:
                    assert end.reason is (EndReason.LISTENER if kind == 6 else EndReason.MAX_TOKENS), end
                    assert len(heard.ids) == (min(2, n) if kind == 6 else n)
                else:
                    assert end.reason in (EndReason.CANCELLED, EndReason.TIME, EndReason.MAX_TOKENS)

        for i in range(10_000):
            kind = int(random.integers(0, 9))
            # Few different beginnings, so that there is much to share and to copy.
            ids = [int(id) for id in random.integers(0, 2, random.integers(1, 30))]
            n = 2 + int(random.integers(0, 2))
            heard = Heard(stop_after=2 if kind == 6 else None)
            job = scheduler.submit(request(ids, heard, max_tokens=n, seconds=0.0 if kind == 8 else None))
            if kind == 7:
                job.cancel()
            open_ones.append((heard, ids, n, kind))
            settle(40)
            if i == 2000:
                settle(0)
                gc.collect()
                objects = len(gc.get_objects())
        settle(0)
        gc.collect()
        assert len(gc.get_objects()) < objects + 300
        assert scheduler.waiting == scheduler.running == 0
        assert sum(scheduler.totals.ends.values()) == 10_000
        assert scheduler.totals.preemptions > 0 and scheduler.cache.evictions > 100
        scheduler.cache.drop_idle()
        assert session.pages() == (0, 18) and not any(session.held)
    assert threading.active_count() <= threads  # that of a session of another test may end meanwhile


def test_pages_of_the_engine_are_returned(model):
    with model.session(context=CONTEXT, sequences=4, threads=1) as session:
        with Scheduler(session, options(sequences=4, parallel=4)) as scheduler:
            for round in range(20):
                heard = [Heard() for _ in range(6)]
                for i, one in enumerate(heard):
                    scheduler.submit(request([*prompt(5 + 9 * i, i % 3), round], one, max_tokens=2))
                for one in heard:
                    assert one.wait().reason is EndReason.MAX_TOKENS
            scheduler.cache.drop_idle()
        assert session.pages()[0] == 0


def test_preempted_requests_go_on_where_they_were():
    """Three that together need more pages than there are."""
    session = FakeSession(sequences=4, pages=16)
    with Scheduler(session, SchedulerOptions(sequences=4, context=64, block_size=4, parallel=3, queue=9)) as scheduler:
        heard = [Heard() for _ in range(3)]
        prompts = [[i, 1, 2, 3, 4] for i in range(3)]
        for ids, one in zip(prompts, heard, strict=True):
            scheduler.submit(request(ids, one, max_tokens=50))
        assert [one.wait().reason for one in heard] == [EndReason.MAX_TOKENS] * 3
        assert [one.ids for one in heard] == [expected_of_fake(ids, 50) for ids in prompts]
        assert scheduler.totals.preemptions >= 2


def test_too_few_pages_change_no_bit(model):
    """On the engine: pages shared by forks, copied, dropped and evaluated again."""
    common = prompt(75, 7)
    prompts = [common[: 70 - 5 * i] + prompt(60 + 17 * i, i) for i in range(5)]
    lone = [alone(model, ids, 70, DRAWN, i)[0] for i, ids in enumerate(prompts)]
    with model.session(context=CONTEXT, sequences=8, pages=CONTEXT // BLOCK + 2, threads=1) as session:
        with Scheduler(session, options(chunk=48)) as scheduler:
            heard = [Heard() for _ in prompts]
            for i, ids in enumerate(prompts):
                scheduler.submit(request(ids, heard[i], DRAWN, i, max_tokens=70))
            assert {one.wait().reason for one in heard} == {EndReason.MAX_TOKENS}
            assert scheduler.totals.preemptions > 0
            assert [one.ids for one in heard] == lone
            scheduler.cache.drop_idle()
        assert session.pages()[0] == 0


def test_an_idle_prefix_stays_until_its_room_is_needed():
    session = FakeSession(sequences=3, pages=64)
    cache = PrefixCache(session, 3, 4)

    def run(ids: list[int]) -> int:
        match = cache.match(array("i", ids))
        slot = cache.take(match)
        assert slot is not None
        session.eval_batch([(slot.seq, ids[len(slot.ids) :])])
        cache.append(slot, ids[len(slot.ids) :])
        cache.release(slot)
        return match.length if match else 0

    assert run([1, 2, 3, 4, 5, 6]) == 0
    assert run([1, 2, 3, 9]) == 3  # forked: the longer one stays
    assert run([1, 2, 3, 4, 5, 6, 7]) == 6
    assert run([7, 7]) == 0
    assert run([8, 8]) == 0  # drops the one unused for longest
    assert run([1, 2, 3, 9, 9]) == 3 and cache.evictions >= 1
    assert cache.make_room(64) and cache.cached_tokens == 0 and session.pages()[0] == 0


# -------------------------------------------------------------------------------------------------- ends and refusals


def test_cancelling_stops_the_batch_and_keeps_the_rest():
    session = FakeSession(sequences=2, pages=64)
    session.seconds = 30.0
    with Scheduler(session, SchedulerOptions(sequences=2, context=64, block_size=4, parallel=1, queue=9)) as scheduler:
        slow, next = Heard(), Heard()
        start = time.monotonic()
        job = scheduler.submit(request([1, 2, 3], slow, max_tokens=5))
        scheduler.submit(request([1, 2, 3], next, max_tokens=2))
        time.sleep(0.05)
        session.seconds = 0.0
        job.cancel()
        job.cancel()
        assert slow.wait().reason is EndReason.CANCELLED and not slow.tokens
        assert next.wait().reason is EndReason.MAX_TOKENS and next.ids == expected_of_fake([1, 2, 3], 2)
        assert time.monotonic() - start < 10


def test_the_queue_has_a_limit_and_closing_ends_all():
    session = FakeSession(sequences=2, pages=64)
    session.seconds = 30.0
    scheduler = Scheduler(session, SchedulerOptions(sequences=2, context=64, block_size=4, parallel=2, queue=3))
    heard = [Heard() for _ in range(5)]
    for one in heard:
        scheduler.submit(request([1, 2], one))
    with pytest.raises(BusyError, match=r"at work and \d wait"):
        scheduler.submit(request([1, 2], Heard()))
    assert 1 <= scheduler.retry_after() <= 60
    scheduler.close()
    assert [one.wait().reason for one in heard] == [EndReason.CANCELLED] * 5
    with pytest.raises(ClosedError):
        scheduler.submit(request([1, 2], Heard()))
    scheduler.close()


def test_time_limit():
    session = FakeSession(sequences=2, pages=64)
    session.seconds = 0.02
    with Scheduler(session, SchedulerOptions(sequences=2, context=64, block_size=4, parallel=2, queue=3)) as scheduler:
        heard = Heard()
        scheduler.submit(request([1], heard, seconds=0.15))
        end = heard.wait()
        assert end.reason is EndReason.TIME and 1 <= end.generated_tokens == len(heard.ids) < 9
        assert end.prefill_seconds > 0 and end.decode_seconds > 0


def test_one_broken_request_harms_no_other():
    session = FakeSession(sequences=3, pages=64)
    session.broken = {31}
    with Scheduler(session, SchedulerOptions(sequences=3, context=64, block_size=4, parallel=3, queue=9)) as scheduler:
        session.seconds = 0.05
        bad, good, deaf = Heard(), Heard(), Heard()
        deaf.token = lambda token: 1 / 0  # type: ignore[method-assign]
        scheduler.submit(request([1, 31], bad, max_tokens=3))
        scheduler.submit(request([2, 2], good, max_tokens=3))
        scheduler.submit(request([3, 3], deaf, max_tokens=3))
        assert isinstance(bad.wait().error, NotFiniteError)
        assert good.wait().reason is EndReason.MAX_TOKENS and good.ids == expected_of_fake([2, 2], 3)
        assert isinstance(deaf.wait().error, ZeroDivisionError)


def test_context_and_empty_prompts_are_refused_with_numbers(model):
    session = FakeSession(sequences=1, pages=16)
    with Scheduler(session, SchedulerOptions(sequences=1, context=64, block_size=4, parallel=1, queue=9)) as scheduler:
        with pytest.raises(ContextError, match="64 tokens, the context holds 64"):
            scheduler.submit(request([1] * 64, Heard()))
        with pytest.raises(ContextError, match="60 tokens and 5 are asked for, the context holds 64"):
            scheduler.submit(request([1] * 60, Heard(), max_tokens=5))
        with pytest.raises(InputError, match="no tokens"):
            scheduler.submit(request([], Heard()))
        heard = Heard()
        scheduler.submit(request([1] * 60, heard))
        assert heard.wait().reason is EndReason.CONTEXT and len(heard.ids) == 5
    with pytest.raises(InputError, match="pages: 16, expected 17"):
        Scheduler(session, SchedulerOptions(sequences=1, context=65, block_size=4, parallel=1, queue=9))
    with pytest.raises(InputError, match="parallel: 2"):
        Scheduler(session, SchedulerOptions(sequences=1, context=64, block_size=4, parallel=2, queue=9))


# ------------------------------------------------------------------------------------------------- tokens as they come


class EvenOnly:
    """A constraint."""

    def __init__(self, n_vocab: int) -> None:
        self.mask = np.arange(n_vocab) % 2 == 0
        self.seen: list[int] = []

    def allowed(self):
        return self.mask

    def accept(self, id: int) -> None:
        self.seen.append(id)


def test_logprobs_constraint_and_end_tokens(model):
    n_vocab = model.hparams.n_vocab
    with model.session(context=CONTEXT, sequences=1, threads=1) as session:
        logits = session.eval(prompt(20)).astype(np.float64)
        session.rewind(0)
        logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        with Scheduler(session, options(sequences=1, parallel=1)) as scheduler:
            heard, even = Heard(stop_after=4), EvenOnly(n_vocab)
            scheduler.submit(request(prompt(20), heard, constraint=even, top_logprobs=3))
            assert heard.wait().reason is EndReason.LISTENER
            assert even.seen == heard.ids and all(id % 2 == 0 for id in heard.ids)
            first = heard.tokens[0]
            assert first.id == 2 * int(np.argmax(logits[::2]))
            assert first.logprob == pytest.approx(logprobs[first.id], abs=1e-9)
            best = np.argsort(-logprobs, kind="stable")[:3]
            assert [id for id, _ in first.top] == best.tolist()
            assert [p for _, p in first.top] == pytest.approx(logprobs[best].tolist(), abs=1e-9)
            ending = Heard()
            scheduler.submit(request(prompt(20), ending, constraint=EvenOnly(n_vocab), end_ids=frozenset([first.id])))
            end = ending.wait()
            assert end.reason is EndReason.END_TOKEN and ending.ids == [] and end.generated_tokens == 1


def test_penalties_count_the_reply_and_bias_is_added():
    logits = np.array([1.0, 2.0, 3.0, 0.0], np.float32)
    adjusted = Sampler(GREEDY, 0, adjustment=Adjustment(presence_penalty=1.5, frequency_penalty=0.25))
    assert adjusted.sample(logits, [2, 2, 2], n_prompt=3) == 2
    assert adjusted.sample(logits, [0, 2], n_prompt=1) == 1  # 3 - 1.75
    scores = [1.0, 2.0 - 1.75, 3.0 - 2.0, 0.0]
    assert adjusted.sample(logits, [2, 2, 1]) == int(np.argmax(scores))
    biased = Sampler(GREEDY, 0, adjustment=Adjustment(bias={3: 100.0, 2: -100.0}))
    assert biased.sample(logits) == 3
    with pytest.raises(InputError, match="no token is left"):
        biased.sample(logits, allowed=np.zeros(4, bool))
