"""Equal models agree everywhere; what differs is found where it is."""

import hashlib
from dataclasses import replace

import pytest

from convert.check.small_check import EXAMPLE, FIRST, LISTS, LONG, N, assert_equal_logits, assert_exactly_equal, patched


@pytest.mark.parametrize("fixture", ["tiny_gguf", "tiny_q8_gguf", "tiny_checkpoint"])
def test_a_model_equals_itself(request, m3_check_selection, fixture):
    path = request.getfixturevalue(fixture)
    thresholds = ("--min-overlap", 1, "--max-mass-lost", 0, "--max-kld", 0)
    run = m3_check_selection(path, path, *EXAMPLE, "--json", "--isolate", "--attribute", *thresholds)
    assert run.code == 0
    assert_exactly_equal(run.json, 2, 2, N - FIRST)
    assert_equal_logits(run.json)
    verdict = run.json["verdict"]
    assert (verdict["status"], verdict["cause"], verdict["cost"], verdict["failed"]) == ("passed", "equal", "none", [])
    for layer in run.json["isolated"]:
        for head in layer["heads"]:
            assert (head["overlap_mean"], head["overlap_min"], head["mass_lost"]) == (1.0, 1.0, 0.0)
    attribution = run.json["attribution"]
    assert attribution["groups"] == [] and set(attribution["same"]) == set(run.json["candidate"]["types"])
    for layer in run.json["layers"]:
        assert layer["index_deviation"] == {"queries": [0.0, 0.0], "keys": 0.0}


def test_exact_ties_still_give_equal_sets(make_folder, small, m3_check_selection):
    folder = make_folder(replace(small, tie=True))
    run = m3_check_selection(folder, folder, *EXAMPLE, "--json")
    assert_exactly_equal(run.json, 2, 2, N - 48)
    assert_equal_logits(run.json)


@pytest.mark.parametrize("mxfp8", [False, True])
def test_a_folder_equals_the_files_made_from_it(make_folder, small, m3_convert, m3_check_selection, tmp_path, mxfp8):
    folder = make_folder(replace(small, mxfp8=mxfp8, index_dim=32))
    for type_ in ("bf16", "f32"):
        file = tmp_path / f"{type_}.gguf"
        assert m3_convert(folder, file, "--type", type_).code == 0
        run = m3_check_selection(folder, file, *EXAMPLE, "--json")
        assert run.json["candidate"]["types"]["experts"].keys() == {type_.upper()}
        if type_ == "bf16":
            assert_exactly_equal(run.json, 2, 2, N - 48)
            assert_equal_logits(run.json)
        else:  # the same values, but other kernels multiply them, and those may round in another way
            assert run.json["overall"]["changed"] == 0


def test_a_folder_is_evaluated_as_the_file_that_auto_writes(tiny_checkpoint, m3_convert, m3_check_selection, tmp_path):
    file = tmp_path / "auto.gguf"
    m3_convert(tiny_checkpoint, file)
    report = m3_check_selection(tiny_checkpoint, file, *LISTS, "--json").json
    sides = report["reference"], report["candidate"]
    assert sides[0]["types"] == sides[1]["types"]
    assert sides[0]["types"]["experts"].keys() == {"BF16"} and sides[0]["types"]["index"].keys() == {"F32"}
    shards = sum(path.stat().st_size for path in tiny_checkpoint.glob("*.safetensors"))
    assert [side["bytes"] for side in sides] == [shards, file.stat().st_size]
    assert [side["kind"] for side in sides] == ["checkpoint", "gguf"]
    assert [side["path"] for side in sides] == [str(tiny_checkpoint), str(file)]
    described = b"".join((tiny_checkpoint / n).read_bytes() for n in ("config.json", "model.safetensors.index.json"))
    assert [side["sha256"] for side in sides] == [hashlib.sha256(x).hexdigest() for x in (described, file.read_bytes())]
    assert [side["hash_of"] for side in sides] == ["config.json and model.safetensors.index.json", "the file"]


def test_index_projections_of_4_bits_are_reported(tiny_gguf, coarse_index, m3_check_selection):
    run = m3_check_selection(tiny_gguf, coarse_index, *LISTS, "--json")
    assert run.code == 1 and run.json["verdict"]["failed"] == ["max_mass_lost"]
    run = m3_check_selection(tiny_gguf, coarse_index, *LISTS, "--json", "--no-thresholds")
    assert run.code == 0 and run.json["verdict"]["status"] == "reported"
    assert "Selection changed" in run.json["verdict"]["text"]
    for layer in run.json["layers"]:
        assert sum(head["changed"] for head in layer["heads"]) > 0
        assert max(head["overlap_mean"] for head in layer["heads"]) < 1


def test_one_head_with_other_projections_is_named(tiny_gguf, m3_check_selection, tmp_path):
    """A single index head of the last layer, whose rows are negated: nothing else may differ."""

    def negate(name, values):
        if name == "blk.2.indexer.q_proj.weight":
            values.reshape(2, -1)[1] *= -1

    candidate = patched(tiny_gguf, tmp_path / "head.gguf", negate)
    run = m3_check_selection(tiny_gguf, candidate, *LISTS, "--json", "--min-overlap", 0.9)
    found = [[head["changed"] for head in layer["heads"]] for layer in run.json["layers"]]
    assert found[0] == [0, 0] and found[1][0] == 0 and found[1][1] > 0
    worst = run.json["overall"]["worst"]
    assert (worst["layer"], worst["head"]) == (2, 1)
    assert run.code == 1
    assert run.error.startswith(f"m3-check-selection: layer 2, head 1: mean overlap {worst['overlap_mean']:.2f}"[:60])


def test_differences_between_tied_blocks_are_counted_apart(make_folder, small, m3_check_selection):
    """All scores of the reference are 0, so that every other list of the candidate is a tie."""
    reference = make_folder(replace(small, tie=True), name="tied")
    candidate = make_folder(small, name="candidate")
    run = m3_check_selection(reference, candidate, *LISTS, "--json", "--min-overlap", 1)
    first = run.json["layers"][0]["heads"]
    assert [head["changed"] for head in first] == [0, 0]
    assert all(head["ties"] > 0 and head["equal"] + head["ties"] == N - 48 for head in first)
    assert all(head["overlap_mean"] == 1.0 and head["blocks_lost"] == 0 for head in first)
    # The other way round the reference's scores differ, so that the same differences are real.
    other = m3_check_selection(candidate, reference, *LISTS, "--json").json["layers"][0]["heads"]
    assert [head["equal"] for head in other] == [head["equal"] for head in first]
    assert all(head["changed"] > 0 for head in other)


def test_quantized_weights_are_reported(tiny_checkpoint, tiny_q8_gguf, m3_check_selection):
    report = m3_check_selection(tiny_checkpoint, tiny_q8_gguf, *LONG, "--selection-only", "--json").json
    assert 0 < report["overall"]["changed"] < report["tested"]["lists"]
    assert report["candidate"]["types"]["experts"].keys() == {"Q8_0"}
