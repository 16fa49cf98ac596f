"""The report for people fits on a screen, whatever the model."""

import io
import re
from copy import deepcopy

import pytest

from m3_convert.report_text import print_report

N = 160


@pytest.fixture
def report(tiny_gguf, tiny_q8_gguf, m3_check_selection):
    return m3_check_selection(tiny_gguf, tiny_q8_gguf, "--context", N, "--threads", 1, "--json").json


def printed(report):
    stream = io.StringIO()
    print_report(report, stream)
    return stream.getvalue().splitlines()


def with_layers(report, n):
    """The report of a model with so many sparse layers, all equal."""
    like = deepcopy(report["layers"][0])
    for head in like["heads"]:
        head |= {"overlap_mean": 1.0, "overlap_min": 1.0, "changed": 0, "first_changed": None}
        for query_head in head["mass_lost"]["query_heads"]:
            query_head["mean"] = 0.0
    return {**report, "layers": [{**deepcopy(like), "layer": 3 + i} for i in range(n)]}


def shown_layers(lines):
    return [int(line.split()[0]) for line in lines if re.match(r"\d+ +[01]\.\d{4} ", line)]


def test_a_few_layers_are_all_shown(report):
    assert shown_layers(printed(with_layers(report, 12))) == list(range(3, 15))


def test_of_many_layers_the_worst_are_shown(report):
    many = with_layers(report, 57)
    many["layers"][40]["heads"][1]["overlap_mean"] = 0.5
    many["layers"][50]["heads"][0]["mass_lost"]["query_heads"][1]["mean"] = 0.25
    many["layers"][20]["heads"][0]["overlap_mean"] = 0.75
    lines = printed(many)
    shown = shown_layers(lines)
    assert {23, 43, 53} <= set(shown) and len(shown) == 12 and shown == sorted(shown)
    assert "45 more layers: overlap of every head at least 1.0000, mass lost of every query head at most 0%" in lines
    assert len(lines) < 40


def test_markup_and_control_characters_of_names_are_text(report):
    report["reference"]["path"] = "[bold]x[/bold]\x1b[2J\nfile.gguf"
    lines = printed(report)
    assert any("[bold]x[/bold]?[2J file.gguf (GGUF" in line for line in lines) and not any("\x1b" in x for x in lines)


def test_attention_and_caches_of_both_sides(report):
    assert any("; sparse, K/V F16, index keys F32; " in line for line in printed(report))
    report["settings"]["candidate"]["kv_type"] = "q8_0"
    text = "reference: sparse, K/V F16, index keys F32; candidate: sparse, K/V Q8_0, index keys F32; "
    assert any(text in line for line in printed(report))
