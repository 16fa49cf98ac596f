"""Costs of rounding errors from runs with groups of tensors restored."""

import numpy as np
import pytest

from m3_convert.sensitivity import MAX_BANDS, Restorations, kind_of, sensitivities

LAYERS = 12
NAMES = ["output.weight", "token_embd.weight"] + [
    f"blk.{layer}.{kind}.weight" for layer in range(LAYERS) for kind in ("attn_q", "ffn_down_exps")
]


def test_kinds_and_bands():
    runs = Restorations.of(NAMES, LAYERS)
    assert [run.name for run in runs.kinds] == [
        "output.weight",
        "token_embd.weight",
        "blk.*.attn_q.weight",
        "blk.*.ffn_down_exps.weight",
    ]
    assert [run.name for run in runs.bands] == [f"layers {i}-{i + 1}" for i in range(0, LAYERS, 2)]
    assert set().union(*(run.tensors for run in runs.kinds)) == set(NAMES)
    assert set().union(*(run.tensors for run in runs.bands)) == set(NAMES[2:])
    assert kind_of("blk.11.attn_q.weight") == "blk.*.attn_q.weight" and kind_of("output.weight") == "output.weight"


@pytest.mark.parametrize("layers", [1, 60])
def test_the_number_of_runs_does_not_grow_with_the_layers(layers):
    names = [f"blk.{layer}.attn_q.weight" for layer in range(layers)]
    assert len(list(Restorations.of(names, layers))) == (1 if layers == 1 else 1 + MAX_BANDS)


def measured(costs, errors):
    """What the runs of a model with these costs [harms] leave, if harms add up."""
    runs = Restorations.of(NAMES, LAYERS)
    harm = sum(costs[name] * errors[name] for name in NAMES)
    restored = {run.name: harm - sum(costs[n] * errors[n] for n in run.tensors) for run in runs}
    return runs, harm, restored


def touched(costs):
    return {name: cost > 0 for name, cost in costs.items()}


def test_costs_of_a_kind_times_a_band_are_found():
    random = np.random.default_rng(3)
    kinds = {"attn_q": 0.4, "ffn_down_exps": 2.0}
    bands = [1.0, 2.0, 0.5, 3.0, 1.5, 0.7]
    costs = {"output.weight": np.array([5.0]), "token_embd.weight": np.array([1.0])}
    for name in NAMES[2:]:
        _, layer, kind, _ = name.split(".")
        costs[name] = np.array([kinds[kind] * bands[int(layer) // 2]])
    errors = {name: random.uniform(0.003, 0.006) for name in NAMES}
    runs, harm, restored = measured(costs, errors)
    found = sensitivities(runs, errors, harm, restored, touched(costs))
    for name in NAMES:  # what a run gave back is known up to a hundredth of the whole, and drawn to the mean so far
        assert found[name] == pytest.approx(costs[name], rel=0.1)


def test_harms_are_found_each_on_its_own():
    # The second harm is that of a layer in the middle: nothing behind it can touch it.
    costs = {}
    for name in NAMES:
        layer = int(name.split(".")[1]) if name.startswith("blk.") else (-1 if "embd" in name else LAYERS)
        costs[name] = np.array([1.0, 1.0 if layer < 6 else 0.0])
    errors = dict.fromkeys(NAMES, 0.004)
    runs, harm, restored = measured(costs, errors)
    found = sensitivities(runs, errors, harm, restored, touched(costs))
    assert found["output.weight"][1] == 0
    assert found["blk.11.ffn_down_exps.weight"][1] == 0 and found["blk.11.ffn_down_exps.weight"][0] > 0.9
    assert found["blk.3.attn_q.weight"] == pytest.approx([1.0, 1.0], rel=0.1)


def test_a_lucky_run_makes_nothing_free():
    costs = {name: np.array([1.0]) for name in NAMES}
    errors = dict.fromkeys(NAMES, 0.004)
    runs, harm, restored = measured(costs, errors)
    restored["output.weight"] = harm * 1.001  # restored, and worse by chance
    found = sensitivities(runs, errors, harm, restored, touched(costs))
    assert 0 < found["output.weight"][0] < 1
