"""m3-check-selection on small models, from the command line to the report."""

import hashlib
import shutil
import signal
import subprocess
import sys
from dataclasses import fields, replace
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from m3_convert import check, check_cli, check_runs, comparable, layer_walk, walk_progress, walker
from m3_convert.check_runs import CheckRuns
from m3_convert.comparison import LayerComparison
from m3_convert.layered_model import open_layered, tensor_group
from m3_convert.mixed_model import MixedModel
from m3_convert.notation import percent, share
from m3_convert.text_sample import load_text, sample_text
from m3_runtime import GGUF, InputError, Model, NothingTestedError, Session
from m3_runtime.engine import Hparams
from m3_runtime.text import ChatTokenizer
from make_checkpoint import CheckpointSpec, make_checkpoint

NOTHING_TESTED = 3
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


@pytest.fixture(scope="module")
def coarse_index(tiny_gguf, tmp_path_factory):
    """The tiny model with index projections of 4 bits."""
    return patched(tiny_gguf, tmp_path_factory.mktemp("coarse") / "coarse-index.gguf", round_to_4_bits)


def cells(report):
    return [head for layer in report["layers"] for head in layer["heads"]]


# ------------------------------------------------------------------------------------------------ what must be equal


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


# ------------------------------------------------------------------------------------------------ what must be found


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


# ------------------------------------------------------------------------------------------------ thresholds


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


# ------------------------------------------------------------------------------------------------ was anything tested?


def test_without_a_choice_nothing_is_tested(tiny_gguf, coarse_index, m3_check_selection):
    run = m3_check_selection(tiny_gguf, coarse_index, "--context", FIRST)
    assert (run.code, run.out) == (NOTHING_TESTED, "")
    assert "no query had a choice of blocks: 96 tokens" in run.error and "3 * 32 = 96 tokens" in run.error


def test_one_token_more_tests_one_query(tiny_gguf, coarse_index, m3_check_selection):
    run = m3_check_selection(tiny_gguf, coarse_index, "--context", FIRST + 1, "--json", "--no-thresholds")
    assert run.code == 0
    assert run.json["tested"] == {"queries": 1, "first_position": FIRST, "lists": 4}
    assert run.json["buckets"] == [{"first": FIRST, "last": FIRST, "queries": 1}]


def test_a_short_text_tests_nothing(tiny_gguf, m3_check_selection, tmp_path):
    for content in ("", "a few words"):
        (tmp_path / "text").write_text(content)
        run = m3_check_selection(tiny_gguf, tiny_gguf, "--text", tmp_path / "text", "--min-overlap", 0)
        assert run.code == NOTHING_TESTED, content


def test_only_local_blocks_test_nothing(make_folder, small, m3_check_selection):
    folder = make_folder(replace(small, local=3, top_k=3))
    run = m3_check_selection(folder, folder, *EXAMPLE)
    assert run.code == NOTHING_TESTED and "all 3 blocks that a query reads are local ones" in run.error


def test_a_model_without_sparse_layers_tests_nothing(tiny_gguf):
    with Model(tiny_gguf) as model:
        dense = replace(model.hparams, n_dense_layer=model.hparams.n_layer)
    with pytest.raises(NothingTestedError, match="all 3 layers of the model are dense"):
        comparable.check_choice(dense, 4096)


# ------------------------------------------------------------------------------------------------ text


