"""The tokenizer of m3-nano, text to token ids, and the compressed file that carries ids to the machine with the GPU.

    python vocabulary.py CORPUS_DIR DATA_DIR

makes tokenizer.json, train.xz, heldout.npy and definitions.json in DATA_DIR from train.txt, heldout.txt and
definitions.json in CORPUS_DIR.
"""

import argparse
import json
import lzma
import math
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from make_checkpoint import PRE_TOKENIZER_PATTERN, SPECIAL_TOKENS, TOP_IDS, VISIBLE_TOKENS

VOCAB = 4096  #: ids: byte pairs, the named tokens, and three that no token has
DOCUMENT, TURN, END = "]~!b[", "]~b]", "[e~["
BREAK = "\n\f\n"  #: between the documents of a corpus file

# A value is put between two characters of Unicode's private use area, which no text of the corpus has.
OPEN, CLOSE = "\ue000", "\ue001"
_MARK = re.compile(f"[{OPEN}{CLOSE}]")

Ids = NDArray[np.uint16]


def train_tokenizer(texts: Iterable[str], vocab: int = VOCAB) -> Tokenizer:
    """Byte-level BPE of `vocab` - 64 tokens with M3's pre-tokenizer, and the named tokens above it.

    A token holds at most one digit: codes and sums are then read digit by digit, whatever the text had.
    Raises ValueError if the text is too short for the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer(PRE_TOKENIZER_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - TOP_IDS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab - TOP_IDS:
        raise ValueError(f"vocab {vocab} is more than the text gives, at most {tokenizer.get_vocab_size() + TOP_IDS}")
    tokenizer.pre_tokenizer = _pre_tokenizer(PRE_TOKENIZER_PATTERN)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=token not in VISIBLE_TOKENS) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def _pre_tokenizer(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@dataclass(frozen=True)
class Encoded:
    """Text as ids. spans [n, 2]: first and last-plus-one token of every marked value, in the text's order."""

    ids: NDArray[np.int32]
    spans: NDArray[np.int32]


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a named token. Raises KeyError if the tokenizer has none."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def mark(value: str) -> str:
    """`value` so that `encode` tells its tokens from the others."""
    return f"{OPEN}{value}{CLOSE}"


def unmark(text: str) -> str:
    """`text` without marks."""
    return _MARK.sub("", text)


def encode(tokenizer: Tokenizer, text: str) -> Encoded:
    """The ids of `text` without its marks, and where the marked values are; a value's leading space may count."""
    places = [match.start() for match in _MARK.finditer(text)]
    encoding = tokenizer.encode(unmark(text), add_special_tokens=False)
    ids = np.array(encoding.ids, np.int32)
    if not places:
        return Encoded(ids, np.empty((0, 2), np.int32))
    edges = np.array(places) - np.arange(len(places))
    offsets = np.array(encoding.offsets)
    first = np.searchsorted(offsets[:, 1], edges[::2], "right")
    last = np.searchsorted(offsets[:, 0], edges[1::2], "left")
    return Encoded(ids, np.stack([first, last], 1).astype(np.int32))


def read_documents(path: Path) -> list[str]:
    """The documents of a corpus file that are not empty."""
    return [text for text in path.read_text(encoding="utf-8").split(BREAK) if text.strip()]


def encode_documents(tokenizer: Tokenizer, documents: Sequence[str], batch: int) -> Iterator[Ids]:
    """The ids of every batch of documents, each document after its own token and with a line end."""
    opening = token_id(tokenizer, DOCUMENT)
    for start in range(0, len(documents), batch):
        texts = [text.rstrip("\n") + "\n" for text in documents[start : start + batch]]
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        yield np.concatenate([np.array([opening, *encoding.ids], np.uint16) for encoding in encodings])


def encode_corpus(tokenizer: Tokenizer, path: Path) -> Ids:
    """The ids of a corpus file, with progress on stderr."""
    documents = read_documents(path)
    size = math.ceil(len(documents) / 50)
    parts: list[Ids] = []
    start = time.monotonic()
    for part in encode_documents(tokenizer, documents, size):
        parts.append(part)
        done = min(len(parts) * size, len(documents))
        print(f"\r{path.name}: {done}/{len(documents)} documents", end="", file=sys.stderr, flush=True)
    ids = np.concatenate(parts)
    print(f", {len(ids)} tokens, {time.monotonic() - start:.0f} s", file=sys.stderr)
    return ids


# Ids of two bytes, told apart by their position: a quarter smaller than all low bytes and then all high bytes.
_PAIRS = {"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 3, "lp": 1, "pb": 1}


def write_ids(path: Path, ids: Ids) -> None:
    """Writes ids compressed by xz, little-endian."""
    with lzma.open(path, "wb", format=lzma.FORMAT_XZ, filters=[_PAIRS]) as file:
        file.write(ids.astype("<u2").tobytes())


def read_ids(path: Path) -> Ids:
    """What `write_ids` wrote."""
    with lzma.open(path) as file:
        return np.frombuffer(file.read(), "<u2").astype(np.uint16)


def sample_text(path: Path, piece: int = 3_000, step: int = 20_000) -> Iterator[str]:
    """Pieces of a corpus file for the tokenizer: `piece` characters of every `step`, from every document."""
    for document in read_documents(path):
        for start in range(0, len(document), step):
            yield document[start : start + piece]


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the data folder."""
    from rows import sample_generated  # rows.py needs this module

    parser = argparse.ArgumentParser(description="Trains the tokenizer and encodes the corpus.")
    parser.add_argument("corpus", type=Path, metavar="CORPUS_DIR")
    parser.add_argument("data", type=Path, metavar="DATA_DIR")
    options = parser.parse_args(arguments)
    corpus: Path = options.corpus
    data: Path = options.data
    data.mkdir(parents=True, exist_ok=True)
    definitions = json.loads((corpus / "definitions.json").read_text(encoding="utf-8"))

    # A fifth of what is trained on is generated: its names and words deserve tokens of their own.
    texts = [*sample_text(corpus / "train.txt"), *(4 * sample_generated(definitions))]
    print(f"tokenizer: {sum(map(len, texts)) / 1e6:.1f} M characters", file=sys.stderr)
    tokenizer = train_tokenizer(texts)
    del texts
    held_out = encode_corpus(tokenizer, corpus / "heldout.txt")
    ids = encode_corpus(tokenizer, corpus / "train.txt")
    # Compressing takes minutes: the files of the folder change together, after it.
    write_ids(data / "train.new", ids)
    (data / "train.new").replace(data / "train.xz")
    tokenizer.save(str(data / "tokenizer.json"))
    (data / "definitions.json").write_text(json.dumps(definitions, ensure_ascii=False), encoding="utf-8")
    np.save(data / "heldout.npy", held_out)
    print(f"{data}: {len(ids)} tokens, train.xz {(data / 'train.xz').stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
