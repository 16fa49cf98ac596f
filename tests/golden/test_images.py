"""Preprocessing of pictures against the release's processor (`make_images.py` says how)."""

import numpy as np
import pytest

from golden.image_cases import PATH, SIZES, STEPS, WHOLE, picture_of
from m3_runtime.image import fitted_size, patches
from m3_runtime.vision import VisionHparams

HPARAMS = VisionHparams(
    n_layer=1, n_embd=80, n_head=1, head_dim=80, n_rot=78, n_ff=320, n_projector=64, n_merger=64, n_out=64,
    patch_size=14, merge=2, frames=2, rope_theta=1e4, eps=1e-5,
    mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711),
)  # fmt: skip

# Pillow and torchvision round their bicubic weights in other places.
MOST_LEVELS = 2  #: of 255
MOST_DIFFERENT = 0.01  #: share of the values


@pytest.fixture(scope="module")
def stored():
    with np.load(PATH) as file:
        return dict(file)


def levels_of(pixels, grid):
    """The first frame of patches as [height, width, 3] levels, of the inverse of what the tower reads."""
    _, h, w = grid
    cut = pixels.reshape(h // 2, w // 2, 2, 2, 3, 2, 14, 14)
    assert np.array_equal(cut[:, :, :, :, :, 0], cut[:, :, :, :, :, 1]), "frames of a still picture differ"
    values = cut[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4).reshape(h * 14, w * 14, 3)
    return np.rint((values * np.array(HPARAMS.std) + np.array(HPARAMS.mean)) * 255).astype(int)


@pytest.mark.parametrize("number", range(len(SIZES)), ids=[f"{h}x{w}" for h, w in SIZES])
def test_resized_as_the_reference(stored, number) -> None:
    picture = picture_of(number)
    shape = tuple(stored[f"shape_{number}"].tolist())
    assert fitted_size(*picture.shape[:2]) == shape
    pixels, grid = patches(picture, HPARAMS)
    assert pixels.dtype == np.float32 and grid == (1, shape[0] // 14, shape[1] // 14)
    levels = levels_of(pixels, grid)[:: STEPS[number], :: STEPS[number]]
    difference = np.abs(levels - stored[f"picture_{number}"].astype(int))
    assert difference.max() <= MOST_LEVELS
    assert (difference > 0).mean() < MOST_DIFFERENT


def test_layout_and_values_as_the_reference(stored) -> None:
    """A picture that needs no resizing: every value of every patch, in order."""
    pixels, _ = patches(picture_of(WHOLE), HPARAMS)
    assert pixels.shape == stored["pixels"].shape
    assert np.abs(pixels - stored["pixels"]).max() < 1e-6


def test_the_pictures_are_of_the_named_versions(stored) -> None:
    assert stored["versions"].tolist() == ["torch 2.13.0", "transformers 5.24.0", "torchvision 0.28.0"]
