"""Stand-ins for tests of the chat half: the metadata of a GGUF file, and a session that follows a script."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from m3_runtime.errors import ContextError


def tokenizer_metadata(source: Tokenizer, n_vocab: int, *, keep_json: bool = False) -> dict[str, Any]:
    """The tokenizer's keys of a GGUF file as a converter writes them: ids above the tokenizer's are unused."""
    data = json.loads(source.to_str())
    tokens, types = [f"[PAD{i}]" for i in range(n_vocab)], [5] * n_vocab
    for token, id in data["model"]["vocab"].items():
        tokens[id], types[id] = token, 1
    for added in data["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], 3 if added["special"] else 4
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "minimax-m2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in data["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index("]~!b["),
        "tokenizer.ggml.eos_token_id": tokens.index("[e~["),
        "tokenizer.ggml.unknown_token_id": tokens.index("]!d~["),
    }
    if keep_json:
        metadata["tokenizer.huggingface.json"] = source.to_str()
    return metadata


class FakeSession:
    """A session whose model writes what `script(held)` says: the next id after the ids that it holds."""

    def __init__(self, n_vocab: int, script: Callable[[list[int]], int], context: int = 1 << 20) -> None:
        self.n_vocab = n_vocab
        self.context = context
        self.script = script
        self.held: list[int] = []
        self.block_size = 16
        self.evals: list[int] = []  #: tokens of each eval
        self.drops: list[tuple[int, int]] = []  #: first block and number of blocks
        self.before_eval: Callable[[], None] = lambda: None

    def eval(
        self, ids: npt.NDArray[np.int32], seq: int = 0, *, progress: Callable[[int, int], None] | None = None
    ) -> npt.NDArray[np.float32]:
        assert ids.dtype == np.int32 and ids.ndim == 1 and len(ids)
        self.before_eval()
        if len(self.held) + len(ids) > self.context:
            raise ContextError("too long for the fake")
        if progress is not None:
            progress(len(ids), len(ids))
        self.held += ids.tolist()
        self.evals.append(len(ids))
        logits = np.zeros(self.n_vocab, dtype=np.float32)
        logits[self.script(self.held)] = 20
        return logits

    def length(self, seq: int = 0) -> int:
        return len(self.held)

    def rewind(self, length: int, seq: int = 0) -> None:
        assert 0 <= length <= len(self.held)
        del self.held[length:]

    def drop(self, first_block: int, n_blocks: int, seq: int = 0) -> None:
        at, end = first_block * self.block_size, (first_block + n_blocks) * self.block_size
        assert 0 <= at < end <= len(self.held)
        del self.held[at:end]
        self.drops.append((first_block, n_blocks))


def replies(*answers: Sequence[int]) -> Callable[[list[int]], int]:
    """A script that writes one answer after the other: each starts when an eval brings more than one token."""
    state = {"answer": -1, "at": 0, "length": 0}

    def script(held: list[int]) -> int:
        if len(held) != state["length"] + 1 or state["answer"] < 0:
            state["answer"] += 1
            state["at"] = 0
        state["length"] = len(held)
        answer = answers[min(state["answer"], len(answers) - 1)]
        state["at"] += 1
        return int(answer[min(state["at"], len(answer)) - 1]) if answer else 0

    return script
