"""Sampling, against a plain reference written for lists."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from m3_runtime.errors import InputError, NotFiniteError
from m3_runtime.sampler import Sampler, SamplerOptions, new_seed

options_strategy = st.builds(
    SamplerOptions,
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.01, 0.3, 0.9, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repeat_penalty=st.sampled_from([0.5, 1.0, 1.3]),
    repeat_last_n=st.integers(-1, 5),
)
# Few different values, so that ties occur.
logits_strategy = st.lists(st.sampled_from([-9.0, -2.5, -1.0, 0.0, 0.5, 1.0, 2.0, 4.0]), min_size=3, max_size=12)


def reference(
    logits: Sequence[float], options: SamplerOptions, u: float, history: Sequence[int], banned: Sequence[int]
) -> tuple[int, float]:
    """The chosen id, and how near `u` is to the border of another choice."""
    scores = list(logits)
    recent = list(history)
    if options.repeat_last_n >= 0:
        recent = recent[len(recent) - options.repeat_last_n :] if options.repeat_last_n < len(recent) else recent
        recent = recent if options.repeat_last_n else []
    for id in set(recent):
        scores[id] = scores[id] / options.repeat_penalty if scores[id] > 0 else scores[id] * options.repeat_penalty
    order = sorted((i for i in range(len(scores)) if i not in banned), key=lambda i: (-scores[i], i))
    if options.temperature == 0:
        return order[0], 1.0
    if options.top_k:
        order = order[: options.top_k]
    weights = [math.exp((scores[i] - scores[order[0]]) / options.temperature) for i in order]
    total = sum(weights)
    kept, mass = 0, 0.0
    for weight in weights:
        if options.top_p < 1 and mass >= options.top_p * total:
            break
        if weight < options.min_p * weights[0]:
            break
        mass += weight
        kept += 1
    target, mass, nearest, chosen = u * sum(weights[:kept]), 0.0, 1.0, None
    for i, weight in zip(order[:kept], weights[:kept], strict=True):
        mass += weight
        nearest = min(nearest, abs(mass - target))
        if chosen is None and target < mass:
            chosen = i
    assert chosen is not None
    return chosen, nearest


@given(logits_strategy, options_strategy, st.integers(0, 2**32), st.data())
def test_equals_the_reference(logits: list[float], options: SamplerOptions, seed: int, data: st.DataObject):
    history = data.draw(st.lists(st.integers(0, len(logits) - 1), max_size=8))
    banned = data.draw(st.lists(st.integers(0, len(logits) - 2), max_size=len(logits) - 2, unique=True))
    u = float(np.random.Generator(np.random.PCG64(seed)).random())
    expected, margin = reference(logits, options, u, history, banned)
    assume(margin > 1e-9)
    sampler = Sampler(options, seed, banned)
    assert sampler.sample(np.array(logits, dtype=np.float32), history) == expected


@given(logits_strategy, st.integers(0, 2**32))
def test_the_same_seed_gives_the_same_tokens(logits: list[float], seed: int):
    array = np.array(logits, dtype=np.float32)
    first, second = (Sampler(SamplerOptions(), seed) for _ in range(2))
    assert [first.sample(array) for _ in range(20)] == [second.sample(array) for _ in range(20)]
    np.testing.assert_array_equal(array, np.array(logits, dtype=np.float32))


def test_known_draws_of_a_seed():
    """Holds the random stream itself: PCG64 and one draw a token."""
    sampler = Sampler(SamplerOptions(top_k=0, top_p=1.0), 42)
    logits = np.zeros(1000, dtype=np.float32)
    expected = [int(u * 1000) for u in np.random.Generator(np.random.PCG64(42)).random(5)]
    assert expected == [773, 438, 858, 697, 94]
    assert [sampler.sample(logits) for _ in range(5)] == expected


def test_frequencies_follow_the_probabilities():
    sampler = Sampler(SamplerOptions(top_k=0, top_p=1.0), 1)
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))
    counts = np.bincount([sampler.sample(logits) for _ in range(4000)], minlength=4)
    np.testing.assert_allclose(counts / 4000, [0.5, 0.25, 0.125, 0.125], atol=0.03)


def test_greedy_takes_the_lowest_id_among_equals():
    sampler = Sampler(SamplerOptions(temperature=0), 0)
    assert sampler.sample(np.array([1, 3, 3, 2], dtype=np.float32)) == 1
    assert Sampler(SamplerOptions(temperature=0), 0, banned=[1]).sample(np.array([1, 3, 3, 2], dtype=np.float32)) == 2


def test_top_k_keeps_exactly_k_of_equals():
    sampler = Sampler(SamplerOptions(top_k=2, top_p=1.0), 3)
    assert {sampler.sample(np.ones(50, dtype=np.float32)) for _ in range(200)} == {0, 1}


def test_top_p_keeps_the_token_that_crosses_it():
    logits = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    for top_p, expected in ((0.4, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2})):
        sampler = Sampler(SamplerOptions(top_p=top_p), 5)
        assert {sampler.sample(logits) for _ in range(300)} == expected


def test_the_temperature_comes_before_top_p():
    """0.9 of the mass is one token at temperature 1 and three at temperature 10."""
    logits = np.array([5.0, 1.0, 0.0], dtype=np.float32)
    for temperature, expected in ((1.0, {0}), (10.0, {0, 1, 2})):
        sampler = Sampler(SamplerOptions(temperature=temperature, top_p=0.9), 5)
        assert {sampler.sample(logits) for _ in range(300)} == expected


def test_the_penalty_lowers_positive_and_negative_logits():
    options = SamplerOptions(temperature=0, repeat_penalty=2.0)
    assert Sampler(options, 0).sample(np.array([3.0, 2.0], dtype=np.float32), [0]) == 1
    assert Sampler(options, 0).sample(np.array([-1.0, -1.5], dtype=np.float32), [0]) == 1
    window = SamplerOptions(temperature=0, repeat_penalty=2.0, repeat_last_n=2)
    assert Sampler(window, 0).sample(np.array([3.0, 2.0], dtype=np.float32), [0, 1, 1]) == 0


def test_banned_ids_are_never_chosen():
    sampler = Sampler(SamplerOptions(temperature=1000, top_k=0, top_p=1.0), 9, banned=[0, 2, 4])
    assert {sampler.sample(np.zeros(6, dtype=np.float32)) for _ in range(200)} == {1, 3, 5}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_not_finite_stops_the_run(bad: float, temperature: float):
    logits = np.zeros(8, dtype=np.float32)
    logits[[3, 5]] = bad
    with pytest.raises(NotFiniteError, match="2 of 8 are not finite, the first is id 3"):
        Sampler(SamplerOptions(temperature=temperature), 0, banned=[3, 5]).sample(logits)


def test_huge_logits_do_not_overflow():
    logits = np.array([3e38, 3e38, -3e38], dtype=np.float32)
    assert Sampler(SamplerOptions(temperature=0.01), 0).sample(logits) in (0, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", v) for v in (-0.1, math.nan, math.inf, "1", None, True)),
        *(("top_k", v) for v in (-1, 1.5, 2**31)),
        *(("top_p", v) for v in (0.0, 1.1, -1.0, math.nan)),
        *(("min_p", v) for v in (-0.1, 1.1, math.nan)),
        *(("repeat_penalty", v) for v in (0.0, -1.0, math.inf)),
        *(("repeat_last_n", v) for v in (-2, 1.5)),
    ],
)
def test_a_value_out_of_range_is_named(name: str, value: object):
    with pytest.raises(InputError, match=f"^{name}: .*expected"):
        SamplerOptions(**{name: value})


def test_a_negative_seed_is_refused():
    with pytest.raises(InputError, match="seed: -1"):
        Sampler(SamplerOptions(), -1)
    assert 0 <= new_seed() < 2**32


def test_defaults_of_the_file():
    assert SamplerOptions.from_metadata({}) == SamplerOptions(temperature=1.0, top_k=40, top_p=0.95)
    found = SamplerOptions.from_metadata(
        {
            "general.sampling.temp": float(np.float32(0.7)),
            "general.sampling.top_k": 20,
            "general.sampling.top_p": float(np.float32(0.95)),
            "general.sampling.min_p": float(np.float32(0.05)),
            "general.sampling.penalty_repeat": float(np.float32(1.1)),
            "general.sampling.penalty_last_n": 256,
        }
    )
    assert found == SamplerOptions(
        temperature=0.7, top_k=20, top_p=0.95, min_p=0.05, repeat_penalty=1.1, repeat_last_n=256
    )


def test_a_wrong_default_of_the_file_is_named():
    with pytest.raises(InputError, match=r"^general\.sampling\.top_p: top_p: 1\.5, expected"):
        SamplerOptions.from_metadata({"general.sampling.top_p": 1.5})