def test_the_text_of_the_report(tiny_gguf, m3_check_selection, tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. " * 8, encoding="utf-8")
    with Model(tiny_gguf) as model:
        n = len(ChatTokenizer(model.gguf.metadata).encode(text.read_text(encoding="utf-8")))
    assert FIRST < n < 500
    raw = text.read_bytes()
    expected = {"name": str(text), "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    run = m3_check_selection(tiny_gguf, tiny_gguf, "--text", text, "--threads", 1, "--json")
    assert run.json["text"] == {**expected, "tokens": n, "whole": True, "wanted": None}
    run = m3_check_selection(tiny_gguf, tiny_gguf, "--text", text, "--context", n - 1, "--threads", 1, "--json")
    assert run.json["text"] == {**expected, "tokens": n - 1, "whole": False, "wanted": n - 1}
    run = m3_check_selection(tiny_gguf, tiny_gguf, "--text", text, "--context", 4000, "--threads", 1)
    assert f"all {n} tokens (fewer than the 4,000 asked for)" in run.out


def test_the_built_in_text(tiny_gguf, m3_check_selection):
    raw = files("m3_convert").joinpath("text.txt").read_bytes()
    report = m3_check_selection(tiny_gguf, tiny_gguf, *EXAMPLE, "--json").json
    assert report["text"]["name"] == "built-in text"
    assert report["text"]["sha256"] == hashlib.sha256(raw).hexdigest()


def test_a_text_that_is_not_utf_8(tiny_gguf, m3_check_selection, tmp_path):
    (tmp_path / "latin").write_bytes(b"abc\xe9 " + b"x" * 5000)
    run = m3_check_selection(tiny_gguf, tiny_gguf, "--text", tmp_path / "latin")
    assert (run.code, run.out) == (2, "")
    assert "expected UTF-8, found byte 0xe9 at offset 3" in run.error
    run = m3_check_selection(tiny_gguf, tiny_gguf, "--text", tmp_path / "absent")
    assert run.code == 2 and "absent: the text cannot be read: No such file" in run.error


def test_no_more_text_is_tokenized_than_needed(tiny_gguf):
    with Model(tiny_gguf) as model:
        tokenizer = ChatTokenizer(model.gguf.metadata)
    text = load_text(None)
    sample = sample_text(text, tokenizer, 50)
    assert sample.ids == tokenizer.encode(text.content)[:50] and not sample.whole
    seen = []

    def encode(part):  # one token for 100 characters
        seen.append(len(part))
        return list(range(len(part) // 100))

    found = sample_text(replace(text, content="x" * 10000), SimpleNamespace(encode=encode), 10)
    assert found.ids == list(range(10)) and not found.whole
    assert seen == [320, 1280]
    whole = sample_text(replace(text, content="x" * 900), SimpleNamespace(encode=encode), 10)
    assert whole.ids == list(range(9)) and whole.whole


# ------------------------------------------------------------------------------------------------ refused


def side(hparams, tokens=("a", "b"), name="model"):
    metadata = {} if tokens is None else {"tokenizer.ggml.tokens": list(tokens)}
    return SimpleNamespace(name=name, hparams=hparams, model=SimpleNamespace(gguf=SimpleNamespace(metadata=metadata)))


@pytest.fixture
def hparams():
    return Hparams(**{field.name: 4 for field in fields(Hparams)})


@pytest.mark.parametrize("name", [f.name for f in fields(Hparams) if f.name != "context_train"])
def test_other_dimensions_are_refused_by_name(hparams, name):
    with pytest.raises(InputError, match=rf"^B cannot be compared with A: {name} is 5, expected 4$"):
        comparable.check_comparable(side(hparams, name="A"), side(replace(hparams, **{name: 5}), name="B"))


def test_another_trained_context_is_no_other_model(hparams):
    comparable.check_comparable(side(hparams), side(replace(hparams, context_train=5)))


def test_another_vocabulary_is_refused(hparams):
    with pytest.raises(InputError, match=r"the vocabularies differ: token 1 is 'c', expected 'b'"):
        comparable.check_comparable(side(hparams), side(hparams, tokens=("a", "c")))
    with pytest.raises(InputError, match=r"B: has no token list"):
        comparable.check_comparable(side(hparams), side(hparams, tokens=None, name="B"))


def test_other_models_are_refused(tiny_gguf, make_folder, small, m3_check_selection):
    run = m3_check_selection(tiny_gguf, make_folder(), *EXAMPLE)
    assert (run.code, run.out) == (2, "") and "cannot be compared with" in run.error


def test_a_renamed_token_is_refused(tiny_gguf, m3_check_selection, tmp_path):
    content = tiny_gguf.read_bytes()
    token = b"\x05\0\0\0\0\0\0\0]~!b["
    assert content.count(token) == 1
    (tmp_path / "other.gguf").write_bytes(content.replace(token, token.replace(b"!", b"?")))
    run = m3_check_selection(tiny_gguf, tmp_path / "other.gguf", *EXAMPLE)
    assert run.code == 2 and "is ']~?b[', expected ']~!b['" in run.error


def test_sides_that_are_no_models(tiny_gguf, m3_check_selection, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "noise.gguf").write_bytes(b"not a GGUF file at all, but long enough")
    (tmp_path / "half.gguf").write_bytes(tiny_gguf.read_bytes()[:-4000])
    for name, message in (
        ("absent", "expected a checkpoint folder, a GGUF file or an id on the Hub (owner/name), found nothing"),
        ("empty", "config.json"),
        ("noise.gguf", "not a GGUF file"),
        ("half.gguf", "truncated"),
    ):
        run = m3_check_selection(tiny_gguf, tmp_path / name, *EXAMPLE)
        assert (run.code, run.out) == (2, ""), name
        assert message in run.error and str(tmp_path / name) in run.error


def test_a_context_beyond_the_trained_one(tiny_gguf, m3_check_selection):
    run = m3_check_selection(tiny_gguf, tiny_gguf, "--context", 4097)
    assert run.code == 2 and "--context is 4097, the model was trained for 4096 tokens" in run.error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "0"], "--context"),
        (["--threads", "-1"], "--threads"),
        (["--kv-type", "q5_1"], "--kv-type is 'q5_1', expected one of f32, f16, bf16, q8_0, q4_0"),
        (["--index-type", "int8"], "--index-type is 'int8', expected one of f32, f16, bf16, q8_0, q4_0"),
        (["--candidate-kv-type", "q5_1"], "--candidate-kv-type is 'q5_1'"),
        (["--candidate-index-type", "q5_1"], "--candidate-index-type is 'q5_1'"),
        (["--candidate-attention", "full"], "--candidate-attention is 'full', expected one of sparse, dense"),
        (["--isa", "mmx"], "isa is 'mmx'"),
        (["--attribute", "--group", "pumps"], "--group is 'pumps', expected one of index, norms, router, experts"),
        (["--group", "experts"], "--group is for --attribute"),
        (["--attribute", "--group", "other"], "--group is 'other'"),
        (["--selection-only", "--max-kld", "1"], "--max-kld judges the logits"),
        (["--candidate-attention", "dense", "--isolate"], "--isolate is about the selection"),
        (["--candidate-attention", "dense", "--attribute"], "--attribute is about the selection"),
        (["--candidate-attention", "dense", "--selection-only"], "--selection-only is about the selection"),
        (["--candidate-attention", "dense", "--min-overlap", "0"], "--min-overlap is about the selection"),
        (["--candidate-attention", "dense", "--max-mass-lost", "0"], "--max-mass-lost is about the selection"),
        (["a third model"], "a third model"),
    ],
)
def test_wrong_arguments(tiny_gguf, m3_check_selection, arguments, message):
    run = m3_check_selection(tiny_gguf, tiny_gguf, *arguments)
    assert (run.code, run.out) == (2, "")
    assert len(run.err.splitlines()) == 1 and message in run.err


