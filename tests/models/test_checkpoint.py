"""Weights of m3-nano in files, and what evaluates and compares them, on models made for tests."""

import argparse
import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

import checkpoint  # noqa: E402
from attention import select_blocks, selected_keys  # noqa: E402
from checkpoint import export, load_master, load_release, places, save_master, spec_of  # noqa: E402
from checkpoint_tensors import TEXT_PREFIX, make_tensors  # noqa: E402
from evaluate import RandomBlocks, evaluate, recent_blocks, round_weights  # noqa: E402
from evaluation_tables import print_tables  # noqa: E402
from m3_runtime import Model as Engine  # noqa: E402
from make_checkpoint import TEXT, make_tokenizer  # noqa: E402
from model import SMALL, Model, Pass, Stage  # noqa: E402
from tiny_model import convert  # noqa: E402
from vocabulary import encode_documents, train_tokenizer  # noqa: E402

CONFIG = dataclasses.replace(SMALL, vocab=1024, context=1024, top_k=3, experts=4)


def make_model(config=CONFIG):
    """A model in which every weight counts: norms and biases differ from 0, attention and router are not flat."""
    torch.manual_seed(5)
    model = Model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(0, 0.2)
        for layer in model.sparse_layers():
            layer.bias.normal_(0.3, 0.15)
            layer.router.mul_(3)
            layer.q_proj.mul_(3)
            layer.k_proj.mul_(3)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`make_model` exported."""
    data, out = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("release")
    make_tokenizer(spec_of(CONFIG)).save(str(data / "tokenizer.json"))
    np.save(data / "heldout.npy", np.arange(100, dtype=np.uint16))
    export(make_model(), data, out)
    return out


@pytest.fixture(scope="module")
def data(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an export takes from a data folder."""
    data = tmp_path_factory.mktemp("data")
    shutil.copy(folder / "tokenizer.json", data)
    np.save(data / "heldout.npy", np.arange(100, dtype=np.uint16))
    return data


def sample_ids():
    return torch.from_numpy(np.random.default_rng(1).integers(0, CONFIG.vocab - 64, CONFIG.context))


# ---------------------------------------------------------------------------------------------- master


def test_the_master_comes_back(tmp_path):
    model, meta = make_model(), {"state": {"step": 3, "history": [[1.5, 2]]}, "seconds": 7}
    save_master(tmp_path, make_model(SMALL), {"old": True})
    save_master(tmp_path, model, meta)
    loaded, found = load_master(tmp_path, "cpu")
    assert loaded.config == CONFIG
    assert found == meta
    state = loaded.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["master.json", "weights-b-1-of-1.safetensors"]


def test_a_save_that_fails_leaves_the_master_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 600_000)
    model = make_model()
    save_master(tmp_path, model, {"step": 1})
    before = sorted(path.name for path in tmp_path.iterdir())
    assert len(before) > 2
    assert all(path.stat().st_size <= 600_000 for path in tmp_path.iterdir())
    plain = checkpoint.save_file

    def failing(state, path):
        if "-2-of-" in str(path):
            raise OSError("the disk is full")
        plain(state, path)

    monkeypatch.setattr(checkpoint, "save_file", failing)
    with torch.no_grad():
        model.head.zero_()
    with pytest.raises(OSError, match="full"):
        save_master(tmp_path, model, {"step": 2})
    loaded, meta = load_master(tmp_path, "cpu")
    assert meta == {"step": 1}
    assert torch.equal(loaded.head, make_model().head)
    monkeypatch.setattr(checkpoint, "save_file", plain)
    save_master(tmp_path, model, {"step": 3})
    assert load_master(tmp_path, "cpu")[1] == {"step": 3}
    assert len(list(tmp_path.iterdir())) == len(before)


def test_a_master_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 100_000)
    with pytest.raises(ValueError, match="at most 5 files"):
        save_master(tmp_path, make_model(), {})
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------- release


def test_every_tensor_of_the_release_has_its_place():
    names = {name for name in make_tensors(spec_of(CONFIG)) if name.startswith(TEXT_PREFIX)}
    assert names == set(places(CONFIG))
    state = make_model().state_dict()
    covered = sum(place.of(state).numel() for place in places(CONFIG).values())
    assert covered == sum(value.numel() for value in state.values())


