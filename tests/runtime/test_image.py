"""Pictures from anywhere: what is decoded how, and what is refused. The resizing is tested in tests/golden."""

import io
import os
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from m3_runtime import InputError
from m3_runtime.image import MAX_AREA, MAX_FILE_BYTES, MIN_AREA, fitted_size, open_image


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def colors(width: int = 30, height: int = 20) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([x * 8, y * 12, (x + y) * 5], axis=-1).astype(np.uint8))


def png(width: int, height: int, bits: int = 8, color: int = 2, data: bytes = b"") -> bytes:
    """A PNG as its header says, with compressed `data`."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP", "GIF"])
def test_formats(kind, tmp_path) -> None:
    """From a file and from bytes; WebP without loss, GIF of as many colors as it has."""
    options = {"lossless": True} if kind == "WEBP" else {}
    picture = colors() if kind != "GIF" else colors().quantize(16)
    path = tmp_path / "picture"
    path.write_bytes(encoded(picture, kind, **options))
    found = open_image(path)
    assert found.dtype == np.uint8 and found.shape == (20, 30, 3)
    assert np.array_equal(found, np.asarray(picture.convert("RGB")))
    assert np.array_equal(open_image(path.read_bytes()), found)


def test_jpeg_and_its_rotation() -> None:
    """EXIF orientation 6: the picture lies on its side, its left is the top."""
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, turned = (open_image(encoded(colors(), "JPEG", quality=95, exif=e)) for e in (Image.Exif(), exif))
    assert plain.shape == (20, 30, 3) and turned.shape == (30, 20, 3)
    assert np.array_equal(turned, np.rot90(plain, -1))
    assert np.abs(plain.astype(int) - np.asarray(colors()).astype(int)).mean() < 6


def test_cmyk_is_converted() -> None:
    found = open_image(encoded(colors().convert("CMYK"), "JPEG", quality=95))
    assert found.shape == (20, 30, 3) and np.abs(found.astype(int) - np.asarray(colors()).astype(int)).mean() < 12


def test_transparency_lies_on_white() -> None:
    picture = Image.new("RGBA", (30, 20), (200, 0, 0, 0))
    picture.putpixel((3, 2), (10, 20, 30, 255))
    found = open_image(encoded(picture))
    assert found[2, 3].tolist() == [10, 20, 30] and (found.reshape(-1, 3).min(axis=1) == 255).sum() == 30 * 20 - 1
    palette = colors().quantize(8)
    assert (open_image(encoded(palette, "PNG", transparency=palette.getpixel((0, 0)))).reshape(-1, 3)[0] == 255).all()


def test_gray_of_1_8_and_16_bits() -> None:
    ramp = np.arange(600, dtype=np.uint16).reshape(20, 30) * 109
    wide = b"".join(b"\0" + row.astype(">u2").tobytes() for row in ramp)
    found = open_image(png(30, 20, bits=16, color=0, data=wide))
    assert np.array_equal(found, np.repeat((ramp >> 8).astype(np.uint8)[..., None], 3, axis=2))
    narrow = Image.fromarray((ramp >> 8).astype(np.uint8))
    assert np.array_equal(open_image(encoded(narrow)), found)
    assert set(open_image(encoded(narrow.convert("1"))).reshape(-1).tolist()) == {0, 255}


GOOD = encoded(colors())
REFUSED = {
    "empty": (b"", "expected an image (PNG, JPEG, WEBP, GIF, BMP), found another kind of file"),
    "text": (b"hello, I am a picture", "found another kind of file"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "found another kind of file"),
    "tiff": (encoded(colors(), "TIFF"), "found another kind of file"),
    "half a png": (GOOD[: len(GOOD) // 2], "the image is damaged or truncated"),
    "half a jpeg": (encoded(colors(400, 300), "JPEG")[:3000], "the image is damaged or truncated"),
    "no data": (png(30, 20), "the image is damaged or truncated"),
    "size bomb": (png(100_000, 100_000), "expected at most 50000000 pixels"),
    "larger than is decoded": (png(10_000, 6_000), "an image of 10000 x 6000 pixels, expected at most 50000000"),
    "zero width": (png(0, 20), "image: "),
    "zero height": (png(20, 0), "image: "),
    "too long": (encoded(Image.new("RGB", (1005, 5))), "expected sides of a ratio of at most 200"),
    "animation": (
        encoded(colors(), "GIF", save_all=True, append_images=[colors().rotate(90), colors().rotate(180)]),
        "an animation of 3 frames, expected a still image",
    ),
    "moving png": (
        encoded(colors(), "PNG", save_all=True, append_images=[colors().rotate(90)]),
        "an animation of 2 frames, expected a still image",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what) -> None:
    """One line, soon, and without the memory that the header asks for."""
    content, message = REFUSED[what]
    tracemalloc.start()
    with pytest.raises(InputError) as error:
        open_image(content, "image")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    said = str(error.value)
    assert message in said and "\n" not in said and said.startswith("image: ")
    assert peak < 8 << 20


def test_refused_files(tmp_path) -> None:
    def message(path) -> str:
        with pytest.raises(InputError) as error:
            open_image(path)
        return str(error.value)

    assert message(tmp_path / "absent.png") == f"{tmp_path / 'absent.png'}: cannot be read: No such file or directory"
    assert message(tmp_path) == f"{tmp_path}: expected an image file, found a folder"
    os.mkfifo(tmp_path / "pipe")
    assert message(tmp_path / "pipe") == f"{tmp_path / 'pipe'}: expected an image file, found no file"
    large = tmp_path / "large.png"
    with large.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    assert message(large) == f"{large}: an image file of {MAX_FILE_BYTES + 1} bytes, expected at most {MAX_FILE_BYTES}"
    with pytest.raises(InputError, match="expected at most"):
        open_image(bytes(MAX_FILE_BYTES + 1))


@settings(deadline=None)
@given(st.data())
def test_damage_is_refused_or_decoded(data) -> None:
    """Any byte of a small picture changed, or its end cut off: an error of ours, or a picture of a size that may be."""
    content = bytearray(data.draw(st.sampled_from([GOOD, encoded(colors(), "JPEG"), encoded(colors(), "GIF")])))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    try:
        found = open_image(bytes(content))
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert found.dtype == np.uint8 and found.ndim == 3


@settings(deadline=None)
@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_fitted_sizes(height, width) -> None:
    """Multiples of 28 within the limits, the ratio kept as far as a multiple of 28 allows."""
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(InputError, match="expected sides of a ratio of at most 200"):
            fitted_size(height, width)
        return
    h, w = fitted_size(height, width)
    assert h % 28 == w % 28 == 0 and min(h, w) >= 28
    assert h * w >= MIN_AREA
    # A side of the least length takes the area beyond the limit where the other one is very long.
    assert h * w <= MAX_AREA or min(h, w) == 28
    if min(h, w) > 28:
        assert abs(np.log(h / w) - np.log(height / width)) < 28 / min(h, w)
