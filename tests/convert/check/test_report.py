"""The numbers of a report, as JSON and for people."""

import re

import numpy as np
import pytest

from convert.check.small_check import EXAMPLE, FIRST, LONG, N, cells
from m3_convert import report_json
from m3_convert.notation import percent, share
from m3_convert.tensor_group import tensor_group
from m3_convert.text_sample import load_text
from m3_runtime import GGUF, Model
from m3_runtime.text import ChatTokenizer


def test_the_schema(tiny_gguf, coarse_index, m3_check_selection):
    report = m3_check_selection(tiny_gguf, coarse_index, *EXAMPLE, "--json", "--isolate", "--attribute").json
    assert " ".join(report) == (
        "schema program versions verdict thresholds reference candidate model text settings tested overall buckets "
        "layers logits isolated attribution worst not_tested memory seconds"
    )
    keys = {
        "schema": "name version",
        "versions": "engine_sha256 python numpy tokenizers",
        "verdict": "text evidence cause cost status exit_code failed",
        "thresholds": "min_overlap max_mass_lost max_kld",
        "reference": "path kind bytes types sha256 hash_of",
        "candidate": "path kind bytes types sha256 hash_of",
        "model": "layers dense_layers heads index_heads block_size top_k local_blocks",
        "text": "name bytes sha256 tokens whole wanted",
        "settings": "reference candidate isa threads",
        "tested": "queries first_position lists",
        "overall": "equal ties changed blocks_lost overlap_mean worst lowest first_changed mass_lost flips",
        "logits": "positions reference candidate forced selection buckets",
        "attribution": "baseline groups same",
        "memory": "estimated_bytes peak_bytes",
    }
    for part, names in keys.items():
        assert list(report[part]) == names.split(), part
    assert report["schema"] == {"name": "m3-check-selection", "version": 2}
    assert list(report["model"].values()) == [3, 1, 4, 2, 32, 3, 1]
    assert list(report["overall"]["worst"]) == ["layer", "head", "overlap_mean"]
    assert list(report["overall"]["lowest"]) == ["layer", "head", "overlap", "position"]
    assert list(report["overall"]["mass_lost"]) == ["mean", "worst", "max"]
    assert list(report["overall"]["mass_lost"]["worst"]) == ["layer", "head", "query_head", "mean"]
    assert list(report["overall"]["mass_lost"]["max"]) == ["layer", "query_head", "position", "value"]
    assert [layer["layer"] for layer in report["layers"]] == [1, 2]
    assert list(report["layers"][0]) == ["layer", "rounding", "index_deviation", "heads"]
    for cell in cells(report):
        assert " ".join(cell) == (
            "head equal ties changed blocks_lost overlap_mean overlap_min overlap_min_position first_changed mass_lost "
            "flips histogram"
        )
        assert list(cell["mass_lost"]) == ["mean", "max", "max_position", "query_heads"]
        assert list(cell["histogram"]) == ["changed", "overlap_mean", "overlap_min", "mass_lost"]
        assert all(len(values) == len(report["buckets"]) for values in cell["histogram"].values())
    for run in ("candidate", "forced"):
        assert list(report["logits"][run]) == ["perplexity", "kld", "top1"]
        assert list(report["logits"][run]["kld"]) == ["mean", "median", "p99", "max", "max_position"]
    assert [list(layer) for layer in report["isolated"]] == [["layer", "heads"]] * 2
    costs = "overlap_mean worst_overlap mass_lost kld"
    assert " ".join(report["attribution"]["baseline"]) == costs
    (group,) = report["attribution"]["groups"]
    assert " ".join(group) == f"group types bytes reference_bytes {costs} returned"
    for query in report["worst"]:
        assert " ".join(query) == (
            "layer head query_head position mass_lost overlap text_before token text_after reference_blocks "
            "candidate_blocks lost gained"
        )
        assert all(list(block) == ["block", "score", "margin", "mass", "text"] for block in query["lost"])
        assert all(list(block) == ["block", "score", "text"] for block in query["gained"])


def test_the_schema_documents_every_key(tiny_gguf, tiny_q8_gguf, m3_check_selection):
    report = m3_check_selection(tiny_gguf, tiny_q8_gguf, *EXAMPLE, "--json", "--isolate", "--attribute").json
    assert report["worst"] and report["attribution"]["groups"]

    def keys(value):
        if isinstance(value, dict):
            yield from value
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from keys(part)

    groups, types = report["reference"]["types"], {"F32", "Q8_0"}  # names of tensor groups and types are values
    words = set(re.findall(r"\w+", report_json.__doc__))
    assert set(keys(report)) - words - set(groups) - types == set()


