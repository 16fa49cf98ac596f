"""How near to a tie the router of an F32 file is at each position of a text.

The engine does not tell a router's logits. But a copy of the file in which experts and shared expert give nothing has,
after a layer, the states that the router of that layer sees; the rest is a norm and a product.
"""

from pathlib import Path
from shutil import copyfile

import gguf
import numpy as np
from numpy.typing import NDArray

from m3_runtime import GGUF, Hparams, Model

SILENCED = (".ffn_down_exps.weight", ".ffn_down_shexp.weight")

Doubles = NDArray[np.float64]


def write_silent(f32: Path, out: Path) -> None:
    """A copy of an F32 file whose experts give nothing."""
    copyfile(f32, out)
    copy = gguf.GGUFReader(out, "r+")
    for tensor in copy.tensors:
        if tensor.name.endswith(SILENCED):
            tensor.data[...] = 0
    copy.data.flush()


def expert_ranks(f32: Path, silent: Path, ids: NDArray[np.int32], attention: str) -> Doubles:
    """What ranks the experts: float64 [sparse layers, n, n_expert], the sigmoid of the router's logits plus the bias.

    silent: from `write_silent`. ids: int32 [n]. The states are those of the engine with K and V in float32.
    """
    found = []
    with Model(f32) as whole, Model(silent) as halves:
        h = whole.hparams
        states: NDArray[np.int32] | NDArray[np.float32] = ids
        for layer in range(h.n_layer):
            if layer >= h.n_dense_layer:
                found.append(_ranks(whole.gguf, h, layer, _through(halves, layer, states, attention)))
            states = _through(whole, layer, states, attention)
    return np.stack(found)


def expert_gaps(ranks: Doubles, used: int) -> Doubles:
    """Between the last expert that is chosen and the next, the smallest of all layers: float64 [n]."""
    if ranks.shape[-1] <= used:
        return np.full(ranks.shape[1], np.inf)
    ordered = -np.sort(-ranks, axis=-1)
    gaps: Doubles = (ordered[..., used - 1] - ordered[..., used]).min(axis=0)
    return gaps


def _through(model: Model, layer: int, states: NDArray, attention: str) -> NDArray[np.float32]:
    with model.session(context=len(states), kv_type="f32", attention=attention, layers=(layer, 1)) as session:
        return session.forward([(0, states)], output="hidden")


def _ranks(file: GGUF, h: Hparams, layer: int, states: NDArray[np.float32]) -> Doubles:
    def weight(name: str) -> Doubles:
        return np.frombuffer(file.tensor_data(f"blk.{layer}.{name}"), "<f4").astype(np.float64)

    x = states.astype(np.float64)
    x *= weight("ffn_norm.weight") / np.sqrt((x**2).mean(axis=-1, keepdims=True) + h.rms_eps)
    logits = x @ weight("ffn_gate_inp.weight").reshape(h.n_expert, h.n_embd).T
    ranks: Doubles = 1 / (1 + np.exp(-logits)) + weight("exp_probs_b.bias")
    return ranks
