"""Replies of a given form: the tokens that a grammar allows next, by llguidance."""

import json
import re
import threading
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from m3_runtime.errors import InputError
from m3_runtime.reply import THINK, UNTHINK
from m3_runtime.text import ChatTokenizer, TokenType


class _Vocabulary:
    """A tokenizer as llguidance reads it: the bytes of each id, and a function from text to ids."""

    bos_token_id = None

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        ids = range(len(tokenizer))
        # Named tokens stand for themselves, not for their text: none may be part of a string in JSON.
        self.special_token_ids = [id for id in ids if tokenizer.token_type(id) is not TokenType.NORMAL]
        self.tokens = [tokenizer.token_bytes(id) or b"<unused %d>" % id for id in ids]
        self.eos_token_id = min(tokenizer.end_ids)
        names = (tokenizer.token_bytes(id).decode("utf-8", errors="replace") for id in self.special_token_ids)
        self._named = re.compile("|".join(re.escape(name[0]) + f"(?={re.escape(name[1:])})" for name in names if name))

    def __call__(self, data: bytes) -> list[int]:
        """Ids of a text, in which the name of a named token is text too: cut behind its first character, it is not
        taken for the token."""
        text = data.decode("utf-8", errors="replace")
        cuts = [0, *(match.end() for match in self._named.finditer(text)), len(text)]
        return [id for a, b in pairwise(cuts) for id in self._tokenizer.encode(text[a:b])]


class GrammarCompiler:
    """Compiles what replies may look like. For several threads."""

    def __init__(self, tokenizer: ChatTokenizer, n_vocab: int) -> None:
        """n_vocab: of the model's logits, at least as many as the tokenizer has ids."""
        self.tokenizer = tokenizer
        self._n_vocab = n_vocab
        self._lock = threading.Lock()
        self._compiled: LLTokenizer | None = None

    def json(self, schema: Mapping[str, Any], *, prompt: str) -> "ReplyConstraint":
        """JSON of a schema, after thinking if the model thinks.

        prompt: where the reply begins. Raises InputError if the schema cannot be compiled.
        """
        try:
            grammar = LLMatcher.grammar_from_json_schema(
                json.dumps(schema),
                # As Python's json.dumps writes it. Where white space is free, a model may write it for ever.
                overrides={"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False},
            )
        except (ValueError, RecursionError) as error:
            raise InputError(f"response_format: the schema cannot be compiled: {_line(str(error))}") from None
        return self._constraint(grammar, prompt, "response_format: the schema")

    def lark(self, grammar: str, *, prompt: str, what: str) -> "ReplyConstraint":
        """Text of a grammar in llguidance's dialect of Lark. what: it is called so in messages."""
        return self._constraint(LLMatcher.grammar_from_lark(grammar), prompt, what)

    def _constraint(self, grammar: str, prompt: str, what: str) -> "ReplyConstraint":
        if not self.tokenizer.end_ids:
            raise InputError(f"{what} needs a tokenizer with an end token, this file has none")
        with self._lock:
            if self._compiled is None:
                self._compiled = LLTokenizer(TokenizerWrapper(_Vocabulary(self.tokenizer)))
        matcher = LLMatcher(self._compiled, grammar, log_level=0)
        if matcher.is_error():
            raise InputError(f"{what} cannot be compiled: {_line(matcher.get_error())}")
        return ReplyConstraint(matcher, self.tokenizer, self._n_vocab, prompt)


class ReplyConstraint:
    """One reply: thinking without a limit to its form, then what the grammar allows, then the end."""

    def __init__(self, matcher: LLMatcher, tokenizer: ChatTokenizer, n_vocab: int, prompt: str) -> None:
        self._matcher = matcher
        tags = [tokenizer.token_id(tag) for tag in (THINK, UNTHINK)]
        self._tags = [id for id in tags if id is not None]
        self._think, self._unthink = tags
        self._n_vocab = n_vocab
        self._stage: Literal["start", "thinking", "grammar"] = "start"
        if prompt.rstrip().endswith(THINK) and self._unthink is not None:
            self._stage = "thinking"
        elif prompt.rstrip().endswith(UNTHINK) or len(self._tags) < 2:
            self._stage = "grammar"
        self._any = np.ones(n_vocab, np.bool_)
        self._any[list(tokenizer.end_ids)] = False
        self.in_grammar = False  #: whether the last token was one of the grammar's

    def allowed(self) -> npt.NDArray[np.bool_]:
        if self._stage == "thinking":
            return self._any
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.zeros(self._n_vocab, np.bool_)
        found = np.unpackbits(bits, bitorder="little")[: self._n_vocab]
        mask[: len(found)] = found
        if self._stage == "start":
            mask[self._tags] = True
        return mask

    def accept(self, id: int) -> None:
        if self._stage == "start" and id == self._think:
            self._stage = "thinking"
        elif self._stage != "grammar" and id == self._unthink:
            self._stage = "grammar"
        elif self._stage != "thinking":
            self._stage, self.in_grammar = "grammar", True
            self._matcher.consume_token(id)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InputError(f"the reply cannot be kept to its form: {_line(self._matcher.get_error())}")


def _line(text: str) -> str:
    """The first line of a message."""
    return text.strip().partition("\n")[0][:300]
