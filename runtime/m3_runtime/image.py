"""Pictures to the patches that the vision tower reads, as the release's processor makes them; Pillow does the pixels.

    picture = open_image("photo.jpg")
    pixels, grid = patches(picture, tower.hparams)

A picture comes from anywhere, so that nothing of it is taken on trust: the file is read up to MAX_FILE_BYTES, only the
decoders of FORMATS are tried, and a picture of more than MAX_PIXELS is refused by its header, before it is decoded.

What is not plain 8-bit RGB is made that: the rotation that EXIF asks for is done, what is transparent lies on white,
CMYK and palettes are converted without their color profile, of 16-bit values the high byte is taken. The reference does
the same but for 16-bit gray, which it saturates. Animations are refused.
"""

import io
import math
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from m3_runtime.errors import InputError, MachineError
from m3_runtime.vision import Floats, Grid, VisionHparams

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Pixels: TypeAlias = NDArray[np.uint8]  #: [height, width, 3]

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_FILE_BYTES: Final = 64 << 20
MAX_PIXELS: Final = 50_000_000  #: of the picture as it comes; up to 16 bytes each while it is decoded

# Of the release's processor (transformers 5.24, MiniMaxM3VLImageProcessor): after resizing.
MIN_AREA: Final = 4 * 28 * 28  #: pixels: 4 tokens
MAX_AREA: Final = 451_584  #: pixels: 576 tokens
MAX_RATIO: Final = 200  #: of the longer side to the shorter one

_MAY_MOVE: Final = ("PNG", "GIF", "WEBP")  #: formats of animations; a JPEG may hold a second picture of another kind


def open_image(source: str | os.PathLike[str] | bytes, name: str = "image") -> Pixels:
    """The picture in a file, or in the bytes of one, as uint8 [height, width, 3].

    name: stands for bytes in messages. InputError names what is wrong with it, MachineError if Pillow is not installed.
    """
    if isinstance(source, bytes):
        if len(source) > MAX_FILE_BYTES:
            raise _too_long(name, len(source))
        return _decode(source, name)
    path = Path(source)
    return _decode(_read(path), str(path))


def fitted_size(height: int, width: int, factor: int = 28) -> tuple[int, int]:
    """Height and width that a picture is resized to: multiples of `factor`, the ratio kept as far as these allow, and
    an area from MIN_AREA to MAX_AREA. InputError for sides of a ratio above MAX_RATIO, and for an empty picture."""
    if min(height, width) < 1:
        raise InputError(f"an image of {width} x {height} pixels, expected at least one")
    if max(height, width) > MAX_RATIO * min(height, width):
        raise InputError(f"an image of {width} x {height} pixels, expected sides of a ratio of at most {MAX_RATIO}")
    # Halves go to the even neighbor, as Python rounds and the reference with it.
    fitted = round(height / factor) * factor, round(width / factor) * factor
    if fitted[0] * fitted[1] > MAX_AREA:
        shrink = math.sqrt(height * width / MAX_AREA)
        sides = (math.floor(side / shrink / factor) * factor for side in (height, width))
        fitted = max(factor, next(sides)), max(factor, next(sides))
    elif fitted[0] * fitted[1] < MIN_AREA:
        grow = math.sqrt(MIN_AREA / (height * width))
        fitted = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return fitted


def patches(picture: Pixels, hparams: VisionHparams) -> tuple[Floats, Grid]:
    """A picture as the tower reads it, resized (bicubic), normalized and cut.

    picture: uint8 [height, width, 3]. Returns float32 [n, patch_values] and the grid (1, h, w), n = h * w: patches in
    the order of their squares of 2 x 2; a patch is [3 channels, 2 frames, patch_size, patch_size], both frames alike.
    The values are within 1/255 (before normalization) of the reference's, whose resizing rounds in other places.
    """
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
        raise InputError(f"an image of {picture.dtype} {list(picture.shape)}, expected uint8 [height, width, 3]")
    h = hparams
    size = fitted_size(picture.shape[0], picture.shape[1], h.patch_size * h.merge)
    if picture.shape[:2] != size:
        pil = _pillow()
        resized = pil.fromarray(picture).resize((size[1], size[0]), pil.Resampling.BICUBIC)
        picture = np.asarray(resized)
    mean, std = np.array(h.mean, np.float32), np.array(h.std, np.float32)
    values = (picture.astype(np.float32) / np.float32(255) - mean) / std
    grid = (1, size[0] // h.patch_size, size[1] // h.patch_size)
    # [squares down, 2, pixels, squares across, 2, pixels, channel] -> a patch after the other
    cut = values.reshape(grid[1] // h.merge, h.merge, h.patch_size, grid[2] // h.merge, h.merge, h.patch_size, 3)
    cut = cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(grid[1] * grid[2], 3, 1, h.patch_size**2)
    return np.repeat(cut, h.frames, axis=2).reshape(len(cut), h.patch_values), grid


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MachineError(f"images need Pillow: pip install 'm3-gguf[vision]' ({error})") from None
    return Image


def _read(path: Path) -> bytes:
    try:
        # A pipe or a device could give bytes without end, or none for ever.
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: expected an image file, found {'a folder' if path.is_dir() else 'no file'}")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise _too_long(str(path), path.stat().st_size)
    return content


def _too_long(name: str, n_bytes: int) -> InputError:
    return InputError(f"{name}: an image file of {n_bytes} bytes, expected at most {MAX_FILE_BYTES}")


def _decode(content: bytes, name: str) -> Pixels:
    pil = _pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata, and of large pictures, which are refused below
            with pil.open(io.BytesIO(content), formats=FORMATS) as image:
                _check(image, name)
                return _rgb(image)
    except (InputError, MemoryError):
        raise
    except pil.DecompressionBombError:
        raise InputError(f"{name}: a decompression bomb, expected at most {MAX_PIXELS} pixels") from None
    except pil.UnidentifiedImageError:
        raise InputError(f"{name}: expected an image ({', '.join(FORMATS)}), found another kind of file") from None
    except Exception as error:  # decoders raise what comes: OSError, SyntaxError, ValueError, struct.error, ...
        raise InputError(f"{name}: the image is damaged or truncated: {' '.join(str(error).split())}") from error


def _check(image: "Picture", name: str) -> None:
    """By what the header says; nothing is decoded yet."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise InputError(f"{name}: an image of {width} x {height} pixels, expected at most {MAX_PIXELS}")
    try:
        fitted_size(height, width)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    frames = getattr(image, "n_frames", 1) if image.format in _MAY_MOVE else 1
    if frames > 1:
        raise InputError(f"{name}: an animation of {frames} frames, expected a still image")


def _rgb(image: "Picture") -> Pixels:
    from PIL import Image, ImageOps

    image.load()
    turned = ImageOps.exif_transpose(image)
    if turned.mode.startswith("I"):  # 16-bit gray
        gray = np.minimum(np.asarray(turned).astype(np.int64), 65535) >> 8
        return np.repeat(gray.astype(np.uint8)[..., None], 3, axis=2)
    if turned.has_transparency_data:
        turned = turned.convert("RGBA")
        turned = Image.alpha_composite(Image.new("RGBA", turned.size, (255, 255, 255, 255)), turned)
    return np.asarray(turned.convert("RGB"))
