"""What the comparison with llama.cpp excuses, which runs without llama.cpp."""

from dataclasses import replace

import numpy as np
import pytest

from compare_types import ENGINE, Difference, Limits
from m3_runtime import Model
from routing import expert_gaps, expert_ranks, write_silent

LIMITS = Limits(
    tolerance=2e-4, tie=1e-3, expert_tie=1e-6, rounding=5e-4, jump=0.02, rounding_expert_tie=1e-5, noise=0.1
)
OFF = Difference(
    model="m",
    type="Q4_K",
    kind="type",
    bytes=1,
    fallbacks=0,
    run="dense, F32",
    max_dlogit=0.9,
    mean_dlogit=1e-3,
    other_top1=0.0,
    kl=1e-5,
    off=130,
    first_off=770,
    gap=None,
    expert_gap=None,
    as_near=None,
)


def test_a_difference_without_a_tie_is_wrong():
    assert not LIMITS.allow(OFF)
    assert not LIMITS.allow(replace(OFF, gap=2e-3, expert_gap=2e-6, as_near=40))
    assert LIMITS.allow(replace(OFF, off=0, first_off=None))
    # Where llama.cpp rounds, the divergence is judged, and no tie excuses it.
    tied = replace(OFF, expert_gap=2e-7, as_near=1)
    for run in ("dense", "sparse", "sparse, F16"):
        assert LIMITS.allow(replace(tied, run=run, kl=0.1))
        assert not LIMITS.allow(replace(tied, run=run, kl=0.101))


def test_the_rounding_of_the_engine_may_tip_something_over():
    within = replace(OFF, run=ENGINE, off=900, first_off=None, kl=5e-4)
    assert LIMITS.allow(within) and not LIMITS.exceeded(within)
    # Above it without a jump, or with one where nothing is near a tie, it is wrong.
    above = replace(within, kl=5.1e-4)
    assert LIMITS.exceeded(above) and not LIMITS.allow(above)
    assert not LIMITS.allow(replace(above, gap=2e-5, expert_gap=2e-7, as_near=1))
    assert not LIMITS.allow(replace(above, first_off=499, gap=2e-3, expert_gap=1.1e-5, as_near=40))
    tied = replace(above, first_off=499, gap=2.7e-5)
    assert LIMITS.allow(tied) and LIMITS.exceeded(tied) and LIMITS.excuse(tied) == "two block scores within 2.7e-05"
    routed = replace(above, first_off=151, expert_gap=4.6e-6, as_near=8)
    assert LIMITS.allow(routed)
    assert LIMITS.excuse(routed) == "two experts within 4.6e-06, as near as at 7 other positions"
    assert not LIMITS.allow(replace(routed, run="dense, F32"))
    assert str(tied).endswith("KL 5.1e-04, a jump at position 499")


@pytest.mark.parametrize(
    ("ties", "why"),
    [
        ({"gap": 1.9e-6, "expert_gap": 0.1}, "two block scores within 1.9e-06"),
        ({"expert_gap": 2.1e-7, "as_near": 1}, "two experts within 2.1e-07, as near as at no other position"),
        ({"expert_gap": 2.1e-7, "as_near": 3}, "two experts within 2.1e-07, as near as at 2 other positions"),
    ],
)
def test_a_tie_is_an_excuse_that_is_told(ties, why):
    tied = replace(OFF, **ties)
    assert LIMITS.allow(tied) and LIMITS.excuse(tied) == why
    assert str(tied).endswith("|dlogit| up to 9.0e-01, KL 1.0e-05, 130 positions off, the first 770")


@pytest.mark.parametrize("attention", ["sparse", "dense"])
def test_the_ranks_are_those_by_which_the_engine_chooses(tiny_gguf, tmp_path, attention):
    """Of every expert, in every layer, as many rows as the engine counts."""
    silent = tmp_path / "silent.gguf"
    write_silent(tiny_gguf, silent)
    ids = np.random.default_rng(5).integers(0, 900, 300).astype(np.int32)
    ranks = expert_ranks(tiny_gguf, silent, ids, attention)
    with Model(tiny_gguf) as model:
        h = model.hparams
        options = {"context": len(ids), "kv_type": "f32", "attention": attention, "record": ("importance",)}
        with model.session(**options) as session:
            session.eval(ids)
            counts = [
                session.importance(f"blk.{layer}.ffn_down_exps.weight")[1]
                for layer in range(h.n_dense_layer, h.n_layer)
            ]
    chosen = np.argsort(-ranks, axis=-1)[..., : h.n_expert_used]
    found = [np.bincount(layer.ravel(), minlength=h.n_expert) for layer in chosen]
    np.testing.assert_array_equal(found, counts)


def test_the_gap_is_the_smallest_of_all_layers():
    ranks = np.array([[[0.5, 0.9, 0.1, 0.4], [1.0, 0.2, 0.3, 0.0]], [[0.7, 0.1, 0.5, 0.2], [0.1, 0.4, 0.0, 0.35]]])
    np.testing.assert_allclose(expert_gaps(ranks, 2), [0.1, 0.1])
    np.testing.assert_allclose(expert_gaps(ranks, 1), [0.2, 0.05])
    assert np.isinf(expert_gaps(ranks, 4)).all()
