"""m3-check-selection tells apart what changes a selection: files that differ from the reference in one thing."""

from dataclasses import replace

import numpy as np
import pytest

from m3_convert.text_sample import load_text, sample_text
from m3_runtime import Model
from m3_runtime.text import ChatTokenizer
from tiny_model import convert

N, FIRST = 400, 96
RUN = ("--context", N, "--threads", 1, "--json")


@pytest.fixture(scope="module")
def coarse(tiny_checkpoint, tmp_path_factory):
    """F32 but for index projections of 4 bits."""
    out = tmp_path_factory.mktemp("coarse") / "coarse.gguf"
    rule = "*.indexer.?_proj.weight=q4_0"
    return convert(tiny_checkpoint, out, "--type", "f32", "--rule", rule, "--allow-lossy-indexer")


@pytest.fixture(scope="module")
def rounded(tiny_checkpoint, tmp_path_factory):
    """All weights of 4 bits but for the indexer."""
    out = tmp_path_factory.mktemp("rounded") / "rounded.gguf"
    return convert(tiny_checkpoint, out, "--type", "q4_0")


@pytest.fixture(scope="module")
def both(tiny_checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("both") / "both.gguf"
    rule = "*.indexer.?_proj.weight=q4_0"
    return convert(tiny_checkpoint, out, "--type", "q4_0", "--rule", rule, "--allow-lossy-indexer")


def heads(layer):
    return [head["overlap_mean"] for head in layer["heads"]]


def test_index_projections_of_4_bits(tiny_gguf, coarse, m3_check_selection):
    report = m3_check_selection(tiny_gguf, coarse, *RUN, "--isolate", "--attribute").json
    verdict, logits = report["verdict"], report["logits"]
    assert verdict["cause"] == "index" and "because of the index projections." in verdict["text"]  # of no layer alone
    assert any("(Q4_0 for F32)" in sentence for sentence in verdict["evidence"])
    assert 0.05 < report["layers"][0]["index_deviation"]["keys"] < 0.2
    # Every layer's own tensors change the selection, in the first sparse layer as much as in the whole.
    assert all(overlap < 1 for layer in report["isolated"] for overlap in heads(layer))
    assert heads(report["isolated"][0]) == heads(report["layers"][0])
    # Nothing else differs: with the reference's blocks it is the reference.
    assert logits["forced"]["kld"]["mean"] == logits["forced"]["kld"]["max"] == 0 < logits["candidate"]["kld"]["mean"]
    assert logits["forced"]["top1"] == 1 and logits["selection"]["kld"] == logits["candidate"]["kld"]["mean"]
    (group,) = report["attribution"]["groups"]
    assert group["group"] == "index" and "Q4_0" in group["types"]
    assert (group["overlap_mean"], group["worst_overlap"], group["mass_lost"], group["kld"]) == (1, 1, 0, 0)
    assert "index" not in report["attribution"]["same"] and "experts" in report["attribution"]["same"]


def test_other_weights_of_4_bits(tiny_gguf, rounded, m3_check_selection):
    report = m3_check_selection(tiny_gguf, rounded, *RUN, "--isolate").json
    verdict, logits = report["verdict"], report["logits"]
    assert verdict["cause"] == "weights" and "the other weights" in verdict["text"]
    assert "The index projections are the reference's, value for value." in verdict["evidence"]
    # The indexer is untouched, so that no layer alone selects other blocks; together they do.
    assert {overlap for layer in report["isolated"] for overlap in heads(layer)} == {1.0}
    assert all(overlap < 0.98 for layer in report["layers"] for overlap in heads(layer))
    # The reference's blocks do not save it.
    free, forced = logits["candidate"], logits["forced"]
    assert forced["kld"]["mean"] > 0.8 * free["kld"]["mean"] > 0
    assert logits["selection"] == {
        "kld": free["kld"]["mean"] - forced["kld"]["mean"],
        "top1": free["top1"] - forced["top1"],
        "log_perplexity": pytest.approx(np.log(free["perplexity"]) - np.log(forced["perplexity"])),
    }


def test_attribution_names_the_group(tiny_checkpoint, tiny_gguf, m3_check_selection, tmp_path):
    rules = ("--rule=*_exps.weight=q4_0", "--rule=output.weight=q4_0")
    candidate = convert(tiny_checkpoint, tmp_path / "experts.gguf", "--type", "f32", *rules)
    report = m3_check_selection(tiny_gguf, candidate, *RUN, "--attribute").json
    experts, head = report["attribution"]["groups"]
    base = report["attribution"]["baseline"]
    assert (experts["group"], head["group"]) == ("experts", "head")
    assert set(report["attribution"]["same"]) == set(report["candidate"]["types"]) - {"experts", "head"}
    assert base["overlap_mean"] == report["overall"]["overlap_mean"] < 1
    assert base["kld"] == report["logits"]["candidate"]["kld"]["mean"]
    # With the reference's experts nothing is left but the head, which selects nothing.
    assert (experts["overlap_mean"], experts["worst_overlap"], experts["mass_lost"]) == (1, 1, 0)
    assert 0 < experts["kld"] < base["kld"]
    same = ("overlap_mean", "worst_overlap", "mass_lost")
    assert [head[name] for name in same] == [base[name] for name in same] and 0 < head["kld"] != base["kld"]
    assert experts["types"] == {"Q4_0": experts["bytes"]} and experts["reference_bytes"] == experts["bytes"] * 32 / 4.5
    assert "the other weights, above all the experts, move" in report["verdict"]["text"]
    twice = ("--group", "experts") * 2
    out = m3_check_selection(tiny_gguf, candidate, *RUN[:-1], "--attribute", *twice).out.splitlines()
    table = out.index(next(line for line in out if line.startswith("restored")))
    assert out[table + 2].startswith("experts") and "1.0000      1.0000" in out[table + 2]
    assert out[table + 3 :] == []


def test_a_group_that_the_model_lacks(make_folder, small, m3_check_selection):
    folder = make_folder(replace(small, dense=0))
    run = m3_check_selection(folder, folder, *RUN, "--attribute", "--group", "dense mlp")
    assert run.code == 2 and f"--group dense mlp: {folder} has no such tensors" in run.error


def test_both_are_told_apart(tiny_gguf, both, m3_check_selection):
    report = m3_check_selection(tiny_gguf, both, *RUN).json
    assert report["verdict"]["cause"] == "index and weights"
    report = m3_check_selection(tiny_gguf, both, *RUN, "--attribute", "--group", "index").json
    (group,) = report["attribution"]["groups"]
    base = report["attribution"]["baseline"]
    returned = (group["overlap_mean"] - base["overlap_mean"]) / (1 - base["overlap_mean"])
    expected = "index" if returned >= 0.75 else "weights" if returned <= 0.25 else "index and weights"
    assert report["verdict"]["cause"] == expected and 0 < returned < 1


def permuted_head(source, target, layer, head):
    """A copy whose index head `head` of `layer` has its query rows in another order."""
    content = bytearray(source.read_bytes())
    with Model(source) as model:
        place = next(t for t in model.gguf.tensors if t.name == f"blk.{layer}.indexer.q_proj.weight")
        n_heads = model.hparams.n_index_head
    rows = np.frombuffer(content, np.float32, place.n_bytes // 4, place.offset).reshape(n_heads, -1, place.ne[0])
    rows[head] = np.roll(rows[head], 1, axis=0)
    target.write_bytes(content)
    return target


def test_one_bad_head_is_named(tiny_gguf, m3_check_selection, tmp_path):
    candidate = permuted_head(tiny_gguf, tmp_path / "head.gguf", layer=1, head=1)
    report = m3_check_selection(tiny_gguf, candidate, *RUN, "--isolate", "--no-thresholds", "--min-overlap", 0.9).json
    worst, lost = report["overall"]["worst"], report["overall"]["mass_lost"]["worst"]
    assert (worst["layer"], worst["head"]) == (lost["layer"], lost["head"]) == (1, 1)
    assert [[head["changed"] > 0 for head in layer["heads"]] for layer in report["isolated"]] == [
        [False, True],
        [False, False],
    ]
    deviations = [layer["index_deviation"] for layer in report["layers"]]
    assert deviations[0]["queries"][0] == deviations[0]["keys"] == deviations[1]["keys"] == 0
    assert deviations[1]["queries"] == [0, 0] and deviations[0]["queries"][1] > 1
    assert "because of the index projections (those of layer 1, head 1 alone)" in report["verdict"]["text"]
    assert report["verdict"]["failed"] == ["min_overlap"]


def test_caches_are_causes(tiny_gguf, m3_check_selection):
    report = m3_check_selection(tiny_gguf, tiny_gguf, *RUN, "--candidate-index-type", "q4_0", "--isolate").json
    assert report["verdict"]["cause"] == "index cache"
    assert report["logits"]["forced"]["kld"]["max"] == 0 < report["logits"]["candidate"]["kld"]["max"]
    assert all(overlap < 1 for layer in report["isolated"] for overlap in heads(layer))
    report = m3_check_selection(tiny_gguf, tiny_gguf, *RUN, "--candidate-kv-type", "q4_0", "--isolate").json
    assert report["verdict"]["cause"] == "K/V cache"
    assert {overlap for layer in report["isolated"] for overlap in heads(layer)} == {1.0}
    # The first sparse layer sees hidden states that a dense layer with that cache has moved.
    assert heads(report["layers"][0])[0] < 1


def test_dense(tiny_gguf, m3_check_selection):
    run = m3_check_selection(tiny_gguf, tiny_gguf, *RUN, "--candidate-attention", "dense", "--max-kld", 1e-9)
    report = run.json
    assert run.code == 1 and report["verdict"]["failed"] == ["max_kld"]
    assert report["settings"]["candidate"]["attention"] == "dense" and report["verdict"]["cause"] == "dense"
    logits = report["logits"]
    # Up to position 95 dense and sparse are the same; with the reference's blocks it is the reference.
    assert logits["buckets"][0]["candidate_kld"] == 0 < logits["buckets"][1]["candidate_kld"]
    assert logits["forced"]["kld"]["max"] == 0 and logits["forced"]["top1"] == 1
    overall = report["overall"]
    assert overall["overlap_mean"] is None and overall["worst"] is None and overall["mass_lost"]["mean"] == 0
    assert report["worst"] == [] and report["tested"] == {"queries": N - FIRST, "first_position": FIRST, "lists": 0}
    assert [layer["layer"] for layer in report["layers"]] == [1, 2]
    assert {head["overlap_mean"] for layer in report["layers"] for head in layer["heads"]} == {None}
    with Model(tiny_gguf) as model:
        kinds = {}
        ids = sample_text(load_text(None), ChatTokenizer(model.gguf.metadata), N).ids
        for attention in ("sparse", "dense"):
            with model.session(context=N, attention=attention, threads=1) as session:
                kinds[attention] = session.eval(ids, all_logits=True)
    same = (kinds["sparse"].argmax(axis=1) == kinds["dense"].argmax(axis=1)).mean()
    assert logits["candidate"]["top1"] == same
    out = m3_check_selection(tiny_gguf, tiny_gguf, *RUN[:-1], "--candidate-attention", "dense").out
    assert out.startswith("Dense: the candidate reads every visible block") and "\nlayer" not in out


def test_without_dense_layers_every_run_begins_sparse(make_folder, small, m3_convert, m3_check_selection, tmp_path):
    folder = make_folder(replace(small, dense=0))
    assert m3_convert(folder, tmp_path / "q8.gguf", "--type", "q8_0").code == 0
    options = (*RUN[2:], "--context", 120, "--isolate", "--attribute", "--group", "index", "--group", "experts")
    report = m3_check_selection(folder, tmp_path / "q8.gguf", *options).json
    assert [layer["layer"] for layer in report["layers"]] == [0, 1, 2] and report["tested"]["first_position"] == 48
    # The first layer reads embeddings: what enters it is the candidate's own in each run.
    assert heads(report["isolated"][0]) == heads(report["layers"][0])
    assert report["logits"]["forced"]["kld"]["mean"] > 0
    assert report["attribution"]["same"] == ["index"]
    equal = m3_check_selection(folder, folder, *options).json
    assert equal["verdict"]["cause"] == "equal" and equal["overall"]["overlap_mean"] == 1