def test_one_model_is_not_enough(tiny_gguf, m3_check_selection):
    run = m3_check_selection(tiny_gguf)
    assert run.code == 2 and "CANDIDATE" in run.error


# ------------------------------------------------------------------------------------------------ broken weights


@pytest.mark.parametrize("broken", ["blk.1.attn_q.weight", "blk.2.ffn_down_exps.weight", "blk.0.ffn_norm.weight"])
def test_nan_is_an_error_with_file_and_layer(tiny_gguf, m3_check_selection, tmp_path, broken):
    def spoil(name, values):
        if name == broken:
            values[:] = np.nan

    candidate = patched(tiny_gguf, tmp_path / "nan.gguf", spoil)
    layer = broken.split(".")[1]
    for pair in ((tiny_gguf, candidate), (candidate, tiny_gguf)):
        run = m3_check_selection(*pair, *EXAMPLE)
        assert (run.code, run.out) == (2, "")
        assert run.error.startswith(f"m3-check-selection: {candidate}: layer {layer}: ")


def test_nan_in_a_folder_is_an_error_with_its_tensor(make_folder, m3_check_selection):
    name = "language_model.model.layers.2.self_attn.v_proj.weight"

    def spoil(tensors):
        tensors[name] = replace(tensors[name], data=b"\xff\x7f" + tensors[name].data[2:])

    folder = make_folder(tensors=spoil)
    run = m3_check_selection(folder, folder, *EXAMPLE)
    assert (run.code, run.out) == (2, "")
    assert run.error.startswith(f"m3-check-selection: {folder}: blk.2.attn_v.weight") and "NaN" in run.error


# ------------------------------------------------------------------------------------------------ the walk


