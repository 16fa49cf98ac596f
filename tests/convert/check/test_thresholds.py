"""What m3-check-selection judges, and with which exit code."""

import pytest

from convert.check.small_check import EXAMPLE, FIRST, LISTS, cells
from m3_convert.notation import share


def test_min_overlap_judges_the_worst_layer_and_head(tiny_gguf, coarse_index, m3_check_selection):
    report = m3_check_selection(tiny_gguf, coarse_index, *LISTS, "--no-thresholds", "--json").json
    worst, mean = report["overall"]["worst"], report["overall"]["overlap_mean"]
    assert worst["overlap_mean"] == min(cell["overlap_mean"] for cell in cells(report)) < mean
    between = (worst["overlap_mean"] + mean) / 2  # the mean of all would pass
    short = m3_check_selection(tiny_gguf, coarse_index, *LISTS, "--no-thresholds", "--json", "--min-overlap", between)
    assert short.code == 1 == short.json["verdict"]["exit_code"]
    assert short.json["verdict"]["status"] == "fell short" and short.json["verdict"]["failed"] == ["min_overlap"]
    assert f"layer {worst['layer']}, head {worst['head']}: mean overlap {share(worst['overlap_mean'])}" in short.error
    passed = m3_check_selection(
        tiny_gguf, coarse_index, *LISTS, "--no-thresholds", "--min-overlap", worst["overlap_mean"]
    )
    assert passed.code == 0 and "Passed: " in passed.out.splitlines()[0]


def test_defaults_of_thresholds(tiny_gguf, m3_check_selection):
    """What cannot be judged is left out; the README says why the overlap has none."""
    asked = {
        (): {"min_overlap": None, "max_mass_lost": 0.05, "max_kld": 0.05},
        ("--selection-only",): {"min_overlap": None, "max_mass_lost": 0.05, "max_kld": None},
        ("--candidate-attention", "dense"): {"min_overlap": None, "max_mass_lost": None, "max_kld": 0.05},
        ("--no-thresholds", "--max-kld", 1): {"min_overlap": None, "max_mass_lost": None, "max_kld": 1},
        ("--min-overlap", 0.5, "--max-mass-lost", 1): {"min_overlap": 0.5, "max_mass_lost": 1, "max_kld": 0.05},
    }
    for options, thresholds in asked.items():
        run = m3_check_selection(tiny_gguf, tiny_gguf, "--context", FIRST + 1, "--json", *options)
        assert run.json["thresholds"] == thresholds, options


def test_the_other_thresholds(tiny_gguf, coarse_index, m3_check_selection):
    report = m3_check_selection(tiny_gguf, coarse_index, *EXAMPLE, "--json").json
    mass, kld = report["overall"]["mass_lost"]["worst"], report["logits"]["candidate"]["kld"]["mean"]
    heads = [head for cell in cells(report) for head in cell["mass_lost"]["query_heads"]]
    assert mass["mean"] == max(head["mean"] for head in heads) > report["overall"]["mass_lost"]["mean"]
    both = ("--max-mass-lost", mass["mean"], "--max-kld", kld)
    assert m3_check_selection(tiny_gguf, coarse_index, *EXAMPLE, *both).code == 0
    strict = ("--max-mass-lost", mass["mean"] * 0.99, "--max-kld", kld * 0.99, "--min-overlap", 0)
    run = m3_check_selection(tiny_gguf, coarse_index, *EXAMPLE, "--json", *strict)
    assert run.code == 1 and run.json["verdict"]["failed"] == ["max_mass_lost", "max_kld"]
    assert f"layer {mass['layer']}, query head {mass['query_head']}: mean attention lost" in run.error
    assert "KL divergence" in run.error and len(run.error.splitlines()) == 1
    assert run.json["thresholds"] == {"min_overlap": 0, "max_mass_lost": strict[1], "max_kld": strict[3]}


@pytest.mark.parametrize("value", ["-0.1", "1.01", "nan", "many"])
@pytest.mark.parametrize("option", ["--min-overlap", "--max-mass-lost", "--max-kld"])
def test_threshold_out_of_range(tiny_gguf, m3_check_selection, option, value):
    if (option, value) == ("--max-kld", "1.01"):
        value = "inf"  # would never be missed
    run = m3_check_selection(tiny_gguf, tiny_gguf, option, value)
    assert (run.code, run.out) == (2, "") and option.lstrip("-") in run.error


@pytest.mark.parametrize("option", ["--min-overlap", "--max-mass-lost", "--max-kld"])
def test_a_threshold_of_minus_zero_is_zero(tiny_gguf, m3_check_selection, option):
    run = m3_check_selection(tiny_gguf, tiny_gguf, "--context", 150, option, "-0", "--json")
    assert run.code == 0 and "-0" not in run.json["verdict"]["text"]
    assert str(run.json["thresholds"][option.lstrip("-").replace("-", "_")]) == "0.0"


def test_a_number_that_is_nearly_allowed(tiny_gguf, m3_check_selection):
    run = m3_check_selection(tiny_gguf, tiny_gguf, "--min-overlap", "1.0000001")
    assert (run.code, run.error) == (2, "m3-check-selection: --min-overlap is 1.0000001, expected 0 to 1")
