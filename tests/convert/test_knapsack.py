"""Choosing types: against every combination of a few tensors."""

from itertools import product

import numpy as np
import pytest

from m3_convert.knapsack import Choice, fewest_bytes, least_harm
from m3_runtime.quantize import TensorType as T

TYPES = (T.Q2_K, T.Q4_K, T.Q6_K, T.Q8_0)


def made(n, harms, seed):
    """Tensors whose harm falls to a quarter with every step of size, about."""
    random = np.random.default_rng(seed)
    choices = {}
    for i in range(n):
        size, scale = int(random.integers(10, 200)), random.uniform(0.1, 10, harms)
        choices[f"t{i}"] = [
            Choice(t, size * (step + 2), tuple(scale * 0.25**step * random.uniform(0.7, 1.3, harms)))
            for step, t in enumerate(TYPES)
        ]
    return choices


def total_bytes(chosen):
    return sum(choice.n_bytes for choice in chosen.values())


def total_harm(chosen):
    return np.sum([choice.harm for choice in chosen.values()], axis=0)


def every(choices):
    return [dict(zip(choices, found, strict=True)) for found in product(*choices.values())]


@pytest.mark.parametrize("seed", range(5))
def test_least_harm_is_within_one_step_of_the_best(seed):
    choices = made(6, 1, seed)
    combinations = every(choices)
    smallest = min(map(total_bytes, combinations))
    largest = max(map(total_bytes, combinations))
    for max_bytes in np.linspace(smallest, largest, 12).astype(int).tolist():
        best = min(total_harm(c)[0] for c in combinations if total_bytes(c) <= max_bytes)
        found = least_harm(choices, max_bytes)
        assert total_bytes(found) <= max_bytes
        step = max(options[i].harm[0] - options[i + 1].harm[0] for options in choices.values() for i in range(3))
        assert best <= total_harm(found)[0] <= best + step
        assert total_harm(found)[0] <= 1.25 * best  # as it comes out here


def test_least_harm_at_the_ends():
    choices = made(4, 1, 9)
    smallest, largest = (sum(f(c.n_bytes for c in options) for options in choices.values()) for f in (min, max))
    assert least_harm(choices, smallest - 1) is None
    assert total_bytes(least_harm(choices, smallest)) == smallest
    assert {c.type for c in least_harm(choices, largest).values()} == {T.Q8_0}


def test_a_type_that_is_larger_and_worse_is_never_chosen():
    choices = {"a": [Choice(T.Q2_K, 10, (5.0,)), Choice(T.Q4_K, 20, (6.0,)), Choice(T.Q6_K, 30, (1.0,))]}
    assert least_harm(choices, 29)["a"].type is T.Q2_K
    assert least_harm(choices, 30)["a"].type is T.Q6_K


def test_room_that_is_left_is_used_off_the_hull():
    # Q4_K lies above the line from Q2_K to Q6_K, for which there is no room.
    choices = {"a": [Choice(T.Q2_K, 10, (5.0,)), Choice(T.Q4_K, 20, (4.5,)), Choice(T.Q6_K, 30, (1.0,))]}
    assert least_harm(choices, 25)["a"].type is T.Q4_K


@pytest.mark.parametrize("harms", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_fewest_bytes_keep_all_limits_and_are_near_the_fewest(harms, seed):
    choices = made(6, harms, seed)
    combinations = every(choices)
    largest = total_harm(max(combinations, key=total_bytes))
    for factor in (1.5, 4, 20):
        limits = largest * factor * np.linspace(1, 1.5, harms)
        best = min(total_bytes(c) for c in combinations if (total_harm(c) <= limits).all())
        found = fewest_bytes(choices, limits.tolist())
        assert (total_harm(found) <= limits).all()
        assert best <= total_bytes(found) <= 1.12 * best


def test_limits_that_nothing_keeps():
    choices = made(3, 2, 1)
    least = np.sum([np.min([c.harm for c in options], axis=0) for options in choices.values()], axis=0)
    assert fewest_bytes(choices, (0.9 * least).tolist()) is None


def test_what_harms_nothing_stays_small():
    choices = made(3, 1, 2) | {"free": [Choice(T.Q2_K, 10, (0.0,)), Choice(T.Q8_0, 40, (0.0,))]}
    assert fewest_bytes(choices, [0.5])["free"].type is T.Q2_K
    assert least_harm(choices, 10**6)["free"].type is T.Q2_K
