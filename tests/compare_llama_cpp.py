"""The engine against llama.cpp on the same GGUF file and token ids.

    pip install llama-cpp-python==0.3.36        # builds llama.cpp; not a dependency of the project
    python tests/compare_llama_cpp.py FILE.gguf [--tokens 700] [--tolerance 2e-4]

Both run with K/V in float32 and flash attention, llama.cpp on 2 threads. llama.cpp is run as one batch (prefill) and then
token by token. Prints the largest and mean |dlogit| over all positions, before and beyond the position where selection
begins, and exits with 1 if one is above the tolerance. Meant for F32 files: a model whose weights are rounded on the fly
differs by more.
"""

import argparse
import ctypes
import sys

import llama_cpp
import numpy as np
from m3_runtime import Model
from numpy.typing import NDArray

GGML_TYPE_F32 = 0

# Kept for the life of the process: llama.cpp holds the pointer.
_SILENT = llama_cpp.llama_log_callback(lambda *_: None)


def llama_logits(path: str, ids: NDArray[np.int32], batch: int, n_vocab: int) -> NDArray[np.float32]:
    """Logits of all positions, float32 [n, n_vocab], evaluated `batch` tokens at a time."""
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
    params.flash_attn_type = 1
    context = llama_cpp.llama_init_from_model(model, params)
    out = np.empty((len(ids), n_vocab), np.float32)
    for first in range(0, len(ids), batch):
        part = ids[first : first + batch]
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
    arguments = parser.parse_args()
    worst = 0.0
    with Model(arguments.file) as model:
        h = model.hparams
        ids = np.random.default_rng(3).integers(0, h.n_vocab - 64, arguments.tokens).astype(np.int32)
        with model.session(context=len(ids), kv_type="f32", index_type="f32") as session:
            ours = session.eval(ids, all_logits=True)
    limit = h.top_k * h.block_size
    print(f"{arguments.file}: {len(ids)} tokens, selection begins at {limit}, logit std {ours.std():.2f}")
    for name, batch in (("one batch", len(ids)), ("token by token", 1)):
        theirs = llama_logits(arguments.file, ids, batch, h.n_vocab)
        d = np.abs(ours - theirs)
        worst = max(worst, float(d.max()))
        print(
            f"llama.cpp, {name}: max |dlogit| {d[:limit].max():.2e} before, {d[limit:].max(initial=0):.2e} beyond; "
            f"mean {d.mean():.2e}; top-1 agrees at {np.mean(ours.argmax(1) == theirs.argmax(1)):.2%}"
        )
    return int(not worst <= arguments.tolerance)


if __name__ == "__main__":
    sys.exit(main())
