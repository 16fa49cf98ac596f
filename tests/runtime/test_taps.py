"""What a session hands out of its way, and what can be put into it: attention masses, block lists, the head alone."""

from pathlib import Path

import numpy as np
import pytest

from m3_runtime import InputError, Model, NotFiniteError

N = 200
IDS = np.random.default_rng(2).integers(0, 900, N).astype(np.int32)
BLOCK, TOP_K, HEADS, INDEX_HEADS, LAYERS = 32, 3, 4, 2, 3
SPARSE = (1, 2)
OWN = np.arange(N) // BLOCK


@pytest.fixture(scope="module")
def model(tiny_gguf: Path):
    with Model(tiny_gguf) as opened:
        h = opened.hparams
        assert (h.block_size, h.top_k, h.n_head, h.n_index_head, h.n_layer) == (
            BLOCK,
            TOP_K,
            HEADS,
            INDEX_HEADS,
            LAYERS,
        )
        yield opened


def lists(model: Model, **options) -> np.ndarray:
    """Own block lists, int32 [2 layers, N, index_heads, top_k]."""
    with model.session(context=256, record=("blocks",), **options) as session:
        session.eval(IDS)
        return np.stack([session.selected_blocks(layer) for layer in SPARSE])


def random_lists(seed: int) -> np.ndarray:
    """Lists that hold any visible blocks, fewer than there could be at times; often without the own one."""
    random = np.random.default_rng(seed)
    out = np.full((2, N, INDEX_HEADS, TOP_K), -1, np.int32)
    for layer, row, head in np.ndindex(out.shape[:3]):
        n = random.integers(1, min(OWN[row] + 1, TOP_K) + 1)
        out[layer, row, head, :n] = np.sort(random.choice(OWN[row] + 1, n, replace=False))
    return out


# ------------------------------------------------------------------------------------------------ mass


