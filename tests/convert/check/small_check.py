"""A small model beside itself with one thing changed, and what a report of no difference looks like."""

import shutil

import numpy as np

from m3_runtime import GGUF

FIRST = 96  #: position of the first query of the tiny model that has a choice
N = 200  #: tokens of most tests
# One thread: with more, small models spend their time waiting, and the result is the same.
LONG = ("--context", 700, "--threads", 1)
EXAMPLE = ("--context", N, "--threads", 1)
LISTS = (*EXAMPLE, "--selection-only")  #: where logits do not matter


def patched(source, target, change):
    """A copy of an F32 GGUF file; change(name, values) alters float32 values in place."""
    shutil.copy(source, target)
    with GGUF(source) as gguf:
        tensors = gguf.tensors
    content = np.memmap(target, np.uint8, "r+")
    for tensor in tensors:
        change(tensor.name, content[tensor.offset : tensor.offset + tensor.n_bytes].view(np.float32))
    content.flush()
    return target


def round_to_4_bits(name, values):
    """Index projections to -7 ... 7 times a scale for 32 values."""
    if ".indexer." in name and "proj" in name:
        groups = values.reshape(-1, 32)
        scale = np.abs(groups).max(axis=1, keepdims=True) / 7
        groups[:] = np.rint(groups / scale) * scale


def cells(report):
    return [head for layer in report["layers"] for head in layer["heads"]]


def assert_exactly_equal(report, n_layers, n_heads, queries):
    assert report["tested"] == {
        "queries": queries,
        "first_position": report["model"]["top_k"] * report["model"]["block_size"],
        "lists": n_layers * n_heads * queries,
    }
    overall = report["overall"]
    assert overall["equal"] == report["tested"]["lists"]
    assert overall["ties"] == overall["changed"] == overall["blocks_lost"] == 0
    assert overall["overlap_mean"] == overall["worst"]["overlap_mean"] == overall["lowest"]["overlap"] == 1.0
    assert overall["lowest"]["position"] is None and overall["first_changed"] is None
    lost = overall["mass_lost"]
    assert lost["mean"] == lost["worst"]["mean"] == lost["max"]["value"] == 0.0 and lost["max"]["position"] is None
    flips = {"counts": [0] * 6, "mass": [0.0] * 6}
    assert overall["flips"] == {"edges": [0, 0.01, 0.03, 0.1, 0.3, 1, None], **flips, "near_ties": None}
    assert len(cells(report)) == n_layers * n_heads
    nothing, all_ = [0.0] * len(report["buckets"]), [1.0] * len(report["buckets"])
    for cell in cells(report):
        assert cell["equal"] == queries
        assert cell["overlap_mean"] == cell["overlap_min"] == 1.0
        assert cell["histogram"] == {
            "changed": [0] * len(report["buckets"]),
            "overlap_mean": all_,
            "overlap_min": all_,
            "mass_lost": nothing,
        }
        assert cell["mass_lost"]["mean"] == cell["mass_lost"]["max"] == 0.0
        assert {(head["mean"], head["max"]) for head in cell["mass_lost"]["query_heads"]} == {(0.0, 0.0)}
        assert cell["flips"] == flips
    assert report["worst"] == []


def assert_equal_logits(report):
    logits = report["logits"]
    for run in ("candidate", "forced"):
        none = {**dict.fromkeys(("mean", "median", "p99", "max"), 0.0), "max_position": None}
        assert logits[run] == {"perplexity": logits["reference"]["perplexity"], "kld": none, "top1": 1.0}
    assert logits["selection"] == {"kld": 0.0, "top1": 0.0, "log_perplexity": 0.0}
    assert {(b["candidate_kld"], b["forced_kld"]) for b in logits["buckets"]} == {(0.0, 0.0)}
