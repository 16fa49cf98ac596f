"""Walks two models layer by layer over the same tokens and compares the blocks that they select.

Each model goes its own way: what enters a layer is what left the layer before it in the same model, so differences add
up as they do in use. In memory at a time: the hidden states of both models for all tokens, and the weights and the
cache of one layer of one model.
"""

from dataclasses import fields

import numpy as np
import numpy.typing as npt

from m3_convert.layered_model import LayeredModel
from m3_convert.progress import format_bytes
from m3_convert.selection import (
    Agreement,
    LayerTally,
    Lists,
    PositionBuckets,
    SelectionRule,
    compare_lists,
    score_rounding,
)
from m3_convert.walker import CHUNK, Advance, MemoryEstimate, Walker, WalkOptions, read_share, session_options
from m3_runtime.engine import Hparams, Session
from m3_runtime.errors import InputError, MachineError, NothingTestedError

_LISTS = ("blocks",)
_SCORES = ("blocks", "scores")


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


def estimate_memory(
    reference: LayeredModel, candidate: LayeredModel, n_tokens: int, options: WalkOptions
) -> MemoryEstimate:
    """What `walk` will take at its peak for `n_tokens` tokens."""
    h = reference.hparams
    n_blocks = -(-n_tokens // h.block_size)
    states = 2 * n_tokens * h.n_embd * 4
    lists = n_tokens * h.n_index_head * h.top_k * 4
    # The scores of a chunk as recorded and as copied, and some ten masks and temporaries of one byte to eight.
    chunk = min(CHUNK, n_tokens) * (h.n_index_head * n_blocks * 40 + 2 * h.n_embd * 4)
    own, mapped = 0, 0
    for side in (reference, candidate):
        for layer in range(h.n_layer):
            session = side.model.memory(**session_options(layer, n_tokens, options, _SCORES)).total
            weights = side.layer_bytes(layer)
            own = max(own, session + (0 if side.mapped else weights))
            mapped = max(mapped, weights if side.mapped else 0)
    return MemoryEstimate(own + states + lists + chunk, mapped)


def check_memory(estimate: MemoryEstimate, room: int | None) -> None:
    """Raises MachineError if the walk does not fit in `room` bytes (None: unknown)."""
    if room is not None and estimate.own > room:
        raise MachineError(
            f"not enough memory: the check takes {format_bytes(estimate.own)}, {format_bytes(room)} are free; "
            "a smaller --context takes less"
        )


def work(reference: LayeredModel, candidate: LayeredModel, n_tokens: int) -> float:
    """All that `walk` reports to `advance`."""
    return reference.hparams.n_layer * n_tokens * (2 + read_share(reference) + read_share(candidate))


def walk(
    reference: LayeredModel,
    candidate: LayeredModel,
    ids: npt.NDArray[np.int32],
    options: WalkOptions | None = None,
    advance: Advance = lambda _: None,
) -> Agreement:
    """Agreement of the block selections of two comparable models over `ids`, int32 [n].

    Raises NothingTestedError if no query has a choice, InputError and NotFiniteError naming the model and what is
    wrong with its weights.
    """
    h, options = reference.hparams, options or WalkOptions()
    check_choice(h, len(ids))
    rule = selection_rule(h)
    buckets = PositionBuckets.over(rule, len(ids))
    walkers = [Walker(side, ids, options, advance) for side in (reference, candidate)]
    tallies = []
    for layer in range(h.n_layer):
        if layer < h.n_dense_layer:
            for walker in reversed(walkers):
                walker.layer(layer, record=_LISTS)
            continue
        q_norm, k_norm = (reference.vector(f"blk.{layer}.indexer.{name}.weight") for name in ("q_norm", "k_norm"))
        tally = LayerTally(layer, h.n_index_head, buckets, score_rounding(q_norm, k_norm))
        _walk_sparse_layer(walkers[0], walkers[1], rule, tally)
        tallies.append(tally)
    return Agreement(rule, buckets, tallies)


def _walk_sparse_layer(reference: Walker, candidate: Walker, rule: SelectionRule, tally: LayerTally) -> None:
    """The candidate goes first and only its lists are kept, so that the reference's scores, which are as many as
    queries times blocks, are needed for one chunk at a time."""
    h, layer = reference.side.hparams, tally.layer
    lists: Lists = np.empty((len(candidate.ids), h.n_index_head, h.top_k), np.int32)

    def keep(first: int, session: Session) -> None:
        lists[first : first + CHUNK] = session.selected_blocks(layer)

    def compare(first: int, session: Session) -> None:
        ours = session.selected_blocks(layer)
        positions = np.arange(first, first + len(ours))
        tested = rule.had_choice(positions)
        if not tested.any():
            return
        positions = positions[tested]
        scores = session.block_scores(layer)[tested]
        theirs = lists[first : first + CHUNK][tested]
        forced = rule.forced(positions, scores.shape[-1])
        tally.add(positions, compare_lists(ours[tested], theirs, scores, forced, tally.rounding))

    candidate.layer(layer, record=_LISTS, visit=keep)
    reference.layer(layer, record=_SCORES, visit=compare)
