"""The text around a token of a sample, for people."""

from collections.abc import Sequence
from typing import Final

from m3_runtime.text import ChatTokenizer

AROUND: Final = 80  #: characters of text on each side of a token, and of a block's beginning
# More tokens than that many characters have, in text of any kind.
_TOKENS: Final = 120


class TokenText:
    """ids: of the sample. block_size: tokens of a block."""

    def __init__(self, tokenizer: ChatTokenizer, ids: Sequence[int], block_size: int) -> None:
        self._tokenizer, self._ids, self._block_size = tokenizer, ids, block_size

    def around(self, position: int) -> tuple[str, str, str]:
        """Up to AROUND characters before a token, the token, and as many behind it, white space as it is."""
        before = self._decode(max(0, position - _TOKENS), position)[-AROUND:]
        after = self._decode(position + 1, position + 1 + _TOKENS)[:AROUND]
        return before, self._decode(position, position + 1), after

    def block(self, number: int) -> str:
        """The beginning of a block, white space folded."""
        first = number * self._block_size
        text = self._decode(first, min(first + self._block_size, first + _TOKENS))
        return " ".join(text.split())[:AROUND]

    def _decode(self, first: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[first:end], control=True)
