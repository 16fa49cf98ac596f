"""Prompts with images: where the tokens that the vision tower makes stand among those of the text.

A chat template writes one image token for each image. In its place comes what the model was trained with: a start
token, the tokens of the image, an end token. Their positions are ordinary ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from m3_runtime.errors import InputError
from m3_runtime.text import ChatTokenizer
from m3_runtime.vision import Floats

EMBEDDED: Final = -1  #: the id of a row whose embedding is given, see `Session.forward`


@dataclass(frozen=True)
class ImageTokens:
    """Ids of the tokens that have to do with images."""

    image: int
    start: int
    end: int

    @classmethod
    def of(cls, tokenizer: ChatTokenizer) -> Self:
        """Those of a vocabulary. InputError if it lacks one: the model was not made for images."""
        ids = {name: tokenizer.token_id(name) for name in IMAGE_TOKEN_NAMES}
        for name, id_ in ids.items():
            if id_ is None:
                raise InputError(f"the vocabulary has no token '{name}': the model takes no images")
        image, start, end = (int(id_ or 0) for id_ in ids.values())
        return cls(image, start, end)


IMAGE_TOKEN_NAMES: Final = ("]<]image[>[", "]<]start of image[>[", "]<]end of image[>[")


def with_images(ids: ArrayLike, images: Sequence[Floats], special: ImageTokens) -> tuple[NDArray[np.int32], Floats]:
    """The prompt with its images, for `Session.eval`: ids int32 [n] and embeddings float32 [rows of id -1, n_embd].

    ids: int32 [m] with one `special.image` for each image. images: tokens of each, float32 [tokens, n_embd], as
    `VisionTower.encode` gives them. InputError if there are more or fewer images than places.
    """
    text = np.asarray(ids, np.int32)
    (places,) = np.nonzero(text == special.image)
    if len(places) != len(images):
        raise InputError(f"a prompt with {len(places)} places for images, expected {len(images)}, one for each image")
    parts, first = [], 0
    for place, tokens in zip(places, images, strict=True):
        framed = np.full(len(tokens) + 2, EMBEDDED, np.int32)
        framed[0], framed[-1] = special.start, special.end
        parts += [text[first:place], framed]
        first = int(place) + 1
    parts.append(text[first:])
    width = images[0].shape[1] if images else 0
    embeddings = np.concatenate(images) if images else np.empty((0, width), np.float32)
    return np.concatenate(parts), embeddings