def test_the_numbers_agree_with_each_other(tiny_gguf, coarse_index, m3_check_selection):
    report = m3_check_selection(tiny_gguf, coarse_index, *LONG, "--json").json
    overall, queries = report["overall"], report["tested"]["queries"]
    assert queries == 700 - FIRST == sum(bucket["queries"] for bucket in report["buckets"])
    positions = [p for bucket in report["buckets"] for p in range(bucket["first"], bucket["last"] + 1)]
    assert positions == list(range(FIRST, 700))
    for name in ("equal", "ties", "changed", "blocks_lost"):
        assert overall[name] == sum(cell[name] for cell in cells(report)), name
    assert overall["equal"] + overall["ties"] + overall["changed"] == report["tested"]["lists"]
    weights = [bucket["queries"] for bucket in report["buckets"]]
    for cell in cells(report):
        histogram, mass = cell["histogram"], cell["mass_lost"]
        assert cell["equal"] + cell["ties"] + cell["changed"] == queries
        assert sum(histogram["changed"]) == cell["changed"]
        assert cell["overlap_mean"] == pytest.approx(np.average(histogram["overlap_mean"], weights=weights))
        assert cell["overlap_min"] == min(histogram["overlap_min"]) <= cell["overlap_mean"]
        assert FIRST <= cell["first_changed"] <= cell["overlap_min_position"] < 700
        # one block of three: 2 of 4, two of three: 1 of 5; the local one is always read
        assert cell["overlap_min"] in (0.5, 0.2)
        assert mass["mean"] == pytest.approx(np.average(histogram["mass_lost"], weights=weights))
        assert mass["mean"] == pytest.approx(np.mean([head["mean"] for head in mass["query_heads"]]))
        assert mass["mean"] == pytest.approx(sum(cell["flips"]["mass"]) / queries)
        assert mass["max"] == max(head["max"] for head in mass["query_heads"]) <= 1
        assert sum(cell["flips"]["counts"]) >= cell["blocks_lost"]
    assert overall["overlap_mean"] == pytest.approx(np.mean([cell["overlap_mean"] for cell in cells(report)]))
    assert overall["lowest"]["overlap"] == min(cell["overlap_min"] for cell in cells(report))
    assert overall["first_changed"] == min(cell["first_changed"] for cell in cells(report))
    flips, lost = overall["flips"], overall["mass_lost"]
    assert flips["counts"] == np.sum([cell["flips"]["counts"] for cell in cells(report)], axis=0).tolist()
    assert flips["near_ties"] == sum(flips["counts"][:3]) / sum(flips["counts"])
    assert lost["mean"] == pytest.approx(sum(flips["mass"]) / report["tested"]["lists"])
    assert lost["max"]["value"] == max(cell["mass_lost"]["max"] for cell in cells(report))
    logits = report["logits"]
    assert logits["buckets"][0]["first"] == 0 and logits["buckets"][1]["first"] == FIRST
    sizes = [bucket["last"] - bucket["first"] + 1 for bucket in logits["buckets"]]
    assert sum(sizes) == logits["positions"] == 700
    for run in ("candidate", "forced"):
        by_bucket = [bucket[f"{run}_kld"] for bucket in logits["buckets"]]
        assert logits[run]["kld"]["mean"] == pytest.approx(np.average(by_bucket, weights=sizes), abs=1e-15)
    assert report["memory"]["peak_bytes"] > 10e6 and report["seconds"] > 0


