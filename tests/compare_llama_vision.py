"""The vision tower against llama.cpp's multimodal library on the same files and picture.

    pip install llama-cpp-python==0.3.36        # builds llama.cpp; not a dependency of the project
    python tests/compare_llama_vision.py MODEL.gguf MMPROJ.gguf [--size 168x224] [--tolerance 0.01]

The picture is random and has sides that are multiples of 28, so that neither program resizes it. Prints the largest and
the mean difference of a token's value beside the root mean square of all; the exit code is 1 if the largest one is
above the tolerance times that. Meant for F32 files: llama.cpp takes the convolution's input as F16 and rounds
activations where weights are in another type than F32.
"""

import argparse
import ctypes
import sys

import llama_cpp
import numpy as np
from llama_cpp import mtmd_cpp
from numpy.typing import NDArray

from m3_runtime.image import patches
from m3_runtime.vision import VisionTower

# Kept for the life of the process: llama.cpp holds the pointer.
_SILENT = llama_cpp.llama_log_callback(lambda *_: None)


def llama_tokens(model_path: str, vision_path: str, picture: NDArray[np.uint8], width: int) -> NDArray[np.float32]:
    """Tokens of the picture, float32 [n, width]."""
    llama_cpp.llama_log_set(_SILENT, None)
    mtmd_cpp.mtmd_log_set(_SILENT, None)
    mtmd_cpp.mtmd_helper_log_set(_SILENT, None)
    model = llama_cpp.llama_model_load_from_file(model_path.encode(), llama_cpp.llama_model_default_params())
    if not model:
        sys.exit(f"{model_path}: llama.cpp does not load it")
    params = mtmd_cpp.mtmd_context_params_default()
    params.use_gpu, params.n_threads, params.warmup, params.print_timings = False, 2, False, False
    params.flash_attn_type = 0
    context = mtmd_cpp.mtmd_init_from_file(vision_path.encode(), model, params)
    if not context:
        sys.exit(f"{vision_path}: llama.cpp does not load it")
    data = np.ascontiguousarray(picture)
    pointer = data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    bitmap = mtmd_cpp.mtmd_bitmap_init(picture.shape[1], picture.shape[0], pointer)
    chunks = mtmd_cpp.mtmd_input_chunks_init()
    prompt = mtmd_cpp.mtmd_default_marker()
    text = mtmd_cpp.mtmd_input_text(prompt, len(prompt), False, True)
    bitmaps = (mtmd_cpp.mtmd_bitmap_p_ctypes * 1)(bitmap)
    if mtmd_cpp.mtmd_tokenize(context, chunks, ctypes.byref(text), bitmaps, 1):
        sys.exit("mtmd_tokenize failed")
    for i in range(mtmd_cpp.mtmd_input_chunks_size(chunks)):
        chunk = mtmd_cpp.mtmd_input_chunks_get(chunks, i)
        if mtmd_cpp.mtmd_input_chunk_get_type(chunk) == mtmd_cpp.MTMD_INPUT_CHUNK_TYPE_IMAGE:
            n = mtmd_cpp.mtmd_input_chunk_get_n_tokens(chunk)
            if mtmd_cpp.mtmd_encode_chunk(context, chunk):
                sys.exit("mtmd_encode_chunk failed")
            row = ctypes.cast(mtmd_cpp.mtmd_get_output_embd(context), ctypes.POINTER(ctypes.c_float))
            return np.ctypeslib.as_array(row, (n, width)).copy()
    sys.exit("llama.cpp made no tokens of the picture")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("vision")
    parser.add_argument("--size", default="168x224", help="height x width, multiples of 28")
    parser.add_argument("--tolerance", type=float, default=0.01)
    arguments = parser.parse_args()
    height, width = map(int, arguments.size.split("x"))
    picture = np.random.default_rng(3).integers(0, 256, (height, width, 3), np.uint8)
    with VisionTower(arguments.vision) as tower:
        pixels, grid = patches(picture, tower.hparams)
        (ours,) = tower.encode(pixels, [grid])
    theirs = llama_tokens(arguments.model, arguments.vision, picture, ours.shape[1])
    if theirs.shape != ours.shape:
        sys.exit(f"llama.cpp makes {len(theirs)} tokens of it, this project {len(ours)}")
    difference, rms = np.abs(ours - theirs), float(np.sqrt((ours**2).mean()))
    print(
        f"{arguments.vision}: {len(ours)} tokens of {height} x {width} pixels: max difference {difference.max():.2e}, "
        f"mean {difference.mean():.2e}, root mean square {rms:.2f}"
    )
    return int(not difference.max() <= arguments.tolerance * rms)


if __name__ == "__main__":
    sys.exit(main())
