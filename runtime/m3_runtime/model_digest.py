"""Which model a file holds, told without reading all of it."""

import hashlib
from typing import Final

from m3_runtime.gguf_reader import GGUF

_SAMPLE: Final = 1024  #: bytes of each tensor


def model_digest(gguf: GGUF) -> str:
    """Hexadecimal digest of keys, tensor names, types and shapes, and of a kilobyte from the middle of each tensor.

    The same for a model in one file and split into several. Two fine-tunes of one model differ in it; two files that
    differ nowhere but outside these samples, as in one matrix of one expert, do not. InputError for a header without
    data. It reads a page of the file for each tensor.
    """
    digest = hashlib.blake2b(gguf.header(), digest_size=16)
    for tensor in gguf.tensors:
        data = gguf.tensor_data(tensor.name)
        middle = max(len(data) - _SAMPLE, 0) // 2
        digest.update(data[middle : middle + _SAMPLE])
    return digest.hexdigest()
