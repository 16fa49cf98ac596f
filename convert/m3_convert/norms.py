"""Detection of checkpoints whose norms already hold 1 + w.

MiniMax-M3 stores its text norms as w and multiplies by 1 + w. Some exports store the sum. Converting such a checkpoint
would add 1 a second time, which gives a file that loads and talks nonsense.
"""

from collections.abc import Sequence

import numpy as np

from m3_convert.decode import SourceReader, read_values
from m3_convert.shards import Shards
from m3_convert.tensor_map import MappedTensor
from m3_runtime.errors import InputError

# Factors 1 + w are positive but for stray channels, while w itself is negative wherever a channel is damped: a
# checkpoint that stores w has many negative elements. The mean is asked for as well, so that a fresh model, whose w is
# 0 everywhere, passes.
MAX_NEGATIVE = 0.01
MIN_MEAN = 0.5


def check_norms(tensors: Sequence[MappedTensor], shards: Shards | None = None) -> None:
    """Raises InputError if the text norms, taken together, are 1 + w instead of w.

    The sign: fewer than 1 in 100 of all elements are negative, and the mean of the norms' means is above 0.5.
    """
    means, negative, total = [], 0, 0
    norms = [matrix for tensor in tensors if tensor.spec.plus_one for matrix in tensor.matrices]
    with SourceReader(shards) as reader:
        reader.peek(norms)
        for matrix in norms:
            values = read_values(reader, matrix, 0, 1)
            with np.errstate(invalid="ignore"):  # NaN and infinity are reported when the tensor is encoded
                means.append(float(np.mean(values, dtype=np.float64)))
            negative += int(np.count_nonzero(values < 0))
            total += values.size
    with np.errstate(invalid="ignore"):
        mean = float(np.mean(means))
    if mean > MIN_MEAN and negative < MAX_NEGATIVE * total:
        raise InputError(
            f"the {len(means)} norms of the checkpoint already hold 1 + w: expected w around 0 with both signs, found "
            f"a mean of {mean:.3f} and {negative} of {total} elements below 0; the GGUF would hold 2 + w"
        )
