"""Models that cannot be compared, wrong arguments, broken weights."""

import os
import shutil
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest

from convert.check.small_check import EXAMPLE, patched
from m3_convert import comparable
from m3_convert.walker import Walker
from m3_runtime import InputError
from m3_runtime.engine import Hparams


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


def test_a_file_that_changes_during_the_check(tiny_gguf, tiny_checkpoint, m3_check_selection, tmp_path, monkeypatch):
    file, folder = tmp_path / "a.gguf", tmp_path / "folder"
    shutil.copy(tiny_gguf, file)
    shutil.copytree(tiny_checkpoint, folder)
    (shard,) = folder.glob("*.safetensors")
    through = Walker.through
    for model, changed in ((file, file), (folder, shard)):

        def touch(*arguments, path=changed, **options):
            os.utime(path, (1, 1))  # as if another program wrote it
            return through(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Walker, "through", touch)
            run = m3_check_selection(tiny_gguf, model, *EXAMPLE)
        assert (run.code, run.out) == (2, "")
        which = "" if model is file else f": {shard.name}"
        assert run.error.endswith(f"{model}: changed while it was in use{which}")
        assert m3_check_selection(tiny_gguf, model, *EXAMPLE, "--no-thresholds").code == 0
