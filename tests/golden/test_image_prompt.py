"""A prompt with images, from picture values to logits, against transformers (`make_golden.py` says how)."""

import numpy as np
import pytest

from golden.cases import IMAGE_PROMPT, shard_hashes
from golden.test_golden import Golden, Run, assert_equals_reference, cuts
from golden.vision_cases import VisionCase, pixels_of
from m3_runtime import InputError, Model
from m3_runtime.gguf_reader import GGUF
from m3_runtime.image_prompt import ImageTokens, with_images
from m3_runtime.text import ChatTokenizer
from m3_runtime.vision import VisionTower
from make_checkpoint import make_checkpoint
from tiny_model import convert_vision


@pytest.fixture(scope="module")
def golden(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("image_prompt") / "checkpoint"
    make_checkpoint(folder, IMAGE_PROMPT.spec)
    with np.load(IMAGE_PROMPT.path) as file:
        stored = dict(file)
    if shard_hashes(folder) != stored["shards"].tolist():
        pytest.fail("make_checkpoint.py makes other weights than the golden vectors came from: run make_golden.py")
    return Golden(IMAGE_PROMPT, stored, folder, request.config.getoption("--device"))


@pytest.fixture(scope="module")
def images(golden):
    """Tokens of the images, from a vision file of this project."""
    grids = [grid for _, grid in IMAGE_PROMPT.images]
    pixels = pixels_of(VisionCase(IMAGE_PROMPT.name, IMAGE_PROMPT.spec, (tuple(grids),)), 0)
    path = convert_vision(golden.checkpoint, golden.checkpoint.with_name("mmproj.gguf"), "--vision-type", "f32")
    with VisionTower(path) as tower:
        return tower.encode(pixels, grids)


@pytest.fixture(scope="module")
def tokens(golden):
    with GGUF(golden.convert("f32")) as gguf:
        return ImageTokens.of(ChatTokenizer(gguf.metadata))


@pytest.fixture(scope="module")
def prompt(golden, images, tokens):
    """Ids with -1 and embeddings, made from a text with one image token for each image."""
    stored = golden.stored["ids"]
    inside = (stored == tokens.image) & (np.roll(stored, 1) == tokens.image)
    framing = np.isin(stored, [tokens.start, tokens.end])
    text = stored[~inside & ~framing]
    ids, embeddings = with_images(text, images, tokens)
    assert np.array_equal(np.where(ids == -1, tokens.image, ids), stored)
    return ids, embeddings


def evaluate(golden, ids, embeddings, sizes, **options):
    layers, n_blocks = golden.sparse_layers, -(-len(ids) // golden.case.spec.block)
    logits, blocks, scores = [], {i: [] for i in layers}, {i: [] for i in layers}
    given = 0
    with (
        Model(golden.convert("f32"), device=golden.device) as model,
        model.session(context=len(ids), kv_type="f32", record=("blocks", "scores"), exact=True, **options) as session,
    ):
        for part in np.split(ids, cuts(len(ids), sizes)):
            n = np.count_nonzero(part == -1)
            logits.append(session.eval(part, all_logits=True, embeddings=embeddings[given : given + n]))
            given += n
            for i in layers:
                blocks[i].append(session.selected_blocks(i))
                seen = session.block_scores(i)
                later = ((0, 0), (0, 0), (0, n_blocks - seen.shape[2]))
                scores[i].append(np.pad(seen, later, constant_values=-np.inf))
    return Run(
        np.concatenate(logits),
        {i: np.concatenate(parts) for i, parts in blocks.items()},
        {i: np.concatenate(parts) for i, parts in scores.items()},
    )


@pytest.mark.parametrize(
    ("sizes", "chunk"), [([1000], 0), ([1000], 7), ([23], 0), ([40, 1], 0)], ids=["whole", "cut", "parts", "tokens"]
)
def test_logits_equal_transformers(golden, prompt, sizes, chunk) -> None:
    assert_equals_reference(golden, evaluate(golden, *prompt, sizes, chunk=chunk, threads=1))


def test_the_images_matter(golden, prompt) -> None:
    """With another image the stored logits are missed by far, from its place on and not before."""
    ids, embeddings = prompt
    other = embeddings.copy()
    other[16:20] = other[12:16]
    logits = evaluate(golden, ids, other, [1000]).logits
    first = int(np.nonzero(ids == -1)[0][16])
    right = evaluate(golden, ids, embeddings, [1000]).logits
    assert np.array_equal(logits[:first], right[:first])
    assert np.abs(logits[first + 4 :] - right[first + 4 :]).mean() > 0.02


def test_parts_of_several_sequences(golden, prompt) -> None:
    """Embeddings are taken in the order of the rows, whatever sequence these are of."""
    ids, embeddings = prompt
    text = golden.stored["ids"][:9]
    with Model(golden.convert("f32"), device=golden.device) as model:
        options = {"context": len(ids), "kv_type": "f32", "exact": True}
        with model.session(sequences=3, **options) as session:
            both = np.concatenate([embeddings, embeddings[::-1]])
            found = session.forward([(1, ids), (0, text), (2, ids)], embeddings=both)
        with model.session(**options) as session:
            alone = [session.eval(ids, embeddings=embeddings)]
            session.rewind(0)
            alone.append(session.eval(text))
            session.rewind(0)
            alone.append(session.eval(ids, embeddings=embeddings[::-1]))
    assert np.array_equal(found, np.stack(alone))


def test_refused(golden, prompt, images, tokens) -> None:
    ids, embeddings = prompt
    n = len(embeddings)
    with Model(golden.convert("f32"), device=golden.device) as model:
        width = model.hparams.n_embd
        with model.session(context=len(ids)) as session:
            for given, message in (
                (None, "token id -1, expected 0 to 511"),
                (embeddings[1:], f"embeddings: {(n - 1) * width} values, expected {n * width} for {n} rows of id -1"),
                (np.concatenate([embeddings, embeddings]), f"embeddings: {2 * n * width} values, expected {n * width}"),
                (embeddings[:, 1:], rf"embeddings of shape \({n}, {width - 1}\), expected \[n, {width}\]"),
            ):
                with pytest.raises(InputError, match=message):
                    session.eval(ids, embeddings=given)
            with pytest.raises(InputError, match="token id -2, expected -1 to 511"):
                session.eval([-2], embeddings=embeddings[:1])
            with pytest.raises(InputError, match=f"embeddings: {width} values, expected 0 for 0 rows of id -1"):
                session.eval([5], embeddings=embeddings[:1])
            assert session.length() == 0
        with model.session(context=8, layers=(1, 1)) as session, pytest.raises(InputError, match="embeddings"):
            session.forward([(0, embeddings[:2])], output="hidden", embeddings=embeddings[:2])
    with pytest.raises(InputError, match="a prompt with 1 places for images, expected 3, one for each image"):
        with_images([tokens.image], images, tokens)
    text, none = with_images([1, 2, 3], [], tokens)
    assert text.tolist() == [1, 2, 3] and none.size == 0


def test_a_broken_embedding_is_an_error(golden, prompt) -> None:
    ids, embeddings = prompt
    broken = embeddings.copy()
    broken[5, 3] = np.nan
    with Model(golden.convert("f32"), device=golden.device) as model, model.session(context=len(ids)) as session:
        with pytest.raises(Exception, match="the input of layer 0 is NaN or infinite"):
            session.eval(ids, embeddings=broken)
        assert session.length() == 0
