"""Whether two models can be compared over a text: the same model but for its weights, and queries with a choice."""

from dataclasses import fields

from m3_convert.layered_model import LayeredModel
from m3_convert.selection import SelectionRule
from m3_runtime.engine import Hparams
from m3_runtime.errors import InputError, NothingTestedError


def selection_rule(hparams: Hparams) -> SelectionRule:
    return SelectionRule(hparams.top_k, hparams.block_size, hparams.local_blocks)


def check_comparable(reference: LayeredModel, candidate: LayeredModel) -> None:
    """Raises InputError, naming the first difference, unless both sides are the same model but for its weights."""
    for field in fields(Hparams):
        ours, theirs = getattr(reference.hparams, field.name), getattr(candidate.hparams, field.name)
        # What a file says of its trained context changes nothing that is computed.
        if field.name != "context_train" and ours != theirs:
            raise InputError(
                f"{candidate.name} cannot be compared with {reference.name}: {field.name} is {theirs}, expected {ours}"
            )
    ours, theirs = _tokens(reference), _tokens(candidate)
    if ours != theirs:
        i = next(i for i in range(len(ours)) if ours[i] != theirs[i])
        raise InputError(
            f"{candidate.name} cannot be compared with {reference.name}: the vocabularies differ: token {i} is "
            f"{theirs[i]!r}, expected {ours[i]!r}"
        )


def _tokens(side: LayeredModel) -> list[object]:
    tokens = side.model.gguf.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise InputError(f"{side.name}: has no token list (tokenizer.ggml.tokens), so that no text can be compared")
    return list(tokens)


def check_choice(hparams: Hparams, n_tokens: int) -> None:
    """Raises NothingTestedError, with the numbers, if no query among `n_tokens` tokens has a choice of blocks."""
    rule = selection_rule(hparams)
    if hparams.n_dense_layer == hparams.n_layer:
        raise NothingTestedError(
            f"no query had a choice of blocks: all {hparams.n_layer} layers of the model are dense and read every token"
        )
    if not rule.chooses:
        raise NothingTestedError(
            f"no query had a choice of blocks: all {rule.top_k} blocks that a query reads are local ones"
        )
    if n_tokens <= rule.always_read:
        raise NothingTestedError(
            f"no query had a choice of blocks: {n_tokens} tokens, and every block is read up to top_k * block_size = "
            f"{rule.top_k} * {rule.block_size} = {rule.always_read} tokens; take a longer text or context"
        )
