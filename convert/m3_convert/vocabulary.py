"""The tokenizer of a checkpoint as GGUF metadata: tokens, types, merges, special ids, chat template.

Read with the `tokenizers` library: transformers 5 replaces the pre-tokenizer of this model and gives wrong ids. The
whole text of tokenizer.json goes into the file as well, so that a reader can rebuild the tokenizer without guessing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import SpecialVocab, TokenType
from tokenizers import Tokenizer

from m3_convert.config import ModelConfig
from m3_convert.json_file import parse_object, read_object, read_text
from m3_runtime.errors import InputError

# The tails that this model's pre-tokenizer pattern has in public sources; llama.cpp implements the first.
_PATTERN_TAILS = (r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r" ?[^\s\p{L}\p{N}]+[\r\n]*")


@dataclass(frozen=True)
class Vocabulary:
    """What the `tokenizer.*` keys hold."""

    tokens: list[str]  #: by id, one for each row of the embedding
    token_types: list[int]  #: 1 normal, 3 control, 4 user defined, 5 unused
    merges: list[str]  #: "left right", by rank
    special_ids: dict[
        str, int
    ]  #: "bos", "eos", "unk", ... in the order of the file; "eot" and "eom": further end tokens
    add_flags: dict[str, bool]  #: add_bos_token and the like, only where tokenizer_config.json says so
    chat_template: str | Sequence[Mapping[str, str]] | None
    tokenizer_json: str  #: the text of tokenizer.json
    warnings: tuple[str, ...]


def load_vocabulary(folder: Path, config: ModelConfig) -> Vocabulary:
    """Reads tokenizer.json, tokenizer_config.json, generation_config.json and the chat template of a checkpoint folder.

    tokenizer_config.json decides the beginning and end tokens; end tokens that only generation_config.json names follow
    as "eot" and "eom". Raises InputError for a file that is missing or broken, a tokenizer that is not byte-level BPE,
    ids beyond the vocabulary, two chat templates that differ, and more end tokens than a GGUF can name.
    """
    path = folder / "tokenizer.json"
    text = read_text(path)
    content = parse_object(text, str(path))
    _check_bpe(path, content)
    tokens, types = _tokens(path, text, config.vocab)
    _check_added(path, content, tokens)
    settings = read_object(folder / "tokenizer_config.json")
    _check_templates(folder, settings)
    special = _special_vocab(folder)
    if not special.merges:
        raise InputError(f"{path}: model.merges: expected a list, found none")
    ids = dict(special.special_token_ids)
    _add_end_tokens(folder, ids, len(tokens))
    for kind, token_id in ids.items():
        if token_id >= len(tokens):
            raise InputError(f"{folder}: {kind} token id {token_id}: expected less than vocab_size {len(tokens)}")
    known = any(tail in text for tail in (json.dumps(t)[1:-1] for t in _PATTERN_TAILS))
    warning = f"{path}: its pre-tokenizer pattern is not that of MiniMax-M3; llama.cpp may split text in another way"
    return Vocabulary(
        tokens=tokens,
        token_types=types,
        merges=special.merges,
        special_ids=ids,
        add_flags=dict(special.add_special_token),
        chat_template=special.chat_template,
        tokenizer_json=text,
        warnings=() if known else (warning,),
    )


def _check_bpe(path: Path, content: dict[str, Any]) -> None:
    model, decoder = content.get("model"), content.get("decoder")
    kind = model.get("type") if isinstance(model, dict) else None
    decoder_text = json.dumps(decoder)
    if kind != "BPE" or '"ByteLevel"' not in decoder_text or (isinstance(model, dict) and model.get("byte_fallback")):
        raise InputError(
            f"{path}: expected a byte-level BPE tokenizer, found model {kind!r} with decoder {decoder_text:.80}"
        )


def _tokens(path: Path, text: str, n_vocab: int) -> tuple[list[str], list[int]]:
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{path}: is not a tokenizer: {error}") from error
    tokens = [f"[PAD{i}]" for i in range(n_vocab)]
    types = [int(TokenType.UNUSED)] * n_vocab
    added = tokenizer.get_added_tokens_decoder()
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id >= n_vocab:
            raise InputError(f"{path}: token {token!r} has id {token_id}, expected less than vocab_size {n_vocab}")
        tokens[token_id] = token
        kind = TokenType.NORMAL
        if token_id in added:
            kind = TokenType.CONTROL if added[token_id].special else TokenType.USER_DEFINED
        types[token_id] = int(kind)
    return tokens, types


def _check_added(path: Path, content: dict[str, Any], tokens: list[str]) -> None:
    # The library numbers added tokens itself and passes over the ids in the file.
    for entry in content.get("added_tokens", ()):
        token, token_id = entry["content"], entry["id"]
        if not 0 <= token_id < len(tokens) or tokens[token_id] != token:
            raise InputError(f"{path}: added token {token!r} has id {token_id}, where the tokenizer puts another token")


def _check_templates(folder: Path, settings: dict[str, Any]) -> None:
    file = folder / "chat_template.jinja"
    inline = settings.get("chat_template")
    text = read_text(file) if file.exists() else None
    if inline is not None and text is not None and inline != text:
        raise InputError(
            f"{folder}: tokenizer_config.json and chat_template.jinja hold chat templates that differ: expected one, "
            "remove the other"
        )


def _special_vocab(folder: Path) -> SpecialVocab:
    try:
        return SpecialVocab(folder, load_merges=True)
    except (ValueError, TypeError, AttributeError, KeyError, OSError) as error:
        # The files are valid JSON by now: what is left is a field of another kind than the library takes for granted.
        raise InputError(
            f"{folder}: tokenizer.json or tokenizer_config.json: {type(error).__name__}: {error}"
        ) from error


def _add_end_tokens(folder: Path, ids: dict[str, int], n_vocab: int) -> None:
    path = folder / "generation_config.json"
    if not path.exists():
        return
    found = read_object(path).get("eos_token_id")
    ends = found if isinstance(found, list) else [] if found is None else [found]
    for end in ends:
        if not isinstance(end, int) or isinstance(end, bool) or not 0 <= end < n_vocab:
            raise InputError(f"{path}: eos_token_id: expected ids from 0 to {n_vocab - 1}, found {end!r}")
        if end in (ids.get("eos"), ids.get("eot"), ids.get("eom")):
            continue
        slot = next((kind for kind in ("eos", "eot", "eom") if kind not in ids), None)
        if slot is None:
            raise InputError(f"{path}: eos_token_id: expected at most three different end tokens, found {found}")
        ids[slot] = end
