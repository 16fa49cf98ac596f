"""Generation on a session that follows a script: stopping, reuse of the cache, interruption, no leaks."""

import numpy as np
import pytest

from fake_model import FakeSession, replies, tokenizer_metadata
from m3_runtime.errors import CancelledError, ContextError, InputError, NotFiniteError
from m3_runtime.generate import Answer, FinishReason, Generator, Prompt
from m3_runtime.reply import Kind
from m3_runtime.sampler import Sampler, SamplerOptions
from m3_runtime.text import ChatTokenizer
from make_checkpoint import CheckpointSpec, make_tokenizer

SPEC = CheckpointSpec()
METADATA = tokenizer_metadata(make_tokenizer(SPEC), SPEC.vocab)
TOKENIZER = ChatTokenizer(METADATA)
END = "[e~["
GREEDY = SamplerOptions(temperature=0)


def generator(
    session: FakeSession, tokenizer: ChatTokenizer = TOKENIZER, options: SamplerOptions = GREEDY
) -> Generator:
    return Generator(session, session.context, tokenizer, Sampler(options, 0, banned=tokenizer.unused_ids()))


def session_for(*answers: str, context: int = 1 << 20) -> FakeSession:
    return FakeSession(SPEC.vocab, replies(*(TOKENIZER.encode(text) for text in answers)), context)


def ask(
    generator: Generator, prompt: str | list[int], *, max_tokens: int | None = None, thinking: bool = False
) -> Answer:
    answer = Answer()
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    list(generator.answer(Prompt(ids, thinking), answer, max_tokens=max_tokens))
    return answer


def test_a_reply_ends_with_the_end_token():
    session = session_for(f"Hello you{END}never seen")
    answer = ask(generator(session), "Hi")
    assert answer.finish is FinishReason.STOP
    assert (answer.reply.text, answer.reply.thinking) == ("Hello you", "")
    assert answer.ids[-1] == TOKENIZER.token_id(END)
    assert TOKENIZER.token_id(END) not in session.held


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({}, END),
        ({"tokenizer.ggml.eos_token_id": None}, END),
        ({"tokenizer.ggml.eos_token_id": TOKENIZER.token_id("]!p~[")}, END),
        ({"tokenizer.ggml.eos_token_id": TOKENIZER.token_id("]!p~[")}, "]!p~["),
        ({"tokenizer.ggml.eot_token_id": TOKENIZER.token_id("]!p~[")}, "]!p~["),
        ({"tokenizer.ggml.eom_token_id": TOKENIZER.token_id("]!p~[")}, "]!p~["),
        ({"tokenizer.ggml.eos_token_ids": [TOKENIZER.token_id("]!p~["), 5]}, "]!p~["),
    ],
)
def test_every_end_token_ends_it(changes: dict[str, object], end: str):
    metadata = {key: value for key, value in (METADATA | changes).items() if value is not None}
    answer = ask(generator(session_for(f"Yes{end}no"), ChatTokenizer(metadata)), "Hi", max_tokens=50)
    assert (answer.finish, answer.reply.text) == (FinishReason.STOP, "Yes")


def test_the_limit_of_tokens():
    session = session_for("one two three four five six seven")
    answer = ask(generator(session), "Hi", max_tokens=3)
    assert (answer.finish, len(answer.ids)) == (FinishReason.LENGTH, 3)
    assert session.evals == [len(TOKENIZER.encode("Hi")), 1, 1]


def test_a_full_context_ends_it():
    prompt = TOKENIZER.encode("a b c d")
    session = session_for("x " * 50, context=len(prompt) + 4)
    answer = ask(generator(session), prompt)
    assert answer.finish is FinishReason.CONTEXT
    assert (len(answer.ids), session.length()) == (5, session.context)


def test_a_prompt_that_fills_the_context_still_gives_a_token():
    prompt = TOKENIZER.encode("a b c d")
    answer = ask(generator(session_for("x", context=len(prompt))), prompt)
    assert (answer.finish, len(answer.ids)) == (FinishReason.CONTEXT, 1)


def test_a_prompt_longer_than_the_context_is_refused_before_anything_runs():
    session = session_for("x", context=3)
    with pytest.raises(ContextError, match=r"^context full: the prompt has 5 tokens, the context holds 3$"):
        ask(generator(session), [1, 2, 3, 4, 5])
    assert session.evals == []


def test_an_empty_prompt_is_refused():
    with pytest.raises(InputError, match="no tokens"):
        ask(generator(session_for("x")), [])