def test_masses_are_shares_and_do_not_depend_on_chunks_and_threads(model: Model) -> None:
    with model.session(context=256, record=("blocks", "mass"), chunk=200, threads=1) as session:
        plain = session.eval(IDS, all_logits=True)
        masses = [session.attention_mass(layer) for layer in SPARSE]
        blocks = session.selected_blocks(1)
    assert masses[0].shape == (N, HEADS, TOP_K) and masses[0].dtype == np.float32
    for mass in masses:
        assert np.abs(mass.sum(axis=2) - 1).max() < 1e-5 and mass.min() >= 0
    read = np.repeat(blocks >= 0, HEADS // INDEX_HEADS, axis=1)
    assert (masses[0][~read] == 0).all() and (masses[0][read] > 0).all()
    with model.session(context=256, record=("mass",), chunk=7, threads=2) as session:
        assert np.array_equal(session.eval(IDS[:90], all_logits=True), plain[:90])
        first = session.attention_mass(1)
        session.eval(IDS[90:])
        assert np.array_equal(np.concatenate([first, session.attention_mass(1)]), masses[0])
        with pytest.raises(InputError, match="dense attention"):
            session.attention_mass(0)
        with pytest.raises(InputError, match="does not record blocks"):
            session.selected_blocks(1)


def test_masses_are_not_recorded_in_dense_attention(model: Model) -> None:
    with model.session(context=256, attention="dense", record=("mass",)) as session:
        session.eval(IDS)
        with pytest.raises(InputError, match="dense attention"):
            session.attention_mass(1)


# ------------------------------------------------------------------------------------------------ given lists


def test_its_own_lists_change_no_bit(model: Model) -> None:
    own = lists(model)
    with model.session(context=256) as free, model.session(context=256, record=("blocks",), chunk=33) as told:
        want = free.eval(IDS, all_logits=True)
        assert np.array_equal(told.forward([(0, IDS)], output="all", blocks=own), want)
        assert np.array_equal(told.selected_blocks(2), own[1])


def test_given_lists_are_what_is_read(model: Model) -> None:
    given = random_lists(3)
    with model.session(context=256, record=("blocks", "mass", "scores"), kv_type="f32") as told:
        got = told.forward([(0, IDS)], output="all", blocks=given)
        scores = told.block_scores(1)
        for i, layer in enumerate(SPARSE):
            assert np.array_equal(told.selected_blocks(layer), given[i])
            read = np.repeat(given[i] >= 0, HEADS // INDEX_HEADS, axis=1)
            mass = told.attention_mass(layer)
            assert (mass[~read] == 0).all() and np.abs(mass.sum(axis=2) - 1).max() < 1e-5
    with model.session(context=256, record=("scores",), kv_type="f32") as free:
        assert not np.allclose(free.eval(IDS, all_logits=True), got, atol=1e-2)
        # The scores of its own indexer, and layer 1 is the first whose input does not depend on lists.
        assert np.array_equal(free.block_scores(1), scores)


def test_all_visible_blocks_are_dense_attention(model: Model) -> None:
    n = TOP_K * BLOCK
    every = np.full((2, n, INDEX_HEADS, TOP_K), -1, np.int32)
    for row in range(n):
        every[:, row, :, : OWN[row] + 1] = np.arange(OWN[row] + 1)
    with model.session(context=256, attention="dense") as dense, model.session(context=256) as told:
        want = dense.eval(IDS[:n], all_logits=True)
        assert np.array_equal(told.forward([(0, IDS[:n])], output="all", blocks=every), want)


def test_lists_for_a_window_that_continues_a_sequence(model: Model) -> None:
    given = random_lists(4)
    with model.session(context=256, layers=(0, 2), kv_type="f32") as whole:
        want = whole.forward([(0, IDS)], output="hidden", blocks=given[:1])
    with model.session(context=256, layers=(0, 2), kv_type="f32", sequences=2) as parts:
        a = parts.forward([(1, IDS[:77])], output="hidden", blocks=given[:1, :77])
        b = parts.forward([(1, IDS[77:])], output="hidden", blocks=given[:1, 77:])
    assert np.array_equal(np.concatenate([a, b]), want)


@pytest.mark.parametrize(
    ("change", "row", "message"),
    [
        ([2, 1, 0], 199, "position 199, head 1, starting with 2: expected ascending blocks up to 6"),
        ([1, 1, -1], 199, "expected ascending"),
        ([-1, -1, -1], 199, "at least one"),
        ([0, -1, 1], 199, "padded with -1"),
        ([0, 1, -2], 199, "padded with -1"),
        ([0, 1, 7], 199, "up to 6"),
        ([0, 1, -1], 31, "up to 0"),
    ],
)
def test_lists_that_are_none(model: Model, change: list[int], row: int, message: str) -> None:
    bad = random_lists(5)
    bad[1, row, 1] = change
    with model.session(context=256) as session:
        with pytest.raises(InputError, match=message):
            session.forward([(0, IDS)], blocks=bad)
        assert session.length() == 0
        with pytest.raises(InputError, match="blocks: 1200 values, expected 2400"):
            session.forward([(0, IDS)], blocks=random_lists(5)[:1])
    with model.session(context=256, layers=(0, 1)) as session, pytest.raises(InputError, match="dense attention"):
        session.forward([(0, IDS)], output="hidden", blocks=random_lists(5))
    with model.session(context=256, attention="dense") as session, pytest.raises(InputError, match="dense attention"):
        session.forward([(0, IDS)], blocks=random_lists(5))


# ------------------------------------------------------------------------------------------------ head


def test_a_window_of_the_head_alone(model: Model) -> None:
    with (
        model.session(context=256) as whole,
        model.session(context=256, layers=(0, LAYERS)) as layers,
        model.session(context=64, layers=(LAYERS, 0)) as head,
    ):
        want = whole.eval(IDS, all_logits=True)
        hidden = layers.forward([(0, IDS)], output="hidden")
        for first in range(0, N, 64):
            head.rewind(0)
            got = head.forward([(0, hidden[first : first + 64])], output="all")
            assert np.array_equal(got, want[first : first + 64])
        head.rewind(0)
        assert np.array_equal(head.forward([(0, hidden[-3:])])[0], want[-1])
    assert model.memory(context=64, layers=(LAYERS, 0)).kv_bytes == 0
    with pytest.raises(InputError, match="layer_first is 4, expected 0 to 3"):
        model.session(layers=(LAYERS + 1, 0))
    with pytest.raises(InputError, match="layer_count is 1, expected 0 to 0"):
        model.session(layers=(LAYERS, 1))
    with pytest.raises(InputError, match="no layer to record"):
        model.session(layers=(LAYERS, 0), record=("blocks",))


# ------------------------------------------------------------------------------------------------ cache types


def test_smaller_cache_types_lose_more(model: Model) -> None:
    def logits(**options) -> np.ndarray:
        with model.session(context=256, **options) as session:
            # The same lists for all, so that what is compared is what attention does with the values.
            return session.forward([(0, IDS)], output="all", blocks=own)

    own = lists(model, kv_type="f32")
    exact = logits(kv_type="f32")
    errors = [np.abs(logits(kv_type=kind) - exact).mean() for kind in ("f16", "q8_0", "q4_0")]
    assert 0 < errors[0] < errors[1] < errors[2] < 1
    memory = [model.memory(context=256, kv_type=kind).kv_bytes for kind in ("f16", "q8_0", "q4_0")]
    assert [m * 64 // memory[0] for m in memory] == [64, 34, 18]


def test_smaller_index_types_flip_more_blocks(model: Model) -> None:
    exact = lists(model, kv_type="f32")[0]
    flips = [
        (lists(model, kv_type="f32", index_type=kind)[0] != exact).any(axis=-1).mean() for kind in ("q8_0", "q4_0")
    ]
    assert 0 < flips[0] < flips[1] < 0.9


def test_a_cache_type_that_does_not_fit_is_named(model: Model) -> None:
    with pytest.raises(InputError, match=r"kv_type Q4_K \(12\): F32, F16, BF16, Q8_0 and Q4_0 are supported"):
        model.session(kv_type="q4_k")


@pytest.mark.parametrize("tensor", ["blk.1.attn_k_norm.weight", "blk.2.attn_v.weight", "blk.1.indexer.k_norm.weight"])
def test_broken_keys_are_found_in_a_cache_of_blocks(tiny_gguf: Path, tmp_path: Path, tensor: str) -> None:
    content = bytearray(tiny_gguf.read_bytes())
    with Model(tiny_gguf) as model:
        place = next(t for t in model.gguf.tensors if t.name == tensor)
    content[place.offset + 4 : place.offset + 8] = np.float32(3e38 if "norm" in tensor else np.nan).tobytes()
    (tmp_path / "broken.gguf").write_bytes(content)
    with (
        Model(tmp_path / "broken.gguf") as model,
        model.session(context=256, kv_type="q8_0", index_type="q8_0") as session,
        pytest.raises(NotFiniteError, match=f"layer {tensor[4]}"),
    ):
        session.eval(IDS)
