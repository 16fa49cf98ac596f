"""The verdict on findings that were made by hand."""

from dataclasses import replace

import pytest

from m3_convert.comparison import MassCell
from m3_convert.findings import Differences, Findings, Restored, Selection
from m3_convert.notation import beside
from m3_convert.selection import Cell
from m3_convert.verdict import Thresholds, judge
from m3_convert.verdict_cause import find_cost

SAME = Differences(0.0, None, ("F32", "F32"), False, ("f32", "f32"), ("f16", "f16"))
EQUAL = Selection(2, 2, 100, 0, 0, 1.0, Cell(1, 0, 1.0), 0.0, MassCell(1, 0, 0.0), None)
CHANGED = Selection(2, 2, 100, 40, 0, 0.96, Cell(2, 1, 0.9), 0.004, MassCell(2, 3, 0.012), 0.8)
COARSE = replace(SAME, index=0.09, index_types=("F32", "Q4_0"))
ROUNDED = replace(SAME, types=True)
BOTH = replace(COARSE, types=True)


def found(selection=CHANGED, differences=SAME, kld=0.002, forced=0.0, **more):
    return Findings(selection, differences, kld, forced, **more)


def verdict(findings, **thresholds):
    return judge(findings, Thresholds(**thresholds))


def test_equal():
    v = verdict(found(EQUAL, kld=0.0))
    assert (v.cause, v.cost, v.status, v.exit_code) == ("equal", "none", "reported", 0)
    assert v.text == (
        "Same selection: the candidate reads the reference's blocks in all 400 lists. The logits are equal."
    )
    assert "The index projections are the reference's, value for value." in v.evidence


def test_what_was_not_compared_is_not_called_equal():
    assert verdict(found(EQUAL, kld=None, forced=None)).cause == "none"
    assert verdict(found(replace(EQUAL, ties=1), kld=0.0)).cause == "none"
    assert verdict(found(EQUAL, COARSE, kld=0.0)).cause == "none"


def test_nothing_changed_but_the_logits():
    v = verdict(found(EQUAL, ROUNDED, kld=0.02, forced=0.02))
    assert (v.cause, v.cost) == ("none", "weights")
    assert "KL divergence of 0.0200, which is 0.0200 with the reference's blocks" in v.text


@pytest.mark.parametrize("logits", [True, False])
def test_index_projections(logits):
    v = verdict(found(differences=COARSE) if logits else found(differences=COARSE, kld=None, forced=None))
    assert v.cause == "index"
    assert "10.0% of 400 lists, most in layer 2, head 1 (mean overlap 0.9000), because of the index projections." in (
        v.text
    )
    assert "The index projections are 9.00% off (Q4_0 for F32)." in v.evidence


def test_index_projections_of_one_head():
    v = verdict(found(differences=replace(COARSE, index_at=(7, 1))))
    assert "because of the index projections (those of layer 7, head 1 alone)" in v.text
    v = verdict(found(differences=replace(COARSE, index_at=(7, None))))
    assert "because of the index projections (keys of layer 7 alone)" in v.text


def test_other_weights():
    v = verdict(found(differences=ROUNDED, kld=0.12, forced=0.11))
    assert (v.cause, v.cost) == ("weights", "weights")
    assert "because the other weights move the hidden states. It costs 1.20% of the attention of query head 3" in v.text
    assert "The index projections are the reference's, value for value." in v.evidence
    # Other values of the same types
    assert verdict(found(differences=SAME, kld=0.12, forced=0.11)).cause == "weights"
    assert verdict(found(differences=SAME, kld=None, forced=None)).cause == "weights"


def test_both_and_what_tells_them_apart():
    both = found(differences=BOTH, kld=0.12, forced=0.11)
    v = verdict(both)
    assert v.cause == "index and weights"
    assert "because of the index projections and because the other weights move the hidden states" in v.text
    v = verdict(replace(both, isolated_overlap=0.965))
    assert v.cause == "index"
    assert (
        ", above all because of the index projections, less because the other weights move the hidden states." in v.text
    )
    assert verdict(replace(both, isolated_overlap=0.98)).cause == "index and weights"
    v = verdict(replace(both, isolated_overlap=0.995))
    assert v.cause == "weights"
    assert (
        ", above all because the other weights move the hidden states, less because of the index projections." in v.text
    )
    experts = Restored("experts", 0.6, 0.8)
    assert verdict(replace(both, restored=[Restored("index", 0.9, 0.1), experts])).cause == "index"
    v = verdict(replace(both, restored=[experts, Restored("index", 0.1, 0.1)], isolated_overlap=0.965))
    assert v.cause == "weights" and "because the other weights, above all the experts, move" in v.text
    assert (
        "Restoring the experts gives back most: 60.0% of the agreement lost and 80.0% of the KL divergence."
        in v.evidence
    )


def test_with_the_references_blocks_all_other_differences_show():
    """Other types, but not another bit of the logits: they cannot have moved anything."""
    assert verdict(found(differences=BOTH, forced=0.0)).cause == "index"
    assert verdict(found(differences=BOTH, kld=0.01, forced=0.00009)).cause == "index"  # kernels that round otherwise
    assert verdict(found(differences=BOTH, kld=0.01, forced=0.00011)).cause == "index and weights"


