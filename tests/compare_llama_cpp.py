"""The engine against llama.cpp on the same GGUF file and token ids.

    pip install llama-cpp-python==0.3.36        # builds llama.cpp; not a dependency of the project
    python tests/compare_llama_cpp.py FILE.gguf [--tokens 700] [--tolerance 2e-4]

Both run with K/V in float32, llama.cpp on 2 threads, as one batch (prefill) and then token by token. Prints the largest
and the mean |dlogit| over all positions, before and beyond the one where selection begins.

llama.cpp needs flash attention for its sparse path, and rounds q, K and V to F16 there: sparse runs differ by that much
(and now and then by a block or an expert that it tips over). Without flash attention it computes dense attention in
float32: that pair must agree to the tolerance, and the exit code is 1 if it does not. Meant for F32 files: llama.cpp
also rounds activations where weights are in another type.
"""

import argparse
import ctypes
import sys
from dataclasses import dataclass

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from m3_runtime import Model

GGML_TYPE_F32 = 0

# Kept for the life of the process: llama.cpp holds the pointer.
_SILENT = llama_cpp.llama_log_callback(lambda *_: None)


@dataclass(frozen=True)
class Run:
    """How a program evaluates the ids: sparse or dense, so many tokens at a time."""

    sparse: bool
    batch: int


def llama_logits(path: str, ids: NDArray[np.int32], run: Run, n_vocab: int) -> NDArray[np.float32]:
    """Logits of all positions, float32 [n, n_vocab]."""
    llama_cpp.llama_log_set(_SILENT, None)
    model_params = llama_cpp.llama_model_default_params()
    model_params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
    if not model:
        sys.exit(f"{path}: llama.cpp does not load it")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = (len(ids) + 511) // 256 * 256
    params.n_batch = params.n_ubatch = len(ids)
    params.n_threads = params.n_threads_batch = 2
    params.type_k = params.type_v = GGML_TYPE_F32
    params.flash_attn_type = int(run.sparse)
    context = llama_cpp.llama_init_from_model(model, params)
    out = np.empty((len(ids), n_vocab), np.float32)
    for first in range(0, len(ids), run.batch):
        part = ids[first : first + run.batch]
        b = llama_cpp.llama_batch_init(len(part), 0, 1)
        b.n_tokens = len(part)
        for i, token in enumerate(part):
            b.token[i], b.pos[i], b.n_seq_id[i], b.seq_id[i][0], b.logits[i] = int(token), first + i, 1, 0, 1
        if llama_cpp.llama_decode(context, b):
            sys.exit("llama_decode failed")
        for i in range(len(part)):
            row = llama_cpp.llama_get_logits_ith(context, i)
            out[first + i] = np.ctypeslib.as_array(ctypes.cast(row, ctypes.POINTER(ctypes.c_float)), (n_vocab,))
        llama_cpp.llama_batch_free(b)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--tokens", type=int, default=700)
    parser.add_argument("--tolerance", type=float, default=2e-4)
    parser.add_argument("--exact", action="store_true", help="the sparse runs must agree too (a llama.cpp without F16)")
    arguments = parser.parse_args()
    worst = 0.0
    with Model(arguments.file) as model:
        h = model.hparams
        ids = np.random.default_rng(3).integers(0, h.n_vocab - 64, arguments.tokens).astype(np.int32)
        ours = {}
        for sparse in (True, False):
            attention = "sparse" if sparse else "dense"
            with model.session(context=len(ids), kv_type="f32", attention=attention) as session:
                ours[sparse] = session.eval(ids, all_logits=True)
    limit = h.top_k * h.block_size
    print(f"{arguments.file}: {len(ids)} tokens, selection begins at {limit}, logit std {ours[True].std():.2f}")
    for run in (Run(False, len(ids)), Run(False, 1), Run(True, len(ids)), Run(True, 1)):
        theirs = llama_logits(arguments.file, ids, run, h.n_vocab)
        d = np.abs(ours[run.sparse] - theirs)
        if not run.sparse or arguments.exact:
            worst = max(worst, float(d.max()))
        print(
            f"{'sparse' if run.sparse else 'dense '} {'one batch     ' if run.batch > 1 else 'token by token'}: "
            f"max |dlogit| {d[:limit].max():.2e} before, {d[limit:].max(initial=0):.2e} beyond; mean {d.mean():.2e}; "
            f"top-1 agrees at {np.mean(ours[run.sparse].argmax(1) == theirs.argmax(1)):.2%}"
        )
    return int(not worst <= arguments.tolerance)


if __name__ == "__main__":
    sys.exit(main())