def test_thinking_text_and_calls_come_apart():
    call = ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>'
    answer = ask(generator(session_for(f"<mm:think>why</mm:think>so{call}{END}")), "Hi")
    assert (answer.reply.thinking, answer.reply.text, answer.reply.tools) == ("why", "so", call)


def test_a_prompt_that_ends_inside_the_thinking():
    answer = ask(generator(session_for(f"why</mm:think>so{END}")), "Hi<mm:think>", thinking=True)
    assert (answer.reply.thinking, answer.reply.text) == ("why", "so")


def test_markup_of_another_token_type_is_still_found():
    """Some files call the thinking tags control tokens."""
    types = list(METADATA["tokenizer.ggml.token_type"])
    for name in ("<mm:think>", "</mm:think>", "]<]minimax[>["):
        types[TOKENIZER.token_id(name) or 0] = 3
    tokenizer = ChatTokenizer(METADATA | {"tokenizer.ggml.token_type": types})
    answer = ask(generator(session_for(f"<mm:think>why</mm:think>so{END}"), tokenizer), "Hi")
    assert (answer.reply.thinking, answer.reply.text) == ("why", "so")


def test_control_tokens_are_not_shown():
    answer = ask(generator(session_for(f"a]~b]b<fim_prefix>c]<]image[>[d{END}")), "Hi")
    assert answer.reply.text == "abcd"


def test_characters_cut_between_tokens_come_whole():
    session = session_for(f"\U0001f469\u200d\U0001f4bb é\U0001f1e9\U0001f1ea{END}")
    pieces = list(generator(session).answer(Prompt(TOKENIZER.encode("Hi")), Answer()))
    assert "".join(piece.text for piece in pieces) == "\U0001f469\u200d\U0001f4bb é\U0001f1e9\U0001f1ea"
    assert not any("\ufffd" in piece.text for piece in pieces)


def test_a_reply_cut_inside_a_character_ends_in_a_replacement():
    ids = TOKENIZER.encode("a\U0001f469")
    assert len(ids) > 2
    answer = ask(generator(session_for("a\U0001f469")), "Hi", max_tokens=2)
    assert answer.reply.text == "a\ufffd"


def test_a_cut_tag_at_the_end_is_given_out():
    answer = ask(generator(session_for(f"a <mm:th{END}")), "Hi")
    assert answer.reply.text == "a <mm:th"


def test_unused_ids_are_never_sampled():
    class Unused(FakeSession):
        def eval(self, ids, seq=0, *, progress=None):
            logits = super().eval(ids, seq, progress=progress)
            logits[TOKENIZER.unused_ids()] = 1000
            return logits

    answer = ask(generator(Unused(SPEC.vocab, replies(TOKENIZER.encode(f"fine{END}")))), "Hi", max_tokens=9)
    assert (answer.reply.text, answer.finish) == ("fine", FinishReason.STOP)


def test_logits_that_are_not_finite_stop_the_run():
    class Broken(FakeSession):
        def eval(self, ids, seq=0, *, progress=None):
            logits = super().eval(ids, seq, progress=progress)
            if len(self.evals) == 3:
                logits[17] = np.nan
            return logits

    answer = Answer()
    with pytest.raises(NotFiniteError, match="id 17"):
        list(
            generator(Broken(SPEC.vocab, replies(TOKENIZER.encode("one two three")))).answer(
                Prompt(TOKENIZER.encode("Hi")), answer
            )
        )
    assert answer.finish is None


# ---------------------------------------------------------------------------------------------- reuse of the cache


def test_what_the_session_holds_is_not_evaluated_again():
    session = session_for(f"First{END}", f"Second{END}")
    generates = generator(session)
    first = [*TOKENIZER.encode("Hello"), 1, 2, 3]
    ask(generates, first)
    held = list(session.held)
    assert held == first + TOKENIZER.encode("First")
    answer = ask(generates, [*held, 7, 8])
    assert (answer.timings.reused_tokens, answer.timings.prefill_tokens) == (len(held), 2)
    assert session.held == [*held, 7, 8, *TOKENIZER.encode("Second")]


def test_a_change_in_the_middle_rewinds_to_it():
    session = session_for(f"x{END}", f"y{END}")
    generates = generator(session)
    ask(generates, [1, 2, 3, 4, 5])
    answer = ask(generates, [1, 2, 9, 4, 5, 6])
    assert (answer.timings.reused_tokens, answer.timings.prefill_tokens) == (2, 4)
    assert session.held == [1, 2, 9, 4, 5, 6, *TOKENIZER.encode("y")]


