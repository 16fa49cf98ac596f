"""The towers and images of the golden features: what `make_vision.py` computes with transformers and
`test_vision.py` repeats."""

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from golden.cases import HERE
from make_checkpoint import CheckpointSpec

PATCH_VALUES = 3 * 2 * 14 * 14

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class VisionCase:
    """One tower, and batches of images by their grids (t, h, w)."""

    name: str
    spec: CheckpointSpec
    batches: tuple[tuple[Grid, ...], ...]

    @property
    def path(self) -> Path:
        return HERE / f"{self.name}.npz"


# Text models as small as they get: they only give the width of the tokens.
CASES = (
    # Three heads; small, long, wide, of more than a block of patches, several in a batch, clips of four and six frames.
    VisionCase(
        name="vision_heads",
        spec=CheckpointSpec(
            layers=2, dense=1, hidden=64, heads=2, kv_heads=1, head_dim=32, rotary=16, index_dim=32, experts=2, top=1,
            inter=32, shared_inter=32, dense_inter=64, vocab=512, vit_hidden=240, vit_layers=3, seed=3,
        ),
        batches=(
            ((1, 2, 2),),
            ((1, 2, 16),),
            ((1, 12, 2),),
            ((1, 10, 14),),
            ((1, 4, 6), (1, 6, 4), (1, 4, 6)),
            ((2, 4, 8), (3, 2, 4)),
        ),
    ),
    # One head, more layers, shards that part weights from biases.
    VisionCase(
        name="vision_deep",
        spec=CheckpointSpec(
            layers=2, dense=1, hidden=96, heads=2, kv_heads=1, head_dim=32, rotary=16, index_dim=32, experts=2, top=1,
            inter=32, shared_inter=32, dense_inter=64, vocab=512, vit_hidden=80, vit_layers=9, seed=4,
            order="shuffled", shard_mb=0.1,
        ),
        batches=(((1, 8, 10),), ((1, 6, 4), (1, 2, 8))),
    ),
)  # fmt: skip


def pixels_of(case: VisionCase, batch: int) -> NDArray[np.float32]:
    """Pixel values of a batch, float32 [patches, PATCH_VALUES] from -2 to 2: smooth waves over noise, so that patches
    are neither alike nor without order. From integers, which every NumPy gives alike."""
    n = sum(t * h * w for t, h, w in case.batches[batch])
    stream = np.random.PCG64(np.random.SeedSequence([case.spec.seed, batch, zlib.crc32(case.name.encode())]))
    noise = stream.random_raw(n * PATCH_VALUES // 4).view(np.uint16).astype(np.float32) / np.float32(65536)
    # Triangles whose period differs from patch to patch.
    steps = np.arange(n * PATCH_VALUES).reshape(n, PATCH_VALUES) * (np.arange(n)[:, None] % 7 + 1) % 512
    waves = np.abs(steps - 256).astype(np.float32) / np.float32(256)
    values: NDArray[np.float32] = noise.reshape(n, PATCH_VALUES) + waves * 3 - 2
    return values
