"""Text to token ids and back, rebuilt from the metadata of a GGUF file.

A file of m3-convert holds the checkpoint's own tokenizer.json (`tokenizer.huggingface.json`); other files hold only
the token list and the merges, from which the same byte-level BPE is built with the pre-tokenizer of MiniMax-M2/M3.

Named tokens in the text (`[e~[`, `<mm:think>`, ...) become their ids wherever they stand, also when a user typed
them: that is what transformers does with a rendered chat template, and the model was trained on it.
"""

import codecs
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntEnum

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from m3_runtime.errors import InputError

END_OF_TURN = "[e~["  #: ends every turn of the chat format; an end token in every file that has it

# Source: the release's tokenizer.json. Of its two published forms the one whose symbols may end in "/".
_WORD_END = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _WORD_END,
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _WORD_END,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_END_LIST_KEY = "tokenizer.ggml.eos_token_ids"


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type` that a byte-level tokenizer has."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


def byte_alphabet() -> dict[int, str]:
    """The character that stands for each byte in the tokens of a byte-level BPE.

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100 onward in byte order (source: the
    GPT-2 tokenizer).
    """
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in itself]
    return {byte: chr(byte) for byte in itself} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


_BYTE_OF = {character: byte for byte, character in byte_alphabet().items()}


class ChatTokenizer:
    """The tokenizer of one GGUF file. Immutable after construction."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        """metadata: keys and values of a GGUF file (str, int, float, bool, lists of them).

        Raises InputError if a key is missing or of another kind, if the tokenizer is not M3's, or if
        `tokenizer.huggingface.json` and the token list disagree.
        """
        _require(metadata, "tokenizer.ggml.model", "gpt2")
        _require(metadata, "tokenizer.ggml.pre", "minimax-m2")
        self._tokens = _strings(metadata, "tokenizer.ggml.tokens")
        self._types = _token_types(metadata, len(self._tokens))
        self._ids = self._index()
        if "tokenizer.huggingface.json" in metadata:
            self._tokenizer = self._from_json(metadata["tokenizer.huggingface.json"])
        else:
            self._tokenizer = self._from_merges(_list(metadata, "tokenizer.ggml.merges"))
        self.end_ids = self._end_ids(metadata)  #: ids that end a reply
        self._named = {
            name: self._optional_id(metadata, f"tokenizer.ggml.{key}_token_id")
            for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"))
        }

    def __len__(self) -> int:
        """Ids in the file's token list, unused ones included."""
        return len(self._tokens)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without anything added in front or behind. Raises InputError for a lone surrogate."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            raise InputError(
                f"text: character {error.start} is a lone surrogate (U+{code:04X}), expected valid Unicode"
            ) from None
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int], *, control: bool = False) -> str:
        """Text of `ids`; invalid UTF-8 becomes U+FFFD. Control tokens are left out unless `control` is set."""
        stream = TokenStream(self, control=control)
        return "".join([stream.push(id) for id in ids]) + stream.finish()

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for: those of its name for a named token, none for an unused id."""
        kind = self._types[id]
        if kind == TokenType.UNUSED:
            return b""
        token = self._tokens[id]
        if kind == TokenType.NORMAL:
            try:
                return bytes([_BYTE_OF[character] for character in token])
            except KeyError:
                pass  # not made of the byte alphabet: stands for itself, as in the tokenizers library
        return token.encode("utf-8")

    def token_type(self, id: int) -> TokenType:
        return TokenType(self._types[id])

    def token_id(self, name: str) -> int | None:
        """Id of the token with exactly this text in the token list, None if there is none."""
        return self._ids.get(name)

    def named_tokens(self, text: str) -> list[str]:
        """Names of control tokens that `encode` finds in a text, each once, in the order of their ids."""
        return [self._tokens[id] for id in sorted(set(self.encode(text))) if self._types[id] == TokenType.CONTROL]

    @property
    def longest_token(self) -> int:
        """Bytes of the longest token: a text of n bytes has at least n / longest_token tokens."""
        return max((len(self.token_bytes(id)) for id in range(len(self))), default=1)

    def unused_ids(self) -> list[int]:
        """Ids that stand for nothing and that a model must never produce, ascending."""
        return [id for id, kind in enumerate(self._types) if kind == TokenType.UNUSED]

    def template_variables(self) -> dict[str, str]:
        """What transformers hands to a chat template beside the messages: bos_token, eos_token, unk_token."""
        return {name: self._tokens[id] for name, id in self._named.items() if id is not None}

    # ------------------------------------------------------------------------------------------ construction

    def _index(self) -> dict[str, int]:
        ids: dict[str, int] = {}
        for id, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True)):
            if kind == TokenType.UNUSED:
                continue
            if not token:
                raise InputError(f"tokenizer.ggml.tokens: id {id} is empty")
            if ids.setdefault(token, id) != id:
                raise InputError(f"tokenizer.ggml.tokens: ids {ids[token]} and {id} are both {token!r}")
        for byte, character in byte_alphabet().items():
            if character not in ids:
                # The BPE would leave such bytes out of the text without a word.
                raise InputError(f"tokenizer.ggml.tokens: no token {character!r} for byte {byte:#04x}")
        return ids

    def _from_json(self, text: object) -> Tokenizer:
        key = "tokenizer.huggingface.json"
        if not isinstance(text, str):
            raise InputError(f"{key}: expected a string, found {type(text).__name__}")
        try:
            tokenizer = Tokenizer.from_str(text)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # the library's panics do not derive from Exception
            raise InputError(f"{key}: {_folded(error)}") from None
        if getattr(tokenizer.model, "dropout", None):
            raise InputError(f"{key}: the model has dropout {tokenizer.model.dropout}, expected none")
        # A tokenizer.json may ask for both; a prompt must never be cut or filled without a word.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        for id, token in enumerate(self._tokens):
            expected = None if self._types[id] == TokenType.UNUSED else token
            found = tokenizer.id_to_token(id)
            if found != expected:
                raise InputError(f"{key}: id {id} is {found!r}, tokenizer.ggml.tokens has {expected!r}")
        count = tokenizer.get_vocab_size(with_added_tokens=True)
        if count != len(self._ids):
            raise InputError(f"{key}: {count} tokens, tokenizer.ggml.tokens has {len(self._ids)}")
        return tokenizer

    def _from_merges(self, merges: Sequence[object]) -> Tokenizer:
        pairs = [self._merge(i, merge) for i, merge in enumerate(merges)]
        # Named tokens go into the model's vocabulary too: the library would else number them without the list's holes.
        tokenizer = Tokenizer(models.BPE(vocab=self._ids, merges=pairs))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.add_tokens(
            [
                AddedToken(token, normalized=False, special=self._types[id] == TokenType.CONTROL)
                for token, id in self._ids.items()
                if self._types[id] in (TokenType.CONTROL, TokenType.USER_DEFINED)
            ]
        )
        return tokenizer

    def _merge(self, i: int, merge: object) -> tuple[str, str]:
        """A merge is "left right", as llama.cpp writes it (spaces inside are `Ġ`), or a pair."""
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, Sequence) or len(pair) != 2 or not all(isinstance(part, str) and part for part in pair):
            raise InputError(f"tokenizer.ggml.merges: entry {i} is {merge!r}, expected two tokens with a space between")
        left, right = pair
        for token in (left, right, left + right):
            if token not in self._ids:
                raise InputError(f"tokenizer.ggml.merges: entry {i} needs the token {token!r}, which the list lacks")
        return left, right

    def _end_ids(self, metadata: Mapping[str, object]) -> frozenset[int]:
        ids = {self._optional_id(metadata, key) for key in _END_KEYS}
        if _END_LIST_KEY in metadata:
            ids.update(self._checked_id(_END_LIST_KEY, id) for id in _list(metadata, _END_LIST_KEY))
        ids.add(self.token_id(END_OF_TURN))
        return frozenset(id for id in ids if id is not None)

    def _optional_id(self, metadata: Mapping[str, object], key: str) -> int | None:
        return self._checked_id(key, metadata[key]) if key in metadata else None

    def _checked_id(self, key: str, id: object) -> int:
        if not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < len(self._tokens):
            raise InputError(f"{key}: {id!r}, expected an id from 0 to {len(self._tokens) - 1}")
        return id


class TokenStream:
    """Turns a stream of ids into text, giving out whole characters only.

    The pieces joined equal `bytes.decode("utf-8", errors="replace")` of all bytes: a character that is cut between
    tokens is held back until it is complete, and bytes that can be no UTF-8 become U+FFFD.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, control: bool = False, visible: Collection[int] = ()) -> None:
        """control: give out control tokens by name; visible: control tokens that are given out in any case."""
        self._tokenizer = tokenizer
        self._control = control
        self._visible = frozenset(visible)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        """Text that is complete after `id`; may be empty."""
        hidden = self._tokenizer.token_type(id) == TokenType.CONTROL and not self._control and id not in self._visible
        return self._decoder.decode(b"" if hidden else self._tokenizer.token_bytes(id))

    def finish(self) -> str:
        """What was held back, as U+FFFD. The stream starts anew after it."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def invalid_utf8(error: UnicodeDecodeError) -> str:
    """What is wrong with bytes that should be UTF-8, with the offset."""
    found = error.object[error.start]
    return f"invalid UTF-8 at byte offset {error.start} (byte {found:#04x}): {error.reason}"


def _folded(error: BaseException) -> str:
    return " ".join(str(error).split())


def _require(metadata: Mapping[str, object], key: str, expected: str) -> None:
    found = metadata.get(key)
    if found != expected:
        raise InputError(f"{key}: expected {expected!r}, found {'no such key' if found is None else repr(found)}")


def _list(metadata: Mapping[str, object], key: str) -> Sequence[object]:
    value = metadata.get(key)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InputError(f"{key}: expected a list, found {'no such key' if value is None else type(value).__name__}")
    return value


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    strings: list[str] = []
    for i, value in enumerate(_list(metadata, key)):
        if not isinstance(value, str):
            raise InputError(f"{key}: entry {i} is {type(value).__name__}, expected a string")
        strings.append(value)
    return strings


def _token_types(metadata: Mapping[str, object], n_tokens: int) -> list[int]:
    key = "tokenizer.ggml.token_type"
    values = _list(metadata, key)
    if len(values) != n_tokens:
        raise InputError(f"{key}: {len(values)} entries, tokenizer.ggml.tokens has {n_tokens}")
    types: list[int] = []
    for i, value in enumerate(values):
        if not isinstance(value, int) or value not in TokenType._value2member_map_:
            raise InputError(f"{key}: entry {i} is {value!r}, expected 1, 3, 4 or 5")
        types.append(value)
    return types