def test_the_same_prompt_again_evaluates_its_last_token_only():
    session = session_for(f"x{END}", f"y{END}")
    generates = generator(session)
    ask(generates, [1, 2, 3])
    answer = ask(generates, [1, 2, 3])
    assert (answer.timings.reused_tokens, answer.timings.prefill_tokens) == (2, 1)
    assert answer.reply.text == "y"


def test_a_shorter_prompt_rewinds():
    session = session_for(f"x{END}", f"y{END}")
    generates = generator(session)
    ask(generates, [1, 2, 3, 4])
    assert ask(generates, [1, 2]).timings.reused_tokens == 1
    assert session.held == [1, 2, *TOKENIZER.encode("y")]


@pytest.mark.parametrize("error", [KeyboardInterrupt, CancelledError])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_an_interruption_ends_the_reply_and_keeps_the_session_right(error: type[BaseException], at: int):
    session = session_for(f"one two three four five{END}", f"second{END}")
    calls = 0

    def interrupt() -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error

    session.before_eval = interrupt
    generates = generator(session)
    prompt = [1, 2, 3, 4]
    answer = ask(generates, prompt)
    assert answer.finish is FinishReason.INTERRUPTED
    assert answer.reply.text == TOKENIZER.decode(answer.ids)
    assert len(answer.ids) == at - 1
    again = ask(generates, [1, 2, 3, 4, 5])
    assert again.timings.reused_tokens == (0 if at == 1 else 4)
    assert session.held[:5] == [1, 2, 3, 4, 5]
    assert again.finish is FinishReason.STOP


def test_a_caller_that_stops_early_leaves_the_session_right():
    session = session_for(f"one two three four{END}", f"second{END}")
    generates = generator(session)
    pieces = generates.answer(Prompt([1, 2, 3]), answer := Answer())
    next(pieces)
    pieces.close()
    assert answer.reply.text == TOKENIZER.decode(answer.ids)
    again = ask(generates, [1, 2, 3, 4])
    assert again.timings.reused_tokens == 3
    assert session.held[:4] == [1, 2, 3, 4]


def test_the_repeat_penalty_sees_prompt_and_answer():
    """Two tokens of nearly equal logits: each lowers itself once it was written."""

    class Flat(FakeSession):
        def eval(self, ids, seq=0, *, progress=None):
            super().eval(ids, seq, progress=progress)
            logits = np.zeros(self.n_vocab, dtype=np.float32)
            logits[[300, 301, 302]] = [3.0, 2.9, 2.8]
            return logits

    options = SamplerOptions(temperature=0, repeat_penalty=2.0, repeat_last_n=-1)
    answer = ask(generator(Flat(SPEC.vocab, lambda held: 0), options=options), [1, 301], max_tokens=3)
    assert answer.ids[:2] == [300, 302]


def test_the_same_seed_gives_the_same_reply():
    class Noise(FakeSession):
        def eval(self, ids, seq=0, *, progress=None):
            super().eval(ids, seq, progress=progress)
            return np.random.default_rng(sum(self.held)).normal(size=self.n_vocab).astype(np.float32)

    def reply(seed: int) -> list[int]:
        sampler = Sampler(SamplerOptions(), seed, banned=TOKENIZER.unused_ids())
        generates = Generator(Noise(SPEC.vocab, lambda held: 0), 100, TOKENIZER, sampler)
        return ask(generates, [1, 2, 3], max_tokens=20).ids

    assert reply(5) == reply(5)
    assert reply(5) != reply(6)


def test_progress_is_for_the_prompt_only():
    seen: list[tuple[int, int]] = []
    list(
        generator(session_for(f"one two{END}")).answer(
            Prompt([1, 2, 3]), Answer(), progress=lambda done, total: seen.append((done, total))
        )
    )
    assert seen == [(3, 3)]


def test_rates_are_of_what_was_measured():
    answer = ask(generator(session_for(f"one{END}")), [1, 2, 3])
    assert answer.timings.prefill_tokens == 3
    assert answer.timings.prefill_rate is not None and answer.timings.prefill_rate > 0
    assert answer.timings.decode_evals == len(answer.ids) - 1
    single = ask(generator(session_for("one two")), [1, 2, 3], max_tokens=1)
    assert single.timings.decode_rate is None


def test_pieces_are_what_the_reply_is_made_of():
    answer = Answer()
    pieces = list(
        generator(session_for(f"<mm:think>a b</mm:think>c d{END}")).answer(Prompt(TOKENIZER.encode("Hi")), answer)
    )
    assert "".join(piece.text for piece in pieces if piece.kind is Kind.TEXT) == answer.reply.text == "c d"
    assert "".join(piece.text for piece in pieces if piece.kind is Kind.THINKING) == answer.reply.thinking == "a b"