def test_an_export_leaves_other_files_alone(folder, data, tmp_path):
    (tmp_path / "train").mkdir()
    for name in ("README.md", "train/model.py"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "model-00009-of-00009.safetensors").write_bytes(b"old")
    export(make_model(), data, tmp_path)
    assert (tmp_path / "README.md").read_text() == (tmp_path / "train/model.py").read_text() == "mine"
    assert not (tmp_path / "model-00009-of-00009.safetensors").exists()
    for path in folder.rglob("*.*"):
        assert (tmp_path / path.relative_to(folder)).read_bytes() == path.read_bytes()


def test_weights_that_are_not_finite_are_neither_saved_nor_exported(data, tmp_path):
    model = make_model()
    save_master(tmp_path / "run", model, {"step": 1})
    with torch.no_grad():
        model.head[3, 4] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        export(model, data, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="head has values that are not finite"):
        save_master(tmp_path / "run", model, {"step": 2})
    kept, meta = load_master(tmp_path / "run", "cpu")
    assert meta == {"step": 1}
    assert bool(kept.head.isfinite().all())


def test_an_export_does_not_replace_a_master(data, tmp_path):
    save_master(tmp_path, make_model(), {})
    with pytest.raises(ValueError, match="float32 weights of a training"):
        export(make_model(), data, tmp_path)
    load_master(tmp_path, "cpu")


