"""The candidate with one group of tensors restored from the reference."""

import numpy as np
import pytest

from m3_convert.layered_model import open_layered
from m3_convert.mixed_model import MixedModel, group_tensors, same_group
from m3_convert.tensor_group import TENSOR_GROUPS
from m3_runtime import GGUF, Model
from tiny_model import convert

IDS = np.random.default_rng(4).integers(0, 900, 150).astype(np.int32)
GROUPS = {
    "index": (),
    "attention": ("*.attn_[qkv].weight", "*.attn_output.weight"),
    "experts": ("*_exps.weight",),
    "shared experts": ("*_shexp.weight",),
    "dense mlp": ("blk.0.ffn_[gud]*.weight",),
    "embeddings": ("token_embd.weight",),
    "head": ("output.weight",),
}
FIRST_LAYER = {"index": 1, "experts": 1, "shared experts": 1, "head": 3}


def evaluate(model):
    """Logits, layer by layer and by the head alone."""
    states = IDS
    h = model.hparams
    for layer in range(h.n_layer):
        with model.bound(layer, lambda _: None) as bound, bound.session(context=256, layers=(layer, 1)) as session:
            states = session.forward([(0, states)], output="hidden")
    with (
        model.bound(h.n_layer, lambda _: None) as bound,
        bound.session(context=256, layers=(h.n_layer, 0)) as session,
    ):
        return session.forward([(0, states)], output="all")


@pytest.mark.parametrize(
    ("reference", "group"),
    [
        *(("tiny_gguf", group) for group in ("index", "experts", "embeddings", "head")),
        *(("tiny_checkpoint", group) for group in ("experts", "shared experts", "attention", "dense mlp", "head")),
    ],
)
def test_it_is_the_file_with_that_group_in_the_references_type(
    request, tmp_path, tiny_checkpoint, tiny_q8_gguf, reference, group
):
    """Byte for byte: the file that m3-convert writes with a rule for the group gives the same logits."""
    kind = "f32" if reference == "tiny_gguf" else "bf16"
    rules = [f"--rule={pattern}={kind}" for pattern in GROUPS[group]]
    expected = convert(tiny_checkpoint, tmp_path / "mixed.gguf", "--type", "q8_0", *rules)
    with (
        open_layered(request.getfixturevalue(reference)) as ours,
        open_layered(tiny_q8_gguf) as theirs,
        MixedModel(theirs, ours, group) as mixed,
        Model(expected) as whole,
        whole.session(context=256) as session,
    ):
        assert mixed.first_layer == FIRST_LAYER.get(group, 0)
        assert mixed.has_head == (group == "head")
        assert {t.name: t.type for t in mixed.model.gguf.tensors} == {t.name: t.type for t in whole.gguf.tensors}
        np.testing.assert_array_equal(evaluate(mixed), session.eval(IDS, all_logits=True))
        sizes = [
            sum(t.n_bytes for t in side.gguf.tensors if t.name in group_tensors(ours, group))
            for side in (theirs.model, whole)
        ]
        assert list(mixed.group_bytes) == sizes
        for layer in range(4):
            restored = [t for t in group_tensors(mixed, group) if t in mixed._needed(layer)]
            owned = sum(t.n_bytes for t in whole.gguf.tensors if t.name in restored)
            assert mixed.owned_bytes(layer) == (0 if ours.mapped else owned)
        # The candidate is still what it was.
        with Model(tiny_q8_gguf) as plain, plain.session(context=256) as own:
            np.testing.assert_array_equal(evaluate(theirs), own.eval(IDS, all_logits=True))


def test_groups_that_are_the_same(tiny_gguf, tiny_q8_gguf, tiny_checkpoint, tmp_path):
    with open_layered(tiny_gguf) as ours, open_layered(tiny_q8_gguf) as theirs, open_layered(tiny_checkpoint) as folder:
        names = list(dict.fromkeys(group for group, _ in TENSOR_GROUPS))
        assert [name for name in names if same_group(ours, theirs, name)] == ["index", "norms", "router"]
        assert all(same_group(ours, ours, name) for name in names)
        # F32 of the folder and of the file are the same values, made in another way.
        assert [name for name in names if same_group(folder, theirs, name)] == ["index", "norms", "router"]
    with GGUF(tiny_q8_gguf) as gguf:
        tensor = next(t for t in gguf.tensors if t.name == "blk.2.indexer.k_proj.weight")
    content = bytearray(tiny_q8_gguf.read_bytes())
    content[tensor.offset + tensor.n_bytes - 1] ^= 1
    (tmp_path / "other.gguf").write_bytes(content)
    with open_layered(tiny_gguf) as ours, open_layered(tmp_path / "other.gguf") as theirs:
        assert [name for name in names if same_group(ours, theirs, name)] == ["norms", "router"]
