"""Collects an importance matrix: what every weight matrix is multiplied with while the model reads a text.

The model is walked layer by layer. In memory at a time: the hidden states of all tokens, the weights and the cache of
one layer, and the sums of the layers done.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from m3_convert.imatrix import Entry, Shape
from m3_convert.layered_model import LayeredModel, unchanged
from m3_convert.tensor_map import layer_of
from m3_convert.walker import CHUNK, MemoryEstimate, Walker, WalkOptions, read_share, session_options
from m3_runtime.engine import Hparams, Session
from m3_runtime.errors import InputError

_RECORD = ("importance",)
_EMBEDDINGS = "token_embd.weight"  # looked up, multiplied with nothing
_HEAD = "output.weight"
_SMALLEST_DEFAULT = 512

# Rows that an expert should get in the mean. The mean of the squares of n normally distributed numbers is off by
# sqrt(2 / n) of itself: a tenth for 200. That much is small beside the factors by which columns differ; with a handful
# of rows the weights of a rarely chosen expert are chance. In MiniMax-M3 (4 of 128 experts) it is 6,400 tokens.
_USEFUL_ROWS = 200


@dataclass(frozen=True)
class ExpertReach:
    """How often the text reached the routed experts. An expert is its layer and its number."""

    experts: int  #: of all layers
    unreached: tuple[tuple[int, int], ...]
    least: tuple[int, int] | None  #: the expert with the fewest rows among those reached
    least_rows: int


def weight_shapes(model: LayeredModel) -> dict[str, Shape]:
    """Number of matrices and columns of every weight that activations are multiplied with, by GGUF name."""
    return {
        t.name: (t.ne[2] if len(t.ne) > 2 else 1, t.ne[0])
        for t in model.model.gguf.tensors
        if len(t.ne) > 1 and t.name != _EMBEDDINGS
    }


def default_context(hparams: Hparams) -> int:
    """Tokens of a chunk: twice what a query reads in full, so that half of the queries have a choice of blocks; at
    least 512, at most what the model was trained for. 4096 for MiniMax-M3."""
    return min(max(2 * always_read(hparams), _SMALLEST_DEFAULT), hparams.context_train)


def always_read(hparams: Hparams) -> int:
    """Tokens up to which the sparse layers read every block."""
    return hparams.top_k * hparams.block_size


def collect(
    model: LayeredModel,
    ids: npt.NDArray[np.int32],
    context: int,
    options: WalkOptions | None = None,
    advance: Callable[[float], None] = lambda _: None,
) -> dict[str, Entry]:
    """Sums and counts of all weights of `weight_shapes`, for a text of tokens `ids`, int32 [n], n >= 1.

    context: tokens of a chunk; each is read on its own, the last may be shorter. An expert that no token was sent to
    has a count of 0. advance: told the work done since its last call; all of it is `work`. The result depends on
    neither threads nor whether the weights come from a folder or a file of the same values and types.
    Raises InputError and NotFiniteError naming what is wrong with the model, or that its files have changed.
    """
    shapes = weight_shapes(model)
    last = model.hparams.n_layer - 1
    by_layer: dict[int, list[str]] = {}
    for name in shapes:
        by_layer.setdefault(last if name == _HEAD else layer_of(name), []).append(name)
    found: dict[str, Entry] = {}
    walker = Walker(model, ids, options or WalkOptions(), advance, context)
    with unchanged(model):
        for layer in range(model.hparams.n_layer):
            names = by_layer[layer]

            def finish(session: Session, names: list[str] = names) -> None:
                for name in names:
                    found[name] = _entry(name, *session.importance(name))

            walker.layer(layer, record=_RECORD, finish=finish)
    return found


def _entry(name: str, sums: npt.NDArray[np.float64], counts: npt.NDArray[np.int64]) -> Entry:
    if sums.max() > np.finfo(np.float32).max:
        raise InputError(f"{name}: inputs are so large that float32 cannot hold the sum of their squares")
    return Entry(sums.astype(np.float32), counts.astype(np.float32))


def work(model: LayeredModel, n_tokens: int) -> float:
    """All that `collect` reports to `advance`."""
    return model.hparams.n_layer * n_tokens * (1 + read_share(model))


def estimate_memory(model: LayeredModel, n_tokens: int, context: int, options: WalkOptions) -> MemoryEstimate:
    """What `collect` takes at its peak."""
    h = model.hparams
    states = n_tokens * (h.n_embd + 1) * 4
    sums = sum(n_matrix * (n_in + 1) * 4 for n_matrix, n_in in weight_shapes(model).values())
    chunk = 2 * min(CHUNK, n_tokens) * h.n_embd * 4
    layers, mapped = 0, 0
    for layer in range(h.n_layer):
        session = model.model.memory(**session_options(layer, min(context, n_tokens), options, _RECORD)).total
        weights = model.layer_bytes(layer)
        layers = max(layers, session + (0 if model.mapped else weights))
        mapped = max(mapped, weights if model.mapped else 0)
    return MemoryEstimate(layers + states + sums + chunk, mapped)


def useful_tokens(hparams: Hparams) -> int:
    """Tokens below which a text says too little of what each expert gets."""
    return -(-_USEFUL_ROWS * hparams.n_expert // hparams.n_expert_used)


def few_tokens(n_tokens: int, hparams: Hparams, reach: ExpertReach) -> str | None:
    """What is to be said of a text that is too short, None for a longer one."""
    useful = useful_tokens(hparams)
    if n_tokens >= useful:
        return None
    tokens = "1 token is" if n_tokens == 1 else f"{n_tokens} tokens are"
    return (
        f"note: {tokens} too few to tell columns apart, {useful} or more would do; {len(reach.unreached)} of "
        f"{reach.experts} experts were never reached"
    )


def expert_reach(entries: Mapping[str, Entry]) -> ExpertReach:
    """Of `collect`'s result."""
    rows = {layer_of(name): entry.counts for name, entry in entries.items() if name.endswith(".ffn_down_exps.weight")}
    by_rows = sorted(
        (int(count), layer, expert) for layer, counts in rows.items() for expert, count in enumerate(counts)
    )
    reached = [(count, (layer, expert)) for count, layer, expert in by_rows if count]
    least_rows, least = reached[0] if reached else (0, None)
    unreached = tuple((layer, expert) for count, layer, expert in by_rows if not count)
    return ExpertReach(len(by_rows), unreached, least, least_rows)
