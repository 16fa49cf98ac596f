"""A candidate that several tests look at."""

import pytest

from convert.check.small_check import patched, round_to_4_bits


@pytest.fixture(scope="module")
def coarse_index(tiny_gguf, tmp_path_factory):
    """The tiny model with index projections of 4 bits."""
    return patched(tiny_gguf, tmp_path_factory.mktemp("coarse") / "coarse-index.gguf", round_to_4_bits)
