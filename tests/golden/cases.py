"""The models of the golden vectors: what `make_golden.py` computes with transformers and `test_golden.py` repeats."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from make_checkpoint import CheckpointSpec

HERE = Path(__file__).resolve().parent

#: No choice of blocks in a stored run is closer than this (difference of the last block taken and the first one left),
#: which is above the noise of float32 sums in another order by more than ten times.
MIN_BLOCK_GAP = 1e-3
#: The same for the choice of experts, in units of the biased sigmoid.
MIN_EXPERT_GAP = 1e-5

# The seeds are the first ones that `make_golden.py --search` found to keep both gaps.


@dataclass(frozen=True)
class GoldenCase:
    """One model and one text."""

    name: str
    spec: CheckpointSpec
    n_tokens: int
    prefill: int  #: tokens evaluated at once before single tokens follow
    chunk: int  #: size of chunks, odd so that they never end with a block
    #: Images by the place in the text that they stand before, and their grids (t, h, w).
    images: tuple[tuple[int, tuple[int, int, int]], ...] = ()

    @property
    def path(self) -> Path:
        return HERE / f"{self.name}.npz"


CASES = (
    # Head geometry, block and rotary size of the release; everything else small.
    GoldenCase(
        name="release_heads",
        spec=CheckpointSpec(
            layers=4, dense=1, hidden=128, inter=64, shared_inter=64, dense_inter=256, vocab=640, seed=5, vision=False
        ),
        n_tokens=800,
        prefill=300,
        chunk=137,
    ),
    # Nothing equals the release: odd group size, two local blocks, widths that 256 does not divide, another theta.
    GoldenCase(
        name="odd_sizes",
        spec=CheckpointSpec(
            layers=3, dense=1, hidden=128, heads=6, kv_heads=2, head_dim=64, rotary=32, index_dim=32, experts=6, top=3,
            inter=96, shared_inter=96, dense_inter=256, vocab=576, block=32, top_k=4, local=2, theta=12345.5, seed=9,
            prefix=False, vision=False,
        ),
        n_tokens=600,
        prefill=90,
        chunk=61,
    ),
    # The smallest block and one free choice for each of eight heads, in more layers.
    GoldenCase(
        name="small_blocks",
        spec=CheckpointSpec(
            layers=7, dense=2, hidden=96, heads=8, kv_heads=8, head_dim=32, rotary=16, index_dim=48, experts=12, top=2,
            inter=64, shared_inter=64, dense_inter=160, vocab=512, block=16, top_k=2, seed=49, order="shuffled",
            shard_mb=0.5,
        ),
        n_tokens=300,
        prefill=29,
        chunk=23,
    ),
)  # fmt: skip


# Text with two images next to one another and one further on, between them more than the blocks that a query reads.
IMAGE_PROMPT = GoldenCase(
    name="image_prompt",
    spec=CheckpointSpec(
        layers=3, dense=1, hidden=96, heads=4, kv_heads=2, head_dim=32, rotary=16, index_dim=32, experts=4, top=2,
        inter=64, shared_inter=64, dense_inter=160, vocab=512, block=16, top_k=3, vit_hidden=80, vit_layers=2, seed=2,
    ),
    n_tokens=120,
    prefill=40,
    chunk=23,
    images=((10, (1, 6, 8)), (10, (1, 4, 4)), (70, (1, 10, 6))),
)  # fmt: skip


def shard_hashes(folder: Path) -> list[str]:
    """ "name sha256" of each safetensors file of a checkpoint, by name."""
    paths = sorted(folder.glob("*.safetensors"))
    return [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in paths]
