"""Sequences through the Python face: prefixes that are reused, blocks that are dropped, one pool of pages."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from m3_runtime import ContextError, InputError, Model, Session

RNG = np.random.default_rng(11)
PROMPT = RNG.integers(0, 900, 4060).astype(np.int32)
OTHER = RNG.integers(0, 900, 90).astype(np.int32)


@pytest.fixture(scope="module")
def model(tiny_gguf: Path) -> Iterator[Model]:
    with Model(tiny_gguf, device="cpu") as opened:
        yield opened


def greedy(session: Session, logits: np.ndarray, seq: int, n: int = 16) -> list[int]:
    """The next n tokens."""
    tokens = [int(logits.argmax())]
    while len(tokens) < n:
        tokens.append(int(session.eval([tokens[-1]], seq).argmax()))
    return tokens


@pytest.mark.parametrize("length", [700, 4060])
def test_a_prefix_that_ends_anywhere_is_reused(model: Model, length: int) -> None:
    """Blocks have 32 tokens here, and a row reads three of them."""
    prompt = PROMPT[:length]
    cuts = (31, 32, 33, 127, 128, 129, 200) if length == 700 else (4000,)
    with model.session(context=4096, sequences=4, poison=True, page_seed=2) as session:
        logits = session.eval(prompt, 0)
        session.fork(0, 1)
        want = greedy(session, logits, 1)
        assert len(set(want)) > 4
        for cut in cuts:
            # A conversation with the same beginning goes on in another way. The beginning is taken from it by a fork,
            # or in place.
            session.fork(0, 2)
            session.rewind(cut, 2)
            session.eval(OTHER, 2)
            session.fork(2, 3)
            seq = 2 + cut % 2
            session.rewind(cut, seq)
            again = session.eval(prompt[cut:], seq)
            assert (again == logits).all(), cut
            assert greedy(session, again, seq) == want, cut


def test_blocks_are_places_in_the_text_and_not_in_the_pool(model: Model) -> None:
    """Rows 128 to 255 of 600 are dropped and others appended, so that pages and positions disagree.

    A window of one sparse layer is given its rows, so that a fresh run of the rows that are left is the same cache.
    """
    rows = np.random.default_rng(4).standard_normal((760, model.hparams.n_embd)).astype(np.float32)
    kept = np.concatenate([rows[:128], rows[256:600]])
    with model.session(context=1024, layers=(1, 1), kv_type="f32", record=("blocks",), poison=True) as session:
        session.forward([(0, rows[:600])], output="hidden")
        session.drop(4, 4)
        assert session.length() == 472 and session.pages()[0] == 15
        out = session.forward([(0, rows[600:])], output="hidden")
        blocks = session.selected_blocks(1)
    with model.session(context=1024, layers=(1, 1), kv_type="f32", record=("blocks",), poison=True) as session:
        session.forward([(0, kept)], output="hidden")
        fresh = session.forward([(0, rows[600:])], output="hidden")
        assert (session.selected_blocks(1) == blocks).all()
    assert blocks.max() == 19 and len(np.unique(blocks)) > 15
    assert np.abs(out - fresh).max() < 1e-4


def test_a_drop_is_told_and_forgotten_with_what_it_touched(model: Model) -> None:
    with model.session(context=512, sequences=3) as session:
        session.eval(PROMPT[:200])
        assert session.shifted_from() is None
        session.drop(5, 1)  # the last full one; 8 tokens follow
        assert session.length() == 168 and session.shifted_from() == 160
        session.drop(1, 2)
        assert session.length() == 104 and session.shifted_from() == 32
        session.fork(0, 1)
        session.fork(0, 2)
        session.rewind(32, 1)
        assert (session.shifted_from(0), session.shifted_from(1), session.shifted_from(2)) == (32, None, 32)
        session.fork(1, 2)
        assert session.shifted_from(2) is None
        assert (session.eval(PROMPT[32:60], 1) == session.eval(PROMPT[32:60], 2)).all()
        session.rewind(33, 0)
        assert session.shifted_from() == 32
    with model.session(context=512) as session:
        session.eval(PROMPT[:128])
        session.drop(2, 2)  # nothing follows: a rewind
        assert session.length() == 64 and session.shifted_from() is None
        for first, n in [(2, 1), (0, 3), (-1, 1), (0, 0)]:
            with pytest.raises(InputError, match="expected"):
                session.drop(first, n)
        with pytest.raises(InputError, match="position 64 is not one of the 64"):
            session.mark_shifted(64)
        with pytest.raises(InputError, match="sequence 1"):
            session.shifted_from(1)


def test_a_drop_leaves_those_who_share_pages_alone(model: Model) -> None:
    with model.session(context=512, sequences=2, poison=True) as session:
        session.eval(PROMPT[:200])
        session.fork(0, 1)
        session.drop(1, 3, 1)
        assert session.pages()[0] == 7 + 3  # the first page is still shared
        got = session.eval(PROMPT[200:260])
    with model.session(context=512) as session:
        assert (session.eval(PROMPT[:260]) == got).all()


def test_fewer_pages_than_all_sequences_could_fill(model: Model) -> None:
    whole, part = model.memory(context=1024, sequences=4), model.memory(context=1024, sequences=4, pages=8)
    assert part.kv_bytes * 16 == whole.kv_bytes and part.index_bytes * 16 == whole.index_bytes
    with model.session(context=1024, sequences=4, pages=8) as session:
        assert session.pages() == (0, 8)
        session.eval(PROMPT[:100], 0)
        with pytest.raises(ContextError, match=r"the cache is full: 5 pages are needed, 4 of 8 are free"):
            session.eval_batch([(1, PROMPT[:64]), (2, PROMPT[:65])])
        assert session.pages() == (4, 8) and session.length(1) == 0
        session.eval_batch([(1, PROMPT[:64]), (2, PROMPT[:64])])
        assert session.pages() == (8, 8)
    for pages in (-1, 129):
        with pytest.raises(InputError, match=f"pages is {pages}, expected 1 to 128"):
            model.session(context=1024, sequences=4, pages=pages)


def test_pages_as_arrays(model: Model) -> None:
    with model.session(context=512, sequences=2, poison=True) as session:
        # 3 layers, K and V of 2 heads of 64 in F16; index keys of 64 in F32 in two of them.
        assert session.page_bytes == 32 * (3 * 2 * 2 * 64 * 2 + 2 * 64 * 4)
        session.eval(PROMPT[:100])
        page = session.export_page(3)
        assert page.shape == (session.page_bytes,) and np.count_nonzero(page.view(np.uint32)) < page.size / 4 / 6
        for block in range(4):
            session.import_page(session.export_page(block, out=page), min(32, 100 - 32 * block), 1)
        assert (session.eval(PROMPT[100:120], 0) == session.eval(PROMPT[100:120], 1)).all()
        with pytest.raises(InputError, match="no whole number of blocks of 32"):
            session.import_page(page, 1)
        with pytest.raises(InputError, match="block is 4, expected 0 to 3"):
            session.export_page(4)
        with pytest.raises(InputError, match="a page of 3 bytes"):
            session.export_page(0, out=np.zeros(3, np.uint8))
