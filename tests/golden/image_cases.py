"""The pictures of the golden preprocessing: what `make_images.py` gives to the release's processor and
`test_images.py` repeats."""

import numpy as np
from numpy.typing import NDArray

from golden.cases import HERE

PATH = HERE / "images.npz"

#: Height and width: below the least area, enlarged, left as it is, odd, wide, high, above the greatest area.
SIZES = ((1, 3), (20, 50), (56, 84), (101, 143), (29, 700), (500, 33), (900, 777))

#: Of each picture every so many rows and columns are stored.
STEPS = (1, 1, 1, 1, 3, 3, 13)

#: The picture whose values are stored in full.
WHOLE = 2


def picture_of(number: int) -> NDArray[np.uint8]:
    """Bands with sharp edges under a slow gradient, uint8 [height, width, 3]. From integers only."""
    height, width = SIZES[number]
    y, x = np.mgrid[0:height, 0:width]
    red = (x * 7 + y * 3) // 16 % 2 * 180 + (x * 60 // width)
    green = (x + y * 5) * 255 // (width + 5 * height)
    blue = np.where((x // 11 + y // 5) % 3 == 0, 240, y * 90 // height)
    return np.stack([red, green, blue], axis=-1).astype(np.uint8)