def test_caches():
    v = verdict(found(differences=replace(SAME, index_cache=("f32", "q8_0"))))
    assert v.cause == "index cache" and "because of the index keys in Q8_0" in v.text
    v = verdict(found(differences=replace(SAME, kv_cache=("f16", "q4_0")), kld=0.1, forced=0.09))
    assert v.cause == "K/V cache" and "because K and V in Q4_0 move the hidden states" in v.text
    v = verdict(found(differences=replace(COARSE, kv_cache=("f16", "q4_0")), kld=0.1, forced=0.09))
    assert v.cause == "index and weights"
    assert "because of the index projections and because K and V in Q4_0 move the hidden states" in v.text


def test_the_lesser_cause_is_named_too():
    """Caches of K/V and of index keys that are both rounded: the isolated run alone tells what each does."""
    differences = replace(SAME, index_cache=("f32", "q4_0"), kv_cache=("f16", "q8_0"))
    both = found(differences=differences, kld=0.02, forced=0.005)
    index, kv = "because of the index keys in Q4_0", "because K and V in Q8_0 move the hidden states"
    for isolated, cause, words in (
        (None, "index and weights", f"{index} and {kv}."),
        (0.965, "index cache", f"above all {index}, less {kv}."),
        (0.995, "K/V cache", f"above all {kv}, less {index}."),
    ):
        v = verdict(replace(both, isolated_overlap=isolated))
        assert v.cause == cause and words in v.text
    # With the reference's blocks nothing is left.
    v = verdict(replace(both, forced_kld=0.0))
    assert v.cause == "index cache" and f"(mean overlap 0.9000), {index}." in v.text


def test_dense():
    v = verdict(found(None, kld=0.03), max_kld=0.02)
    assert (v.cause, v.cost, v.exit_code) == ("dense", "selection", 1)
    assert v.text.startswith("Dense: the candidate reads every visible block")


def test_near_ties_without_cost():
    near = replace(CHANGED, near_ties=0.95, worst_mass=MassCell(2, 3, 0.001))
    assert find_cost(found(near, COARSE, kld=0.0004)) == "near-ties"
    assert find_cost(found(replace(near, near_ties=0.2), COARSE, kld=0.0004)) == "small"


def test_a_head_that_loses_much_costs_whatever_comes_out():
    worse = replace(CHANGED, worst_mass=MassCell(2, 3, 0.3))
    assert find_cost(found(worse, ROUNDED, kld=0.12, forced=0.119)) == "selection"
    v = verdict(found(worse))
    assert "Means hide it: query head 3 of layer 2 loses 30.0% of its attention, all together 0.40%." in v.evidence


def test_selection_costs():
    assert find_cost(found(differences=COARSE, kld=0.01, forced=0.001)) == "selection"
    assert find_cost(found(differences=BOTH, kld=0.01, forced=0.006)) == "weights"


def test_thresholds():
    f = found(differences=COARSE)
    v = verdict(f, min_overlap=0.9, max_mass_lost=0.012, max_kld=0.002)
    assert (v.status, v.exit_code, v.shortfalls) == ("passed", 0, [])
    assert v.text.endswith(
        " Passed: every layer and head has a mean overlap of at least 0.9, every query head loses at most 0.012 of its "
        "attention, the KL divergence is at most 0.002."
    )
    v = verdict(f, min_overlap=0.900001, max_mass_lost=0.0119, max_kld=0.0019)
    assert (v.status, v.exit_code) == ("fell short", 1)
    assert [name for name, _ in v.shortfalls] == ["min_overlap", "max_mass_lost", "max_kld"]
    assert v.shortfall == (
        "layer 2, head 1: mean overlap 0.9000 is below --min-overlap 0.900001; layer 2, query head 3: mean attention "
        "lost 0.012 is above --max-mass-lost 0.0119; KL divergence 0.002 is above --max-kld 0.0019"
    )
    assert f"Fell short: {v.shortfall}." in v.text
    assert [name for name, _ in verdict(f, max_kld=0.001).shortfalls] == ["max_kld"]


def test_a_number_does_not_look_like_the_limit_that_it_missed():
    f = found(replace(CHANGED, worst_mass=MassCell(2, 3, 0.0500000001)), COARSE, kld=0.05000004)
    v = verdict(f, min_overlap=0.9000001, max_mass_lost=0.05, max_kld=0.05)
    assert v.shortfall == (
        "layer 2, head 1: mean overlap 0.9000 is below --min-overlap 0.9000001; layer 2, query head 3: mean attention "
        "lost 0.0500000001 is above --max-mass-lost 0.05; KL divergence 0.05000004 is above --max-kld 0.05"
    )
    v = verdict(f, max_kld=0.05000004)
    assert v.text.endswith(" Passed: the KL divergence is at most 0.05000004.")
    assert beside(1 - 2**-53, 1.0) == "0.9999999999999999" and beside(0.5, 0.5) == "0.5"