@pytest.mark.parametrize("fixture", ["tiny_gguf", "tiny_checkpoint"])
def test_layer_by_layer_equals_the_whole_model(request, m3_convert, monkeypatch, tmp_path, fixture):
    """Block lists, and with them all that led to them, are those of one evaluation of the whole model."""
    path = request.getfixturevalue(fixture)
    file = path
    if path.is_dir():
        file = tmp_path / "auto.gguf"
        m3_convert(path, file)
    seen = []
    add = LayerComparison.add

    def record(self, rows, lists):
        seen.append((rows, lists))
        return add(self, rows, lists)

    monkeypatch.setattr(LayerComparison, "add", record)
    n = walker.CHUNK + 130  # not a whole number of chunks, nor of blocks
    ids = np.random.default_rng(1).integers(0, 900, n).astype(np.int32)
    options = walker.WalkOptions(threads=1)
    with open_layered(path) as reference, open_layered(path) as candidate:
        layer_walk.walk(CheckRuns(reference, candidate, options, options, logits=False), ids)
    with (
        Model(file) as model,
        model.session(context=n, record=("blocks", "scores", "mass"), threads=1) as session,
    ):
        session.forward([(0, ids)], output="hidden")
        for i, layer in enumerate((1, 2)):
            chunks = seen[2 * i : 2 * i + 2]
            whole = session.selected_blocks(layer)[FIRST:]
            np.testing.assert_array_equal(np.concatenate([rows.lists for rows, _ in chunks]), whole)
            np.testing.assert_array_equal(np.concatenate([lists for _, lists in chunks]), whole)
            for name, found in (("scores", session.block_scores(layer)), ("mass", session.attention_mass(layer))):
                parts = np.concatenate([getattr(rows, name) for rows, _ in chunks])
                np.testing.assert_array_equal(parts, found[FIRST:], err_msg=name)


def test_all_memory_of_a_layer_is_let_go(tiny_gguf, tiny_checkpoint):
    for path in (tiny_gguf, tiny_checkpoint):
        with open_layered(path) as model:
            sizes = []
            with model.bound(0, sizes.append), model.model.session(layers=(0, 1)) as session:
                session.forward([(0, [1, 2, 3])], output="hidden")
            assert sum(sizes) == model.layer_bytes(0)
            with (
                model.model.session(layers=(0, 1)) as session,
                pytest.raises(InputError, match=r"token_embd"),
            ):
                session.forward([(0, [1, 2, 3])], output="hidden")


