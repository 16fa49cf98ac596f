"""What a sequence holds stays in step with the session, and a full context drops what the policy says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_model import FakeSession
from m3_runtime.errors import ContextError
from m3_runtime.held_tokens import HeldTokens, Shift

BLOCK = 16


class Held(HeldTokens):
    """On a fake session, whose ids must at any time be those of the list."""

    def __init__(self, context: int = 128, pinned: int | None = 20) -> None:
        self.fake = FakeSession(1000, lambda held: 0, context)
        self.told: list[list[int]] = []
        shift = None if pinned is None else Shift(BLOCK, pinned)
        super().__init__(self.fake, context, shift=shift, on_drop=self.told.append)

    def check(self) -> None:
        assert self.ids == self.fake.held
        assert [id for ids in self.told for id in ids][-len(self.dropped) or None :][
            : len(self.dropped)
        ] == self.dropped


def prompt(n: int, first: int = 0) -> list[int]:
    return list(range(first, first + n))


def test_a_prompt_is_evaluated_from_where_it_differs():
    held = Held()
    assert held.evaluate(prompt(50), 50, None)[1] == 0
    held.append(777)
    assert held.evaluate([*prompt(50), 777, 1, 2], 2, None)[1] == 51
    assert held.evaluate([*prompt(50), 777, 1, 2], 2, None)[1] == 52
    assert held.evaluate(prompt(30), 1, None)[1] == 29
    assert held.fake.evals == [50, 1, 2, 1, 1]
    held.check()


def test_without_a_policy_a_prompt_that_does_not_fit_is_refused():
    held = Held(pinned=None)
    held.evaluate(prompt(128), 128, None)
    assert not held.make_room()
    with pytest.raises(ContextError, match=r"^context full: the prompt has 129 tokens, the context holds 128$"):
        held.evaluate(prompt(129), 1, None)
    assert held.fake.held == prompt(128) and held.pinned == 0


def test_a_shift_drops_whole_blocks_behind_the_pinned_ones():
    held = Held()
    assert held.pinned == 32
    held.evaluate(prompt(120), 120, None)
    # 140 tokens and an eighth of the context for the answer: 28 too many, two blocks.
    _, reused = held.evaluate(prompt(140), 20, None)
    assert held.fake.drops == [(2, 2)]
    assert (reused, held.fake.evals[-1]) == (120 - 32, 20)
    assert held.fake.held == [*prompt(32), *prompt(76, 64)]
    assert held.told == [prompt(32, 32)] and held.dropped == prompt(32, 32)
    # The next turns come on top of what is held.
    assert held.common(prompt(160)) == 140
    _, reused = held.evaluate(prompt(160), 20, None)
    assert reused == 108 and held.fake.drops == [(2, 2)]
    held.evaluate(prompt(175), 15, None)
    assert held.fake.drops == [(2, 2), (2, 2)]
    assert held.fake.held == [*prompt(32), *prompt(79, 96)]
    held.check()


def test_a_growing_answer_makes_room_for_itself():
    held = Held()
    held.evaluate(prompt(128), 128, None)
    assert held.make_room() and held.used == 112
    held.append(500)
    assert held.fake.held == [*prompt(32), *prompt(80, 48), 500]
    held.check()


def test_what_is_pinned_or_new_is_not_dropped():
    held = Held()
    held.evaluate(prompt(100), 100, None)
    with pytest.raises(
        ContextError,
        match=r"^context full: the new part of the prompt has 100 tokens, 32 are pinned, the context holds 128$",
    ):
        held.evaluate(prompt(200), 100, None)
    assert held.fake.held == prompt(100) and held.told == []
    full = Held(context=48)
    full.evaluate(prompt(40), 40, None)
    assert full.make_room() is False  # no whole block stands behind the pinned ones
    full.check()


def test_a_conversation_that_is_not_in_the_cache_is_evaluated_without_its_oldest_blocks():
    held = Held()
    _, reused = held.evaluate(prompt(300), 20, None)
    assert (reused, held.fake.drops) == (0, [])
    assert held.fake.held == [*prompt(32), *prompt(300)[32 + len(held.dropped) :]]
    assert held.used <= 128 - 16 + BLOCK and len(held.dropped) % BLOCK == 0
    held.check()


def test_a_conversation_that_changed_before_what_was_dropped_is_evaluated_again():
    held = Held()
    held.evaluate(prompt(120), 120, None)
    held.evaluate(prompt(140), 20, None)
    changed = [*prompt(40), *prompt(60, 400)]
    _, reused = held.evaluate(changed, 10, None)
    assert reused == 32 and held.dropped == [] and held.fake.held == changed
    held.check()


def test_other_pins_forget_what_follows_dropped_tokens():
    held = Held()
    held.evaluate(prompt(120), 120, None)
    held.evaluate(prompt(140), 20, None)
    held.set_shift(Shift(BLOCK, 50))
    assert (held.pinned, held.dropped, held.fake.held) == (64, [], prompt(32))
    held.check()


def test_an_interruption_leaves_the_list_in_step():
    held = Held()
    held.evaluate(prompt(120), 120, None)

    def interrupt() -> None:
        raise KeyboardInterrupt

    held.fake.before_eval = interrupt
    with pytest.raises(KeyboardInterrupt):
        held.evaluate(prompt(140), 20, None)
    held.check()
    held.fake.before_eval = lambda: None
    held.evaluate(prompt(140), 20, None)
    assert held.fake.held == [*prompt(32), *prompt(76, 64)]
    held.check()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 90), st.integers(0, 60), st.booleans()), max_size=12), st.integers(0, 40))
def test_a_long_chat(turns: list[tuple[int, int, bool]], pinned: int):
    """Whatever is asked, answered and taken back: the session holds the prompt less whole blocks behind the pins."""
    held, text, next_id = Held(128, pinned), prompt(10), 10
    for n_new, n_answer, undo in turns:
        before = list(text)
        text = [*text, *prompt(n_new, next_id)]
        next_id += n_new
        try:
            logits, reused = held.evaluate(text, n_new, None)
        except ContextError:
            text = before
            held.check()
            continue
        assert logits.dtype == np.float32 and reused < held.used
        for _ in range(n_answer):
            if held.used >= held.context and not held.make_room():
                break
            held.append(next_id)
            text.append(next_id)
            next_id += 1
        if undo:
            text = before
            held.keep(text)
        at, n = held.pinned, len(held.dropped)
        assert n % BLOCK == 0 and held.used <= held.context
        if not undo:
            assert held.fake.held == [*text[:at], *text[at + n :]] and held.dropped == text[at : at + n]
        else:
            assert held.fake.held == [*text[:at], *text[at + n :]][: held.used]
        held.check()