def test_the_worst_queries(tiny_gguf, coarse_index, m3_check_selection):
    report = m3_check_selection(tiny_gguf, coarse_index, *LONG, "--selection-only", "--json").json
    worst, model = report["worst"], report["model"]
    assert len(worst) == 10
    losses = [query["mass_lost"] for query in worst]
    assert losses == sorted(losses, reverse=True) and losses[0] == report["overall"]["mass_lost"]["max"]["value"]
    assert len({(q["layer"], q["head"], q["position"] // model["block_size"]) for q in worst}) == 10
    with Model(tiny_gguf) as opened:
        tokenizer = ChatTokenizer(opened.gguf.metadata)
    text = load_text(None).content
    ids = tokenizer.encode(text)[:700]
    for query in worst:
        ours, theirs = set(query["reference_blocks"]), set(query["candidate_blocks"])
        assert {block["block"] for block in query["lost"]} == ours - theirs
        assert {block["block"] for block in query["gained"]} == theirs - ours
        assert query["overlap"] == len(ours & theirs) / len(ours | theirs)
        assert query["query_head"] // 2 == query["head"]
        # This head loses at least what the heads of its list lose in the mean.
        assert query["mass_lost"] >= sum(block["mass"] for block in query["lost"]) - 1e-6
        assert min(block["score"] for block in query["lost"]) >= max(block["score"] for block in query["gained"])
        position = query["position"]
        assert query["token"] == tokenizer.decode([ids[position]])
        assert query["text_before"] == tokenizer.decode(ids[:position])[-80:]
        for block in (*query["lost"], *query["gained"]):
            start = tokenizer.decode(ids[block["block"] * 32 : block["block"] * 32 + 32])
            assert block["text"] == " ".join(start.split())[:80]


def test_the_text_report_is_short(tiny_gguf, coarse_index, m3_check_selection):
    run = m3_check_selection(tiny_gguf, coarse_index, *EXAMPLE, "--no-thresholds", "--isolate")
    lines = run.out.splitlines()
    assert lines[0].startswith("Selection changed: other blocks in ")
    assert len(lines) < 24 and "\x1b" not in run.out
    table = lines.index(next(line for line in lines if line.startswith("layer")))
    report = m3_check_selection(tiny_gguf, coarse_index, *EXAMPLE, "--no-thresholds", "--json", "--isolate").json
    assert lines[0] == report["verdict"]["text"] and lines[1] == report["verdict"]["evidence"][0]
    for i, (line, layer) in enumerate(zip(lines[table + 1 : table + 3], report["layers"], strict=True)):
        heads = layer["heads"]
        worst = min(heads, key=lambda head: head["overlap_mean"])
        query_heads = [head for cell in heads for head in cell["mass_lost"]["query_heads"]]
        loser = max(query_heads, key=lambda head: head["mean"])
        counts = np.sum([head["flips"]["counts"] for head in heads], axis=0)
        assert line.split() == [
            str(layer["layer"]),
            share(sum(head["overlap_mean"] for head in heads) / 2),
            f"{worst['head']}:",
            share(worst["overlap_mean"]),
            share(min(head["overlap_min"] for head in heads)),
            share(min(head["overlap_mean"] for head in report["isolated"][i]["heads"])),
            percent(sum(head["changed"] for head in heads) / (2 * (N - FIRST))),
            str(sum(head["ties"] for head in heads)),
            str(sum(head["blocks_lost"] for head in heads)),
            percent(counts[:3].sum() / counts.sum()),
            percent(np.mean([head["mean"] for head in query_heads])),
            f"{loser['head']}:",
            percent(loser["mean"]),
            str(min(head["first_changed"] for head in heads if head["first_changed"] is not None)),
        ]
    assert "of memory at the peak" in run.err.splitlines()[0]
    assert "peak memory" in run.err.splitlines()[-1]


def test_a_narrow_window_cuts_no_numbers_off(tiny_gguf, coarse_index, m3_check_selection, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    assert "…" not in m3_check_selection(tiny_gguf, coarse_index, *EXAMPLE).out


def test_every_tensor_belongs_to_a_group(tiny_gguf):
    with GGUF(tiny_gguf) as gguf:
        groups = {tensor.name: tensor_group(tensor.name) for tensor in gguf.tensors}
    assert "other" not in groups.values()
    assert groups["blk.1.indexer.k_norm.weight"] == "index" and groups["blk.1.attn_k_norm.weight"] == "norms"
    assert groups["blk.1.attn_output.weight"] == "attention" and groups["output_norm.weight"] == "norms"
    assert groups["blk.0.ffn_up.weight"] == "dense mlp" and groups["blk.1.ffn_up_exps.weight"] == "experts"
    assert groups["blk.1.ffn_up_shexp.weight"] == "shared experts" and groups["output.weight"] == "head"
    assert groups["blk.1.exp_probs_b.bias"] == groups["blk.1.ffn_gate_inp.weight"] == "router"