PEAK = """
import sys
from pathlib import Path
from m3_runtime import command
from m3_convert.check_cli import NAME, app
try:
    command.run(app, NAME, sys.argv[1:])
except SystemExit as exit_:
    assert exit_.code == 0, exit_.code
status = Path("/proc/self/status").read_text()
print([line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")][0], file=sys.stderr)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from /proc")
def test_peak_memory_does_not_grow_with_the_layers(m3_convert, tmp_path):
    """Layers of 6 MB on both sides: one of them in memory at a time, whether they are read or mapped."""
    peaks = []
    for layers in (2, 6):
        folder, file = tmp_path / f"{layers}", tmp_path / f"{layers}.gguf"
        spec = CheckpointSpec(
            layers=layers, dense=1, hidden=256, heads=2, kv_heads=1, head_dim=32, rotary=16, index_dim=32, experts=16,
            top=2, inter=256, shared_inter=256, dense_inter=64, vocab=512, block=16, top_k=2, vision=False,
        )  # fmt: skip
        make_checkpoint(folder, spec)
        assert m3_convert(folder, file).code == 0
        command = [sys.executable, "-c", PEAK, str(folder), str(file), "--context", "40", "--threads", "1"]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(int(run.stderr.splitlines()[-1]) * 1024)
    assert peaks[1] - peaks[0] < 10e6  # four layers more are 25 MB on each side


def test_the_estimate_names_what_is_needed(tiny_gguf, tiny_checkpoint, monkeypatch):
    options, n = walker.WalkOptions(), 4096

    def estimate(reference, candidate, **more):
        return CheckRuns(reference, candidate, options, options, **more).memory(n)

    with open_layered(tiny_gguf) as file, open_layered(tiny_checkpoint) as folder:
        h = file.hparams
        state = n * h.n_embd * 4
        session = file.model.memory(context=n, layers=(1, 1), chunk=512, record=("scores", "mass")).total
        mapped = estimate(file, file, logits=False)
        assert mapped.mapped == max(file.layer_bytes(layer) for layer in range(3))
        assert 2 * state + session < mapped.own < 3 * (state + session)
        owned = estimate(folder, folder, logits=False)
        assert owned.mapped == 0
        weights = max(folder.layer_bytes(layer) for layer in range(3))
        assert mapped.own < owned.own <= mapped.own + weights
        mixed = estimate(file, folder, logits=False)
        assert mapped.own < mixed.own <= owned.own and mixed.mapped == mapped.mapped
        # The forced run has a state; the head of both sides is bound at once.
        forced = estimate(file, file)
        assert forced.mapped >= 2 * file.layer_bytes(3)
        with monkeypatch.context() as patch:
            patch.setattr(CheckRuns, "forced", property(lambda _: False))
            lists = n * h.n_index_head * h.top_k * 4
            assert forced.own - estimate(file, file).own == state + lists
        with MixedModel(file, folder, "index") as restored:
            assert estimate(file, file, groups=[restored]).own >= forced.own + state


def test_memory_is_checked_before_the_start(tiny_gguf, m3_check_selection, monkeypatch):
    monkeypatch.setattr(check.memory, "session_room", lambda: 10**6)
    run = m3_check_selection(tiny_gguf, tiny_gguf, *EXAMPLE)
    assert (run.code, run.out) == (4, "")
    assert "not enough memory: the check takes" in run.error and "1.0 MB are free" in run.error


# ------------------------------------------------------------------------------------------------ settings


def test_threads_and_instruction_sets_do_not_matter(tiny_gguf, tiny_q8_gguf, m3_check_selection):
    runs = [m3_check_selection(tiny_gguf, tiny_q8_gguf, "--context", N, "--json", "--threads", t) for t in (1, 2)]
    for part in ("overall", "layers", "logits", "worst"):
        assert runs[0].json[part] == runs[1].json[part], part
    assert [run.json["settings"]["threads"] for run in runs] == [1, 2]
    scalar = m3_check_selection(tiny_gguf, tiny_gguf, *EXAMPLE, "--json", "--isa", "scalar").json
    assert scalar["settings"]["isa"] == "scalar"
    assert_exactly_equal(scalar, 2, 2, N - FIRST)


def test_chunks_do_not_matter(tiny_gguf, tiny_q8_gguf, m3_check_selection, monkeypatch):
    command = (tiny_gguf, tiny_q8_gguf, *EXAMPLE, "--json", "--isolate", "--attribute", "--group", "experts")
    whole = m3_check_selection(*command).json
    monkeypatch.setattr(walker, "CHUNK", 37)
    monkeypatch.setattr(check_runs, "HEAD_LOGITS", 5 * 1024)
    parts = m3_check_selection(*command).json
    for part in ("overall", "layers", "logits", "isolated", "attribution", "worst"):
        assert parts[part] == whole[part], part


def test_cache_types_reach_both_models(tiny_gguf, m3_check_selection, monkeypatch):
    seen = []
    forward = Session.forward

    def spy(self, *arguments, **options):
        seen.append(self)
        return forward(self, *arguments, **options)

    opened = []
    session = Model.session
    monkeypatch.setattr(Session, "forward", spy)
    monkeypatch.setattr(Model, "session", lambda self, **options: opened.append(options) or session(self, **options))
    types = ("--kv-type", "BF16", "--index-type", "f16", "--candidate-kv-type", "q8_0")
    run = m3_check_selection(tiny_gguf, tiny_gguf, *LISTS, "--json", *types)
    settings = run.json["settings"]
    assert settings["reference"] == {"attention": "sparse", "kv_type": "bf16", "index_type": "f16"}
    assert settings["candidate"] == {"attention": "sparse", "kv_type": "q8_0", "index_type": "f16"}
    assert len(opened) == 2 * 3 == len(seen)
    assert {o["index_type"] for o in opened} == {"f16"}
    assert [(o["layers"], o["kv_type"]) for o in opened] == [
        ((layer, 1), type_) for layer in range(3) for type_ in ("q8_0", "bf16")
    ]


# ------------------------------------------------------------------------------------------------ report


def test_the_schema(tiny_gguf, coarse_index, m3_check_selection):
    report = m3_check_selection(tiny_gguf, coarse_index, *EXAMPLE, "--json", "--isolate", "--attribute").json
    assert " ".join(report) == (
        "schema program verdict thresholds reference candidate model text settings tested overall buckets layers "
        "logits isolated attribution worst not_tested memory seconds"
    )
    keys = {
        "schema": "name version",
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
    assert " ".join(group) == f"group types bytes reference_bytes {costs}"
    for query in report["worst"]:
        assert " ".join(query) == (
            "layer head query_head position mass_lost overlap text_before token text_after reference_blocks "
            "candidate_blocks lost gained"
        )
        assert all(list(block) == ["block", "score", "margin", "mass", "text"] for block in query["lost"])
        assert all(list(block) == ["block", "score", "text"] for block in query["gained"])


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


def test_help(m3_check_selection):
    run = m3_check_selection("--help")
    assert run.code == 0
    for part in (
        "REFERENCE",
        "CANDIDATE",
        "--text",
        "--context",
        "--min-overlap",
        "--max-mass-lost",
        "--max-kld",
        "--isolate",
        "--attribute",
        "--selection-only",
        "--candidate-attention",
        "--report",
        "--state",
        "--json",
        "Exit codes",
        "not the mean",
    ):
        assert part in " ".join(run.out.split())


def test_a_page_is_written_too(tiny_gguf, coarse_index, m3_check_selection, tmp_path):
    page = tmp_path / "report.html"
    run = m3_check_selection(tiny_gguf, coarse_index, *EXAMPLE, "--no-thresholds", "--json", "--report", page)
    assert run.code == 0 and "Selection changed" in page.read_text(encoding="utf-8")
    assert run.json["candidate"]["sha256"] in page.read_text(encoding="utf-8")
    assert list(tmp_path.glob("*")) == [page]


def test_a_page_that_cannot_be_written_is_refused_before_the_work(
    tiny_gguf, coarse_index, m3_check_selection, tmp_path, monkeypatch
):
    monkeypatch.setattr(check_cli, "run_check", lambda _: pytest.fail("it was checked"))
    for page, message in (
        (tmp_path / "absent" / "x.html", "absent does not exist"),
        (tmp_path, "expected a file name for the report, found a folder"),
        (Path("/dev/null"), "expected a file, found a device or pipe"),
        (coarse_index, "is part of the source"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        run = m3_check_selection(tiny_gguf, coarse_index, *EXAMPLE, "--report", page)
        assert (run.code, run.out) == (2, "") and message in run.error and str(page) in run.error


# ------------------------------------------------------------------------------------------------ progress


def test_progress_lines(tiny_gguf, tiny_checkpoint, m3_check_selection, monkeypatch):
    monkeypatch.setattr(walk_progress, "LINE_SECONDS", 0.0)
    run = m3_check_selection(tiny_checkpoint, tiny_gguf, *EXAMPLE)
    lines = [line for line in run.err.splitlines() if line.endswith(" left")]
    assert lines[0].startswith("m3-check-selection: layer 1 of 3, ")
    assert any(line.startswith("m3-check-selection: layer 3 of 3, ") for line in lines)
    assert lines[-1].startswith("m3-check-selection: logits, 99%, 0.0 s left")
    shares = [int(line.split(", ")[1].removesuffix("%")) for line in lines]
    assert shares == sorted(shares) and len(shares) > 6


def test_progress_bar(tmp_path):
    with (tmp_path / "screen").open("w+", encoding="utf-8") as file:
        stream = SimpleNamespace(isatty=lambda: True, write=file.write, flush=file.flush, encoding="utf-8")
        with walk_progress.walk_progress("check", walk_progress.layer_stages(60, 120.0), stream) as advance:
            for _ in range(120):
                advance(1.0)
        file.seek(0)
        shown = file.read()
    assert "layer 60 of 60" in shown and "100%" in shown and "left" in shown


def test_ctrl_c(tiny_checkpoint, tiny_gguf):
    command = [sys.executable, "-m", "m3_convert.check_cli", str(tiny_checkpoint), str(tiny_gguf), "--context", "4096"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        assert "of memory at the peak" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.stdout.read() == ""
    assert process.returncode == 130
    assert rest.splitlines()[-1] == "m3-check-selection: interrupted" and "Traceback" not in rest