def test_a_tokenizer_of_another_vocabulary(data, tmp_path):
    with pytest.raises(ValueError, match="expected 4032"):
        export(make_model(SMALL), data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_the_index_names_and_no_shard_has(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    name = f"{TEXT_PREFIX}model.norm.weight"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shard = tmp_path / "model" / index["weight_map"][name]
    tensors = load_file(shard)
    del tensors[name]
    save_file(tensors, shard)
    with pytest.raises(ValueError, match=f"{name} is in the index and in no shard"):
        load_release(tmp_path / "model", "cpu")
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(ValueError, match=shard.name):
        load_release(tmp_path / "model", "cpu")


def test_a_config_that_the_training_code_does_not_compute(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["swiglu_limit"] = 9.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"swiglu_limit 9\.0, expected 7\.0"):
        load_release(tmp_path, "cpu")


def test_the_engine_computes_what_the_training_code_does(folder, tmp_path):
    ids = sample_ids()
    logits, out = load_release(folder, "cpu").logits(ids[None], Pass(Stage.SPARSE, torch.float32))
    with (
        Engine(convert(folder, tmp_path / "f32.gguf", "--type", "f32")) as engine,
        engine.session(context=len(ids), kv_type="f32", record=("blocks",)) as session,
    ):
        found = session.eval(ids.numpy().astype(np.int32), all_logits=True)
        for i, selection in enumerate(out.selections):
            chosen = session.selected_blocks(CONFIG.dense + i).transpose(1, 0, 2)
            bits = np.where(chosen >= 0, 1 << chosen.clip(0), 0).sum(-1)
            assert np.array_equal(bits, selection[0].numpy())
    assert np.abs(found - logits[0].numpy()).max() < 1e-4
    assert logits.std() > 0.3


def test_transformers_and_the_training_code_agree(folder, capsys):
    compare = pytest.importorskip("compare")
    ids = sample_ids()
    reference = compare.run_transformers(folder, ids, CONFIG)
    run = compare.run_training_code(folder, ids)
    assert np.abs(run.logits - reference.logits).max() < 1e-4
    assert compare.differences(run, reference, CONFIG.dense) == []
    assert compare.judge("same", run, reference, CONFIG.dense, 1e-4)
    # Two choices that are not the reference's: one at a wide gap, one called a near-tie.
    layer, head, position = np.unravel_index(
        np.where(np.isfinite(reference.block_gaps), reference.block_gaps, 0).argmax(), reference.block_gaps.shape
    )
    blocks = run.blocks.copy()
    blocks[layer, head, position] ^= True
    wrong = dataclasses.replace(run, blocks=blocks)
    assert not compare.judge("wrong", wrong, reference, CONFIG.dense, 1e-4)
    gaps = reference.block_gaps.copy()
    gaps[layer, head, position] = 1e-4
    assert compare.judge("tie", wrong, dataclasses.replace(reference, block_gaps=gaps), CONFIG.dense, 1e-4)
    assert not compare.judge("off", run, dataclasses.replace(reference, logits=run.logits + 1), CONFIG.dense, 1e-4)
    assert f"position {position}, layer {CONFIG.dense + layer}, blocks of index head {head}" in capsys.readouterr().out


def test_the_gap_at_the_cut():
    compare = pytest.importorskip("compare")
    infinite = float("inf")
    scores = torch.tensor([[infinite, 3, 1, 0.5], [infinite, 3, -infinite, -infinite], [infinite, *3 * [-infinite]]])
    assert compare.gap_at_cut(scores, 2).tolist() == [2, infinite, infinite]
    assert compare.gap_at_cut(scores, 4).tolist() == 3 * [infinite]


# ---------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("change", [RandomBlocks(1), recent_blocks])
def test_other_blocks_are_as_many_and_visible(change):
    block, n_blocks, top_k = 4, 8, 3
    position = torch.arange(block * n_blocks)
    scores = torch.zeros(1, 2, len(position), n_blocks)
    scores = scores.masked_fill(torch.arange(n_blocks) > (position // block)[:, None], float("-inf"))
    chosen = selected_keys(select_blocks(change(scores), top_k, block), n_blocks, 1)
    assert torch.equal(chosen.sum(-1), (position // block + 1).clamp(max=top_k).expand(1, 2, -1))
    assert chosen[..., position, position // block].all()
    if change is recent_blocks:
        assert chosen[0, 0, -1].nonzero().flatten().tolist() == [5, 6, 7]
    else:
        assert not torch.equal(chosen[0, 0], chosen[0, 1])


def test_rounded_weights():
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    weight[0, :32] = 0
    for bits in (3, 4, 8):
        rounded = round_weights(weight, bits)
        groups, before = rounded.view(-1, 32), weight.view(-1, 32)
        step = before.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        assert ((groups - before).abs() <= step / 2 + 1e-6).all()
        assert max(len(group.unique()) for group in groups) <= 2**bits - 1
        assert torch.allclose(groups.abs().amax(1), before.abs().amax(1))


def test_an_evaluation(tmp_path, capsys):
    text = TEXT.read_text(encoding="utf-8")
    tokenizer = train_tokenizer([text], CONFIG.vocab)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    np.save(tmp_path / "heldout.npy", np.concatenate(list(encode_documents(tokenizer, [text], 1))))
    (tmp_path / "definitions.json").write_text(json.dumps([["apple", "a red fruit"], ["king", "a male sovereign"]]))
    export(make_model(), tmp_path, tmp_path / "model")
    only = ["dense", "recent", "index-f32", "index-3", "top-2"]
    options = argparse.Namespace(folder=tmp_path / "model", rows=1, device="cpu", only=only)
    figures = json.loads(json.dumps(evaluate(options)))
    assert figures["rows"] == {"text": 1, "recall": 1, "hard": 1}
    variants = figures["variants"]
    assert list(variants) == ["sparse", *only]
    assert variants["sparse"]["kl"] == variants["sparse"]["other_top1"] == 0
    assert variants["sparse"]["overlap"]["mean"] == 1
    assert "overlap" not in variants["dense"]
    assert variants["dense"]["kl"] > variants["index-f32"]["kl"] > 0
    assert variants["dense"]["kl_by_position"][0] < variants["dense"]["kl_by_position"][1]
    overlaps = [variants[key]["overlap"]["mean"] for key in ("sparse", "index-f32", "index-3", "recent")]
    assert overlaps == sorted(overlaps, reverse=True)
    assert 0.5 < variants["top-2"]["overlap"]["mean"] < 0.75  # two blocks of three
    everything, *buckets = variants["sparse"]["recall"]
    assert everything["of"] == sum(b["of"] for b in buckets) > 0
    assert 600 < variants["sparse"]["perplexity"] < 2000
    capsys.readouterr()
    print_tables(figures)
    lines = capsys.readouterr().out.splitlines()
    assert "| dense, index ignored |" in "\n".join(lines)
    widths = [line.count("|") for line in lines if line.startswith("| variant |")]
    assert len(widths) == 5
